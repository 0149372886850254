"""Measures the shape of the code: fan-out of imports, constructors, attributes, methods, and packed tuples.

`python -m tests.house.shape` writes the numbers that are over a limit to shape.json. Run it after a change that lowers
one of them.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
RECORDED = Path(__file__).with_name("shape.json")
LIMITS = {
    "imports": 25,
    "constructor arguments": 10,
    "attributes": 15,
    "methods": 25,
    "packed tuples": 0,
    "renamings": 0,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def measured() -> dict[str, dict[str, int]]:
    """Returns the numbers over their limit, by kind and place."""
    found: dict[str, dict[str, int]] = {kind: {} for kind in LIMITS}
    for path in sorted(ROOT.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        for kind, place, number in of_module(tree, name):
            if number > LIMITS[kind]:
                found[kind][place] = number
    return found


def of_module(tree: ast.Module, name: str) -> Iterator[tuple[str, str, int]]:
    """Yields kind, place and number."""
    yield "imports", name, len(imported(tree))
    yield "packed tuples", name, sum(packed_tuples(node) for node in ast.walk(tree) if isinstance(node, Function))
    if not name.endswith("__init__.py"):
        yield "renamings", name, renamings(tree)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            place = f"{name}:{node.name}"
            methods = [each for each in node.body if isinstance(each, Function)]
            yield "methods", place, len(methods)
            for method in methods:
                if method.name == "__init__":
                    arguments = method.args
                    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
                    yield "constructor arguments", place, count
                    yield "attributes", place, len(attributes(method))


def imported(tree: ast.Module) -> set[str]:
    """Returns the modules of ours that a module imports when it runs."""
    typing = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for each in ast.walk(node)
    }
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in typing]
    return {node.module for node in nodes if node.module and node.module.startswith("penstock")}


def attributes(constructor: Function) -> set[str]:
    """Returns the attributes of `self` that a constructor sets."""
    stores = (node for node in ast.walk(constructor) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in stores
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def packed_tuples(function: Function) -> int:
    """Counts the tuples that get a name only to be unpacked in one call: `about = a, b; f(*about)`."""
    packed = {
        node.targets[0].id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
    }
    loads = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    uses = Counter(node.id for node in loads)
    starred = Counter(
        argument.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)
    )
    return sum(uses[name] == starred[name] == 1 for name in packed)


def renamings(tree: ast.Module) -> int:
    """Counts the names that a module imports only to pass them on: `from a import B as B`."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return sum(alias.name == alias.asname for node in imports for alias in node.names)


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(measured(), indent=2, sort_keys=True) + "\n")
