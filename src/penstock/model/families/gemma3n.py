"""Reads the text part of Gemma 3n: four residual streams that each layer predicts and corrects (AltUp), a low-rank
product parallel to attention (Laurel), per-layer embeddings, sparse MLPs in some layers, and last layers that reuse the
keys and values of earlier ones.

The table of per-layer embeddings is larger than the rest of the model: 4.7 GB of E4B in 16 bits. Each token reads one
row, without a product, so it stays in device memory in the file's format.

Images and audio are refused, and their towers are left out. GGUF files are read as llama.cpp writes them, although
llama.cpp itself ignores their numbers in favour of those of the two published sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import NormalDist

import numpy as np

from penstock.errors import MalformedFile
from penstock.model import config_hf, decoder, names, per_layer
from penstock.model.config_reader import MAX_NUMBER, ConfigReader, Item, number_or_null, sizes_in_each
from penstock.model.decoder import Attention, Ends, Norm
from penstock.model.families import gemma2, gemma3
from penstock.model.gguf import config as gguf_config
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.per_layer import PerLayerGate, PerLayerInputs
from penstock.model.spec import AltUpSpec, ModelSpec, PerLayerSpec, all_but_each
from penstock.model.tensor import Tensor

MAX_STREAMS = 8
PERIOD, THETA, LOGIT_CAP = 5, 1000000.0, 30.0
SPARSE_LAYERS, SPARSITY = 10, 0.95  # defaults
FRACTIONS = Item("numbers from 0 to below 1", lambda one: type(one) in (int, float) and 0 <= one < 1, float)
CUTOFF_ITEMS = Item("numbers", lambda one: type(one) in (int, float) and one <= MAX_NUMBER, float)  # or minus infinity

PER_LAYER_TOP = {
    "model.embed_tokens_per_layer": "per_layer_embed",
    "model.per_layer_model_projection": "per_layer_in",
    "model.per_layer_projection_norm": "per_layer_norm",
}
PER_LAYER = {
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_out": "per_layer_projection",
    "after_per_layer_norm": "post_per_layer_input_norm",
}
NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_TEXT = gemma2.HUGGING_FACE.but(
    **NORMS,
    **PER_LAYER,
    laurel_in="laurel.linear_left",
    laurel_out="laurel.linear_right",
    laurel_norm="laurel.post_laurel_norm",
    stream_router="altup.modality_router",
    stream_router_norm="altup.router_norm",
    stream_predict="altup.prediction_coefs",
    stream_correct="altup.correction_coefs",
    stream_scale="altup.correct_output_scale",
)
HUGGING_FACE = names.beside_vision(
    _TEXT._replace(
        top={
            **_TEXT.top,
            **PER_LAYER_TOP,
            **{f"model.altup_projections.{i}": f"stream_in.{i}" for i in range(MAX_STREAMS - 1)},
            **{f"model.altup_unembed_projections.{i}": f"stream_out.{i}" for i in range(MAX_STREAMS - 1)},
        }
    )
)
GGUF_PER_LAYER_TOP = {
    "per_layer_token_embd": "per_layer_embed",
    "per_layer_model_proj": "per_layer_in",
    "per_layer_proj_norm": "per_layer_norm",
}
GGUF_PER_LAYER = {"per_layer_gate": "inp_gate", "per_layer_out": "proj", "after_per_layer_norm": "post_norm"}
_GGUF = gemma3.GGUF.but(
    **GGUF_PER_LAYER,
    laurel_in="laurel_l",
    laurel_out="laurel_r",
    laurel_norm="laurel_post_norm",
    stream_router="altup_router",
    stream_router_norm="altup_router_norm",
    stream_predict="altup_predict_coef",
    stream_correct="altup_correct_coef",
    stream_scale="altup_correct_scale",
)
GGUF = _GGUF._replace(
    top={**_GGUF.top, **GGUF_PER_LAYER_TOP, "altup_proj": "stream_in", "altup_unembd_proj": "stream_out"}
)
SHARED, WIDTH = "attention.shared_kv_layers", "embedding_length_per_layer_input"
STREAMS, ACTIVE, CUTOFFS = "altup.num_inputs", "altup.active_idx", "activation_sparsity_scale"
KEYS = (
    *(gguf_config.WINDOW, gguf_config.PATTERN, "rope.freq_base_swa", gemma2.LOGITS),
    *(SHARED, WIDTH, STREAMS, ACTIVE, CUTOFFS),
)


# ---- model ----


@dataclass(frozen=True, slots=True)
class StreamRouter:
    """Computes AltUp's router from one stream."""

    norm: Norm  # its gain includes the division by the width
    router: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        normed, _ = self.norm(ops, x)
        return ops.soft_cap(ops.linear(normed, self.router), 1.0)  # tanh, which is a soft cap of 1


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Computes a gated MLP. A finite cutoff keeps only the highest values of its gate."""

    act: str
    cutoff: float
    up: Weight
    down: Weight

    def __call__(self, ops: Ops[V], x: V) -> V:
        h = ops.linear(x, self.up)
        cut = ops.act_and_mul(h, self.act) if self.cutoff == -inf else ops.sparse_act_and_mul(h, self.act, self.cutoff)
        return ops.linear(cut, self.down)


@dataclass(frozen=True, slots=True)
class StreamLayer:
    """Predicts all streams, computes the active one, and corrects all by its change."""

    spec: ModelSpec
    router: StreamRouter
    predict: Weight
    correct: Weight
    scale: Weight
    attn_norm: Norm
    attention: Attention
    after_attn_norm: Norm
    laurel: tuple[Weight, Weight]
    laurel_norm: Norm
    mlp_norm: Norm  # applied to a sum of two parts, before its division by the root of 2
    mlp: SparseMlp
    after_mlp_norm: Norm
    per_layer: PerLayerGate

    def __call__(self, ops: Ops[V], streams: V, inputs: V) -> V:
        """Maps the streams [T, n * dim] and the inputs of all layers to streams."""
        predicted = ops.mix_streams(streams, self._coefficients(ops, self._active(ops, streams), self.predict))
        computed = self._compute(ops, self._active(ops, predicted))
        coefficients = self._coefficients(ops, computed, self.correct)
        assert self.spec.altup
        corrected = ops.correct_streams(predicted, computed, coefficients, self.spec.altup.active)
        added = self.per_layer(ops, self._active(ops, corrected, self.scale), inputs)
        return ops.add_to_streams(corrected, added)

    def _compute(self, ops: Ops[V], x: V) -> V:
        """Computes attention, Laurel and MLP: [T, dim] -> [T, dim]."""
        normed, _ = self.attn_norm(ops, x)
        attended, _ = self.after_attn_norm(ops, self.attention(ops, normed))
        into, out = self.laurel
        low_rank, _ = self.laurel_norm(ops, ops.linear(ops.linear(normed, into), out))
        h, total = self.mlp_norm(ops, ops.add(attended, x), ops.add(low_rank, normed))
        y, _ = self.after_mlp_norm(ops, self.mlp(ops, h))
        return ops.add(ops.scale(total, 0.5**0.5), y)

    def _active(self, ops: Ops[V], streams: V, gain: Weight | None = None) -> V:
        assert self.spec.altup
        return ops.take_columns(streams, self.spec.altup.active * self.spec.dim, self.spec.dim, gain)

    def _coefficients(self, ops: Ops[V], x: V, weight: Weight) -> V:
        return ops.linear(self.router(ops, x), weight, precision="float32")


@dataclass(frozen=True, slots=True)
class StreamDecoder:
    """Computes logits with layers over several residual streams."""

    ends: Ends
    inputs: PerLayerInputs
    into: Weight  # projects the first stream to all others
    out: tuple[Weight, ...]
    layers: tuple[StreamLayer, ...]

    def forward(self, ops: Ops[V]) -> V:
        x: V = self.ends.enter(ops)
        inputs = self.inputs(ops, x)
        streams = ops.concat(x, ops.match_rms(ops.linear(x, self.into), x))
        for layer in self.layers:
            streams = layer(ops, streams, inputs)
        return self.ends.leave(ops, self._mean(ops, streams), None)

    def _mean(self, ops: Ops[V], streams: V) -> V:
        dim = self.ends.spec.dim
        first = total = ops.take_columns(streams, 0, dim)
        for i, weight in enumerate(self.out, 1):
            one = ops.linear(ops.take_columns(streams, i * dim, dim), weight)
            total = ops.add(ops.match_rms(one, first), total)
        return ops.scale(total, 1 / (1 + len(self.out)))


def build(spec: ModelSpec, pack: Packer) -> StreamDecoder:
    assert spec.altup
    others = range(spec.altup.streams - 1)
    embed = pack.matrix(("embed", spec.vocab), width=spec.dim)
    head = embed if spec.tied else pack.matrix(("head", spec.vocab), width=spec.dim)
    return StreamDecoder(
        ends=Ends(spec, embed, None, decoder.rms_norm(spec, pack, "norm"), head),
        inputs=per_layer.build_inputs(spec, pack),
        into=pack.matrix(*((f"stream_in.{i}", spec.dim) for i in others), width=spec.dim),
        out=tuple(pack.matrix((f"stream_out.{i}", spec.dim), width=spec.dim) for i in others),
        layers=tuple(build_layer(spec, pack, layer) for layer in range(spec.layers)),
    )


def build_layer(spec: ModelSpec, pack: Packer, layer: int) -> StreamLayer:
    assert spec.altup
    altup, name = spec.altup, f"layers.{layer}"
    count, rank, hidden = altup.streams, altup.laurel_rank, spec.mlp_hidden(layer)

    def norm(part: str) -> Norm:
        return decoder.rms_norm(spec, pack, f"{name}.{part}")

    return StreamLayer(
        spec=spec,
        router=build_router(spec, pack, name),
        predict=pack.matrix((f"{name}.stream_predict", count * count), width=count),
        correct=pack.matrix((f"{name}.stream_correct", count), width=count),
        scale=pack.vector(f"{name}.stream_scale", spec.dim),
        attn_norm=norm("attn_norm"),
        attention=decoder.attention(spec, pack, layer),
        after_attn_norm=norm("after_attn_norm"),
        laurel=(
            pack.matrix((f"{name}.laurel_in", rank), width=spec.dim),
            pack.matrix((f"{name}.laurel_out", spec.dim), width=rank),
        ),
        laurel_norm=norm("laurel_norm"),
        mlp_norm=replace(norm("mlp_norm"), eps=2 * spec.eps),
        mlp=SparseMlp(
            spec.act,
            altup.cutoffs[layer],
            pack.matrix((f"{name}.gate", hidden), (f"{name}.up", hidden), width=spec.dim),
            pack.matrix((f"{name}.down", spec.dim), width=hidden),
        ),
        after_mlp_norm=norm("after_mlp_norm"),
        per_layer=per_layer.build_gate(spec, pack, layer),
    )


def build_router(spec: ModelSpec, pack: Packer, name: str) -> StreamRouter:
    assert spec.altup
    gain = pack.computed(f"{name}.stream_router_norm", spec.dim, lambda values: values / np.float32(spec.dim))
    router = pack.matrix((f"{name}.stream_router", spec.altup.streams), width=spec.dim)
    return StreamRouter(Norm(gain, spec.eps), router)


# ---- configs ----


def read_hf(config: ConfigReader) -> ModelSpec:
    if "text_config" in config:
        config.ignore(*OTHER_TOWERS)
        return config_hf.read_text_part(config, read_text)
    return read_text(config)


OTHER_TOWERS = (  # fields about images and audio
    *("audio_config", "audio_soft_tokens_per_image", "audio_token_id", "boa_token_id", "boi_token_id"),
    *("eoa_token_id", "eoa_token_index", "eoi_token_id", "vision_soft_tokens_per_image"),
)


def read_text(config: ConfigReader) -> ModelSpec:
    both = config_hf.read_two_ropes(config, gemma3.LOCAL_THETA)
    far, near = both or (None, config.number("rope_local_base_freq", gemma3.LOCAL_THETA, least=1.001))
    spec = config_hf.read_decoder(
        config, "gemma3n", tied=True, theta=THETA, act_key="hidden_activation", scaling=far, hidden_key="hidden_size"
    )
    for key in ("head_dim", "num_key_value_heads"):
        config.size(key)  # required: the default differs from other families
    config.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config.ignore("altup_coef_clip", "altup_lr_multiplier")  # training only
    spec = replace(
        with_hidden(gemma2.scaled(spec), sizes_in_each(config, "intermediate_size", spec.layers)),
        logit_cap=number_or_null(config, gemma2.LOGITS, LOGIT_CAP),
        biases=config_hf.read_biases(config),
        per_layer=read_per_layer(config),
        altup=read_altup(config, spec.layers),
    )
    sliding = config_hf.read_sliding(config, all_but_each(PERIOD, spec.layers))
    spec = in_layers(spec, sliding, config.size("sliding_window", 512), near)
    return with_shared_kv(spec, config.count("num_kv_shared_layers", 15))


def read_per_layer(config: ConfigReader) -> PerLayerSpec:
    return PerLayerSpec(
        config.size("hidden_size_per_layer_input", 256), config.size("vocab_size_per_layer_input", 262144)
    )


def read_altup(config: ConfigReader, layers: int) -> AltUpSpec:
    config.require("altup_correct_scale", (True,), True)
    streams = read_streams(config, "altup_num_inputs")
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    sparsity: Sequence[float] = [SPARSITY] * sparse + [0.0] * (layers - sparse)
    if "activation_sparsity_pattern" in config:
        sparsity = config.array("activation_sparsity_pattern", FRACTIONS, layers)
    return AltUpSpec(
        streams=streams,
        active=config.count("altup_active_idx", 0, most=streams - 1),
        laurel_rank=config.size("laurel_rank", 64),
        cutoffs=tuple(NormalDist().inv_cdf(one) if one else -inf for one in sparsity),
    )


def read_streams(config: ConfigReader, key: str) -> int:
    streams = config.size(key, 4)
    if not 2 <= streams <= MAX_STREAMS:
        raise config.unsupported(key, streams, (f"2 to {MAX_STREAMS}",))
    return streams


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    spec = gguf_config.read_decoder(
        config, tensors, "gemma3n", interleaved=False, keys=KEYS, hidden_key="embedding_length"
    )
    streams = read_streams(config, STREAMS)
    sparse = [NormalDist().inv_cdf(SPARSITY)] * min(SPARSE_LAYERS, spec.layers)
    cutoffs: Sequence[float] = [*sparse, *[-inf] * (spec.layers - len(sparse))]
    if CUTOFFS in config:
        cutoffs = config.array(CUTOFFS, CUTOFF_ITEMS, spec.layers)
    spec = replace(
        with_hidden(gemma2.scaled(spec), sizes_in_each(config, "feed_forward_length", spec.layers)),
        logit_cap=number_or_null(config, gemma2.LOGITS, LOGIT_CAP),
        per_layer=PerLayerSpec(config.size(WIDTH), rows_of(tensors, "per_layer_token_embd")),
        altup=AltUpSpec(
            streams=streams,
            active=config.count(ACTIVE, 0, most=streams - 1),
            laurel_rank=rows_of(tensors, "blk.0.laurel_l"),
            cutoffs=tuple(cutoffs),
        ),
    )
    base = config.number("rope.freq_base_swa", gemma3.LOCAL_THETA, least=1.001)
    sliding = gguf_config.read_sliding(config, spec.layers, PERIOD)
    spec = in_layers(spec, sliding, config.size(gguf_config.WINDOW), base)
    return with_shared_kv(spec, config.count(SHARED, 0))


def rows_of(tensors: Mapping[str, Tensor], name: str) -> int:
    found = tensors.get(f"{name}.weight")
    if found is None:
        ours = names.identify(f"{name}.weight", GGUF).name
        raise MalformedFile(f"the checkpoint has no tensor for {ours!r}; it may be truncated or of another kind")
    return found.shape[0]


def in_layers(spec: ModelSpec, sliding: Sequence[bool], window: int, base: float) -> ModelSpec:
    attn = replace(spec.attn, multiplier=1.0, v_norm=True)
    return gemma3.in_layers(replace(spec, attn=attn), sliding, window, base)


def with_hidden(spec: ModelSpec, sizes: Sequence[int]) -> ModelSpec:
    return replace(spec, hidden=max(sizes), layer_hidden=tuple(sizes) if len(set(sizes)) > 1 else ())


def with_shared_kv(spec: ModelSpec, count: int) -> ModelSpec:
    """Returns the spec whose last `count` layers reuse the keys and values of earlier ones."""
    first = spec.layers - count
    attention = [spec.attention(layer) for layer in range(spec.layers)]
    writing, reading = ({attn.window for attn in some} for some in (attention[:first], attention[first:]))
    if count and (first < 1 or not reading <= writing):
        raise MalformedFile(
            f"the last {count} of {spec.layers} layers share the keys and values of earlier ones; a layer of each kind "
            f"must come before them"
        )
    return spec.with_attention([replace(attn, shares_kv=i >= first) for i, attn in enumerate(attention)])
