"""Declares arguments and options that several commands share. `penstock.config` declares the engine's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.framework.command import Argument, EngineOptions, Option
from penstock.config import OPTIONS

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.types import SamplingParams

DEFAULT_MODEL = "smollm2"  # the same as in penstock.store, which is too slow to import for --help

ModelRef = Annotated[
    str, Argument(metavar="MODEL", help="A name, a path, hf:owner/repo[:quantization] or pypi:package/file.")
]
EngineSettings = Annotated[dict[str, Any], EngineOptions(tuple(OPTIONS))]
OneSequenceSettings = Annotated[  # commands that run one sequence at a time
    dict[str, Any], EngineOptions(tuple(name for name in OPTIONS if name not in ("max_rows", "prefill_budget")))
]
ScoringSettings = Annotated[  # commands that compute logits without a scheduler
    dict[str, Any], EngineOptions(("device", "threads", "quantize", "kv", "block_size", "config", "strict_config"))
]
ExportSettings = Annotated[dict[str, Any], EngineOptions(("threads", "config", "strict_config"))]
ReadingSettings = Annotated[dict[str, Any], EngineOptions(("config", "strict_config"))]
Json = Annotated[bool, Option(help="Print JSON.")]


class AnswerOptions(NamedTuple):
    """Declares the options of commands that generate answers."""

    max_tokens: Annotated[
        int | None, Option(minimum=1, help="Maximum tokens of the answer. By default it may fill the context.")
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            minimum=0,
            help="Sampling temperature. 0: always the most likely token, so the same prompt gets the same answer. "
            "Default: the model's own (generation_config.json, GGUF metadata or Modelfile), else 0.7.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            minimum=0,
            maximum=1,
            help="Sample from the most likely tokens up to this total probability. Default: the model's own, else "
            "0.95.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Option(
            minimum=0, help="Sample from this many of the most likely tokens; 0: from all. Default: the model's own."
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Option(
            minimum=0,
            maximum=1,
            help="Exclude tokens less likely than this fraction of the most likely one. Default: the model's own.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Option(
            minimum=0,
            help="Penalty on tokens that already occurred: above 1 discourages repetition, 1 disables it. Default: "
            "the model's own.",
        ),
    ] = None
    seed: Annotated[int | None, Option(help="Seed for reproducible sampling.")] = None
    loop_guard: Annotated[
        bool,
        Option(
            help="At temperature 0, end an answer that repeats itself forever. Enabled by default; --no-loop-guard "
            "disables it."
        ),
    ] = True
    system: Annotated[str, Option(help="System message.")] = ""

    def sampling(self, llm: LLM) -> SamplingParams:
        return llm.sampling_params(**{name: getattr(self, name) for name in self._fields if name != "system"})
