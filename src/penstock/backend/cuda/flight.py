"""Remembers the steps that were launched and not yet waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock.backend.base import Batch, Bitmasks, SampleRows, Ticket
from penstock.backend.cuda.pooling import read
from penstock.backend.cuda.sampler import Pending
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.backend.pooling import with_pooled
from penstock.backend.sample import answers
from penstock.backend.sampler_chain import with_chains
from penstock.types import StepResult

IN_FLIGHT = 3  # buffers: one is written while two may still be read

# Logits, their sampling parameters, their first position, and the place of their tokens.
Sampling = tuple[Any, DeviceInputs, SampleRows, int, Any]


@dataclass(slots=True)
class Flight:
    """Remembers a launched step, and where its answer will be once `done` has happened."""

    batch: Batch
    tokens: Any  # [S] on the host
    asked: list[Pending]
    pooled: dict[int, Any]  # [dim] on the host, by row
    done: Any | None
    chained: list[Any]  # [n, vocab] on the host: the logits of the positions that have a chain
    masks: Bitmasks | None

    def wait(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        logprobs = [entry for asked in self.asked for entry in asked.read()]
        result = answers(self.batch, self.tokens.tolist(), logprobs)
        if self.chained:
            logits = np.concatenate([rows.numpy() for rows in self.chained])
            result = with_chains(result, self.batch, logits, self.masks)
        return with_pooled(result, read(self.pooled)) if self.pooled else result


class SampledTokens:
    """Holds the tokens that the last steps of a program sampled, on the device and on the host. The place of a step is
    taken again by the third after it: it has been waited for by then."""

    def __init__(self, most: int, device: torch.device) -> None:
        ints = {"dtype": torch.int32, "device": device}
        self._chosen = [torch.zeros(most, **ints) for _ in range(IN_FLIGHT)]
        pinned = device.type == "cuda"
        self._fetched = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._turn = 0

    def next(self) -> Any:
        self._turn = (self._turn + 1) % IN_FLIGHT
        return self._chosen[self._turn]

    def fetch(self, count: int) -> Any:
        """Queues the copy of the tokens of the last step to the host; returns where they will be: [S]."""
        return self._fetched[self._turn][:count].copy_(self._chosen[self._turn][:count], non_blocking=True)


@dataclass(slots=True)
class Unconstrained:
    """Remembers a step whose logits are being computed and whose bitmasks are still to come."""

    batch: Batch
    logits: Iterator[Sampling]


@dataclass(slots=True)
class Flights:
    """Holds the launched steps by ticket, and the one that waits for its bitmasks."""

    launched: dict[Ticket, Flight] = field(default_factory=dict)
    unconstrained: Unconstrained | None = None

    def take_unconstrained(self, ticket: Ticket) -> Unconstrained:
        """Returns the step that waits for bitmasks; raises ValueError if it is not this one."""
        step, self.unconstrained = self.unconstrained, None
        if step is None or step.batch.step != ticket:
            raise ValueError(f"step {ticket} waits for no bitmasks: constrain follows the launch of its step at once")
        return step
