"""Holds the state that launchers need besides a node of the recorded program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.hidden_states import HiddenPlaces, HiddenStates
from penstock.backend.cuda.kernels.decode_attention import SplitKV
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation
from penstock.backend.cuda.kv_cache import LayerCache
from penstock.backend.cuda.kv_expansion import KvCopies, KvExpansion
from penstock.backend.cuda.mla_expansion import MlaExpansion
from penstock.backend.cuda.recurrent_states import RecurrentStates
from penstock.model.spec import ExpertSpec, RopeSpec


@dataclass(slots=True)
class ReservedKv:
    """Holds a program's KV cache. By default none is reserved."""

    groups: Mapping[int, int] = field(default_factory=dict)  # the KV group of each layer
    hidden_group: int = 0  # the KV group whose blocks hidden states lie in
    caches: Mapping[int, LayerCache] = field(default_factory=dict)
    planes: Sequence[LayerCache] = ()  # the parts of a block: caches are views of them
    index_scores: Any = None  # see kernels/select_positions.py


@dataclass(slots=True)
class Memory:
    """Holds a program's state between steps, and scratch that all layers share."""

    last: Any  # [slots + 1] the token each slot sampled last
    tokens: Any  # [T] the step's tokens, all known
    token_ids: Any | None  # [vocab] the token that each sampled one is read as; None: the same
    arena: Arena  # where weights, caches and buffers are
    adapters: CudaAdapters
    states: RecurrentStates
    hidden: HiddenStates  # which programs store for each other
    hidden_places: HiddenPlaces  # where a step's rows are stored there
    expansion: MlaExpansion | KvExpansion | None  # how contexts of prompts are expanded; None: they are not
    copies: KvCopies | None  # copied contexts of a cache with 8 bits
    split_kv: SplitKV  # partial results of decode attention over long contexts
    kv: ReservedKv = field(default_factory=ReservedKv)

    def reserve_arrivals(self, count: int) -> None:
        if len(self.split_kv.arrived) < count:
            self.split_kv = self.split_kv._replace(arrived=self.split_kv.arrived.new_zeros(count))


@dataclass(slots=True)
class Context:
    """Holds the device's memory, and constants that nodes share."""

    memory: Memory
    device: torch.device
    tilings: Tilings
    _frequencies: dict[tuple[float, ...], Any] = field(default_factory=dict)
    _permutations: dict[tuple[int, int], ExpertPermutation] = field(default_factory=dict)  # key: experts, top_k

    def frequencies(self, rope: RopeSpec, pairs: int) -> Any:
        key = rope.inv_freq or (0.0,) * pairs  # where nothing is rotated: MLA rotates by 0
        if key not in self._frequencies:
            self._frequencies[key] = torch.tensor(key, dtype=torch.float64, device=self.device)
        return self._frequencies[key]

    def permutation(self, spec: ExpertSpec) -> ExpertPermutation:
        key = spec.count, spec.top_k
        if key not in self._permutations:
            self._permutations[key] = ExpertPermutation.on(self.device, spec, len(self.memory.tokens))
        return self._permutations[key]
