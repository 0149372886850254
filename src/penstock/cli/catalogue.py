"""Implements `penstock list --all`, which lists the models that can be pulled, and which fit this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import line_width, note, print_json, print_table, readable_size

if TYPE_CHECKING:
    from penstock.store import CatalogueModel

WIDE = 80  # columns of a terminal that also shows quantizations


def list_catalogue(json: bool) -> None:
    from penstock.config import available_memory
    from penstock.store import ALIASES, CATALOGUE, entries

    memory = available_memory()
    stored = {entry.name for entry in entries()}
    known = [_facts(model, memory) | {"stored": model.full_name in stored} for model in CATALOGUE]
    if json:
        print_json({"memory": memory, "models": known})
        return
    _print(known)
    note(
        f"Sizes are approximate. A name without a tag is its first line ({', '.join(ALIASES)} alone is a file that pip "
        f"fetches). {readable_size(memory)} of memory are free."
    )


def _facts(model: CatalogueModel, memory: int) -> dict[str, Any]:
    from penstock.store import fit

    default = model.default(memory)
    return {
        "name": model.full_name,
        "tag": model.tag,
        "source": f"hf:{model.repo}",
        "architecture": model.arch,
        "parameters": round(model.parameters * 1e9),
        "quantization": default,  # the default of a pull
        "size": model.sizes[default],
        "here": fit(model.sizes[default], memory),
        "quantizations": {name: {"size": size, "here": fit(size, memory)} for name, size in model.sizes.items()},
    }


def _print(known: list[dict[str, Any]]) -> None:
    from rich.table import Column, Table

    right = [Column(name, justify="right") for name in ("parameters", "size")]
    last = ["quantizations"] if line_width() >= WIDE else []
    table = Table("name", *right, "here", *last, box=None, pad_edge=False)
    for facts in known:
        others = [name for name in facts["quantizations"] if name != facts["quantization"]]
        table.add_row(
            facts["name"],
            readable_size(facts["parameters"]).removesuffix("B").replace(" G", " B"),
            f"about {readable_size(facts['size'])}",
            "stored" if facts["stored"] else facts["here"],
            *([", ".join([facts["quantization"], *others])] if last else []),
        )
    print_table(table)
