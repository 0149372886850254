"""Implements the common part of backends on the host: a step is computed while it is launched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from penstock.backend.base import Batch, Bitmasks, CacheSize, DeviceKeeper, Floats, Ints, Model, Sleeper, Ticket
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.types import StepResult

Launch = Callable[[Batch], Ticket]
Wait = Callable[[Ticket], StepResult]


class HostProgram(Protocol):
    """Runs one loaded model: it has its own KV cache, recurrent states and last sampled tokens."""

    def run(self, batch: Batch, masks: Bitmasks | None) -> StepResult: ...


P = TypeVar("P", bound=HostProgram)
T = TypeVar("T")


class SynchronousBackend(Generic[P]):
    """Computes each step in `launch` or, if it has constrained positions, in `constrain`. Nothing is ever in flight,
    and there is nothing to prepare."""

    depth = 0
    own_memory = False
    padded_sizes: Sequence[int] = ()
    sleeper: Sleeper | None = None
    sharing: DeviceSharing | None = None
    keeper: DeviceKeeper | None = None

    def __init__(self) -> None:
        self._programs: dict[int, P] = {}
        self._results: dict[Ticket, StepResult] = {}
        self._unconstrained: Batch | None = None  # launched, and waiting for its bitmasks

    def launch(self, batch: Batch) -> Ticket:
        self._unconstrained = batch if len(batch.constrained) else None
        if self._unconstrained is None:
            self._results[batch.step] = self._compute(batch, None)
        return batch.step

    def constrain(self, ticket: Ticket, words: Ints) -> None:
        batch, self._unconstrained = self._unconstrained, None
        if batch is None or batch.step != ticket:
            raise ValueError(f"step {ticket} waits for no bitmasks: constrain follows the launch of its step at once")
        self._results[ticket] = self._compute(batch, Bitmasks(batch.constrained, words))

    def wait(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        return self._program_of(batch).run(batch, masks)

    def _program_of(self, batch: Batch) -> P:
        return program_of(self._programs, batch)

    def warm_up(self) -> None: ...

    def tell_of_compiling(self, tell: Callable[[bool], None]) -> None: ...

    def prepare_in_idle(self) -> bool:
        return False

    def free_memory(self) -> None: ...

    def is_lost(self) -> bool:
        return False  # what breaks the host's own memory ends the process

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats | None:
        return None

    def time_step(self, batch: Batch, times: int) -> float:
        return time_step(self.launch, self.wait, batch, times)


def program_of(programs: Mapping[int, T], batch: Batch) -> T:
    """Returns the program that a batch runs. Raises ValueError if it is not loaded."""
    if batch.program not in programs:
        loaded = ", ".join(map(str, programs)) or "none"
        raise ValueError(f"program {batch.program} is not loaded: a batch runs one of those that are ({loaded})")
    return programs[batch.program]


def time_step(launch: Launch, wait: Wait, batch: Batch, times: int) -> float:
    """Returns the seconds of a step from launch to answer, the least of `times` runs."""

    def seconds() -> float:
        begun = time.perf_counter()
        wait(launch(batch))
        return time.perf_counter() - begun

    return min(seconds() for _ in range(times))
