"""Runs a recorded forward pass (model/program.py) as launches over buffers that are made once.

Nothing is allocated in a step, so the same launches can be run at once or captured in a graph, and steps of every size
and of every program share the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from penstock.backend.base import Model
from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.hidden_states import HiddenPlaces, HiddenStates
from penstock.backend.cuda.inputs import RUN_QUERIES, run_sizes_of, spare_splits, split_lines
from penstock.backend.cuda.kernels.decode_attention import SplitKV
from penstock.backend.cuda.kv_expansion import TABLE_WORDS, KvCopies, KvExpansion, kv_expansion_of
from penstock.backend.cuda.launch_context import Context, Memory
from penstock.backend.cuda.launchers import CAPABILITIES, bind
from penstock.backend.cuda.mla_expansion import MlaExpansion, expansion_of
from penstock.backend.cuda.recurrent_states import RecurrentStates
from penstock.backend.cuda.segments import MOST_SPLITS
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.model.program import record
from penstock.model.spec import AttentionSpec

Launch = tuple[Callable[..., None], tuple[int, ...]]  # a launcher and the buffers it is called with


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Bounds the largest step."""

    tokens: int
    rows: int  # sequences, and positions sampled at once


class ActivationMemory:
    """Holds memory for the values of a step. Programs share it, because their steps run one after the other."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._parts: list[Any] = []  # bytes, the most first

    def buffers(self, wanted: Sequence[tuple[tuple[int, int], torch.dtype]]) -> list[Any]:
        """Returns a tensor of each shape and type. Those of one call share nothing with each other."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted]
        found: dict[int, Any] = {}
        for at, index in enumerate(sorted(range(len(wanted)), key=lambda index: -sizes[index])):
            if at == len(self._parts):
                self._parts.append(self._arena.zeros(sizes[index], torch.uint8))
            elif len(self._parts[at]) < sizes[index]:
                self._parts[at] = self._arena.zeros(sizes[index], torch.uint8)
            shape, dtype = wanted[index]
            found[index] = self._parts[at][: sizes[index]].view(dtype).view(shape)
        return [found[index] for index in range(len(wanted))]


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Holds the state that all programs on a device share."""

    device: torch.device
    dtype: torch.dtype  # type of activations
    sizes: StepSizes
    tilings: Tilings
    arena: Arena
    tokens: Any  # [T] the step's tokens, all known
    activations: ActivationMemory
    hidden: HiddenStates
    expands_kv: bool = False  # the cache has 8 bits, and Hopper's kernel may attend to copies of contexts in 16


class CudaProgram:
    """Holds a model's launches and the buffers of their values."""

    def __init__(
        self, model: Model, shared: SharedMemory, adapters: CudaAdapters, token_ids: Sequence[int] = ()
    ) -> None:
        device, sizes, tilings = shared.device, shared.sizes, shared.tilings
        self.recorded = recorded = record(model, CAPABILITIES)
        self.answer = recorded.answer
        self.layers = recorded.attention_layers
        layers = self.layers.values()
        self.sees_whole_rows = not all(spec.causal for spec in layers)
        # MLA attends token by token, but for segments.
        groups = [RUN_QUERIES if spec.v_dim and not tilings.fixed else spec.heads // spec.kv_heads for spec in layers]
        self.run_sizes = run_sizes_of(max(groups, default=1))
        self.spare_splits = spare_splits(max((split_programs(spec, shared) for spec in layers), default=1))
        shared.hidden.declare(recorded.hidden_widths)
        shared.arena.adopt([node.attributes for node in recorded.nodes])
        copying = kv_expansion_of(layers, sizes.tokens, tilings) if shared.expands_kv else None
        expansion = expansion_of(recorded, sizes.tokens) or copying
        self._buffers, copies = self._activations(shared, expansion)
        self.memory = Memory(
            last=torch.zeros(sizes.rows + 1, dtype=torch.int32, device=device),
            tokens=shared.tokens,
            token_ids=torch.tensor(token_ids, dtype=torch.int32, device=device) if token_ids else None,
            arena=shared.arena,
            adapters=adapters,
            states=RecurrentStates(recorded.recurrent_layers, sizes.rows, sizes.tokens, device),
            hidden=shared.hidden,
            hidden_places=HiddenPlaces(recorded, sizes.tokens, device),
            expansion=expansion,
            copies=copies,
            split_kv=self._partial_results(shared),
        )
        context = Context(self.memory, device, tilings)
        launches = [bind(node, context) for node in recorded.nodes]
        self._launches: list[Launch] = list(zip(launches, recorded.places, strict=True))
        self._sampling = recorded.first_sampled

    def _activations(
        self, shared: SharedMemory, expansion: MlaExpansion | KvExpansion | None
    ) -> tuple[list[Any], KvCopies | None]:
        sizes = shared.sizes
        wanted = [
            (
                (sizes.rows if buffer.symbol == "S" else sizes.tokens, buffer.width),
                torch.float32 if buffer.precision == "float32" else shared.dtype,
            )
            for buffer in self.recorded.buffers
        ]
        if not isinstance(expansion, KvExpansion):
            return shared.activations.buffers(wanted), None
        *buffers, room = shared.activations.buffers([*wanted, ((expansion.room, expansion.width), shared.dtype)])
        tables = torch.zeros(TABLE_WORDS, dtype=torch.int32, device=shared.device)
        return buffers, expansion.copies_within(room, tables)

    def _partial_results(self, shared: SharedMemory) -> SplitKV:
        layers, device = self.layers.values(), shared.device
        lines = split_lines(shared.sizes.rows, self.run_sizes, self.spare_splits)
        if shared.tilings.fixed:
            lines = MOST_SPLITS * self.run_sizes[-1]
        most_heads = max([spec.heads for spec in layers], default=1)
        return SplitKV(
            torch.empty(lines * max([spec.heads * spec.head_dim for spec in layers], default=1), device=device),
            torch.empty(lines * most_heads * 2, device=device),
            torch.zeros(lines * most_heads, dtype=torch.int32, device=device),
        )

    @property
    def split_sizes(self) -> tuple[tuple[int, ...], int]:
        return self.run_sizes, self.spare_splits

    def run_tokens(self, step: DeviceInputs) -> None:
        """Launches everything up to the rows whose logits are wanted."""
        self._run(self._launches[: self._sampling], step, 0)

    def run_sampled(self, step: DeviceInputs, count: int) -> Any:
        """Launches the rest, for the `count` positions that step.sampled names; returns the answer, [S, *]."""
        self._run(self._launches[self._sampling :], step, count)
        return self.answer_of(count)

    def answer_of(self, count: int) -> Any:
        return self._buffers[self.recorded.answer_buffer][:count]

    def states_of(self, count: int) -> Any:
        assert self.recorded.pooled_buffer is not None
        return self._buffers[self.recorded.pooled_buffer][:count]

    def _run(self, launches: list[Launch], step: DeviceInputs, count: int) -> None:
        rows = {"T": len(step.tokens), "S": count, "N": None}
        kinds = self.recorded.buffers
        views = [buffer[: rows[kind.symbol]] for buffer, kind in zip(self._buffers, kinds, strict=True)]
        for launch, places in launches:
            launch(step, *[views[place] for place in places])


def split_programs(spec: AttentionSpec, shared: SharedMemory) -> int:
    """Returns how many programs attend to a split of a layer. Those of MLA with many heads take a multiprocessor each,
    and count for four."""
    if not spec.v_dim:
        return spec.kv_heads
    queries = shared.tilings.mla_decode(spec.heads, spec.head_dim, shared.dtype.itemsize).queries
    return 1 if spec.heads <= queries else 4 * -(-spec.heads // queries)
