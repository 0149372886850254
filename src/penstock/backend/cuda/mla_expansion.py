"""Plans MLA in its expanded form: the latents of a prompt's context are projected once to keys and values of all heads.

The contexts of a step's prompts lie one behind the other, each from a multiple of BLOCK on. They are expanded in pieces
of `room` positions, because all of their keys and values would take much memory, and attention continues from piece to
piece. The room is memory that the absorbed form needs anyway and no longer uses by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from penstock.backend.base import Batch, Ints
from penstock.backend.cuda.contexts import (
    BLOCK,
    MOST_BLOCKS,
    NO_CONTEXTS,
    ExpandedContexts,
    PromptSizes,
    place_contexts,
)
from penstock.model.program import OpNode, Program

TILE_TOKENS = 128  # tokens of a row in one program, which has one head


class MlaDims(NamedTuple):
    """Holds the dimensions of MLA's heads."""

    heads: int
    nope: int  # dimensions of queries and keys without RoPE
    rope: int
    rank: int  # dimensions of latents
    v_dim: int  # dimensions of values

    @classmethod
    def of(cls, node: OpNode) -> MlaDims:
        spec, weights = node.attributes["spec"], node.attributes["weights"]
        return cls(spec.heads, weights.k_b.shape[2], spec.head_dim - spec.v_dim, spec.v_dim, weights.v_b.shape[1])

    @property
    def absorbed_width(self) -> int:
        return self.heads * (self.rope + self.rank)

    @property
    def found_width(self) -> int:
        """Returns how many 16-bit values a token needs for its heads' results: among latents, or the running ones among
        expanded values, 32 bits each with the highest score and the sum of weights."""
        return 2 * self.heads * max(-(-self.rank // 2), self.v_dim + 2)


@dataclass(frozen=True, slots=True)
class MlaExpansion:
    """Decides which steps expand their contexts, and where."""

    prompts_last: ClassVar[bool] = True  # what pads the tokens before them is written over their results
    tile_tokens: ClassVar[int] = TILE_TOKENS
    dims: MlaDims
    room: int  # positions that are expanded at a time, a multiple of BLOCK

    @property
    def piece_blocks(self) -> int:
        return self.room // BLOCK

    def usual_blocks(self, tokens: int) -> int:
        """Returns the blocks of one piece: most steps with prompts have one."""
        return self.piece_blocks

    def pays(self, sizes: PromptSizes) -> bool:
        """Returns True if the expanded form takes less arithmetic for rows of these sizes. For each head, the absorbed
        form projects every token and has long dot products; the expanded one projects every position of the context.
        With the heads of DeepSeek V3 it pays for a row of 171 tokens behind a very long context, of fewer behind a
        short one, and for every whole prompt."""
        d, pairs = self.dims, sizes.pairs
        projection = d.rank * (d.nope + d.v_dim)
        absorbed = int(sizes.counts.sum()) * projection + pairs * (d.rope + 2 * d.rank)
        return int(sizes.lengths.sum()) * projection + pairs * (d.nope + d.rope + d.v_dim) < absorbed

    def place(self, batch: Batch, rows: Ints) -> ExpandedContexts:
        """Returns where the contexts of these rows with prompts are expanded: nowhere if the absorbed form is better,
        or if they are too long. The number of pieces is a power of two, so that graphs are few."""
        sizes = PromptSizes.of(batch, rows)
        total = int(sizes.blocks.sum())
        if total > MOST_BLOCKS or not self.pays(sizes):
            return NO_CONTEXTS
        pieces = 1 << (-(-total // self.piece_blocks) - 1).bit_length()
        return place_contexts(batch, rows, sizes, pieces * self.piece_blocks)


def expansion_of(program: Program, tokens: int) -> MlaExpansion | None:
    """Returns how a program expands contexts in steps of at most `tokens` tokens; None if it never does, because a
    layer has another attention or attends only to selected positions."""
    nodes = [node for node in program.nodes if node.op in ("attend", "attend_mla")]
    if not nodes or any(node.op == "attend" or len(node.inputs) > 2 for node in nodes):
        return None
    if len(dims := {MlaDims.of(node) for node in nodes}) > 1:
        return None
    (d,) = dims
    position = d.heads * (d.nope + d.v_dim) + d.rope
    blocks = min(tokens * d.absorbed_width // position // BLOCK, MOST_BLOCKS)
    return MlaExpansion(d, blocks * BLOCK) if blocks else None
