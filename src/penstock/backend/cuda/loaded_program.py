"""Holds one of the programs that a GPU runs, with its own memory and graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from penstock.backend.base import Batch, Bitmasks, Model
from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.flight import Flight, SampledTokens, Sampling
from penstock.backend.cuda.graphs import Graphs, verified_sizes
from penstock.backend.cuda.inputs import Shape
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kernels.select_positions import LINES
from penstock.backend.cuda.kv_cache import KvLayout, places_of, reserve_caches
from penstock.backend.cuda.kv_expansion import BLOCK_SIZE, KvExpansion
from penstock.backend.cuda.launch_context import ReservedKv
from penstock.backend.cuda.mla_expansion import MlaExpansion
from penstock.backend.cuda.pooling import PoolingSums
from penstock.backend.cuda.program import CudaProgram, SharedMemory
from penstock.backend.cuda.sampler import DeviceSampler, PendingTokenLogprobs, sampling_kinds
from penstock.backend.cuda.shared_prefixes import Sharing, tile_tokens
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.model.spec import AttentionSpec, KvGroup

# Queues the copy of sampled tokens to the host, if any are given; returns where they will be, and an event that happens
# when all that was queued has.
Fetch = Callable[[SampledTokens | None, int], tuple[Any, Any | None]]
SAMPLING = ("sampled", "target", "sample_slots", "temperature", "top_p", "top_k", "min_p", "seeds", "sampled_adapters")


class LoadedProgram:
    """Runs one loaded model: it has its own KV cache, recurrent states, last sampled tokens and graphs."""

    def __init__(
        self,
        model: Model,
        shared: SharedMemory,
        adapters: CudaAdapters,
        token_ids: Sequence[int] = (),
        *,
        capture: bool,
    ) -> None:
        device, sizes = shared.device, shared.sizes
        self.program = CudaProgram(model, shared, adapters, token_ids)
        self.memory = self.program.memory
        self.graphs = Graphs(self.program, capture)
        self.sampler = DeviceSampler(device, sizes.rows, by_row=shared.tilings.fixed)
        self.sampler.reserve(self.program.answer.width)
        self.groups = 1  # KV layer groups
        layers = self.program.layers.values()
        self.sharing: Sharing | None = None  # once a cache is reserved, if rows may attend together to what they share
        self.expansion: MlaExpansion | KvExpansion | None = None  # the same, if contexts of prompts may be expanded
        self.tile_tokens = tokens_per_tile(max([spec.heads // spec.kv_heads for spec in layers], default=1))
        self._rows, self._fixed = sizes.rows, shared.tilings.fixed
        self._sampled = SampledTokens(sizes.tokens, device)
        self._pools = PoolingSums(sizes.rows, in_order=self._fixed)

    @property
    def verified_sizes(self) -> list[int]:
        return verified_sizes(self._rows, self.program.run_sizes)

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        return sum(int(states.nbytes) for states in self.memory.states.layers.values())

    def bytes_per_token(self, layout: KvLayout) -> int:
        return sum(layout.bytes_per_token(spec) for spec in self.program.layers.values())

    def check_groups(self, groups: Sequence[KvGroup]) -> None:
        places_of(self.program.layers, groups)

    def reserve_kv(self, layout: KvLayout, size: tuple[int, int], states: int, groups: Sequence[KvGroup]) -> None:
        layers, memory = self.program.layers, self.memory
        caches, planes = reserve_caches(layout, layers, groups, size, memory.arena)
        indexed = any(spec.index_dim for spec in layers.values())
        scores = memory.arena.zeros((max(LINES, self.tile_tokens), size[0] * size[1])) if indexed else None
        memory.kv = replace(memory.kv, caches=caches, planes=planes, index_scores=scores)
        may_share = len(groups) < 2 and not self._fixed
        self.sharing = sharing_of(layers.values(), size[1]) if may_share else None
        readable = not isinstance(memory.expansion, KvExpansion) or (layout.is_kv8 and size[1] == BLOCK_SIZE)
        self.expansion = memory.expansion if may_share and readable else None
        heads = max([spec.kv_heads for spec in layers.values()], default=1)
        memory.reserve_arrivals((self._rows + self.program.spare_splits) * heads)
        memory.states.reserve(states, memory.arena)

    def free_kv(self, groups: Sequence[KvGroup] = ()) -> None:
        memory = self.memory
        self.graphs.forget()
        self.groups = max(len(groups), 1)
        of_layers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        memory.kv = ReservedKv(
            groups=dict.fromkeys(self.program.layers, 0) | of_layers,
            hidden_group=next((number for number, group in enumerate(groups) if not group.window), 0),
        )
        memory.states.layers.clear()

    # -- steps ---------------------------------------------------------------------------------------------------

    def usual(self, shape: Shape) -> Shape:
        """Returns the shape that most steps have which are otherwise like this one."""
        if self.expansion is None or not shape.tiles:
            return shape
        return shape._replace(expanded=self.expansion.usual_blocks(shape.tokens))

    def rehearse(self, shape: Shape, step: DeviceInputs, *, graph: bool, sampling: bool) -> None:
        logits = self.graphs.run(shape, step) if graph else self.graphs.launch(step)
        for rows, masks in sampling_kinds(logits.shape[1]) if sampling else ():
            self.sampler.sample(logits, step, rows, self.memory.last, self._sampled.next()[: shape.sampled], masks)

    def forward(self, batch: Batch, shape: Shape, step: DeviceInputs) -> Iterator[Sampling]:
        """Yields logits and their sampling parameters, for one buffer of positions at a time."""
        chosen, wanted = self._sampled.next(), shape.sampled
        if wanted <= self._rows:
            yield self.graphs.run(shape, step), step, batch.sample, 0, chosen[:wanted]
            return
        self.program.run_tokens(step)
        for first in range(0, wanted, self._rows):
            part = slice(first, min(first + self._rows, wanted))
            some = replace(step, **{name: getattr(step, name)[part] for name in SAMPLING})
            logits = self.program.run_sampled(some, part.stop - first)
            yield logits, some, batch.sample.between(part.start, part.stop), first, chosen[part]

    def sample(self, batch: Batch, computed: Iterator[Sampling], masks: Bitmasks | None, fetch: Fetch) -> Flight:
        """Queues what chooses tokens from logits; returns the step in flight."""
        asked, chained = [], []
        for logits, step, rows, first, chosen in computed:
            if rows.chains:  # before these are edited in place
                chained.append(self.sampler.copy_chained(logits, rows))
            some = masks.between(first, first + len(rows.target)) if masks else None
            entry = self.sampler.sample(logits, step, rows, self.memory.last, chosen, some)
            asked += [entry] if entry else []
        pooled = self._pools.take(batch, self.program.states_of(len(batch.tokens))) if batch.pools else {}
        sent = [entry.found[:, 0] for entry in asked if isinstance(entry, PendingTokenLogprobs)]
        have_tokens = len(sent) == 1 and len(sent[0]) == len(batch.sampled)  # they come with their logprobs
        tokens, done = fetch(None if have_tokens else self._sampled, len(batch.sampled))
        tokens = sent[0] if have_tokens else tokens
        return Flight(batch, tokens, asked, pooled, done, chained, masks)


def sharing_of(layers: Collection[AttentionSpec], block_size: int) -> Sharing | None:
    """Returns how rows of a model with these layers may attend together to a prefix; None if some layer does not see
    all of it, or weighs it by where a token stands."""
    plain = all(
        not (spec.window or spec.chunk or spec.temperature or spec.v_dim or spec.q_gain) and spec.causal
        for spec in layers
    )
    tokens = min([tile_tokens(spec.heads // spec.kv_heads) for spec in layers], default=0)
    alike = len({spec.heads // spec.kv_heads for spec in layers}) == 1
    return Sharing(block_size, tokens) if plain and alike and tokens > 1 else None
