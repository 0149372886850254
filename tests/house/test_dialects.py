"""Dialects are apart: none imports another, and nothing outside their folders imports one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_house import ROOT, imports

DIALECTS = ROOT / "server" / "dialects"
FOLDERS = sorted(path.parent.name for path in DIALECTS.glob("*/__init__.py"))
GATEWAY = ROOT / "fleet" / "foreign"  # translates between some dialects


def dialects_in(path: Path) -> set[str]:
    """The dialects that a file imports, also within functions."""
    names = [name.split(".") for name in imports(path)]
    return {name[3] for name in names if name[:3] == ["penstock", "server", "dialects"] and len(name) > 3}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_dialect_imports_another(folder: str) -> None:
    for path in (DIALECTS / folder).rglob("*.py"):
        assert dialects_in(path) <= {folder}, path


def test_nothing_outside_imports_a_dialect() -> None:
    for path in ROOT.rglob("*.py"):
        if DIALECTS not in path.parents and GATEWAY not in path.parents:
            assert not dialects_in(path), path


def test_nobody_guesses_a_dialect_from_a_url() -> None:
    for path in (ROOT / "server").rglob("*.py"):
        assert "url.path.startswith" not in path.read_text(), path
