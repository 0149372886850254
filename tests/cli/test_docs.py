from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_cli_docs.py", "make_dialect_docs.py", "make_family_docs.py"])
def test_a_page_that_is_written_from_the_code_is_current(script: str) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], check=True)
