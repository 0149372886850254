"""The backend seam over a native program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.backend.base import Batch, Floats, Footprint, Ints, Mask, Model, StoredAs, Ticket
from penstock.backend.cpu import _native
from penstock.backend.cpu.record import record
from penstock.backend.cpu.weights import HeadWeights, Packing, pack_vector, stored_as
from penstock.backend.pooling import Pools
from penstock.backend.sample import answers
from penstock.backend.timing import time_step
from penstock.config import available_memory, available_threads
from penstock.errors import ConfigError
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult, TokenLogprob

KV_TYPES = ("f16", "f32", "int8")
KV_BYTES = {"f16": 2, "f32": 4, "int8": 1}  # of each value
KV_SCALES = {"f16": 0, "f32": 0, "int8": 8}  # beside those of each head
EVERYTHING = np.zeros(0, np.int32)  # a mask of no words


class CpuBackend:
    """Computes a step when it is launched: one native call, on every thread, without the interpreter's lock.

    A row's logits depend neither on the rest of its batch nor on how its tokens were chunked nor on `threads`.
    """

    depth = 0

    def __init__(self, threads: int = 0, *, isa: str = "auto", kv: str = "auto") -> None:
        supported = _native.isas()
        if isa not in ("auto", *supported):
            raise ConfigError(f"this CPU cannot run {isa!r} kernels: use auto or one of {', '.join(supported)}")
        if kv not in ("auto", *KV_TYPES):
            raise ConfigError(f"unknown KV type {kv!r} for a CPU: use auto or one of {', '.join(KV_TYPES)}")
        self._kv = KV_TYPES[0] if kv == "auto" else kv
        self._program = _native.Program(isa, threads or available_threads(), self._kv)
        self.name = f"{self._program.threads} threads of {self._program.isa}"
        self._packing = Packing(self._program.threads)
        self._pools = Pools()
        self._results: dict[Ticket, StepResult] = {}

    @property
    def isa(self) -> str:
        return self._program.isa

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> _native.Weight:
        return self._packing.matrix(parts, bias)

    def pack_vector(self, tensor: Tensor) -> Floats:
        return pack_vector(tensor)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        return self._packing.experts(up, down, choice_bias)

    def pack_heads(self, tensor: Tensor) -> HeadWeights:
        return self._packing.heads(tensor)

    def load(self, model: Model) -> None:
        self._packing.finish()
        self._packing.tell()
        self._answer, self._states = record(model, self._program)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return stored_as(tensor)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        kv_token = spec.kv_layers * (
            KV_BYTES[self._kv] * spec.attn.kv_values + KV_SCALES[self._kv] * spec.attn.kv_heads
        )
        weights = sum(self.stored_as(tensor).bytes(tensor) for tensor in tensors)
        return Footprint.on_host(int(weights), kv_token, spec.state_bytes)

    def kv_bytes_per_token(self) -> int:
        return self._program.kv_bytes_per_token

    def kv_memory(self) -> int:
        return available_memory() // 4

    def state_bytes(self) -> int:
        return self._program.state_bytes

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        self._program.reserve_kv(num_blocks, block_size, states, [list(group.layers) for group in groups])

    def warm_up(self) -> None: ...

    def settle(self) -> bool:
        return False

    def launch(self, batch: Batch) -> Ticket:
        rows = batch.sample
        edits = [
            (s, edit.seen, edit.repetition, edit.add_ids, edit.add_values, edit.ban, _words(edit.allow))
            for s, edit in enumerate(rows.edits)
            if edit is not None
        ]
        if batch.moves:
            self._program.move_states(list(batch.moves))
        tokens, scored = self._program.sample(
            *_arrays(batch),
            rows.target,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            rows.min_p,
            rows.seed,
            rows.logprobs,
            edits,
        )
        logprobs = [TokenLogprob(token, value, tuple(top)) for token, value, top in scored]
        result = answers(batch, tokens, logprobs)
        if batch.pools:
            result = self._pools.answer(batch, result, self._read_states)
        self._results[batch.step] = result
        return batch.step

    def relieve(self) -> None: ...

    def wait(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)

    def logits(self, batch: Batch) -> Floats:
        """Runs the forward pass of a step; returns its answer, [S, vocab]."""
        rows = len(batch.sampled) if self._answer.symbol == "S" else len(batch.tokens)
        out = np.empty((rows, self._answer.width), np.float32)
        self._program.move_states(list(batch.moves))
        self._program.run(*_arrays(batch), out)
        return out

    def _read_states(self, first: int, last: int) -> Floats:
        assert self._states is not None
        out = np.empty((last - first, self._states.width), np.float32)
        self._program.read_kept(first, out)
        return out

    def time_step(self, batch: Batch, times: int) -> float:
        return time_step(self, batch, times)

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._program.copy_blocks(list(pairs))

    def close(self) -> None:
        del self._program


def _words(allow: Mask | None) -> Ints:
    return EVERYTHING if allow is None else allow.words()


def _arrays(batch: Batch) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    tables = np.ascontiguousarray(batch.tables)
    return batch.tokens, batch.positions, batch.row_start, batch.slots, tables, batch.sampled
