"""Defines a model's architecture as numbers read from its own config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from penstock.model.recurrence import RecurrentSpec


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Describes a rotary embedding (RoPE): position p rotates pair i by p * inv_freq[i], and cos and sin are scaled by
    `scale`. Dimensions beyond the pairs are unchanged.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool  # pairs are (2i, 2i+1), as in GGUF llama files; else (i, i + pairs), as in Hugging Face's
    scale: float = 1.0


ATTENTION_VECTORS = ("sinks", "q_gain", "distance_bias")  # options that come with a vector of the same name
SHAPES = ("heads", "kv_heads", "head_dim", "v_dim")
COMPUTED_AROUND = (  # results, or computed by other ops
    *("rope", "multiplier", "qk_norm", "v_norm", "v_is_k", "output_gate", "index"),
)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Describes the index of DeepSeek Sparse Attention (DSA), which selects the positions that a token attends to.

    Each token stores one index key. The score of a position is the sum over heads of weight * relu(query . key), and
    the `top_k` positions with the highest scores are selected; ties go to the first.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec  # applies to the first dimensions of queries and keys
    shared: bool = False  # reuses the last scored selection of an earlier layer


# Norms of q and k: none; RMS norm per head, per head without a gain, or over all heads at once; layer norm per head
# with
# per-head gains.
QkNorm = Literal["", "head", "unit", "all", "layer"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Describes a layer's attention, with every option of the `attend` op."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # 0: unlimited; else the last `window` positions, including the current one, and as far ahead
    multiplier: float = 0.0  # multiplies scores; 0: one over the root of head_dim
    soft_cap: float = 0.0  # 0: no cap
    qk_norm: QkNorm = ""
    causal: bool = True  # sees only earlier positions; else a row holds the whole sequence
    chunk: int = 0  # above 0: attention stays within chunks of this size
    temperature: float = 0.0  # multiplies queries by 1 + temperature * log(1 + floor((position + 1) / span))
    temperature_span: int = 1
    sinks: bool = False  # each head has a logit that joins the softmax without a value
    q_gain: bool = False  # multiplies rotated queries by a vector of head_dim
    v_dim: int = 0  # above 0: MLA, where values are the last v_dim dimensions of keys
    distance_bias: int = 0  # above 0: scores get a bias per head and distance, constant beyond this distance
    output_gate: bool = False  # q also projects to a gate, whose sigmoid multiplies the output
    v_norm: bool = False  # values are normed per head without a gain; requires per-head QK norm
    v_is_k: bool = False  # values use the key projection; they differ after norms and RoPE
    shares_kv: bool = False  # the layer has only queries and reads another layer's KV
    index: IndexSpec | None = None  # selects positions (MLA only); None: all

    @property
    def scale(self) -> float:
        return self.multiplier or float(self.head_dim**-0.5)

    @property
    def reach(self) -> int:
        """Returns the number of visible positions, including the current one; 0: unlimited."""
        return min(self.window, self.chunk) if self.window and self.chunk else self.window or self.chunk

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Returns the width of `attend`'s input: queries, and keys and values unless the layer shares them."""
        return self.q_width if self.shares_kv else self.q_width + 2 * self.kv_width

    @property
    def kv_values(self) -> int:
        return (self.kv_width if self.v_dim else 2 * self.kv_width) + self.index_dim

    @property
    def index_dim(self) -> int:
        """Returns the width of an index key; 0: the layer stores none."""
        return self.index.head_dim if self.index and not self.index.shared else 0

    @property
    def vectors(self) -> dict[str, int]:
        """Returns `attend`'s vectors and their sizes. A layer's checkpoint has a tensor of each name."""
        # from this distance before a query to this distance after it
        biases = self.heads * (2 * self.distance_bias + 1)
        sizes = {"sinks": self.heads, "q_gain": self.head_dim, "distance_bias": biases}
        return {name: sizes[name] for name in ATTENTION_VECTORS if getattr(self, name)}

    @property
    def options(self) -> dict[str, float]:
        others = (*SHAPES, *COMPUTED_AROUND, *ATTENTION_VECTORS)
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Describes the heads of MLA for the projections around the `attend_mla` op."""

    qk_nope_head_dim: int  # unrotated dimensions of a head's query and key
    v_head_dim: int
    q_lora_rank: int = 0  # width of the low-rank query projection; 0: queries are projected from x


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Describes per-layer embeddings: a second table has a slice of each token's row for each layer."""

    width: int  # one slice
    vocab: int  # rows of the table; later tokens take the first one


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """Describes Gemma 3n's layers: residual streams that each layer predicts and corrects while it computes one of them
    (AltUp), and further options.
    """

    streams: int
    active: int  # the stream that layers compute
    laurel_rank: int  # rank of the product parallel to attention (Laurel)
    cutoffs: tuple[float, ...]  # per layer, in deviations above the mean; -inf: none


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Describes a mixture of experts (MoE): how each token's experts are selected and weighted.

    Router logits become scores by a softmax or by sigmoids, or stay raw with a softmax over the selected ones. The
    experts with the highest scores are selected, within the best groups if there are groups; ties go to the first. A
    choice bias affects only the selection.
    """

    count: int
    top_k: int  # experts per token
    hidden: int  # width inside each expert
    act: str = "silu"
    scoring: Literal["softmax", "sigmoid", "softmax_top_k"] = "softmax"
    renormalize: bool = False  # divides the selected scores by their sum
    weigh_inputs: bool = False  # scores multiply the experts' inputs instead of their outputs
    scale: float = 1.0  # multiplies the sum of the experts' outputs
    choice_bias: bool = False
    groups: int = 1  # equal runs of neighbouring experts
    top_k_groups: int = 1
    group_score: Literal["max", "top2"] = "top2"  # the best expert's score, or the sum of the two best
    gated: bool = True  # down(act(gate) * up); else down(act(up))
    width: int = 0  # the experts' own input and output width; 0: the model's

    @property
    def up_rows(self) -> int:
        """Returns the rows of an expert's first matrix: gate and up, or only up."""
        return self.hidden * (2 if self.gated else 1)


@dataclass(frozen=True, slots=True)
class BranchScales:
    """Holds the multipliers of layers with parallel attention and Mamba2."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    convolved: tuple[float, ...] = (1.0, 1.0, 1.0)  # x, B and C
    gate: float = 1.0  # multiplies the MLP's gate before its activation
    down: float = 1.0  # multiplies the MLP's output


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """Describes a classifier's labels and its head (model/classifier.py)."""

    labels: tuple[str, ...]
    activation: str  # maps logits to scores: sigmoid, softmax or identity
    pooling: str  # the head's input state: cls, last or mean
    act: str = ""  # after the head's dense layer: tanh or gelu; "": no such layer
    tokens: tuple[int, ...] = ()  # replace a head: the tokens for yes and, optionally, no


@dataclass(frozen=True, slots=True)
class ObservedSpec:
    """Describes the projection of residual streams that a model stores for an EAGLE-3 head."""

    layers: tuple[int, ...]  # layers whose input stream is taken; the number of layers stands for the final stream
    width: int


@dataclass(frozen=True, slots=True)
class LongContext:
    """Describes the longer context of LongRoPE: its length, and the RoPE of all its positions."""

    max_len: int
    rope: RopeSpec


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Lists layers that share KV blocks: a block holds some tokens of all of them, and one block table serves them."""

    window: int  # 0: unlimited; else the last `window` positions
    layers: tuple[int, ...]  # indices among the layers with KV, as in `ops.attend`


PADDING = 0.1  # the largest unused share of a group's room


def group_by_window(windows: Sequence[int], values: Sequence[int] = ()) -> tuple[KvGroup, ...]:
    """Divides layers, given by their windows, into groups of equal room, full attention first. `values` are the KV
    values per token of each layer, if they differ.

    A block must cost the same in every group, so all groups have room for the same number of layers of the largest
    kind; the last group of a window may have fewer. Several small layers share the room of a large one where they fit.
    Among the sizes that leave at most a tenth of each window's room unused, the function takes those with the fewest
    groups, because every group needs a block table, and of those the smallest.
    """
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
    long: LongContext | None = None  # the RoPE of sequences longer than `max_len`
    tied: bool = False  # the output head is the embedding table
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0: no cap
    gain_offset: float = 0.0  # added to the gain of every norm
    layer_attn: tuple[AttentionSpec, ...] = ()  # per layer, if they differ; the heads are those in `attn`
    biases: frozenset[str] | None = None  # parts of a layer with a bias; None: the checkpoint does not say
    mla: MlaSpec | None = None
    experts: ExpertSpec | None = None  # replace the MLP
    dense: frozenset[int] = frozenset()  # layers that have an MLP instead of experts
    shared_hidden: int = 0  # width of the shared expert; 0: none
    unused_layers: int = 0  # extra layers of the checkpoint that predict further tokens (MTP)
    pooling: str = "mean"  # the checkpoint's embedding pooling: mean, cls or last
    first_position: int = 0  # first used row of the position table
    recurrence: RecurrentSpec | None = None  # the kind of recurrent layers
    recurrent: frozenset[int] = frozenset()  # layers with a state
    attentive: frozenset[int] | None = None  # layers with attention; None: those without a state
    branch_scales: BranchScales | None = None
    shared_gated: bool = False  # the shared expert has its own gate
    classifier: ClassifierSpec | None = None
    segments: int = 1  # token types in a text pair; 0: no table
    parallel: bool = False  # attention and MLP both read the layer's input and add to it
    embed_dim: int = 0  # width of the embeddings, which are projected to and from `dim`; 0: `dim`
    norm_last: bool = False  # each part's output is added to its input before the norm, without a final norm
    generates: bool = True  # the checkpoint has an output head or ties it to its embeddings
    layer_hidden: tuple[int, ...] = ()  # MLP widths per layer, if they differ; `hidden` is the widest
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    stores_hidden: bool = False  # in KV blocks, after the last norm, for a draft head
    observed: ObservedSpec | None = None  # stored instead, for an EAGLE-3 head

    @property
    def hidden_values(self) -> int:
        if self.observed is not None:
            return self.observed.width
        return self.dim if self.stores_hidden else 0

    @property
    def encoder(self) -> bool:
        """Returns True for embedding models: a prompt is computed in one step and nothing is cached."""
        return not self.attn.causal

    @property
    def token_ids(self) -> int:
        """Returns the number of token ids. A pair classifier has `vocab` more for the second text if its token types
        differ.
        """
        return self.vocab * (2 if self.classifier and self.segments > 1 else 1)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        attentive = set(range(self.layers)) - self.recurrent if self.attentive is None else self.attentive
        return tuple(sorted(attentive))

    @property
    def kv_writers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.attention_layers if not self.attention(layer).shares_kv)

    @property
    def cached_attention(self) -> tuple[AttentionSpec, ...]:
        """Returns the attention of each layer of the KV cache. An encoder's layers overwrite each other's KV, so it has
        one.
        """
        return (self.attn,) if self.encoder else tuple(map(self.attention, self.kv_writers))

    def kv_layer(self, layer: int) -> int:
        """Returns the layer of the KV cache that an attention layer uses. With shared KV, it is the last earlier writer
        with the same window.
        """
        if self.encoder:
            return 0
        same = [
            index
            for index, writer in enumerate(self.kv_writers)
            if writer <= layer and self.attention(writer).reach == self.attention(layer).reach
        ]
        return same[-1]

    def state_layer(self, layer: int) -> int:
        return sum(other < layer for other in self.recurrent)

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """Returns the KV layer groups: one, unless windows differ. An encoder has one for the whole sequence."""
        if self.encoder:
            return (KvGroup(0, (0,)),)
        layers = self.cached_attention
        return group_by_window([attn.reach for attn in layers], [attn.kv_values for attn in layers])

    @property
    def kv_planes(self) -> tuple[int, ...]:
        """Returns the values per token in each plane of a KV block. A plane holds one of the largest layers or several
        smaller ones, and each group fills planes from the first.
        """
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

    def kv_group_bytes(self, token: int) -> int:
        return token * sum(self.kv_planes) // max(sum(attn.kv_values for attn in self.cached_attention), 1)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.kv_groups)

    @property
    def state_bytes(self) -> int:
        return 4 * self.recurrence.state_floats * len(self.recurrent) if self.recurrence else 0

    def attention(self, layer: int) -> AttentionSpec:
        return self.layer_attn[layer] if self.layer_attn else self.attn

    def mlp_hidden(self, layer: int) -> int:
        return self.layer_hidden[layer] if self.layer_hidden else self.hidden

    @property
    def longest(self) -> int:
        return self.long.max_len if self.long else self.max_len

    def with_room_for(self, max_len: int) -> ModelSpec:
        """Returns this spec, or the one of its long context if `max_len` needs it."""
        if self.long is None or max_len <= self.max_len:
            return self
        layers = [replace(self.attention(layer), rope=self.long.rope) for layer in range(self.layers)]
        return replace(self, max_len=self.long.max_len).with_attention(layers)

    def with_attention(self, layers: Sequence[AttentionSpec]) -> ModelSpec:
        differ = len(set(layers)) > 1
        return replace(self, attn=layers[0], layer_attn=tuple(layers) if differ else ())

    def with_windows(self, sliding: Sequence[bool], window: int) -> ModelSpec:
        return self.with_attention([replace(self.attn, window=window if one else 0) for one in sliding])


def all_but_each(nth: int, layers: int) -> list[bool]:
    """Returns False for every nth layer and True for all others."""
    return [(layer + 1) % nth != 0 for layer in range(layers)]
