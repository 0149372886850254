"""Writes the tables of docs/families.md from the registry and the docstrings of the families' modules; with --check,
only says whether they are current.

The docstring of a family begins "Reads MODELS: what is their own." Further paragraphs become notes below the table. The
rest of the page is prose, and is edited there.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from generated_blocks import wrapped, write

from penstock.model.config_fields import CHANGING
from penstock.model.registry import CLASSIFIERS, GGUF, HUGGING_FACE, NO_MODELS

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
FILES = "../src/penstock/model/families"


class Described(NamedTuple):
    """Holds what the docstring of a family's module says."""

    models: str
    own: str  # what is their own
    notes: tuple[str, ...]


def described(name: str) -> Described:
    """Returns what the docstring of a family says."""
    paragraphs = (import_module(f"penstock.model.families.{name}").__doc__ or name).strip().split("\n\n")
    first, *rest = (" ".join(paragraph.split()) for paragraph in paragraphs)
    models, own = divided(re.sub(r"^Reads (and builds )?", "", first))
    return Described(models.removesuffix("."), own.removesuffix("."), tuple(rest))


def divided(text: str) -> tuple[str, str]:
    """Returns what comes before the first colon that is in no parentheses, and what comes after it."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and not depth:
            return text[:at], text[at + 1 :].strip()
    return text, ""


def families() -> str:
    """Returns the table of families with their notes."""
    found = {name: described(name) for name in dict.fromkeys((*HUGGING_FACE.values(), *GGUF.values()))}
    rows = [family_row(name, family) for name, family in found.items()]
    notes = [f"- **{family.models}.** {note}" for family in found.values() for note in family.notes]
    heads = "| models | `architectures` | GGUF | what is their own | file |\n|---|---|---|---|---|"
    return "\n".join([heads, *rows, "", *map(wrapped, notes)])


def family_row(name: str, family: Described) -> str:
    """Returns a family's row of the table."""
    folders, files = names_of(name, HUGGING_FACE), names_of(name, GGUF)
    return f"| {family.models} | {folders} | {files} | {family.own} | [`{name}.py`]({FILES}/{name}.py) |"


def names_of(family: str, table: dict[str, str]) -> str:
    """Returns the names that lead to a family."""
    return ", ".join(f"`{name}`" for name, other in table.items() if other == family)


def classifiers() -> str:
    """Returns the architectures with a classification head."""
    names = ", ".join(f"`{name.removesuffix('ForSequenceClassification')}`" for name in CLASSIFIERS)
    return wrapped(f"`...ForSequenceClassification` is read for {names}.")


def refused() -> str:
    """Returns what is refused by name: files that are no models, and fields that would change what is computed."""
    files = [f"- `{kind}`: {reason.partition(';')[0]}." for kind, reason in NO_MODELS.items()]
    fields = ", ".join(f"`{name}`{unless(values)}" for name, values in CHANGING.items())
    return "\n".join(
        [
            "GGUF files whose `general.type` says that they are no models:",
            "",
            *map(wrapped, files),
            "",
            "Fields of `config.json`, where a family does not read them (with the values that are accepted):",
            "",
            wrapped(f"{fields}."),
        ]
    )


def unless(values: tuple[Any, ...]) -> str:
    """Returns the values of a field that say that it is not used."""
    return f" ({' or '.join(map(json.dumps, values))})" if values else ""


BLOCKS = {"families": families, "classifiers": classifiers, "refused": refused}


if __name__ == "__main__":
    write({PAGE: BLOCKS}, Path(__file__).name)
