"""Plans which prompts attend to a 16-bit copy of their context where the KV cache has 8 bits.

Hopper's prefill kernel reads only 16 bits. A copy takes time for every position of a context, and the kernel saves time
for every pair of a token and a position that it sees. All layers share the memory for copies. Longer contexts are
attended to in 8 bits, by the kernel for every GPU. The figures are for an H200.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.contexts import (
    BLOCK,
    MOST_BLOCKS,
    NO_CONTEXTS,
    ExpandedContexts,
    PromptSizes,
    place_contexts,
)
from penstock.model.spec import AttentionSpec

if TYPE_CHECKING:
    from penstock.backend.cuda.device_tilings import Tilings

PLAIN_FLOPS, HOPPER_FLOPS = 188e12, 640e12  # per second of both kernels, the plain one with 8 bits
PLAIN_POSITION, HOPPER_POSITION = 50e-9, 12e-9  # seconds for a position of 128 dimensions: they come one by one
BANDWIDTH = 3.2e12  # bytes that a copy reads and writes in a second
LAUNCH = 5e-6  # seconds
MARGIN = 1.5  # required ratio of saved time to the copy's: both are estimates
VALUE_BYTES = 2  # in a copy
BLOCK_SIZE = 16  # positions in a block of the cache, which the kernel copies at a time
MOST_BYTES = 512 << 20
MOST_PER_TOKEN = 16  # positions for each token of the largest step
FEWEST_BLOCKS = 16  # a minimum, so that graphs are few
TABLE_WORDS = 1 << 20  # a step with larger tables makes no copy


class KvCopies(NamedTuple):
    """Holds copies of contexts: a paged cache with tables of its own."""

    lines: Any  # [blocks, 2, kv_heads, BLOCK_SIZE, D]
    tables: Any  # [TABLE_WORDS] as wide as the step's tables


@dataclass(frozen=True, slots=True)
class KvExpansion:
    """Decides which steps copy the contexts of their prompts, and where."""

    prompts_last: ClassVar[bool] = False
    tile_tokens: ClassVar[int] = 0  # as without a copy
    heads: int
    kv_heads: int
    dims: int
    room: int  # positions, a multiple of BLOCK

    @property
    def bytes(self) -> int:
        return self.room * self.width * VALUE_BYTES + 4 * TABLE_WORDS

    @property
    def width(self) -> int:
        return 2 * self.kv_heads * self.dims

    def copies_within(self, memory: Any, tables: Any) -> KvCopies:
        return KvCopies(memory.view(-1, 2, self.kv_heads, BLOCK_SIZE, self.dims), tables)

    def usual_blocks(self, tokens: int) -> int:
        sizes = PromptSizes.of_one(tokens)
        return self._padded(int(sizes.blocks.sum())) if self.pays(sizes) else 0

    def pays(self, sizes: PromptSizes) -> bool:
        """Returns True if rows of these sizes save more time than their copies take: in multiplications, or on the way
        through the longest context. With the heads of Llama 3 8B, whole prompts of 256 tokens do, and every prompt
        behind a long context."""
        flops = 4 * self.heads * self.dims * sizes.pairs
        steps = int(sizes.lengths.max()) * self.dims / 128
        saved = max(flops / PLAIN_FLOPS - flops / HOPPER_FLOPS, steps * (PLAIN_POSITION - HOPPER_POSITION))
        copied = int(sizes.lengths.sum()) * self.width * (1 + VALUE_BYTES)
        return saved > MARGIN * (copied / BANDWIDTH + LAUNCH)

    def place(self, batch: Batch, rows: Ints) -> ExpandedContexts:
        """Returns where the contexts of these rows with prompts are copied: nowhere if that takes longer or room is
        short."""
        sizes = PromptSizes.of(batch, rows)
        total = int(sizes.blocks.sum())
        if total * BLOCK > self.room or batch.tables.size > TABLE_WORDS or not self.pays(sizes):
            return NO_CONTEXTS
        return place_contexts(batch, rows, sizes, self._padded(total))

    def _padded(self, blocks: int) -> int:
        """Returns the blocks that a step has room for: a power of two, so that graphs are few."""
        return max(1 << (blocks - 1).bit_length(), FEWEST_BLOCKS)


def kv_expansion_of(layers: Collection[AttentionSpec], tokens: int, tilings: Tilings) -> KvExpansion | None:
    """Returns how a model with these layers and an 8-bit cache copies contexts in steps of at most `tokens` tokens;
    None if it never does: Hopper's kernel does not run or lacks a layer's feature, or heads differ in shape."""
    shapes = {(spec.heads, spec.kv_heads, spec.head_dim) for spec in layers}
    if len(shapes) != 1 or not all(map(sees_all, layers)):
        return None
    ((heads, kv_heads, dims),) = shapes
    if tilings.fixed or tilings.hopper_attention(dims) is None:
        return None
    positions = min(MOST_BYTES // (2 * kv_heads * dims * VALUE_BYTES), MOST_PER_TOKEN * tokens)
    blocks = min(positions // BLOCK, MOST_BLOCKS)
    return KvExpansion(heads, kv_heads, dims, blocks * BLOCK) if blocks else None


def sees_all(spec: AttentionSpec) -> bool:
    """Returns whether Hopper's kernel has all features of a layer, and every token sees all of its context: with a
    window, most of a copy would be wasted."""
    others = spec.window, spec.chunk, spec.temperature, spec.v_dim, spec.q_gain, spec.distance_bias
    return spec.causal and not any(others)
