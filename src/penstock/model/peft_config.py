"""Reads the adapter_config.json of a PEFT folder, and refuses settings that Penstock would not compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import AdapterError
from penstock.model.config_reader import MAX_NUMBER, short
from penstock.model.module_pattern import ModulePatterns

# field: (the supported values, why others are refused).
REQUIRED: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": (("LORA",), "only LoRA is supported"),
    "use_dora": ((False, None), "DoRA is not supported: merge the adapter into its model"),
    "bias": (("none", None), "adapters that change biases are not supported"),
    "lora_bias": ((False, None), "biases of adapters are not supported"),
    "use_qalora": ((False, None), "QALoRA is not supported"),
    "use_bdlora": ((False, None), "block-diagonal LoRA is not supported"),
    "alora_invocation_tokens": ((None,), "activated LoRA (aLoRA) is not supported"),
    "modules_to_save": ((None, [], ()), "whole modules beside the adapter are not supported"),
    "layer_replication": ((None,), "repeated layers are not supported"),
    "trainable_token_indices": ((None,), "trained embeddings are not supported"),
    "target_parameters": ((None, []), "adapters of experts and other parameters are not supported"),
    "arrow_config": ((None,), "Arrow is not supported"),
    "lora_ga_config": ((None,), "LoRA-GA changes the base model: merge the adapter into its model"),
    "monteclora_config": ((None,), "MonteCLoRA is not supported"),
    "velora_config": ((None,), "VeLoRA is not supported"),
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the base model's weights
# Training settings, and the module selection that the tensors already show.
NEUTRAL = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "unsloth_fixed",
))  # fmt: skip
READ = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"))


class NumberByModule:
    """Looks up a number by module name, in a table whose keys are patterns."""

    def __init__(self, values: Mapping[str, Any], field: str, default: float) -> None:
        table = values.get(field) or {}
        if not isinstance(table, dict):
            raise AdapterError(f"adapter_config.json has {field} = {short(table)}; it must map module names to numbers")
        self._patterns = ModulePatterns(table, field)
        self._numbers = {pattern: number_of(table, pattern) for pattern in table}
        self._default = default

    def __getitem__(self, module: str) -> float:
        pattern = self._patterns.first(module)
        return self._default if pattern is None else self._numbers[pattern]


class PeftConfig(NamedTuple):
    """Holds the numbers that determine an adapter's scales."""

    ranks: NumberByModule
    alphas: NumberByModule
    rslora: bool

    def rank_of(self, module: str) -> int:
        return int(self.ranks[module])

    def scale_of(self, module: str, rank: int) -> float:
        return self.alphas[module] / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(values: Mapping[str, Any]) -> PeftConfig:
    """Reads a config; raises AdapterError for unsupported fields."""
    for field, (allowed, reason) in REQUIRED.items():
        if values.get(field, allowed[0]) not in allowed:
            raise AdapterError(f"adapter_config.json has {field} = {short(values[field])}: {reason}")
    begun = values.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"adapter_config.json has init_lora_weights = {short(begun)}, which changes the base model's weights: save "
            "the adapter with path_initial_model_for_weight_conversion, or merge it into its model"
        )
    known = REQUIRED.keys() | NEUTRAL | READ
    if unknown := sorted(field for field, value in values.items() if field not in known and value):
        raise AdapterError(
            f"adapter_config.json has fields that this engine does not know: {', '.join(map(short, unknown[:8]))}; "
            "they may change the result"
        )
    ranks = NumberByModule(values, "rank_pattern", number_of(values, "r"))
    alphas = NumberByModule(values, "alpha_pattern", number_of(values, "lora_alpha"))
    return PeftConfig(ranks, alphas, bool(values.get("use_rslora")))


def number_of(values: Mapping[str, Any], field: str) -> float:
    value = values.get(field, 8)  # PEFT's default for both
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise AdapterError(
            f"adapter_config.json has {field} = {short(value)}; it must be a number above 0, at most {MAX_NUMBER:g}"
        )
    return value
