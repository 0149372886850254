"""Runs models on the CPU: each is recorded once into a native program, which one call per step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import (
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    CacheSize,
    Floats,
    Footprint,
    Ints,
    LogitEdits,
    MemoryNeeds,
    Model,
    StoredAs,
)
from penstock.backend.blocks.kv_file import KvFile
from penstock.backend.cpu import _native
from penstock.backend.cpu.adapters import NativeAdapters
from penstock.backend.cpu.blocks import NativeBlocks, NativeStates
from penstock.backend.cpu.device import DEVICE
from penstock.backend.cpu.packed_file import PackedFile
from penstock.backend.cpu.record import record
from penstock.backend.cpu.weights import HeadWeights, Packing, pack_vector, stored_as
from penstock.backend.cpu.write_behind import WriteBehind
from penstock.backend.kv_formats import KvFormats
from penstock.backend.packed_cache import PackedCache
from penstock.backend.pooling import Pools
from penstock.backend.sample import answers
from penstock.backend.sampler_chain import chained_positions, with_chains
from penstock.backend.synchronous import SynchronousBackend
from penstock.backend.weight_exchange import MATRIX, PackedWeight, PairingPacker
from penstock.config import available_memory, available_threads
from penstock.errors import ConfigError
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult, TokenLogprob

HIDDEN_BYTES = 2  # per value of a hidden state
NO_WORDS = np.zeros((0, 0), np.int32)


class CpuProgram:
    """Runs one loaded model: a native program with its own KV cache, recurrent states and last sampled tokens."""

    def __init__(self, native: _native.Program, model: Model, token_ids: Sequence[int] = (), *, kv: KvFormats) -> None:
        self.native = native
        self._answer, self._states = record(model, native, kv)
        if token_ids:
            native.read_tokens_as(list(token_ids))
        self._pools = Pools()

    def take_over(self, other: CpuProgram) -> None:
        """Takes over everything that steps have left in a program of the same model, which cannot run any more."""
        self.native.take_over(other.native)
        self._pools = other._pools

    def run(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        rows = batch.sample
        if batch.moves:
            self.native.move_states(list(batch.moves))
        if len(batch.adapters):
            self.native.choose_adapters(batch.adapters)
        tokens, scored = self.native.sample(
            *_arrays(batch),
            rows.target,
            rows.temperature,
            rows.top_p,
            rows.top_k,
            rows.min_p,
            rows.seed,
            rows.logprobs,
            _flat(rows.edits),
            batch.constrained,
            NO_WORDS if masks is None else np.ascontiguousarray(masks.words),
        )
        logprobs = [TokenLogprob(token, value, tuple(top)) for token, value, top in scored]
        result = answers(batch, tokens, logprobs)
        if rows.chains:
            result = with_chains(result, batch, self._read_answers(chained_positions(batch)), masks)
        return self._pools.answer(batch, result, self._read_states) if batch.pools else result

    def logits(self, batch: Batch) -> Floats:
        """Runs the forward pass of a step; returns its answer, [S, vocab]."""
        rows = len(batch.sampled) if self._answer.symbol == "S" else len(batch.tokens)
        out = np.empty((rows, self._answer.width), np.float32)
        self.native.move_states(list(batch.moves))
        self.native.choose_adapters(batch.adapters)
        self.native.run(*_arrays(batch), out)
        return out

    def _read_answers(self, rows: NDArray[np.int64]) -> Floats:
        out = np.empty((len(rows), self._answer.width), np.float32)
        self.native.read_answers(rows.astype(np.int32), out)
        return out

    def _read_states(self, first: int, last: int) -> Floats:
        assert self._states is not None
        out = np.empty((last - first, self._states.width), np.float32)
        self.native.read_kept(first, out)
        return out


class CpuBackend(SynchronousBackend[CpuProgram]):
    """Computes a step when it is launched: one native call, on every thread, without the interpreter's lock.

    A row's logits depend neither on the rest of its batch nor on how its tokens were chunked nor on `threads`. `packed`
    lists the cache of each program's weights, in the order of loading. With a `kv_file`, the KV cache lies there and
    outlives the process.
    """

    device = "cpu"

    def __init__(
        self,
        threads: int = 0,
        *,
        isa: str = "auto",
        kv: str = "auto",
        packed: Sequence[PackedCache | None] = (),
        kv_file: KvFile | None = None,
    ) -> None:
        super().__init__()
        supported = _native.isas()
        if isa not in ("auto", *supported):
            raise ConfigError(f"this CPU cannot run {isa!r} kernels: use auto or one of {', '.join(supported)}")
        self._kv = KvFormats.parse(kv, DEVICE.kv_formats, "for a CPU")
        self._first = _native.Program(isa, threads or available_threads(), self._kv.name)
        self.name = f"{self._first.threads} threads of {self._first.isa}"
        self.kv: BlockMemory = NativeBlocks(self._programs, self._first.hidden)
        self.states: BlockMemory = NativeStates(self._programs)
        self._adapters = NativeAdapters(self._first)
        self.adapters: AdapterSlots = self._adapters
        self._caches = iter(packed)
        self._packing = self._new_packing()
        self._write_behind = WriteBehind()
        self._kv_file = kv_file

    @property
    def isa(self) -> str:
        return self._first.isa

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> _native.Weight:
        return self._packing.matrix(parts, bias)

    def pack_vector(self, tensor: Tensor) -> Floats:
        return pack_vector(tensor)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        return self._packing.experts(up, down, choice_bias)

    def pack_heads(self, tensor: Tensor) -> HeadWeights:
        return self._packing.heads(tensor)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return stored_as(tensor)

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        if unsaved := self._packing.finish():
            self._write_behind.add(unsaved)
        self._packing.log_growth()
        native = self._native_beside() if self._programs else self._first
        self._programs[program] = CpuProgram(native, model, token_ids, kv=self._kv)
        self._packing = self._new_packing()

    def _new_packing(self) -> Packing:
        cache = next(self._caches, None)
        return Packing(self._first.threads, PackedFile(cache) if cache else None)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        file = None if self._kv_file is None else _native.MemoryFile(self._kv_file.descriptor, self._kv_file.end)
        for number, program in self._programs.items():
            layers = [] if number else [list(group.layers) for group in groups]
            program.native.reserve_kv(num_blocks, block_size, states, layers, file)
        self._first.hidden.reserve(num_blocks, block_size, file)
        if self._kv_file is not None and file is not None:
            self._kv_file.end = file.end

    def logits(self, batch: Batch) -> Floats:
        return self._program_of(batch).logits(batch)

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        if not self._write_behind:
            return super()._compute(batch, masks)
        self._write_behind.pause()
        try:
            return super()._compute(batch, masks)
        finally:
            self._write_behind.resume()

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        kv_token = sum(map(self._kv.bytes_per_token, spec.cached_attention))
        weights = sum(self.stored_as(tensor).bytes(tensor) for tensor in tensors)
        hidden = HIDDEN_BYTES * spec.hidden_values
        return Footprint.on_host(int(weights), kv_token, spec.state_bytes).with_hidden(hidden)

    def memory_needs(self) -> MemoryNeeds:
        natives = [program.native for program in self._programs.values()]
        kv, state = (sum(getattr(each, name) for each in natives) for name in ("kv_bytes_per_token", "state_bytes"))
        return MemoryNeeds(kv + self._first.hidden.kv_bytes_per_token, state, available_memory() // 4)

    def begin_update(self, loaded: Sequence[PackedWeight]) -> CpuUpdate:
        self._packing = Packing(max(self._first.threads // 2, 1))  # steps need the others
        return CpuUpdate(self, loaded)

    def program_beside(self, model: Model) -> CpuProgram:
        """Returns a program of a model whose weights this backend has packed, without a KV cache."""
        self._packing.finish()
        return CpuProgram(self._native_beside(), model, kv=self._kv)

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats:
        formats = KvFormats.parse(kv, DEVICE.kv_formats, "for a CPU")
        program = CpuProgram(self._native_beside(formats), model, kv=formats)
        program.native.reserve_kv(size.blocks, size.block_size, size.states, [], None)
        self._first.hidden.reserve(size.blocks, size.block_size, None)  # all programs share it
        return np.concatenate([program.logits(batch) for batch in batches])

    def _native_beside(self, kv: KvFormats | None = None) -> _native.Program:
        """Returns a native program that shares the first one's threads, with a KV cache in these formats, by default
        the first one's."""
        first = self._first
        return _native.Program(first.isa, first.threads, (kv or self._kv).name, first)

    def replace(self, program: CpuProgram) -> None:
        """Puts a program in the place of program 0, from which it takes over everything that steps have left."""
        program.take_over(self._programs[0])
        self._programs[0] = program
        self._first = self._adapters.program = program.native

    def close(self) -> None:
        self._write_behind.end()
        self._programs.clear()
        del self._first


class CpuUpdate:
    """Replaces weights: see WeightUpdate. Matrices, which adapters know by their identity, get other values; the rest
    comes with a new program."""

    def __init__(self, backend: CpuBackend, loaded: Sequence[PackedWeight]) -> None:
        self.packer = PairingPacker(backend, loaded, (MATRIX,))
        self._backend = backend

    def prepare(self, model: Model) -> None:
        self._program = self._backend.program_beside(model)

    def exchange(self) -> None:
        for loaded, new in self.packer.pairs:
            loaded.exchange(new)
        self._backend.replace(self._program)


def _flat(edits: LogitEdits) -> Any:
    return tuple(getattr(edits, name) for name in LogitEdits.__slots__)


def _arrays(batch: Batch) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    tables = np.ascontiguousarray(batch.tables)
    return batch.tokens, batch.positions, batch.row_start, batch.slots, tables, batch.sampled
