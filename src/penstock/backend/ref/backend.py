"""Makes a backend of the reference: weights become float32 and every step runs as soon as it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from penstock.backend.base import (
    LAST_SAMPLED,
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    CacheSize,
    Floats,
    Footprint,
    Ints,
    MemoryNeeds,
    Model,
    StoredAs,
)
from penstock.backend.batches import greedy_batch
from penstock.backend.blocks.array_blocks import ArrayBlocks
from penstock.backend.kv_formats import KvFormats
from penstock.backend.pooling import Pools
from penstock.backend.ref.adapters import LoadedAdapters, RefAdapters
from penstock.backend.ref.device import DEVICE
from penstock.backend.ref.hidden import RefHidden
from penstock.backend.ref.kv_cache import RefCache
from penstock.backend.ref.ops import Matrix, RefOps
from penstock.backend.sample import sample
from penstock.backend.sampler_chain import chained_positions, with_chains
from penstock.backend.synchronous import SynchronousBackend
from penstock.backend.weight_exchange import MATRIX, PackedWeight, PairingPacker
from penstock.config import available_memory
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult


def kv_formats(kv: str) -> KvFormats:
    """Returns the formats that `--kv` names. All take the memory of f32: keys and values are only rounded."""
    return KvFormats.parse(kv, DEVICE.kv_formats, "for the reference")


class RefProgram:
    """Runs one loaded model: it has its own KV cache, recurrent states and last sampled tokens."""

    def __init__(
        self, model: Model, adapters: LoadedAdapters, hidden: RefHidden, token_ids: Sequence[int] = (), *, kv: KvFormats
    ) -> None:
        self.model = model
        self._kv = kv
        self._token_ids = token_ids
        self._adapters = adapters
        self._hidden = hidden
        self._last: dict[int, int] = {}  # slot: the token it sampled last, as it is read
        self._pools = Pools()
        self.reserve(1, 1, 1)
        self.kv_bytes = sum(array.nbytes for array in self.cache.arrays)
        self.state_bytes = sum(array.nbytes for layer in self.cache.recurrent.values() for array in layer)

    def reserve(self, num_blocks: int, block_size: int, states: int, groups: Sequence[KvGroup] = ()) -> None:
        """Reserves a cache by a pass over no tokens, which shows what layers keep in it, and how much."""
        self.cache = RefCache(num_blocks, block_size, states, groups, self._kv)
        nothing = greedy_batch([])
        self.forward(replace(nothing, tables=nothing.tables.repeat(max(len(groups), 1), 0)))

    def run(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        logits, states = self.forward(batch)
        result = sample(logits, batch, masks)
        if batch.sample.chains:
            result = with_chains(result, batch, logits[chained_positions(batch)], masks)
        if batch.pools:
            result = self._pools.answer(batch, result, lambda first, last: states[0][first:last])
        for slot, row in zip(batch.slots.tolist(), result.rows, strict=True):
            if row.tokens:
                self._last[slot] = self._token_ids[row.tokens[-1]] if self._token_ids else row.tokens[-1]
        return result

    def forward(self, batch: Batch) -> tuple[Floats, list[Floats]]:
        """Returns the logits of the sampled positions, [S, vocab], and what embeddings are pooled from."""
        known = replace(batch, tokens=self._known_tokens(batch))
        ops = RefOps(known, self.cache, adapters=self._adapters, hidden=self._hidden)
        return self.model.forward(ops), ops.states

    def _known_tokens(self, batch: Batch) -> Ints:
        slots = np.repeat(batch.slots, np.diff(batch.row_start))  # [T]
        last = np.array([self._last.get(slot, LAST_SAMPLED) for slot in slots.tolist()], np.int32)
        return np.where(batch.tokens == LAST_SAMPLED, last, batch.tokens)


class RefBackend(SynchronousBackend[RefProgram]):
    """Computes in NumPy, exactly as ref/ops.py and sample.py define it."""

    name = "NumPy"
    device = "ref"

    def __init__(self, kv: str = "auto") -> None:
        super().__init__()
        self._kv = kv_formats(kv)
        self.kv: BlockMemory = ArrayBlocks(f"ref {self._kv.name}", self._kv_arrays)
        self.states: BlockMemory = ArrayBlocks("ref states", self._state_arrays)
        self._adapters = RefAdapters()
        self._hidden = RefHidden()
        self.adapters: AdapterSlots = self._adapters

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Matrix:
        weight = np.concatenate([dequantize(part) for part in parts])
        if not any(bias):
            return Matrix(weight, None)
        vectors = [
            np.zeros(part.shape[0], np.float32) if tensor is None else dequantize(tensor)
            for part, tensor in zip(parts, bias, strict=True)
        ]
        return Matrix(weight, np.concatenate(vectors))

    def pack_vector(self, tensor: Tensor) -> Floats:
        return dequantize(tensor)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        bias = None if choice_bias is None else dequantize(choice_bias)
        return ExpertWeights([self.pack_matrix(*one) for one in up], [self.pack_matrix(*one) for one in down], bias)

    def pack_heads(self, tensor: Tensor) -> Floats:
        heads, rows, width = tensor.shape
        return dequantize(replace(tensor, shape=(heads * rows, width))).reshape(tensor.shape)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return StoredAs("F32", 32)

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        self._programs[program] = RefProgram(model, self._adapters.slots, self._hidden, token_ids, kv=self._kv)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        self._hidden.reserve(num_blocks, block_size)
        for number, program in self._programs.items():
            program.reserve(num_blocks, block_size, states, () if number else groups)

    def _kv_arrays(self) -> list[Floats]:
        kv = [array for program in self._programs.values() for array in program.cache.arrays]
        return [*kv, *self._hidden.arrays.values()]

    def _state_arrays(self) -> list[Floats]:
        layers = [layer for program in self._programs.values() for layer in program.cache.recurrent.values()]
        return [array for layer in layers for array in layer]

    def logits(self, batch: Batch) -> Floats:
        return self._program_of(batch).forward(batch)[0]

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats:
        self._hidden.reserve(size.blocks, size.block_size)
        program = RefProgram(model, self._adapters.slots, self._hidden, kv=kv_formats(kv))
        program.reserve(*size)
        return np.concatenate([program.forward(batch)[0] for batch in batches])

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        weights = sum(self.stored_as(tensor).bytes(tensor) for tensor in tensors)
        kv_token = 4 * sum(a.kv_values for a in spec.cached_attention)
        return Footprint.on_host(int(weights), kv_token, spec.state_bytes).with_hidden(4 * spec.hidden_values)

    def memory_needs(self) -> MemoryNeeds:
        programs = self._programs.values()
        kv, state = (sum(getattr(each, name) for each in programs) for name in ("kv_bytes", "state_bytes"))
        return MemoryNeeds(kv + self._hidden.nbytes, state, available_memory() // 4)

    def begin_update(self, loaded: Sequence[PackedWeight]) -> RefUpdate:
        return RefUpdate(self, self._programs[0], loaded)

    def close(self) -> None: ...


class RefUpdate:
    """Replaces weights: see WeightUpdate. Matrices, which adapters know by their identity, get other values; the rest
    comes with the new model."""

    def __init__(self, backend: RefBackend, program: RefProgram, loaded: Sequence[PackedWeight]) -> None:
        self.packer = PairingPacker(backend, loaded, (MATRIX,))
        self._program = program

    def prepare(self, model: Model) -> None:
        self._model = model

    def exchange(self) -> None:
        for loaded, new in self.packer.pairs:
            np.copyto(loaded.weight, new.weight)
            if new.bias is not None:
                np.copyto(loaded.bias, new.bias)
        self._program.model = self._model
