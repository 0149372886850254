"""Reads the adapter_config.json of a PEFT folder, and refuses what would change the result and is not computed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import AdapterError

# What must have one of these values, because another would change the result: (values, why not).
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
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the base model's weights
# What says how the adapter was trained, or which modules: its tensors tell that.
NEUTRAL = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "unsloth_fixed",
))  # fmt: skip
READ = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"))


class PeftConfig(NamedTuple):
    """Holds the numbers that an adapter's scales follow from."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's matrices."""
        return int(found_in(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns what a module's B @ A is multiplied by."""
        rank = self.rank_of(module)
        return float(found_in(self.alpha_pattern, module, self.alpha)) / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(values: Mapping[str, Any]) -> PeftConfig:
    """Reads a config; raises AdapterError that names a field which is not supported."""
    for field, (allowed, reason) in REQUIRED.items():
        if values.get(field, allowed[0]) not in allowed:
            raise AdapterError(f"adapter_config.json has {field} = {values[field]!r}: {reason}")
    begun = values.get("init_lora_weights", True)
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"adapter_config.json has init_lora_weights = {begun!r}, which changes the base model's weights: save the "
            "adapter with path_initial_model_for_weight_conversion, or merge it into its model"
        )
    known = REQUIRED.keys() | NEUTRAL | READ
    if unknown := sorted(field for field, value in values.items() if field not in known and value):
        raise AdapterError(
            f"adapter_config.json has fields that this engine does not know: {', '.join(unknown)}; they may change the "
            "result"
        )
    numbers = [number_of(values, field) for field in ("r", "lora_alpha")]
    patterns = [pattern_of(values, field) for field in ("rank_pattern", "alpha_pattern")]
    return PeftConfig(int(numbers[0]), numbers[1], bool(values.get("use_rslora")), *patterns)


def number_of(values: Mapping[str, Any], field: str) -> float:
    """Returns a number above 0."""
    value = values.get(field, 8)  # PEFT's own default for both
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise AdapterError(f"adapter_config.json has {field} = {value!r}; it must be a number above 0")
    return value


def pattern_of(values: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Returns a table from patterns of module names to numbers above 0."""
    table = values.get(field) or {}
    if not isinstance(table, dict):
        raise AdapterError(f"adapter_config.json has {field} = {table!r}; it must map module names to numbers")
    for pattern in table:
        number_of(table, pattern)
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(f"adapter_config.json: {field} has the pattern {pattern!r}: {error}") from None
    return table


def found_in(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """Returns the number of the first pattern that a module's name, or the end of it after a dot, matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(?:.*\.)?({pattern})$", module):
            return float(value)
    return default
