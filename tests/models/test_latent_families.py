"""DeepSeek and gpt-oss: what their published configs say, what is refused, and what a token takes in the cache."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import ConfigError, MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.gguf.metadata import config_keys, difference
from penstock.model.load import load_model, open_checkpoint
from penstock.model.spec import MlaSpec
from penstock.model.split_heads import split_heads, split_heads_when_read
from penstock.model.tensor import FORMATS, Scales, Tensor, some_rows
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V2 = V2_LITE | {
    "n_group": 8,
    "n_routed_experts": 160,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_deepseek_v3() -> None:
    spec = read_config(V3)
    assert (spec.attn.kv_heads, spec.attn.head_dim, spec.attn.v_dim, spec.attn.kv_values) == (1, 576, 512, 576)
    assert spec.mla == MlaSpec(qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536)
    assert spec.attn.scale == pytest.approx((1 + 0.1 * log(40)) ** 2 / 192**0.5)
    assert (len(spec.attn.rope.inv_freq), spec.attn.rope.interleaved, spec.attn.rope.scale) == (32, True, 1)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.groups, experts.top_k_groups, experts.group_score) == (256, 8, 4, "top2")
    assert (experts.scoring, experts.scale, experts.renormalize, experts.choice_bias) == ("sigmoid", 2.5, True, True)
    assert (sorted(spec.dense), spec.shared_hidden, spec.unused_layers) == ([0, 1, 2], 2048, 1)


def test_deepseek_v2() -> None:
    lite, large = read_config(V2_LITE), read_config(V2)
    assert lite.mla == MlaSpec(qk_nope_head_dim=128, v_head_dim=128)
    assert (lite.shared_hidden, lite.attn.scale) == (2816, pytest.approx((1 + 0.0707 * log(40)) ** 2 / 192**0.5))
    assert lite.experts is not None
    assert large.experts is not None
    assert (lite.experts.scoring, lite.experts.groups, lite.experts.scale) == ("softmax", 1, 1)
    assert (large.experts.groups, large.experts.top_k_groups, large.experts.group_score) == (8, 3, "max")
    assert not large.experts.choice_bias


@pytest.mark.parametrize("config", [V3, V2 | {"topk_method": "greedy"}, V2_LITE, GPT_OSS])
def test_published_configs_can_be_written(config: dict[str, Any]) -> None:
    spec = read_config(config)
    empty = np.zeros(0, np.uint8)
    names = ["token_embd.weight", "output.weight"]
    names += ["blk.3.exp_probs_b.bias"] if spec.experts and spec.experts.choice_bias else []
    weights = {name: Tensor(name, FORMATS["F32"], (spec.vocab, spec.dim), empty) for name in names}
    keys, extra, found = config_keys(ConfigReader(config, "config.json"), spec, weights)
    assert not extra
    assert not difference(spec, found)
    if config is V3:
        assert keys["deepseek2.attention.key_length_mla"] == 192
        assert keys["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
        assert "deepseek2.rope.scaling.attn_factor" not in keys


def test_gpt_oss() -> None:
    spec = read_config(GPT_OSS)
    assert [spec.attention(layer).window for layer in range(4)] == [128, 0, 128, 0]
    assert spec.attn.sinks
    assert spec.attn.rope.scale == pytest.approx(1 + 0.1 * log(32))
    assert spec.experts is not None
    assert (spec.experts.act, spec.experts.scoring, spec.experts.top_k) == ("clamped", "softmax_top_k", 4)


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"attention_bias": True}, "attention_bias"),
        (V3, {"index_topk": 2048}, "index_topk"),  # V3.2: another attention
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (GPT_OSS, {"swiglu_limit": 5.0}, "swiglu_limit"),
        (GPT_OSS, {"attention_bias": False}, "attention_bias"),
    ],
)
def test_what_is_computed_otherwise_is_refused(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(config | changes)


@pytest.mark.parametrize(("kv", "per_layer"), [("f16", 96), ("f32", 192), ("int8", 56)])
def test_a_token_leaves_its_latents_alone(kv: str, per_layer: int) -> None:
    checkpoint = open_checkpoint(GOLDENS / "deepseek_v3")
    backend = CpuBackend(1, kv=kv)
    backend.load(load_model(checkpoint, backend))
    assert backend.memory_needs().kv_bytes_per_token == 2 * per_layer
    assert backend.footprint(checkpoint.spec, checkpoint.tensors.values()).kv_token == 2 * per_layer


@pytest.mark.parametrize("kv", ["int4", "int8:int4", "f16:int8"])
def test_latents_have_one_format_and_not_4_bits(kv: str) -> None:
    checkpoint = open_checkpoint(GOLDENS / "deepseek_v3")
    backend = CpuBackend(1, kv=kv)
    with pytest.raises(ConfigError, match=rf"in {kv} is not possible for this model: its attention \(MLA\)"):
        backend.load(load_model(checkpoint, backend))
    with pytest.raises(ConfigError, match="MLA"):
        backend.footprint(checkpoint.spec, ())


@pytest.mark.parametrize("split", [split_heads, split_heads_when_read])
def test_a_matrix_in_blocks_of_float8_is_split_as_its_values_are(split: Any) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 120, 24 * 16).astype(np.uint8)
    scales = Scales(rng.normal(size=(3, 2)).astype(np.float32), 8, 8)
    whole = Tensor("kv_b", FORMATS["F32"]._replace(name="F8_E4M3", bytes=1), (24, 16), data, scales)
    keys, values = split(whole, heads=2, first=5)
    wanted = dequantize(whole).reshape(2, 12, 16)
    assert np.array_equal(dequantize(keys), wanted[:, :5].swapaxes(1, 2).astype(np.float16))
    flat = replace(values, shape=(14, 16))
    assert np.array_equal(dequantize(flat).reshape(2, 7, 16), wanted[:, 5:])
    assert np.array_equal(dequantize(some_rows(flat, 3, 9)), wanted[:, 5:].reshape(14, 16)[3:9])


def quantized_biases(tensors: dict[str, Tensor]) -> None:
    bias = tensors["blk.0.ffn_down_exps.bias"]
    tensors["blk.0.ffn_down_exps.bias"] = Tensor(bias.name, FORMATS["Q8_0"], bias.shape, np.zeros(4 * 34, np.uint8))


def test_odd_tensors_are_named(gguf_with: Any) -> None:
    with pytest.raises(UnsupportedModel, match="biases in Q8_0"):
        open_checkpoint(gguf_with("gpt_oss", tensors=quantized_biases))
    path = gguf_with("deepseek_v3", tensors=lambda tensors: tensors.pop("blk.1.attn_v_b.weight"))
    with pytest.raises(MalformedFile, match=r"layers\.1\.v_b"):
        load_model(open_checkpoint(path), RefBackend())
