"""Remembers the steps that were launched and not yet waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.backend.base import Batch, Bitmasks, SampleRows
from penstock.backend.cuda.inputs import DeviceInputs
from penstock.backend.cuda.sampler import PendingLogprobs

# Logits, what is asked of them, their first position, and where their tokens go.
Sampling = tuple[Any, DeviceInputs, SampleRows, int, Any]


@dataclass(slots=True)
class Flight:
    """Remembers a launched step, and where its answer will be once `done` has happened."""

    batch: Batch
    tokens: Any  # [S] on the host
    asked: list[PendingLogprobs]
    pooled: dict[int, Any]  # [dim] on the host, by row
    done: Any | None
    chained: list[Any]  # [n, vocab] on the host: the logits of the positions that have a chain
    masks: Bitmasks | None


@dataclass(slots=True)
class Unconstrained:
    """Remembers a step whose logits are being computed and whose bitmasks are still to come."""

    batch: Batch
    logits: Iterator[Sampling]
