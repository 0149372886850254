"""The short run of tests is a part of the long one, and both together are all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from hypothesis import given, settings, strategies

@pytest.mark.long
def test_long(): ...

@pytest.mark.long(cases=2)
@pytest.mark.parametrize("case", range(9))
def test_cases(case): ...

@given(strategies.integers())
def test_property(case): ...

def test_short(): ...

def test_profile(): assert settings.default.max_examples == 20
"""
LONG = {"test_long", *(f"test_cases[{case}]" for case in range(9)), "test_property"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path / "test_some.py"


def run(*arguments: str | Path) -> tuple[set[str], int]:
    """Returns the names of the tests that ran, and the exit status."""
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-v", "--rootdir=/", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    words = (line.partition("::")[2].split() for line in done.stdout.splitlines() if "%]" in line)
    return {line[0] for line in words}, done.returncode


def test_the_short_run_has_some_cases_and_few_examples(file: Path) -> None:
    short = {"test_cases[2]", "test_cases[6]", "test_property", "test_short", "test_profile"}
    assert run(file) == (short, 0)


def test_the_long_run_has_the_rest(file: Path) -> None:
    assert run("-m", "long", file) == (LONG, 0)


def test_both_runs_at_once_are_everything(file: Path) -> None:
    names, failed = run("-m", "long or not long", file)
    assert (names, failed) == (LONG | {"test_short", "test_profile"}, 1)  # all examples


def test_a_named_test_has_all_cases_and_examples(file: Path) -> None:
    assert run(f"{file}::test_cases") == ({f"test_cases[{case}]" for case in range(9)}, 0)
    assert run(f"{file}::test_profile") == ({"test_profile"}, 1)
