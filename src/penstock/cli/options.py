"""Arguments and options that several commands share. Options of the engine are declared in `penstock.config`."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.cli.command import Argument, EngineOptions, Option
from penstock.config import OPTIONS

DEFAULT_MODEL = "smollm2"  # as in penstock.store, which is too slow to import for --help

ModelRef = Annotated[str, Argument(metavar="MODEL", help="A name, a path, hf:owner/repo[/file] or pypi:package/file.")]
EngineSettings = Annotated[dict[str, Any], EngineOptions(tuple(OPTIONS))]
OneSequenceSettings = Annotated[  # for commands that run one sequence at a time
    dict[str, Any], EngineOptions(tuple(name for name in OPTIONS if name not in ("max_rows", "prefill_budget")))
]
ScoringSettings = Annotated[  # for commands that compute logits without a scheduler
    dict[str, Any], EngineOptions(("device", "threads", "quantize", "kv", "block_size", "config", "strict_config"))
]
ExportSettings = Annotated[dict[str, Any], EngineOptions(("threads", "config", "strict_config"))]
ReadingSettings = Annotated[dict[str, Any], EngineOptions(("config", "strict_config"))]
MaxTokens = Annotated[
    int | None, Option(minimum=1, help="Most tokens of the answer. By default it may fill the context.")
]
TopP = Annotated[
    float, Option(minimum=0, maximum=1, help="Sample from the most likely tokens whose probabilities add up to this.")
]
Seed = Annotated[int | None, Option(help="Seed that makes sampling repeatable.")]
System = Annotated[str, Option(help="System message to begin with.")]
Json = Annotated[bool, Option(help="Print JSON.")]
