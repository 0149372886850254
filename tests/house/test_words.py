"""Tests that a stranger can read the tree: docstrings are sentences, and names mean one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
MAX_PROTOCOL_METHODS = 6

FRAGMENT_BEGINNINGS = (  # such a docstring only continues the name above it
    *("Of ", "The same", "With ", "Without ", "As ", "For ", "From ", "By "),
    *("What ", "How ", "Which ", "Where ", "Whether ", "Who "),
)
BASE_FORMS = Path(__file__).with_name("verbs.txt").read_text().split()
VERBS = {"is", "are", "was", "were", "be", "has", "can", "may", "must", "will", "would", "should", "cannot", "could"}
VERBS |= {form for verb in BASE_FORMS for form in (verb, f"{verb}s", f"{verb}es", re.sub("y$", "ies", verb))}

# Public class names that stand in several modules, and why that is right.
SHARED_CLASS_NAMES: dict[str, str] = {
    "Tiling": "each GEMM kernel has one; it is always named with its module, as in gemv.Tiling",
}


def definitions(path: Path) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_sentence(docstring: str) -> bool:
    """Returns True if the first paragraph does not begin as a fragment and has a verb."""
    paragraph = re.split(r"\n\s*\n", docstring)[0]
    words = set(re.findall(r"[a-z']+", paragraph.lower()))
    return not paragraph.startswith(FRAGMENT_BEGINNINGS) and bool(words & VERBS)


def id_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=id_of)
def test_docstrings_are_sentences(path: Path) -> None:
    found = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in definitions(path)]
    assert not [(name, text) for name, text in found if text and not is_sentence(text)]


def test_fragments_are_told_from_sentences() -> None:
    assert is_sentence("Returns the bytes of one block.")
    for fragment in ("Of one.", "The same of latent attention.", "With such a model.", "A matrix for each head."):
        assert not is_sentence(fragment)


def test_a_class_name_means_one_thing() -> None:
    modules = defaultdict(set)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(id_of(path))
    shared = {name: sorted(paths) for name, paths in modules.items() if len(paths) > 1}
    assert {name: shared[name] for name in shared.keys() - SHARED_CLASS_NAMES.keys()} == {}
    assert SHARED_CLASS_NAMES.keys() <= shared.keys(), "a name on the list is no longer shared: take it off"


def test_backend_protocols_stay_small() -> None:
    tree = ast.parse((ROOT / "backend" / "base.py").read_text())
    protocols = {
        node.name: sum(isinstance(part, ast.FunctionDef) for part in node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
    }
    assert {"WeightPacker", "Runner", "Tuner"} <= protocols.keys()
    assert {name: count for name, count in protocols.items() if count > MAX_PROTOCOL_METHODS} == {}
