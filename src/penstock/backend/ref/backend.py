"""The reference as a backend: weights become float32 and every step runs as soon as it is launched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from penstock.backend.base import LAST_SAMPLED, Batch, Floats, Footprint, Ints, Model, StoredAs, Ticket
from penstock.backend.pooling import Pools
from penstock.backend.ref.batches import greedy_batch
from penstock.backend.ref.ops import Cache, Matrix, RefOps
from penstock.backend.sample import sample
from penstock.backend.timing import time_step
from penstock.config import available_memory
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult


class RefBackend:
    name = "NumPy"
    depth = 0

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # slot: the token it sampled last
        self._pools = Pools()
        self._results: dict[Ticket, StepResult] = {}

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

    def load(self, model: Model) -> None:
        """A pass over no tokens shows which layers keep keys and values, and how wide they are."""
        self._model = model
        self._cache = Cache(num_blocks=1, block_size=1, states=1)
        self.logits(greedy_batch([]))
        self._kv_bytes = sum(array.nbytes for layer in self._cache.layers.values() for array in layer)
        self._state_bytes = sum(array.nbytes for layer in self._cache.recurrent.values() for array in layer)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return StoredAs("F32", 32)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        weights = sum(self.stored_as(tensor).bytes(tensor) for tensor in tensors)
        return Footprint.on_host(int(weights), 4 * spec.kv_layers * spec.attn.kv_values, spec.state_bytes)

    def kv_bytes_per_token(self) -> int:
        return self._kv_bytes

    def kv_memory(self) -> int:
        return available_memory() // 4

    def state_bytes(self) -> int:
        return self._state_bytes

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        self._cache = Cache(num_blocks, block_size, states, groups)

    def warm_up(self) -> None: ...

    def settle(self) -> bool:
        return False

    def launch(self, batch: Batch) -> Ticket:
        logits, states = self._forward(batch)
        result = sample(logits, batch)
        if batch.pools:
            result = self._pools.answer(batch, result, lambda first, last: states[0][first:last])
        for slot, row in zip(batch.slots.tolist(), result.rows, strict=True):
            if row.tokens:
                self._last[slot] = row.tokens[-1]
        self._results[batch.step] = result
        return batch.step

    def logits(self, batch: Batch) -> Floats:
        """What the forward pass gives for the sampled positions: [S, vocab]."""
        return self._forward(batch)[0]

    def _forward(self, batch: Batch) -> tuple[Floats, list[Floats]]:
        ops = RefOps(replace(batch, tokens=self._known_tokens(batch)), self._cache)
        return self._model.forward(ops), ops.states

    def relieve(self) -> None: ...

    def wait(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)

    def time_step(self, batch: Batch, times: int) -> float:
        return time_step(self, batch, times)

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for cache in (array for layer in self._cache.layers.values() for array in layer):
                cache[target] = cache[source]

    def close(self) -> None: ...

    def _known_tokens(self, batch: Batch) -> Ints:
        slots = np.repeat(batch.slots, np.diff(batch.row_start))  # [T]
        last = np.array([self._last.get(slot, LAST_SAMPLED) for slot in slots.tolist()], np.int32)
        return np.where(batch.tokens == LAST_SAMPLED, last, batch.tokens)
