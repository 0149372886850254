"""Translates a Hugging Face config into GGUF metadata: the inverse of each family's `read_gguf`.

The result is read back and compared with the original spec. A model that GGUF metadata cannot describe is refused, and
the error names the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from math import isclose
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.model import config_hf, registry
from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.families import deepseek2, deepseek32, gemma2, glmdsa, llama4
from penstock.model.gguf import config as gguf_config
from penstock.model.gguf.read_alike import check_read_alike
from penstock.model.gguf.rope_keys import (
    Keys,
    Tensors,
    global_attention,
    local_attention,
    plain_base,
    rope_keys,
    rope_table,
)
from penstock.model.recurrence import ConvSpec, DeltaSpec, MambaSpec
from penstock.model.spec import ModelSpec, all_but_each
from penstock.model.tensor import Tensor

Own = Callable[[ConfigReader, ModelSpec], Keys]

NOT_IN_METADATA = (  # spec fields about the file, or visible in its tensors
    *("arch", "biases", "gain_offset", "interleaved", "unused_layers"),
    *("first_position", "tiled", "generates", "stores_hidden"),
)
ARCHITECTURES = {family: name for name, family in reversed(registry.GGUF.items())} | {
    "bamba": "granitehybrid",
    "distilbert": "bert",
    "mixtral": "llama",
    "qwen3vlmoe": "qwen3moe",
}


def config_keys(
    config: ConfigReader, spec: ModelSpec, weights: Mapping[str, Tensor]
) -> tuple[Keys, Tensors, ModelSpec]:
    """Returns the metadata, the tensors derived from the config, and the spec that a reader of the file will get.
    `weights` are the file's other tensors, by file name.
    """
    check_family(spec)
    check_read_alike(spec)
    arch = architecture(spec)
    if "text_config" in config:
        config = config.table("text_config")
    rope_values, extra = rope_keys(config, spec)
    keys = decoder_keys(spec) | rope_values | expert_keys(spec) | OWN[spec.arch](config, spec)
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    reader = ConfigReader(metadata, "the GGUF metadata to be written", prefix=f"{arch}.")
    found = registry.family(registry.GGUF[arch]).read_gguf(reader, {**weights, **extra})
    if odd := difference(spec, found):
        raise UnsupportedModel(f"a GGUF file of {spec.arch} cannot express what config.json says: {odd}")
    return {"general.architecture": arch, **metadata}, extra, found


def check_family(spec: ModelSpec) -> None:
    """Raises if GGUF export does not support the family."""
    if spec.arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"llama.cpp has no architecture for {spec.arch}, so there are no GGUF files of it: use the folder"
        )
    if spec.arch not in OWN:
        raise UnsupportedModel(f"the family {spec.arch} cannot be written as GGUF yet; supported: {', '.join(OWN)}")


def architecture(spec: ModelSpec) -> str:
    name = ARCHITECTURES[spec.arch]
    routed = (f"{name}{moe}" for moe in ("moe", "-moe") if spec.experts)
    return next((one for one in routed if registry.GGUF.get(one) == spec.arch), name)


def decoder_keys(spec: ModelSpec) -> Keys:
    attn = global_attention(spec)
    embeds = not spec.generates or spec.pooling != "mean"
    pooling = {"pooling_type": gguf_config.POOLINGS.index(spec.pooling, 1)} if embeds else {}
    return pooling | {
        "block_count": spec.layers,
        "context_length": spec.max_len,
        "embedding_length": spec.dim,
        "feed_forward_length": spec.hidden,
        "vocab_size": spec.vocab,
        "attention.head_count": attn.heads,
        gguf_config.KV_HEADS: attn.kv_heads,
        "attention.key_length": attn.head_dim,
        "attention.value_length": attn.head_dim,
        gguf_config.RMS_EPS: spec.eps,
    }


def expert_keys(spec: ModelSpec) -> Keys:
    if spec.experts is None:
        return {}
    experts = spec.experts
    keys = {
        "expert_count": experts.count,
        "expert_used_count": experts.top_k,
        "expert_feed_forward_length": experts.hidden,
        "expert_gating_func": next(number for number, way in gguf_config.SCORINGS.items() if way == experts.scoring),
        "expert_weights_norm": experts.renormalize,
        "expert_weights_scale": experts.scale,
    }
    groups = {"expert_group_count": experts.groups, "expert_group_used_count": experts.top_k_groups}
    return keys | (groups if experts.groups > 1 else {})


# ---- keys of single families ----


def nothing(_: ConfigReader, spec: ModelSpec) -> Keys:
    return {}


def window(_: ConfigReader, spec: ModelSpec) -> Keys:
    return {gguf_config.WINDOW: local_attention(spec).window} if local_attention(spec).window else {}


def granite(config: ConfigReader, spec: ModelSpec) -> Keys:
    return {
        gguf_config.RMS_EPS: config.number("rms_norm_eps", 1e-6),
        "attention.scale": config.number("attention_multiplier", 1.0),
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_scale": config.number("logits_scaling", 1.0),
    }


def phi_3(config: ConfigReader, spec: ModelSpec) -> Keys:
    return window(config, spec) | {"context_length": config.size("max_position_embeddings")}


def layer_normed(config: ConfigReader, spec: ModelSpec) -> Keys:
    return window(config, spec) | {gguf_config.RMS_EPS: None, gguf_config.LAYER_EPS: spec.eps}


def glm_4_moe(config: ConfigReader, spec: ModelSpec) -> Keys:
    return {
        "leading_dense_block_count": len(spec.dense),
        "expert_shared_count": config.size("n_shared_experts", 1),
    }


def gemma_2(config: ConfigReader, spec: ModelSpec) -> Keys:
    return window(config, spec) | {gemma2.SCORES: spec.attn.soft_cap, gemma2.LOGITS: spec.logit_cap}


def gemma_3(config: ConfigReader, spec: ModelSpec) -> Keys:
    cap = {gemma2.LOGITS: spec.logit_cap} if spec.logit_cap else {}
    return window(config, spec) | cap | {"rope.freq_base_swa": plain_base(local_attention(spec).rope.inv_freq)}


def windowed(_: ConfigReader, spec: ModelSpec) -> Keys:
    window = local_attention(spec).window
    flags = [spec.attention(layer).window > 0 for layer in range(spec.layers)]
    return {gguf_config.WINDOW: window, gguf_config.PATTERN: flags} if window else {}


def olmo(config: ConfigReader, spec: ModelSpec) -> Keys:
    near = local_attention(spec)
    base = {"rope.freq_base_swa": plain_base(near.rope.inv_freq)} if near.window else {}
    return windowed(config, spec) | base


def hunyuan(_: ConfigReader, spec: ModelSpec) -> Keys:
    return {"rope.freq_base": plain_base(spec.attn.rope.inv_freq)}


def cohere(_: ConfigReader, spec: ModelSpec) -> Keys:
    norms = {gguf_config.RMS_EPS: None, gguf_config.LAYER_EPS: spec.eps}
    return norms | {"logit_scale": spec.logit_scale, "rope.scaling.type": "none"}


def cohere_2(config: ConfigReader, spec: ModelSpec) -> Keys:
    return cohere(config, spec) | windowed(config, spec)


def stablelm(config: ConfigReader, spec: ModelSpec) -> Keys:
    return layer_normed(config, spec) | {"use_parallel_residual": spec.parallel}


def shared_size(spec: ModelSpec) -> Keys:
    return {"expert_shared_feed_forward_length": spec.shared_hidden} if spec.shared_hidden else {}


def qwen_2_moe(_: ConfigReader, spec: ModelSpec) -> Keys:
    return shared_size(spec)


def granite_moe(config: ConfigReader, spec: ModelSpec) -> Keys:
    return granite(config, spec) | shared_size(spec)


def ernie(config: ConfigReader, spec: ModelSpec) -> Keys:
    if spec.experts is None:
        return {}
    return shared_size(spec) | {
        "expert_shared_count": spec.shared_hidden // spec.experts.hidden,
        "interleave_moe_layer_step": config.size("moe_layer_interval", 1),
        "leading_dense_block_count": config.count("moe_layer_start_index", 1),
    }


def hunyuan_moe(config: ConfigReader, spec: ModelSpec) -> Keys:
    assert spec.experts is not None
    unscaled = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
    return hunyuan(config, spec) | shared_size(spec) | unscaled | {"expert_shared_count": 1}


def minicpm(config: ConfigReader, spec: ModelSpec) -> Keys:
    return {
        gguf_config.RMS_EPS: config.number("rms_norm_eps", 1e-6),
        "embedding_scale": config.number("scale_emb", 1.0),
        "residual_scale": config.number("scale_depth", 1.0) / spec.layers**0.5,
        "logit_scale": spec.dim / config.number("dim_model_base", 1.0),
    }


def falcon(config: ConfigReader, spec: ModelSpec) -> Keys:
    norms = config.size("num_ln_in_parallel_attn", 2 if config.flag("new_decoder_architecture", False) else 1)
    if norms > 1:
        raise UnsupportedModel("a Falcon with two norms in each layer cannot be written as GGUF yet: use its folder")
    return layer_normed(config, spec) | {"tensor_data_layout": "jploski"}


def qwen_3_next(_: ConfigReader, spec: ModelSpec) -> Keys:
    d = spec.recurrence
    assert isinstance(d, DeltaSpec)
    shared = {"expert_shared_feed_forward_length": spec.shared_hidden} if spec.experts else {}
    return shared | {
        "full_attention_interval": min(set(range(spec.layers)) - spec.recurrent, default=spec.layers) + 1,
        "ssm.conv_kernel": d.conv_width,
        "ssm.state_size": d.k_dim,
        "ssm.group_count": d.k_heads,
        "ssm.time_step_rank": d.v_heads,
        "ssm.inner_size": d.v_width,
    }


def qwen_3_5(config: ConfigReader, spec: ModelSpec) -> Keys:
    """Adds the keys of Qwen 3.5. By default, time, height and width rotate a third of the pairs each."""
    pairs = len(spec.attn.rope.inv_freq)
    stated = rope_table(config).array("mrope_section", COUNTS) or tuple((pairs + 2 - i) // 3 for i in range(3))
    sections = {"rope.dimension_sections": [*stated, *[0] * (4 - len(stated))]}
    return qwen_3_next(config, spec) | sections | ({"feed_forward_length": None} if spec.experts else {})


def encoder(config: ConfigReader, spec: ModelSpec) -> Keys:
    absent = (gguf_config.RMS_EPS, "rope.dimension_count")
    sizes = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    return dict.fromkeys((*absent, *sizes)) | {
        gguf_config.LAYER_EPS: spec.eps,
        "attention.causal": False,
        "pooling_type": gguf_config.POOLINGS.index(spec.pooling, 1),
    }


def modern_bert(config: ConfigReader, spec: ModelSpec) -> Keys:
    near, far = local_attention(spec), global_attention(spec)
    sliding = [spec.attention(layer).window > 0 for layer in range(spec.layers)]
    return encoder(config, spec) | {
        gguf_config.WINDOW: 2 * (near.window - 1) or None,
        gguf_config.PATTERN: next((at for at, one in enumerate(sliding) if at and not one), 3),
        "rope.freq_base": plain_base(far.rope.inv_freq),
        "rope.freq_base_swa": plain_base(near.rope.inv_freq),
    }


def deepseek_2(config: ConfigReader, spec: ModelSpec) -> Keys:
    """Adds the keys of DeepSeek as newer converters write them: the plain head sizes describe latents, and keys and
    values have keys of their own.
    """
    config.require("rope_interleave", (True,), True)
    assert spec.mla is not None
    assert spec.experts is not None
    mla, attn = spec.mla, spec.attn
    stretch = rope_table(config).number("mscale_all_dim", 0.0, least=0.0)
    return {
        deepseek2.VALUE: attn.v_dim,
        f"{deepseek2.KEY}_mla": mla.qk_nope_head_dim + attn.head_dim - attn.v_dim,
        f"{deepseek2.VALUE}_mla": mla.v_head_dim,
        "attention.kv_lora_rank": attn.v_dim,
        "attention.q_lora_rank": mla.q_lora_rank or None,
        "leading_dense_block_count": len(spec.dense),
        "expert_shared_count": spec.shared_hidden // spec.experts.hidden,
        "rope.scaling.attn_factor": None,  # readers derive it from the next key
        deepseek2.LOG_MULTIPLIER: 0.1 * stretch or None,
    }


def deepseek_32(config: ConfigReader, spec: ModelSpec) -> Keys:
    index = spec.attn.index
    assert index is not None
    numbers = index.heads, index.head_dim, index.top_k
    return deepseek_2(config, spec) | dict(zip(deepseek32.KEYS, numbers, strict=True))


def glm_dsa(config: ConfigReader, spec: ModelSpec) -> Keys:
    full = [int(attn.index_dim > 0) for attn in spec.cached_attention]
    return deepseek_32(config, spec) | {glmdsa.TYPES: full}


def gpt_oss(config: ConfigReader, spec: ModelSpec) -> Keys:
    usual = all_but_each(2, spec.layers)
    if list(config_hf.read_sliding(config, usual)) != usual:
        raise config.unsupported("layer_types", config.strings("layer_types"), ("a window in every other layer",))
    return window(config, spec)


def llama_4(_: ConfigReader, spec: ModelSpec) -> Keys:
    return {llama4.STEP: 1 + min(set(range(spec.layers)) - spec.dense, default=0)}


def layer_kv_heads(spec: ModelSpec) -> Keys:
    """Returns the number of KV heads per layer; 0 without attention."""
    attentive = spec.attention_layers
    return {gguf_config.KV_HEADS: [spec.attn.kv_heads if i in attentive else 0 for i in range(spec.layers)]}


def check_biases(spec: ModelSpec, readable: Collection[str], said: str) -> None:
    """Raises if layers have biases that llama.cpp does not read; `said` names the config field."""
    if odd := sorted((spec.biases or frozenset()) ^ frozenset(readable)):
        raise UnsupportedModel(
            f"a GGUF file of {spec.arch} cannot express {said}: llama.cpp reads other biases of {', '.join(odd)}"
        )


def lfm_2(config: ConfigReader, spec: ModelSpec) -> Keys:
    assert isinstance(spec.recurrence, ConvSpec)
    check_biases(spec, (), "conv_bias = true")
    if spec.experts is None:
        return layer_kv_heads(spec) | {"shortconv.l_cache": spec.recurrence.conv_width}
    if spec.experts.scale != 1:
        raise config.unsupported("routed_scaling_factor", spec.experts.scale, ("1 in a GGUF file of lfm2",))
    dense = {"leading_dense_block_count": len(spec.dense)}
    return layer_kv_heads(spec) | {"shortconv.l_cache": spec.recurrence.conv_width} | dense


def jamba(_: ConfigReader, spec: ModelSpec) -> Keys:
    assert isinstance(spec.recurrence, MambaSpec)
    check_biases(spec, ("conv", "ssm_dt"), "mamba_conv_bias = false or mamba_proj_bias = true")
    conv, scan = spec.recurrence.conv, spec.recurrence.scan
    return layer_kv_heads(spec) | {
        "expert_feed_forward_length": None,
        "ssm.conv_kernel": conv.conv_width,
        "ssm.inner_size": conv.width,
        "ssm.state_size": scan.state_size,
        "ssm.time_step_rank": spec.recurrence.dt_rank,
    }


OWN: dict[str, Own] = {
    "llama": window,
    "qwen2": nothing,
    "qwen3": nothing,
    "granite": granite,
    "smollm3": nothing,
    "phi3": phi_3,
    "olmo2": olmo,
    "seedoss": nothing,
    "gemma": nothing,
    "cohere": cohere,
    "cohere2": cohere_2,
    "stablelm": stablelm,
    "gptneox": stablelm,
    "phi2": layer_normed,
    "falcon": falcon,
    "minicpm": minicpm,
    "exaone4": windowed,
    "hunyuan": hunyuan,
    "gemma2": gemma_2,
    "gemma3": gemma_3,
    "gpt2": layer_normed,
    "starcoder2": layer_normed,
    "glm": nothing,
    "glm4": nothing,
    "mixtral": window,
    "qwen3moe": nothing,
    "glm4moe": glm_4_moe,
    "minimaxm2": nothing,
    "qwen2moe": qwen_2_moe,
    "qwen3vlmoe": nothing,
    "olmoe": nothing,
    "granitemoe": granite_moe,
    "ernie45": ernie,
    "dots1": glm_4_moe,
    "hunyuanmoe": hunyuan_moe,
    "jamba": jamba,
    "lfm2": lfm_2,
    "qwen3next": qwen_3_next,
    "qwen35": qwen_3_5,
    "bert": encoder,
    "distilbert": encoder,
    "nomic_bert": encoder,
    "modernbert": modern_bert,
    "deepseek2": deepseek_2,
    "deepseek32": deepseek_32,
    "glmdsa": glm_dsa,
    "gptoss": gpt_oss,
    "llama4": llama_4,
}


# ---- comparison ----


def difference(wanted: Any, found: Any, name: str = "spec") -> str:
    """Describes the first difference; "" if the specs agree within float32 precision."""
    if is_dataclass(wanted):
        parts = [field.name for field in fields(wanted) if field.name not in NOT_IN_METADATA]
        differences = (difference(getattr(wanted, part), getattr(found, part), part) for part in parts)
        return next((one for one in differences if one), "")
    if isinstance(wanted, tuple) and len(wanted) == len(found):
        differences = (difference(one, other, name) for one, other in zip(wanted, found, strict=True))
        return next((one for one in differences if one), "")
    if isinstance(wanted, float) and isclose(wanted, found, rel_tol=1e-5):
        return ""
    return "" if wanted == found else f"{name} is {wanted!r} in the folder, and would be {found!r} in the file"
