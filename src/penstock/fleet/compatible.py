"""Compares an engine with the others of its fleet."""

from __future__ import annotations

from penstock.types import Hello, Limits

VARIES = (
    *("num_blocks", "memory", "host_places", "host_states", "max_len", "states", "max_rows"),
    *("step_tokens", "prefill_budget"),
)


def difference(fleet: Hello, replica: Hello) -> str:
    """Returns why a replica's engine cannot stand in for the others; empty: it can."""
    if replica.model != fleet.model:
        return f"it serves {replica.model!r}, and the fleet {fleet.model!r}"
    if replica.limits.max_len < fleet.limits.max_len:
        return f"it has {replica.limits.max_len} tokens of context, and the fleet {fleet.limits.max_len}"
    ours, theirs = _model_limits(fleet.limits), _model_limits(replica.limits)
    differing = [name for name in ours if ours[name] != theirs[name]]
    return f"its model differs from the fleet's in {', '.join(differing)}" if differing else ""


def _model_limits(limits: Limits) -> dict[str, object]:
    return {name: value for name, value in limits._asdict().items() if name not in VARIES}
