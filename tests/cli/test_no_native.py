"""Where no compiler was there at install, NumPy computes and says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.modules["penstock.backend.cpu._native"] = None
from penstock.cli.app import app
app(sys.argv[1:])
"""


def without_native(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_numpy_answers_and_says_so(reciter: Path) -> None:
    done = without_native("run", reciter, "Go", "--max-tokens", 3)
    assert (done.returncode, done.stdout) == (0, "abc\n")
    assert "NumPy computes, which is slow" in done.stderr
    assert "on Debian and Ubuntu the package g++" in done.stderr


def test_the_cpu_device_is_refused_with_what_to_do(reciter: Path) -> None:
    done = without_native("run", reciter, "Go", "--device", "cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "device cpu needs native code: it was not built" in done.stderr
    assert "install Penstock again [config_error]" in done.stderr


def test_the_doctor_says_what_to_install() -> None:
    assert "bad   native backend    it was not built" in without_native("doctor").stdout
