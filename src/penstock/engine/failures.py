"""Says why requests fail, and why an engine cannot go on."""

from __future__ import annotations

from penstock.errors import DeviceLost, NotFinite, StepFailed
from penstock.types import Failed


def step_failure(error: Exception) -> tuple[str, str]:
    """Returns the code and the message with which the requests of a step fail that has raised the error."""
    message = f"the step that computed this request failed: {type(error).__name__}: {error}"
    return error.code if isinstance(error, StepFailed) else StepFailed.code, message


def not_finite(id: int) -> Failed:
    """Returns the end of a request that has no logits."""
    message = f"request {id}: the model computed NaN or infinity instead of logits; check its weights"
    return Failed(id, NotFinite.code, message)


def lost_device(error: Exception) -> DeviceLost:
    """Returns what ends an engine whose device computes nothing any more since it has raised the error."""
    return DeviceLost(f"the device computes nothing any more after {type(error).__name__}: {error}")
