from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("make_*.py") if "--check" in path.read_text())


def test_the_scripts_that_write_pages_are_found() -> None:
    pages = {
        "make_api_docs.py",
        "make_cli_docs.py",
        "make_dialect_docs.py",
        "make_error_docs.py",
        "make_family_docs.py",
    }
    assert pages | {"make_flag_docs.py", "make_man_page.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_page_that_is_written_from_the_code_is_current(script: str) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], check=True)
