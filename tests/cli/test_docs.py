from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_about_the_command_line_is_current() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_cli_docs.py", "--check"], check=True)
