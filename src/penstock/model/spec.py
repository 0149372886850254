"""Defines what a model is: the numbers its architecture needs, read from a checkpoint's own config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from penstock.model.recurrence import RecurrentSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Describes a rotary embedding (RoPE): position p rotates pair i by p * inv_freq[i], and cos and sin are scaled by
    `scale`. Dimensions of a head beyond those pairs stay as they are. Without pairs nothing is rotated."""

    inv_freq: tuple[float, ...]
    interleaved: bool  # pairs are (2i, 2i+1) as in GGUF llama files, or (i, i + pairs) as in Hugging Face's
    scale: float = 1.0


ATTENTION_VECTORS = ("sinks", "q_gain", "distance_bias")  # options of attention that come with a vector of that name
SHAPES = ("heads", "kv_heads", "head_dim", "v_dim")
COMPUTED_AROUND = (  # results, or computed by other ops
    *("rope", "multiplier", "qk_norm", "v_norm", "v_is_k", "output_gate", "index"),
)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Describes the index of sparse attention (DeepSeek Sparse Attention, DSA): which positions a token attends to.

    Each token leaves one index key. The score of a position is the sum over heads of weight * relu(query . key), and
    the `top_k` positions with the highest scores are selected, the first of equal ones."""

    heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec  # rotates the first dimensions of queries and keys
    shared: bool = False  # nothing is scored: the layer attends to what the last layer before it selected


# How q and k are normed: not at all; by an RMS norm per head, per head without a gain, or over all heads at once; by a
# layer norm per head, with a gain of its own for each head.
QkNorm = Literal["", "head", "unit", "all", "layer"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Describes the attention of a layer, with every option that the `attend` op has."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # 0: sees everything; else the last `window` positions, itself included, and as many after it
    multiplier: float = 0.0  # scores are multiplied by it; 0: one over the root of head_dim
    soft_cap: float = 0.0  # scores are capped at it; 0: no cap
    qk_norm: QkNorm = ""
    causal: bool = True  # sees nothing after it; else its row is the whole of its sequence
    chunk: int = 0  # above 0: sees nothing before the chunk of so many positions that it is in
    temperature: float = 0.0  # queries are multiplied by 1 + temperature * log(1 + floor((position + 1) / span))
    temperature_span: int = 1
    sinks: bool = False  # each head has a logit that takes part in the softmax and contributes no value
    q_gain: bool = False  # rotated queries are multiplied by a vector as wide as a head
    v_dim: int = 0  # above 0: MLA, where values are the last so many dimensions of keys
    distance_bias: int = 0  # above 0: a head's scores get a bias by distance, the same for all beyond so many positions
    output_gate: bool = False  # q projects to a gate, too: the output is multiplied by its sigmoid
    v_norm: bool = False  # each head's values are normed, without a gain; only where q and k are normed per head
    v_is_k: bool = False  # values are projected as keys are; they differ after norms and RoPE
    shares_kv: bool = False  # the layer has queries alone, and reads the keys and values that another layer wrote
    index: IndexSpec | None = None  # with MLA: selects the positions that are attended to; None: all are

    @property
    def scale(self) -> float:
        """Returns what scores are multiplied by."""
        return self.multiplier or float(self.head_dim**-0.5)

    @property
    def reach(self) -> int:
        """Returns how many positions it sees at most, itself included; 0: no limit."""
        return min(self.window, self.chunk) if self.window and self.chunk else self.window or self.chunk

    @property
    def q_width(self) -> int:
        """Returns the width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the width of the keys of all KV heads."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Returns the width of what `attend` takes: queries, and keys and values unless another layer wrote them."""
        return self.q_width if self.shares_kv else self.q_width + 2 * self.kv_width

    @property
    def kv_values(self) -> int:
        """Returns how many values one token takes in a layer of the KV cache, with its index key."""
        return (self.kv_width if self.v_dim else 2 * self.kv_width) + self.index_dim

    @property
    def index_dim(self) -> int:
        """Returns how many values an index key has; 0: the layer keeps none."""
        return self.index.head_dim if self.index and not self.index.shared else 0

    @property
    def vectors(self) -> dict[str, int]:
        """Returns the vectors that `attend` takes besides qkv, with their sizes. A layer's checkpoint has a tensor with
        each name."""
        biases = self.heads * (2 * self.distance_bias + 1)  # of keys so far before a query to those so far after it
        sizes = {"sinks": self.heads, "q_gain": self.head_dim, "distance_bias": biases}
        return {name: sizes[name] for name in ATTENTION_VECTORS if getattr(self, name)}

    @property
    def options(self) -> dict[str, float]:
        """Returns the numbers and flags that kernels of attention take, by name: all fields but shapes, vectors and
        what is computed around them."""
        others = (*SHAPES, *COMPUTED_AROUND, *ATTENTION_VECTORS)
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Describes the heads of MLA as the projections around the `attend_mla` op see them."""

    qk_nope_head_dim: int  # dimensions of a head's query and key that are not rotated
    v_head_dim: int
    q_lora_rank: int = 0  # width of what queries are projected from; 0: they are projected from x


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Describes per-layer embeddings: a second table has a slice of each token's row for each layer."""

    width: int  # of a slice
    vocab: int  # rows of the table; tokens beyond take the first one


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Describes residual streams that are predicted and corrected by each layer, which computes one of them (AltUp),
    and what else Gemma 3n's layers have."""

    streams: int
    active: int  # the stream that layers compute
    laurel_rank: int  # width inside the low-rank product beside attention (Laurel)
    cutoffs: tuple[float, ...]  # of each layer's MLP, in deviations above the mean; -inf: nothing is cut off


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Describes a mixture of experts (MoE): how each token's experts are selected and weighted.

    Router logits become scores by a softmax, by sigmoids, or stay as they are with a softmax over the selected ones.
    The experts with the highest scores are selected, within the best groups where there are groups, and the first of
    equal ones. A choice bias is added for the selection only."""

    count: int
    top_k: int  # experts per token
    hidden: int  # width inside each expert
    act: str = "silu"
    scoring: Literal["softmax", "sigmoid", "softmax_top_k"] = "softmax"
    renormalize: bool = False  # the selected scores are divided by their sum
    weigh_inputs: bool = False  # a score multiplies what its expert is given, not what it returns
    scale: float = 1.0  # the sum of the experts' outputs is multiplied by it
    choice_bias: bool = False
    groups: int = 1  # equally many neighbouring experts form a group
    top_k_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"  # a group is as good as its best, or as the sum of its two best
    gated: bool = True  # act(gate) is multiplied by up; else act(up) alone goes into down
    width: int = 0  # of what experts compute with, which the token is projected to and from; 0: that of the model

    @property
    def up_rows(self) -> int:
        """Returns the rows of an expert's first matrix: gate and up, or up alone."""
        return self.hidden * (2 if self.gated else 1)


@dataclass(frozen=True, slots=True)
class BranchScales:
    """Holds multipliers of layers that have attention and Mamba2 beside each other."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    convolved: tuple[float, ...] = (1.0, 1.0, 1.0)  # of x, B and C
    gate: float = 1.0  # of the MLP's gate, before its activation
    down: float = 1.0  # of the MLP's output


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """Describes what a model classifies sequences into, and the head that does it (model/classifier.py)."""

    labels: tuple[str, ...]
    activation: str  # what turns logits into scores: sigmoid, softmax or identity
    pooling: str  # the state that the head sees: cls, last or mean
    act: str = ""  # after the head's dense layer: tanh or gelu; "": it has none
    tokens: tuple[int, ...] = ()  # instead of a head: the tokens for yes and, if there is one, for no


@dataclass(frozen=True, slots=True)
class ObservedSpec:
    """Describes what a model stores of each token for an EAGLE-3 head: a projection of residual streams."""

    layers: tuple[int, ...]  # before which streams are taken; one more than the last layer is after all
    width: int  # of the projection


@dataclass(frozen=True, slots=True)
class LongContext:
    """Describes a context beyond the original one (LongRoPE): how long it is, and the RoPE that all positions of it
    have."""

    max_len: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share their KV blocks: a block holds some tokens of all of them, and one block table serves them."""

    window: int  # 0: they see everything before; else the last `window` positions
    layers: tuple[int, ...]  # counted among those that keep KV, as `ops.attend` counts them


PADDING = 0.1  # room that groups may leave unused, as a share of the layers of one window


def group_by_window(windows: Sequence[int], values: Sequence[int] = ()) -> tuple[KvGroup, ...]:
    """Divides layers, each given by its window, into groups that all take the same room, full attention first. `values`
    says how many values a token takes in each layer, where they differ.

    A block must cost the same in every group, so all groups have room for equally many layers of the largest kind; the
    last group of a window may have fewer. Smaller layers share the room of a large one where several fit into it. Of
    the sizes that leave at most a tenth of each window's room unused, the one with the fewest groups is taken, because
    every group needs a block table, and of those the smallest."""
    values = values or [1] * len(windows)
    kinds = {window: [layer for layer, one in enumerate(windows) if one == window] for window in sorted(set(windows))}
    together = {window: max(values) // max(values[layer] for layer in layers) for window, layers in kinds.items()}
    counts = [-(-len(layers) // together[window]) for window, layers in kinds.items()]
    sizes = [size for size in range(1, max(counts) + 1) if all(-count % size <= PADDING * count for count in counts)]
    size = min(sizes, key=lambda size: (sum(-(-count // size) for count in counts), size))
    return tuple(
        KvGroup(window, tuple(layers[first : first + size * together[window]]))
        for window, layers in kinds.items()
        for first in range(0, len(layers), size * together[window])
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describes a whole model."""

    arch: str  # a key of model.registry
    layers: int
    dim: int
    hidden: int
    vocab: int
    max_len: int
    eps: float
    attn: AttentionSpec
    act: str = "silu"
    long: LongContext | None = None  # what the model becomes if sequences may be longer than `max_len`
    tied: bool = False  # the output head is the embedding table
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0: no cap
    gain_offset: float = 0.0  # what is added to the gain of every norm
    layer_attn: tuple[AttentionSpec, ...] = ()  # of each layer, where they differ; all have the heads of `attn`
    biases: frozenset[str] | None = None  # parts of a layer that have one; None: the checkpoint does not say
    mla: MlaSpec | None = None  # where attention is MLA
    experts: ExpertSpec | None = None  # in place of the MLP
    dense: frozenset[int] = frozenset()  # layers that have an MLP nonetheless
    shared_hidden: int = 0  # width of an MLP beside the experts, which computes every token; 0: there is none
    unused_layers: int = 0  # further layers of the checkpoint, which predict more than one token (MTP)
    pooling: str = "mean"  # how the checkpoint makes embeddings: mean, cls or last
    first_position: int = 0  # the first row of its table of positions that is used
    recurrence: RecurrentSpec | None = None  # what recurrent layers compute
    recurrent: frozenset[int] = frozenset()  # layers that have a state
    attentive: frozenset[int] | None = None  # layers that have attention; None: those without a state
    branch_scales: BranchScales | None = None
    shared_gated: bool = False  # the MLP beside the experts has a gate of its own
    classifier: ClassifierSpec | None = None
    segments: int = 1  # kinds of tokens that a pair of texts has: of the first and of the second; 0: no table of them
    parallel: bool = False  # attention and MLP both see the residual stream before the layer, and are added to it
    embed_dim: int = 0  # width of its embeddings, which are projected to `dim` and back; 0: it is `dim`
    norm_last: bool = False  # each part's output is added to its input before they are normed, and no norm follows
    generates: bool = True  # the checkpoint has an output head, or ties it to its embeddings
    layer_hidden: tuple[int, ...] = ()  # of each layer's MLP, where they differ; `hidden` is the widest
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    stores_hidden: bool = False  # in KV blocks, after the last norm, for a head that drafts from them
    observed: ObservedSpec | None = None  # stored in its place, for an EAGLE-3 head

    @property
    def hidden_values(self) -> int:
        """Returns how many values of hidden states it stores of each token."""
        if self.observed is not None:
            return self.observed.width
        return self.dim if self.stores_hidden else 0

    @property
    def encoder(self) -> bool:
        """Returns whether it makes embeddings and no text: a prompt is computed in one step and nothing of it is
        kept."""
        return not self.attn.causal

    @property
    def token_ids(self) -> int:
        """Returns how many token ids it knows. A classifier of pairs has those of the first text and, `vocab` further,
        those of the second one where the two differ."""
        return self.vocab * (2 if self.classifier and self.segments > 1 else 1)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Returns the layers that have attention, in their order."""
        attentive = set(range(self.layers)) - self.recurrent if self.attentive is None else self.attentive
        return tuple(sorted(attentive))

    @property
    def kv_writers(self) -> tuple[int, ...]:
        """Returns the layers that write keys and values, in their order."""
        return tuple(layer for layer in self.attention_layers if not self.attention(layer).shares_kv)

    @property
    def kv_layers(self) -> int:
        """Returns how many layers the KV cache has."""
        return len(self.cached_attention)

    @property
    def cached_attention(self) -> tuple[AttentionSpec, ...]:
        """Returns the attention of each layer of the KV cache. The layers of an encoder write over each other's keys
        and values, so it has one."""
        return (self.attn,) if self.encoder else tuple(map(self.attention, self.kv_writers))

    def kv_layer(self, layer: int) -> int:
        """Returns which layer of the KV cache an attention layer writes. One that shares KV reads that of the last
        layer before it that writes and sees as far."""
        if self.encoder:
            return 0
        same = [
            index
            for index, writer in enumerate(self.kv_writers)
            if writer <= layer and self.attention(writer).reach == self.attention(layer).reach
        ]
        return same[-1]

    def state_layer(self, layer: int) -> int:
        """Returns how many recurrent layers come before a layer: the number of its state, where it has one."""
        return sum(other < layer for other in self.recurrent)

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The groups that its KV cache has: one, unless layers have different windows. An encoder has one, for the
        whole of a sequence."""
        if self.encoder:
            return (KvGroup(0, (0,)),)
        layers = self.cached_attention
        return group_by_window([attn.reach for attn in layers], [attn.kv_values for attn in layers])

    @property
    def kv_planes(self) -> tuple[int, ...]:
        """Returns for how many values of a token each plane of a KV block has room. A plane holds the largest layer, or
        as many smaller ones as fit, and each group fills planes from the first one on."""
        values = [attn.kv_values for attn in self.cached_attention]
        planes: dict[int, int] = {}
        for group in self.kv_groups:
            plane = used = 0
            for layer in group.layers:
                if used + values[layer] > max(values):
                    plane, used = plane + 1, 0
                used += values[layer]
                planes[plane] = max(planes.get(plane, 0), used)
        return tuple(planes.values())

    @property
    def kv_group_layers(self) -> int:
        """Returns how many layers of the largest size a KV block has room for."""
        return len(self.kv_planes)

    def kv_group_bytes(self, token: int) -> int:
        """Returns the bytes of a token in a KV block, given those of a token in all layers."""
        return token * sum(self.kv_planes) // max(sum(attn.kv_values for attn in self.cached_attention), 1)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each KV group; 0: none."""
        return tuple(group.window for group in self.kv_groups)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of a sequence's recurrent state."""
        return 4 * self.recurrence.state_floats * len(self.recurrent) if self.recurrence else 0

    def attention(self, layer: int) -> AttentionSpec:
        """Returns the attention of a layer."""
        return self.layer_attn[layer] if self.layer_attn else self.attn

    def mlp_hidden(self, layer: int) -> int:
        """Returns the width inside a layer's MLP."""
        return self.layer_hidden[layer] if self.layer_hidden else self.hidden

    @property
    def longest(self) -> int:
        """Returns how many positions it has at most, with its long context."""
        return self.long.max_len if self.long else self.max_len

    def with_room_for(self, max_len: int) -> ModelSpec:
        """Returns this spec, or that of its long context if sequences of `max_len` tokens need it."""
        if self.long is None or max_len <= self.max_len:
            return self
        layers = [replace(self.attention(layer), rope=self.long.rope) for layer in range(self.layers)]
        return replace(self, max_len=self.long.max_len).with_attention(layers)

    def with_attention(self, layers: Sequence[AttentionSpec]) -> ModelSpec:
        """Returns this spec with the given attention in each layer."""
        differ = len(set(layers)) > 1
        return replace(self, attn=layers[0], layer_attn=tuple(layers) if differ else ())

    def with_windows(self, sliding: Sequence[bool], window: int) -> ModelSpec:
        """Returns this spec with a window in the layers that are sliding."""
        return self.with_attention([replace(self.attn, window=window if one else 0) for one in sliding])


def all_but_each(nth: int, layers: int) -> list[bool]:
    """Returns False for every nth layer and True for all others."""
    return [(layer + 1) % nth != 0 for layer in range(layers)]
