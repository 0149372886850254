"""Computes without tensors: each KV slot holds the token written there, and the next token is a checksum of the whole
context read back through the block table, and of a state that each token changed where there are states. A mistake
anywhere in allocation, sharing, eviction, chunking or preemption changes an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import (
    LAST_SAMPLED,
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    Footprint,
    Ints,
    MemoryNeeds,
    Model,
    StateMove,
    StoredAs,
)
from penstock.backend.blocks.array_blocks import ArrayBlocks
from penstock.backend.pooling import Pools
from penstock.backend.sampler_chain import chained_positions, sampled_place, with_chains
from penstock.backend.synchronous import SynchronousBackend
from penstock.model.low_rank import LowRankUpdate
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import RowResult, StepResult, TokenLogprob

KV_BYTES = 8  # per token
HOST_BYTES = 1000  # pretended size of sleeping weights
PRIME = 1000003


def next_token(context: Sequence[int] | NDArray[np.int64], vocab: int, windows: Sequence[int] = (0,)) -> int:
    """Returns the fake's answer after `context`, with a KV layer group for each of `windows`."""
    kv = [windowed(context, window) if window else context for window in windows]
    return checksum([group[-window:] for group, window in zip(kv, windows, strict=True)], len(context), vocab)


def checksum(seen: Sequence[Sequence[int] | NDArray[np.int64]], length: int, vocab: int) -> int:
    """Returns the token that follows from what each layer group sees, which ends at position `length` - 1. Values,
    their positions and their groups all count."""
    groups = enumerate(seen, 1)
    return sum(group * int(terms(values, length - len(values)).sum()) for group, values in groups) % vocab


def terms(values: Sequence[int] | NDArray[np.int64], first: int) -> NDArray[np.int64]:
    places = np.arange(first + 1, first + len(values) + 1, dtype=np.int64)
    return (np.asarray(values, np.int64) + 1) * places * 2654435761 % PRIME


def windowed(tokens: Iterable[int], window: int, before: Sequence[int] = ()) -> list[int]:
    """Returns the entries of a windowed layer group for `tokens`, given the entries `before` them. Like the keys and
    values of a real model, each entry depends on all entries in its window, so a lost one changes all that follow."""
    values = list(before)
    for token in tokens:
        values.append((token + 1 + 31 * sum(values[len(values) + 1 - window :] if window > 1 else ())) % PRIME)
    return values[len(before) :]


def gathered(tokens: Iterable[int], state: int = 0) -> int:
    for token in tokens:
        state = (state * 31 + token + 1) % PRIME
    return state


def continuation(
    prompt: Sequence[int],
    count: int,
    vocab: int,
    stateful: bool = False,
    windows: Sequence[int] = (0,),
    adapter: int = 0,
) -> list[int]:
    """Returns the `count` tokens that must follow `prompt`, computed with no cache at all. `adapter` is the value of
    the adapter that computes it (FakeAdapter)."""
    tokens = list(prompt)
    for _ in range(count):
        seen = [token + adapter for token in tokens]
        tokens.append((next_token(seen, vocab, windows) + (gathered(seen) if stateful else 0)) % vocab)
    return tokens[len(prompt) :]


def state(context: Sequence[int] | NDArray[np.int64], vocab: int) -> list[int]:
    return [next_token(context, vocab), int(context[-1]), len(context)]


def pooled(prompt: Sequence[int], kind: str, vocab: int) -> bytes:
    ends = range(len(prompt) if kind == "last" else 1, 2 if kind == "cls" else len(prompt) + 1)
    mean: NDArray[np.float64] = np.mean([state(prompt[:end], vocab) for end in ends], axis=0)
    return mean.astype("<f4").tobytes()


class FakeHead:
    """Stands for a head where it is loaded as a model: see FakeHeadProgram."""

    def forward(self, ops: Any) -> Any: ...


class FakeAdapter(NamedTuple):
    """Is added to every token that a row with this adapter writes."""

    value: int
    nbytes: int


class FakeAdapters:
    """Keeps adapters in slots: see AdapterSlots. An adapter's value is the sum of all that its parts add up to."""

    def __init__(self) -> None:
        self.slots: dict[int, FakeAdapter] = {}

    def pack(self, updates: Sequence[LowRankUpdate]) -> FakeAdapter:
        parts = [part for update in updates for part in update.parts]
        value = sum(float((part.b @ part.a).sum()) for part in parts)
        return FakeAdapter(round(value), sum(part.a.nbytes + part.b.nbytes for part in parts))

    def load(self, slot: int, packed: FakeAdapter) -> None:
        assert slot not in self.slots, "the slot holds an adapter that was not dropped"
        self.slots[slot] = packed

    def drop(self, slot: int) -> None:
        del self.slots[slot]


class FakeProgram:
    """Stores and answers for one of the fake's programs. All that it answers is moved on by its `number`, so that one
    program's answer is not taken for another's."""

    def __init__(
        self, number: int, max_rows: int, vocab: int, windows: Sequence[int], adapters: Mapping[int, FakeAdapter]
    ) -> None:
        self._number = number
        self.weights = 0  # is added to every token that is written, so that KV of other weights changes an answer
        self._adapters = adapters
        self._vocab = vocab
        self._windows = windows
        self._last = np.full(max_rows, -1, np.int64)
        self._pools = Pools()
        self.hidden: NDArray[np.int64] | None = None

    def reserve(self, num_blocks: int, block_size: int, states: int, hidden: NDArray[np.int64] | None) -> None:
        self.kv = np.full((num_blocks, block_size), -1, np.int64)
        self.states = np.full(states, -1, np.int64)
        self.hidden = hidden

    def forget(self) -> None:
        self.kv[:] = -1
        self.states[:] = -1
        self._last[:] = -1
        if self.hidden is not None:
            self.hidden[:] = -1

    def run(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        moves = {move.row: move for move in batch.moves}
        touched = [state for move in batch.moves for state in (move.begin, move.save) if state >= 0]
        saved = [move.save for move in batch.moves if move.save >= 0]
        assert all(touched.count(state) == 1 for state in saved), "rows of one step would race for a state"
        allowed = dict(zip(masks.rows.tolist(), masks.words, strict=True)) if masks else {}
        rows = tuple(self._run_row(batch, row, moves.get(row), allowed) for row in range(len(batch.slots)))
        result = StepResult(batch.step, rows)
        if batch.sample.chains:
            result = self._with_chains(result, batch, masks)
        if batch.pools:
            result = self._pools.answer(batch, result, lambda first, last: self._hidden(batch, first, last))
        return result

    def _with_chains(self, result: StepResult, batch: Batch, masks: Bitmasks | None) -> StepResult:
        """Returns the result with what chains choose from logits that fall off around the checksum's token."""
        places = [sampled_place(batch, position) for position in chained_positions(batch).tolist()]
        distances = [np.arange(self._vocab) - result.rows[row].tokens[-behind] for row, behind in places]
        logits = np.array([-np.abs(distance) / 8 for distance in distances], np.float32)
        return with_chains(result, batch, logits, masks)

    def _run_row(self, batch: Batch, row: int, move: StateMove | None, allowed: Mapping[int, Ints]) -> RowResult:
        first, last = batch.row_start[row], batch.row_start[row + 1]
        slot, tables = batch.slots[row], batch.tables[:, row]
        tokens, positions = batch.tokens[first:last].astype(np.int64), batch.positions[first:last]
        tokens[tokens == LAST_SAMPLED] = self._last[slot]
        added = self.weights
        if len(batch.adapters) and batch.adapters[row] >= 0:
            added += self._adapters[int(batch.adapters[row])].value
        tokens += added
        self._store(tables, positions, tokens)
        if self.hidden is not None:
            self._store_hidden(self.hidden, tables[self._windows.index(0)], positions)
        states = self._gather(tokens.tolist(), int(positions[0]), int(slot), move) if len(self.states) else None
        result = RowResult()
        for s in range(batch.sample_start[row], batch.sample_start[row + 1]):
            length = int(batch.positions[batch.sampled[s]]) + 1
            state = states[batch.sampled[s] - first] if states else 0
            token = self._token(tables, length, state, added)
            if s in allowed:
                token = first_allowed(token, allowed[s], self._vocab)
            result = answered(result, token, int(batch.sample.target[s]))
        if result.tokens:
            self._last[slot] = result.tokens[-1]
        return result

    def _token(self, tables: NDArray[np.int32], length: int, state: int, added: int) -> int:
        """Returns the token that follows the first `length` ones of a row, to each of which its weights and its adapter
        have `added` a number."""
        return (checksum(self._seen(tables, length), length, self._vocab) + state + self._number) % self._vocab

    def _hidden(self, batch: Batch, first: int, last: int) -> NDArray[np.float32]:
        group = self._windows.index(0) if 0 in self._windows else 0
        table = batch.tables[group, np.searchsorted(batch.row_start, first, side="right") - 1]
        contexts = [self._read(table, 0, int(position) + 1) for position in batch.positions[first:last]]
        return np.array([state(context, self._vocab) for context in contexts], np.float32)

    def _gather(self, tokens: list[int], start: int, slot: int, move: StateMove | None) -> list[int]:
        states = [0 if start == 0 else int(self.states[slot if move is None or move.begin < 0 else move.begin])]
        for token in tokens:
            states.append(gathered((token,), states[-1]))
        self.states[slot] = states[-1]
        if move is not None and move.save >= 0:
            self.states[move.save] = states[move.after]
        return states[1:]

    def _store(self, tables: NDArray[np.int32], positions: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        """Writes a row's tokens, or what follows from them and their window, to the blocks of every layer group."""
        size, start = self.kv.shape[1], int(positions[0])
        for table, window in zip(tables, self._windows, strict=True):
            values = tokens
            if window:
                before = self._read(table, max(start - window + 1, 0), start)
                values = np.array(windowed(tokens.tolist(), window, before.tolist()), np.int64)
            self.kv[table[positions // size], positions % size] = values

    def _store_hidden(self, hidden: NDArray[np.int64], table: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        totals = np.cumsum(terms(self._read(table, 0, int(positions[-1]) + 1), 0))
        hidden[table[positions // hidden.shape[1]], positions % hidden.shape[1]] = totals[positions]

    def _seen(self, tables: NDArray[np.int32], length: int) -> list[NDArray[np.int64]]:
        return [
            self._read(table, max(length - window, 0) if window else 0, length)
            for table, window in zip(tables, self._windows, strict=True)
        ]

    def _read(self, table: NDArray[np.int32], first: int, last: int) -> NDArray[np.int64]:
        positions, size = np.arange(first, last), self.kv.shape[1]
        return self.kv[table[positions // size], positions % size]


class FakeHeadProgram(FakeProgram):
    """Answers as a target without windows will: it adds a token to the hidden state of the position before it. Its
    KV are the sums. `stale` lists the places within blocks whose sums came from hidden states or tokens that the
    target has since computed differently."""

    def __init__(self, number: int, **sizes: Any) -> None:
        super().__init__(number, **sizes)
        self.stale: set[int] = set()

    def _run_row(self, batch: Batch, row: int, move: StateMove | None, allowed: Mapping[int, Ints]) -> RowResult:
        assert self.hidden is not None
        table, size, slot, result = batch.tables[0, row], self.kv.shape[1], batch.slots[row], RowResult()
        tokens = np.where(batch.tokens == LAST_SAMPLED, self._last[slot], batch.tokens)
        sampled = dict(zip(batch.sampled.tolist(), range(len(batch.sampled)), strict=True))
        for at in range(batch.row_start[row], batch.row_start[row + 1]):
            position = int(batch.positions[at])
            place, following = ((table[p // size], p % size) for p in (position, position + 1))
            total = self.hidden[place] + terms(tokens[at : at + 1], position + 1)[0]
            self.kv[place] = total
            if at not in sampled:
                continue
            after = np.arange(1, position + 1)
            changed = self.hidden[table[after // size], after % size] != self._read(table, 0, position)
            self.stale.update((np.flatnonzero(changed) % size).tolist())
            self.hidden[following] = total
            token = int(total) % self._vocab
            if sampled[at] in allowed:
                token = first_allowed(token, allowed[sampled[at]], self._vocab)
            result = answered(result, token, int(batch.sample.target[sampled[at]]))
            self._last[slot] = result.tokens[-1]
        return result


class FakeSleeper:
    """Forgets what lies in KV slots and states, as a device does whose memory others have meanwhile."""

    def __init__(self, programs: Mapping[int, FakeProgram]) -> None:
        self._programs = programs
        self.asleep = False

    def sleep(self) -> int:
        assert not self.asleep, "it sleeps already"
        for program in self._programs.values():
            program.forget()
        self.asleep = True
        return HOST_BYTES

    def wake(self) -> None:
        assert self.asleep, "it is awake"
        self.asleep = False


class FakeBackend(SynchronousBackend[FakeProgram]):
    """Answers with checksums. Weights and models count for nothing; there is program 0, and every other that is loaded.
    Program 0 has a KV layer group for each of `windows`; it ignores the `groups` of `reserve_kv`."""

    name = "the fake"
    device = "fake"

    def __init__(self, vocab: int = 1000, max_rows: int = 1024, windows: Sequence[int] = (0,)) -> None:
        super().__init__()
        slots = FakeAdapters()
        self.adapters: AdapterSlots = slots
        self._make, self._make_head = (
            partial(kind, max_rows=max_rows, vocab=vocab, adapters=slots.slots)
            for kind in (FakeProgram, FakeHeadProgram)
        )
        self._programs[0] = self._make(0, windows=windows)
        self._windows = windows
        self._sleeper = FakeSleeper(self._programs)
        self.sleeper = self._sleeper
        self._hidden: NDArray[np.int64] | None = None  # in the same blocks, if there is a head
        self.kv: BlockMemory = ArrayBlocks("fake", self._block_arrays)
        self.states: BlockMemory = ArrayBlocks("fake", lambda: [each.states for each in self._programs.values()])

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        return None

    def pack_vector(self, tensor: Tensor) -> Any:
        return None

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        return None

    def pack_heads(self, tensor: Tensor) -> Any:
        return None

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return StoredAs("nothing", 0)

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        assert not token_ids, "all fakes have one vocabulary"
        if isinstance(model, FakeHead):
            self._hidden = np.full((1, 1), -1, np.int64)
            self._programs[program] = self._make_head(program, windows=(0,))
        else:
            self._programs[program] = self._make(program, windows=(0,) if program else self._windows)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        if self._hidden is not None:
            self._hidden = np.full((num_blocks, block_size), -1, np.int64)
        for program in self._programs.values():
            program.reserve(num_blocks, block_size, states, self._hidden)

    def _block_arrays(self) -> list[NDArray[np.int64]]:
        hidden = [] if self._hidden is None else [self._hidden]
        return [*(program.kv for program in self._programs.values()), *hidden]

    def prepare_in_idle(self) -> bool:
        assert not self._sleeper.asleep, "nothing is prepared while it sleeps"
        return super().prepare_in_idle()

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        assert not self._sleeper.asleep, "no step runs while it sleeps"
        return super()._compute(batch, masks)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        return Footprint(self.name, 1 << 30, 1 << 30, 0, 0, 0, KV_BYTES)

    def memory_needs(self) -> MemoryNeeds:
        return MemoryNeeds(KV_BYTES * len(self._programs), 0, 1 << 30)

    def begin_update(self, loaded: Sequence[Any]) -> FakeUpdate:
        return FakeUpdate(self, self._programs[0])

    def close(self) -> None: ...


class FakeUpdate:
    """Replaces weights that count for nothing: see WeightUpdate. Every exchange changes all answers."""

    def __init__(self, backend: FakeBackend, program: FakeProgram) -> None:
        self.packer = backend
        self._program = program

    def prepare(self, model: Model) -> None: ...

    def exchange(self) -> None:
        self._program.weights += 1


def first_allowed(token: int, words: Ints, vocab: int) -> int:
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def answered(result: RowResult, token: int, target: int) -> RowResult:
    """Returns the row's result with one more token, or with the score of the known token `target`."""
    if target < 0:
        return result._replace(tokens=(*result.tokens, token))
    return result._replace(scores=(*result.scores, TokenLogprob(target, -float(token))))
