"""Writes docs/api.md, the reference of the Python API, from the docstrings and signatures of its public names; with
--check, only says whether it is current."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import penstock
from penstock import errors

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WIDTH = 120
HEAD = """\
# Python API reference

Import these names from `penstock`. [Python](python.md) has examples; [engine options](cli.md#engine-options) lists the
keyword arguments of `LLM` and `AsyncLLM`. `scripts/make_api_docs.py` generates this page: do not edit it.
"""
ORDER = (
    *("LLM", "AsyncLLM", "AsyncEngineArgs", "SamplingParams", "StructuredOutputsParams", "Grammar", "BeamSearchParams"),
    "Targets",
    *("LoRARequest", "RequestOutput", "CompletionOutput", "Logprob", "RequestOutputKind", "PoolingRequestOutput"),
    "PenstockError",
)


def render() -> str:
    """Returns the page."""
    public = {name for name in penstock.__all__ if name != "__version__"}
    if public != set(ORDER):
        sys.exit(f"{', '.join(sorted(public ^ set(ORDER)))}: say in {__file__} where it stands on the page")
    return "\n".join([HEAD, *(section(getattr(penstock, name)) for name in ORDER)])


def section(kind: type) -> str:
    """Returns what the page says about one class."""
    parts = [f"## {kind.__name__}", prose(kind.__doc__ or "")]
    if "__init__" in vars(kind) and not is_dataclass(kind) and kind is not errors.PenstockError:
        parts.append(f"```python\n{signature(kind.__name__, kind.__init__)}\n```")
    listed = list(own_fields(kind))
    if listed:
        parts.append("\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *listed]))
    parts += [method(name, value) for name, value in vars(kind).items() if is_public(name, value)]
    if kind is errors.PenstockError:
        parts.append(error_list())
    return "\n\n".join(parts) + "\n"


def prose(docstring: str) -> str:
    """Returns a docstring's paragraphs in lines of the page's width; nothing for one that Python made up."""
    if re.match(r"\w+\(.*\)$", docstring.strip(), re.DOTALL):
        return ""
    paragraphs = (" ".join(each.split()) for each in inspect.cleandoc(docstring).split("\n\n"))
    return "\n\n".join(
        textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False) for each in paragraphs
    )


def is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, staticmethod | classmethod | property | type(section))


def method(name: str, value: Any) -> str:
    """Returns what the page says about a method or a property."""
    if isinstance(value, property):
        assert value.fget is not None
        kind = inspect.signature(value.fget).return_annotation
        return "\n\n".join(filter(None, (f"### {name}", f"`{name}: {kind}`", prose(value.fget.__doc__ or ""))))
    function = getattr(value, "__func__", value)
    parts = (f"### {name}", f"```python\n{signature(name, function)}\n```", prose(function.__doc__ or ""))
    return "\n\n".join(filter(None, parts))


def signature(name: str, function: Any) -> str:
    """Returns a call as it is declared, on several lines where one is too short."""
    found = inspect.signature(function)
    given = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    returned = "" if found.return_annotation in (None, "None", found.empty) else f" -> {found.return_annotation}"
    before = "async " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    texts: list[str] = []
    for each in given:
        if each.kind is each.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        texts.append(str(each).replace("'", ""))  # annotations are texts
    line = f"{before}{name}({', '.join(texts)}){returned}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{before}{name}(", *(f"    {text}," for text in texts), f"){returned}"])


def own_fields(kind: type) -> Iterator[str]:
    """Yields a row for each field of a dataclass, a named tuple or an enumeration: its comment says what it means."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    if not (is_dataclass(kind) or hasattr(kind, "_fields") or hasattr(kind, "__members__")):
        return
    known = {each.name for each in fields(kind)} if is_dataclass(kind) else None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation, value = node.target.id, ast.unparse(node.annotation), node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, annotation, value = node.targets[0].id, "", node.value
        else:
            continue
        if known is not None and name not in known:
            continue
        comment = lines[(node.end_lineno or 0) - 1].partition("  # ")[2]
        default = "" if value is None else f"`{ast.unparse(value)}`"
        default = "" if default.startswith("`field(") else default
        shown = f"`{annotation}`".replace("|", "\\|") if annotation else ""
        yield f"| `{name}` | {shown} | {default} | {comment} |"


def error_list() -> str:
    """Returns the errors that calls raise, with their codes."""
    kinds = [kind for kind in errors._tree(errors.PenstockError) if kind is not errors.PenstockError]
    names = ", ".join(f"`{kind.__name__}` (`{kind.code}`)" for kind in kinds)
    text = (
        "Every failure raises one of these classes of `penstock.errors`, with a `code` and a `message`. "
        "[Troubleshooting](troubleshooting.md#by-error-code) has advice for each: "
    )
    return textwrap.fill(f"{text}{names}.", WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE} is not current: run python scripts/make_api_docs.py")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
