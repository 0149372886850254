"""Reads vLLM's speculative config, which `--speculative-config` takes as JSON and `LLM` as a dictionary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import ConfigError

DRAFT_MODEL = "draft_model"
NAMING_MODELS = (DRAFT_MODEL, "eagle3")  # methods with a model or head, whose files define its kind
MTP = "mtp"  # --draft's value for the head in the model's own checkpoint
MTP_METHODS = (MTP, "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
DRAFT_FREE = ("ngram", "ngram_gpu", "suffix")  # methods that look up drafts in texts; Penstock has one
NO_EFFECT = (  # the engine makes these choices in each step
    "disable_by_batch_size",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "rejection_sample_method",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_min_token_prob",
)
KNOWN = ("method", "model", "num_speculative_tokens", *NO_EFFECT)
NAME = "speculative_config"


def speculation_in_json(text: str, warn: Callable[[str], None]) -> dict[str, str]:
    """Parses a JSON config; see `speculation_in`."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{NAME} is not JSON: {error}; got {text[:200]!r}") from error
    return speculation_in(given, warn)


def speculation_in(given: Any, warn: Callable[[str], None]) -> dict[str, str]:
    """Returns the engine options of a config: `speculation` and, for a draft model or head, `draft`. `warn` gets a line
    about ignored fields. Raises ConfigError for unknown methods and fields.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f'{NAME} is an object such as {{"method": "ngram"}}; got {given!r:.200}')
    if unknown := sorted(map(str, given.keys() - set(KNOWN))):
        raise ConfigError(f"{NAME} has unknown fields: {', '.join(unknown)}; there are {', '.join(sorted(KNOWN))}")
    stated = {name: value for name, value in given.items() if value is not None}
    draft = _draft_model(stated)
    if ignored := sorted(stated.keys() & set(NO_EFFECT)):
        warn(f"warning: fields of {NAME} without effect here: {', '.join(ignored)}")
    count = stated.get("num_speculative_tokens", "auto")
    if count != "auto" and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ConfigError(f"num_speculative_tokens of {NAME} must be a whole number above 0; got {count!r}")
    return {"speculation": str(count)} | draft


def _draft_model(stated: Mapping[str, Any]) -> dict[str, str]:
    """Returns the draft option, empty for lookup methods. vLLM also accepts the method as the model's name. Raises
    ConfigError for all other methods.
    """
    model = str(stated.get("model", "")).strip("[]")
    method = stated.get("method", model if model in (*DRAFT_FREE, *MTP_METHODS) else DRAFT_MODEL if model else None)
    if method in DRAFT_FREE and model in ("", *DRAFT_FREE):
        return {}
    if method in MTP_METHODS and model in ("", *MTP_METHODS):
        return {"draft": MTP}
    if method in NAMING_MODELS and model:
        return {"draft": model}
    naming = " or ".join(NAMING_MODELS)
    if method is None or method in NAMING_MODELS:
        missing = "method" if method is None else "model"
        raise ConfigError(
            f"{NAME} names no {missing}: use {', '.join((*DRAFT_FREE, MTP))}, or {naming} and a model, or leave it out"
        )
    named = f" ({model})" if model else ""
    raise ConfigError(
        f"{NAME} asks for drafts by {method!r}{named}, which is not supported. Use {naming} and a model, {MTP} for "
        f"the model's own head, or {', '.join(DRAFT_FREE)}, or leave it out: then drafts are looked up in texts"
    )
