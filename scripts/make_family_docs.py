"""Writes the tables of docs/families.md from the registry and the docstrings of the families' modules; with --check,
only says whether they are current.

The docstring of a family begins "Reads MODELS: their differences." Further paragraphs become notes in the list of
differences. The rest of the page is prose, and is edited there.
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
    """Holds the parts of a family's docstring."""

    models: str
    own: str  # differences to other families
    notes: tuple[str, ...]


def described(name: str) -> Described:
    """Returns the parts of a family's docstring."""
    paragraphs = (import_module(f"penstock.model.families.{name}").__doc__ or name).strip().split("\n\n")
    first, *rest = (" ".join(paragraph.split()) for paragraph in paragraphs)
    models, own = divided(re.sub(r"^Reads (and builds )?", "", first))
    return Described(title(models.removesuffix(".")), own.removesuffix("."), tuple(rest))


def divided(text: str) -> tuple[str, str]:
    """Divides a sentence at its first colon outside parentheses or, without one, at its first comma."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ":" and not depth:
            return text[:at], text[at + 1 :].strip()
    models, _, own = text.partition(", ")
    return models, own


def title(models: str) -> str:
    """Returns the name under which a reader looks for the models."""
    if text_part := re.fullmatch(r"the text part of (.*)", models):
        return f"{text_part[1]} (text only)"
    return re.sub(r"^the (Llama) family$", r"\1 2 and 3, Mistral, SmolLM2 and similar models", models)


def found() -> dict[str, Described]:
    """Returns all families, sorted by the names of their models."""
    families = {name: described(name) for name in dict.fromkeys((*HUGGING_FACE.values(), *GGUF.values()))}
    return dict(sorted(families.items(), key=lambda item: item[1].models.lower()))


def families() -> str:
    """Returns the table of names."""
    rows = [
        f"| [{family.models}]({FILES}/{name}.py) | {names_of(name, HUGGING_FACE)} | {names_of(name, GGUF)} |"
        for name, family in found().items()
    ]
    return "\n".join(["| models | `architectures` of `config.json` | GGUF architecture |", "|---|---|---|", *rows])


def differences() -> str:
    """Returns a list item for each family: its differences, and its notes."""
    return "\n".join(
        wrapped(
            f"- **{family.models}:** {'. '.join(filter(None, (family.own, *family.notes)))}".removesuffix(".") + "."
        )
        for family in found().values()
    )


def names_of(family: str, table: dict[str, str]) -> str:
    """Returns the names of a family's architectures."""
    return ", ".join(f"`{name}`" for name, other in table.items() if other == family)


def classifiers() -> str:
    """Returns the architectures with a classification head."""
    names = ", ".join(f"`{name.removesuffix('ForSequenceClassification')}`" for name in CLASSIFIERS)
    return wrapped(f"`...ForSequenceClassification` is supported for {names}.")


def refused() -> str:
    """Returns the list of refused files and fields."""
    files = [f"- `{kind}`: {reason.partition(';')[0]}." for kind, reason in NO_MODELS.items()]
    fields = ", ".join(f"`{name}`{unless(values)}" for name, values in CHANGING.items())
    return "\n".join(
        [
            "Refused values of `general.type` in GGUF files:",
            "",
            *map(wrapped, files),
            "",
            "Refused fields of `config.json`, unless a family reads them (accepted values in parentheses):",
            "",
            wrapped(f"{fields}."),
        ]
    )


def unless(values: tuple[Any, ...]) -> str:
    """Returns the values of a field that turn it off."""
    return f" ({' or '.join(map(json.dumps, values))})" if values else ""


BLOCKS = {"families": families, "differences": differences, "classifiers": classifiers, "refused": refused}


if __name__ == "__main__":
    write({PAGE: BLOCKS}, Path(__file__).name)
