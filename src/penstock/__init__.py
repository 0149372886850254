"""Penstock turns weights on disk into tokens streamed to callers, on a laptop, a server or a fleet."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.llm import LLM
    from penstock.llm.async_llm import AsyncEngineArgs, AsyncLLM
    from penstock.llm.beams import BeamSearchParams
    from penstock.llm.lora import LoRARequest
    from penstock.llm.outputs import CompletionOutput, Logprob, PoolingRequestOutput, RequestOutput, RequestOutputKind
    from penstock.service_levels import Targets
    from penstock.types import Grammar, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Grammar",
    "LoRARequest",
    "Logprob",
    "PenstockError",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "Targets",
    "__version__",
]

_HOMES = {  # modules that are imported when a name of theirs is first used
    "penstock.errors": ("PenstockError",),
    "penstock.llm": ("LLM",),
    "penstock.llm.async_llm": ("AsyncEngineArgs", "AsyncLLM"),
    "penstock.llm.beams": ("BeamSearchParams",),
    "penstock.llm.lora": ("LoRARequest",),
    "penstock.llm.outputs": (
        "CompletionOutput",
        "Logprob",
        "PoolingRequestOutput",
        "RequestOutput",
        "RequestOutputKind",
    ),
    "penstock.service_levels": ("Targets",),
    "penstock.types": ("Grammar", "SamplingParams", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
