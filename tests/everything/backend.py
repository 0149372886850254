"""Computes for the world of everything: it can loop, it obeys all that requests say about sampling, and it fails when
it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Bitmasks
from penstock.backend.fake import FakeBackend, FakeHead, FakeHeadProgram, FakeProgram, gathered, windowed
from penstock.backend.sample import sample
from penstock.backend.sampler_chain import chained_positions, with_chains
from penstock.engine.background_reader import Reader, Reading
from penstock.engine.control.weight_reader import ReadWeights
from penstock.errors import OutOfMemory, StepFailed, WeightsError
from penstock.types import StepResult

VOCAB = 260  # 256 bytes, three tokens that carry structure, and a logit that belongs to no token
SLOPE = 8.0  # tokens over which a logit falls by one
OFTEN = 0.8  # share of the draft program's answers that are the target's


class Death(BaseException):
    """Ends an engine process in the middle of a step: nothing catches it."""


class LoopingPrompt(NamedTuple):
    """Is a prompt after which the model repeats the last `period` tokens without end."""

    prompt: tuple[int, ...]
    period: int


class LoopingProgram(FakeProgram):
    """Repeats a phrase behind prompts that make it loop, if all that it reads back is what it should be."""

    loops: Sequence[LoopingPrompt] = ()

    def _token(self, tables: NDArray[np.int32], length: int, state: int, added: int) -> int:
        if 0 in self._windows:
            for prompt, period in self.loops:
                context = self._tokens(tables, length, added)
                if is_looping(context, prompt, period) and self._is_right(tables, context, state, added):
                    return (context[length - period] + self._number) % self._vocab
        return super()._token(tables, length, state, added)

    def _tokens(self, tables: NDArray[np.int32], length: int, added: int) -> list[int]:
        table = tables[self._windows.index(0)]
        return [int(value) - added for value in self._read(table, 0, length)]

    def _is_right(self, tables: NDArray[np.int32], context: Sequence[int], state: int, added: int) -> bool:
        """Returns whether all layer groups and the recurrent state have what follows from the context."""
        values = [token + added for token in context]
        if len(self.states) and state != gathered(values):
            return False
        for window, seen in zip(self._windows, self._seen(tables, len(values)), strict=True):
            right = windowed(values, window)[-window:] if window else values
            if seen.tolist() != right:
                return False
        return True


def is_looping(context: Sequence[int], prompt: Sequence[int], period: int) -> bool:
    """Returns whether a context is the prompt and repetitions of its last `period` tokens."""
    begun = len(context) >= len(prompt) and tuple(context[: len(prompt)]) == tuple(prompt)
    return begun and all(context[at] == context[at - period] for at in range(len(prompt), len(context)))


class WorldBackend(FakeBackend):
    """Samples by the reference sampler from logits around the fake's token. A draft program (1) is right most of the
    time. `spend` is told how many tokens a step computes, `faults` are what goes wrong in the next steps of the target,
    by the names of moments, and `struck` is told when one does."""

    def __init__(
        self, max_rows: int, windows: Sequence[int], loops: Sequence[LoopingPrompt], seed: int, drafts: str = ""
    ) -> None:
        super().__init__(VOCAB, max_rows, windows)
        self._random = Random(seed)
        self._loops = loops
        self.faults: list[str] = []
        self.failed: dict[str, int] = {}  # rows of steps that a fault has failed, by its name
        self.spend: Callable[[int], None] = lambda tokens: None
        self.struck: Callable[[str], None] = lambda fault: None
        self._make = self._loop(self._make)
        self.load(None, 0)  # type: ignore[arg-type]
        if drafts:
            self.load(FakeHead() if drafts == "head" else None, 1)  # type: ignore[arg-type]

    def _loop(self, make: Callable[..., FakeProgram]) -> Callable[..., FakeProgram]:
        def made(number: int, windows: Sequence[int]) -> FakeProgram:
            program = LoopingProgram(number, windows=windows, **make.keywords)  # type: ignore[attr-defined]
            program.loops = self._loops
            return program

        return made

    @property
    def target(self) -> FakeProgram:
        return self._programs[0]

    def remains(self) -> list[NDArray[np.int64]]:
        """Returns copies of what lies in memory that outlives the process: blocks and states."""
        return [array.copy() for array in (*self._block_arrays(), self.target.states)]

    def restore(self, remains: Sequence[NDArray[np.int64]]) -> None:
        """Takes over what another process has left."""
        for array, found in zip((*self._block_arrays(), self.target.states), remains, strict=True):
            array[:] = found

    def fail(self, fault: str, rows: int) -> None:
        """Takes note of a fault that may fail so many rows."""
        self.failed[fault] = self.failed.get(fault, 0) + rows
        self.struck(fault)

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        fault = self.faults.pop(0) if self.faults and not batch.program else ""
        if fault:
            self.fail(fault, 1 if fault == "not finite" else len(batch.slots))
        self.spend(len(batch.tokens))
        if fault in ("no memory", "failed step"):
            raise OutOfMemory("no memory is left") if fault == "no memory" else StepFailed("the step failed")
        before = self.remains() if fault == "death" else []
        asked = replace(batch.sample, target=np.full_like(batch.sample.target, -1), chains=())
        found = super()._compute(replace(batch, sample=asked, pools=()), None)
        if fault == "death":
            self._write_a_part(before)
            raise Death
        logits = self._logits([self._drafted(token, batch) for row in found.rows for token in row.tokens])
        result = sample(logits, batch, masks)
        if batch.sample.chains:
            result = with_chains(result, batch, logits[chained_positions(batch)], masks)
        program: Any = self._programs[batch.program]
        if batch.pools:
            result = program._pools.answer(batch, result, lambda first, last: program._hidden(batch, first, last))
        for slot, row in zip(batch.slots, result.rows, strict=True):
            program._last[slot] = row.tokens[-1] if row.tokens else -1
        if fault == "not finite":
            result = result._replace(not_finite=(self._random.randrange(len(batch.slots)),))
        return result

    def _drafted(self, token: int, batch: Batch) -> int:
        """Returns the token of a draft program moved to what the target says, most of the time."""
        if not batch.program or self._random.random() >= OFTEN:
            return token
        is_head = isinstance(self._programs[1], FakeHeadProgram)
        return token if is_head else (token - batch.program) % VOCAB

    def _logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        distances = np.abs(np.arange(VOCAB) - np.array(tokens, np.int64).reshape(-1, 1))
        return (-distances / SLOPE).astype(np.float32)

    def _write_a_part(self, before: Sequence[NDArray[np.int64]]) -> None:
        """Takes back a part of what the step has written, as if the process had ended within it."""
        random = np.random.default_rng(self._random.randrange(2**32))
        for array, old in zip((*self._block_arrays(), self.target.states), before, strict=True):
            array[:] = np.where(random.random(array.shape) < 0.5, array, old)


class WorldWeights:
    """Reads weights for the fake: their path begins with the number that they add to every token, and says what becomes
    of the KV of others. `exchanged` is called just before they take the place of others."""

    def __init__(self, backend: WorldBackend, exchanged: Callable[[int, bool], None]) -> None:
        self._backend = backend
        self._exchanged = exchanged
        self._reader = Reader("weights")

    def begin(self, path: Path) -> Reading[ReadWeights]:
        reading = Reading(lambda: ReadWeights(WorldUpdate(self, path.name), None, None), WeightsError)
        self._reader.read(reading)
        return reading

    def exchange(self, name: str) -> None:
        number, mode = name.split()
        self._exchanged(int(number), mode == "recompute")
        self._backend.target.weights = int(number)

    def close(self) -> None:
        self._reader.close()


class WorldUpdate:
    """Has one WorldWeights exchange weights."""

    packer: Any = None

    def __init__(self, weights: WorldWeights, name: str) -> None:
        self._weights = weights
        self._name = name

    def prepare(self, model: Any) -> None: ...

    def exchange(self) -> None:
        self._weights.exchange(self._name)
