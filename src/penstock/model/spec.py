"""What a model is: the numbers its architecture needs, read from a checkpoint's own config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: position p turns pair i by p * inv_freq[i]; cos and sin are scaled by `scale`. Dimensions of a
    head beyond those pairs stay as they are; so do all where there are none."""

    inv_freq: tuple[float, ...]
    interleaved: bool  # pairs are (2i, 2i+1) as in GGUF llama files, or (i, i + pairs) as in Hugging Face's
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # 0: sees everything before; else the last `window` positions, itself included
    multiplier: float = 0.0  # of scores; 0: one over the root of head_dim
    soft_cap: float = 0.0  # of scores; 0: none
    qk_norm: Literal["", "head", "all"] = ""  # over what q and k are normed: nothing, each head, all of them
    causal: bool = True  # else a token sees all of its row, which is then the whole of its sequence
    sinks: bool = False  # each head has a logit that takes part in the softmax and gives nothing
    v_dim: int = 0  # above 0: latent attention, where values are the last so many dimensions of keys

    @property
    def scale(self) -> float:
        return self.multiplier or float(self.head_dim**-0.5)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kv_values(self) -> int:
        """What one token leaves in the cache."""
        return self.kv_width if self.v_dim else 2 * self.kv_width


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Of latent attention, what its heads have outside of it."""

    key_dim: int  # of a head, without what is turned
    value_dim: int
    q_rank: int = 0  # of what queries are made of; 0: all of x


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net. Each value head has a memory [k_dim, v_dim] that keys write values to and queries read."""

    k_heads: int  # of queries and keys
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # positions that the convolution before it sees, its own included
    tiled: bool = False  # value head h has key head h % k_heads; else neighbours share one

    @property
    def k_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def width(self) -> int:
        """Of what is convolved: q, k and v."""
        return 2 * self.k_width + self.v_width

    @property
    def state_floats(self) -> int:
        """The memories, and what was convolved last."""
        return self.k_dim * self.v_width + (self.taps - 1) * self.width


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Of many gated MLPs each token is computed by the few that suit it best: how they are chosen and weighed.

    A router's logits become scores: by a softmax, by sigmoids, or as they are, with a softmax over the chosen ones. The
    highest are chosen, among those of the best groups where there are groups, and of equal ones the first. A bias
    counts for that choice alone."""

    count: int
    chosen: int  # for each token
    hidden: int  # of each
    act: str = "silu"
    scoring: Literal["softmax", "sigmoid", "softmax_chosen"] = "softmax"
    renormalize: bool = False  # the chosen scores are divided by their sum
    scale: float = 1.0  # of what all of them give
    choice_bias: bool = False
    groups: int = 1  # of neighbours, equally large
    chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"  # a group is as good as its best, or as the sum of its two best


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share their KV blocks: a block holds some tokens of all of them, and one block table serves them."""

    window: int  # 0: they see everything before; else the last `window` positions
    layers: tuple[int, ...]  # counted among those that keep KV, as `ops.attend` counts them


PADDING = 0.1  # room that groups may leave unused, as a share of the layers of one window


def group_by_window(windows: Sequence[int]) -> tuple[KvGroup, ...]:
    """Divides layers, each given by its window, into groups that all take the same room, full attention first.

    A block must cost the same in every group, so all groups have room for equally many layers; the last group of a
    window may have fewer. Of the sizes that leave at most a tenth of each window's room unused, the one with the fewest
    groups is taken, because every group needs a block table, and of those the smallest."""
    kinds = {window: [layer for layer, one in enumerate(windows) if one == window] for window in sorted(set(windows))}
    counts = [len(layers) for layers in kinds.values()]
    sizes = [size for size in range(1, max(counts) + 1) if all(-count % size <= PADDING * count for count in counts)]
    size = min(sizes, key=lambda size: (sum(-(-count // size) for count in counts), size))
    return tuple(
        KvGroup(window, tuple(layers[first : first + size]))
        for window, layers in kinds.items()
        for first in range(0, len(layers), size)
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    arch: str  # a key of model.registry
    layers: int
    dim: int
    hidden: int
    vocab: int
    max_len: int
    eps: float
    attn: AttentionSpec
    act: str = "silu"
    tied: bool = False  # the output head is the embedding table
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0: none
    gain_offset: float = 0.0  # what is added to the gain of every norm
    layer_attn: tuple[AttentionSpec, ...] = ()  # of each layer, where they differ; all have the heads of `attn`
    biases: frozenset[str] | None = None  # parts of a layer that have one; None: the checkpoint does not say
    latent: LatentSpec | None = None  # where attention is latent
    experts: ExpertSpec | None = None  # in place of the MLP
    dense: frozenset[int] = frozenset()  # layers that have an MLP nonetheless
    shared_hidden: int = 0  # of an MLP beside the experts, which computes every token; 0: none
    unused_layers: int = 0  # that the checkpoint has besides: they guess more than one token at a time
    pooling: str = "mean"  # what the checkpoint makes embeddings by: mean, cls or last
    first_position: int = 0  # where its table of positions begins to be used
    delta: DeltaSpec | None = None
    recurrent: frozenset[int] = frozenset()  # layers that have it in place of attention
    shared_gated: bool = False  # the MLP beside experts has a gate of its own

    @property
    def encoder(self) -> bool:
        """Makes embeddings and no text: a prompt is computed in one step, and nothing of it is kept."""
        return not self.attn.causal

    @property
    def kv_layers(self) -> int:
        """Of the cache. The layers of an encoder write over each other's keys and values."""
        return 1 if self.encoder else self.layers - len(self.recurrent)

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The groups that its KV cache has: one, unless layers have different windows."""
        layers = [layer for layer in range(self.layers) if layer not in self.recurrent][: self.kv_layers]
        return group_by_window([self.attention(layer).window for layer in layers])

    @property
    def kv_group_layers(self) -> int:
        """How many layers a KV block has room for."""
        return max(len(group.layers) for group in self.kv_groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each KV group; 0: none."""
        return tuple(group.window for group in self.kv_groups)

    @property
    def state_bytes(self) -> int:
        """What a sequence has besides keys and values."""
        return 4 * self.delta.state_floats * len(self.recurrent) if self.delta else 0

    def attention(self, layer: int) -> AttentionSpec:
        return self.layer_attn[layer] if self.layer_attn else self.attn

    def with_attention(self, layers: Sequence[AttentionSpec]) -> ModelSpec:
        """With these in each layer."""
        differ = len(set(layers)) > 1
        return replace(self, attn=layers[0], layer_attn=tuple(layers) if differ else ())

    def with_windows(self, sliding: Sequence[bool], window: int) -> ModelSpec:
        """With a window in those layers that have one."""
        return self.with_attention([replace(self.attn, window=window if one else 0) for one in sliding])


def all_but_each(nth: int, layers: int) -> list[bool]:
    return [(layer + 1) % nth != 0 for layer in range(layers)]
