"""Dense families with norms, windows or layers of their own: what their published configs say, and what is refused."""

from __future__ import annotations

import pytest

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import open_checkpoint, read_fields
from penstock.model.spec import ModelSpec
from tests.models.config_json import read_config

ALL = {
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
    "vocab_size": 256000,
}
SEED_OSS = ALL | {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
}
GEMMA = ALL | {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "model_type": "gemma",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
}
COMMAND_R = ALL | {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "model_max_length": 131072,
    "model_type": "cohere",
    "pretraining_tp": 1,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
}
COMMAND_R7B = ALL | {
    "_attn_implementation_autoset": True,
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "model_type": "cohere2",
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
}
STABLELM_2 = ALL | {
    "architectures": ["StableLmForCausalLM"],
    "hidden_dropout": 0.0,
    "layer_norm_eps": 1e-05,
    "model_type": "stablelm",
    "partial_rotary_factor": 0.25,
    "qk_layernorm": False,
    "rope_scaling": None,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_parallel_residual": False,
    "use_qkv_bias": True,
}
LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SLIDING = [*["sliding_attention"] * 3, "full_attention"] * 2
EXAONE_4 = ALL | {
    "architectures": ["Exaone4ForCausalLM"],
    "head_dim": 128,
    "layer_types": SLIDING,
    "model_type": "exaone4",
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
}
OLMO_3 = ALL | {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "layer_types": SLIDING,
    "model_type": "olmo3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
HUNYUAN = ALL | {
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "eod_token_id": 127967,
    "head_dim": 128,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
}
CWM = ALL | {
    "architectures": ["CwmForCausalLM"],
    "head_dim": 128,
    "layer_types": SLIDING[3:] + SLIDING[:3],
    "mlp_bias": False,
    "model_type": "cwm",
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 1000000.0,
    "sliding_window": 8192,
    "tie_word_embeddings": False,
}


def known(config) -> ModelSpec:
    reader = ConfigReader(config, "config.json")
    spec = read_fields(reader)
    assert reader.unknown == []
    return spec


def windows(spec: ModelSpec) -> list[int]:
    return [spec.attention(layer).window for layer in range(spec.layers)]


def rotated(spec: ModelSpec) -> list[bool]:
    return [bool(spec.attention(layer).rope.inv_freq) for layer in range(spec.layers)]


def test_seed_oss_says_which_biases_it_has():
    spec = known(SEED_OSS)
    assert (spec.attn.q_width, spec.biases) == (10240, {"q", "k", "v"})
    everything = SEED_OSS | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
    assert known(everything).biases == {"o", "gate", "up", "down"}


def test_gemma_means_the_approximation_by_gelu():
    spec = known(GEMMA)
    assert (spec.act, spec.tied, spec.gain_offset, spec.embed_scale, spec.logit_cap) == ("gelu_tanh", True, 1, 64, 0)
    assert known(GEMMA | {"hidden_activation": "gelu_pytorch_tanh"}) == spec


def test_command_r_has_a_longer_context_than_it_says_first():
    spec = known(COMMAND_R)
    assert (spec.parallel, spec.logit_scale, spec.tied, spec.max_len) == (True, 0.0625, True, 131072)
    assert spec.attn.rope.interleaved


def test_command_r7b_has_rope_where_it_has_windows():
    spec = known(COMMAND_R7B)
    assert windows(spec) == [4096, 4096, 4096, 0] * 2
    assert rotated(spec) == [True, True, True, False] * 2


def test_stablelm_rotates_a_quarter():
    spec = known(STABLELM_2)
    assert (len(spec.attn.rope.inv_freq), spec.parallel) == (16, False)
    assert spec.biases == {"q", "k", "v", "attn_norm", "mlp_norm", "norm"}
    with pytest.raises(MalformedFile, match="no partial_rotary_factor"):
        read_config({key: value for key, value in STABLELM_2.items() if key != "partial_rotary_factor"})


def test_exaone_4_has_rope_everywhere_if_it_has_no_windows():
    spec = known(EXAONE_4)
    assert (windows(spec), rotated(spec)) == ([4096, 4096, 4096, 0] * 2, [True, True, True, False] * 2)
    plain = {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 8}
    spec = known(EXAONE_4 | plain)
    assert (windows(spec), rotated(spec)) == ([0] * 8, [True] * 8)
    assert windows(known(EXAONE_4 | {"layer_types": None, "sliding_window_pattern": 2})) == [4096, 0] * 4


def test_olmo_3_scales_the_rope_of_layers_that_see_everything():
    spec = known(OLMO_3)
    assert windows(spec) == [4096, 4096, 4096, 0] * 2
    near, far = spec.attention(0).rope, spec.attention(3).rope
    assert (near.scale, far.scale) == (1, pytest.approx(1.2079441541679836))
    assert near.inv_freq[-1] == pytest.approx(8 * far.inv_freq[-1])


def test_cwm_has_windows_in_all_layers_but_the_first_and_every_fourth_after_it():
    spec = known(CWM)
    assert windows(spec) == [0, 8192, 8192, 8192] * 2
    assert windows(known(CWM | {"layer_types": None})) == windows(spec)
    with pytest.raises(MalformedFile, match="no rope_type"):
        read_config({key: value for key, value in CWM.items() if key != "rope_scaling"})


def test_hunyuan_stretches_the_base_of_its_rope():
    spec = known(HUNYUAN)
    assert spec.attn.rope.inv_freq[1] == pytest.approx((10000 * 1000 ** (128 / 126)) ** (-2 / 128))
    assert (spec.attn.qk_norm, spec.attn.q_gain, spec.attn.rope.scale) == ("head", True, 1)
    with pytest.raises(MalformedFile, match="no alpha"):
        read_config(HUNYUAN | {"rope_scaling": {"type": "dynamic", "factor": 1.0}})
    with pytest.raises(UnsupportedModel, match="factor = 2"):
        read_config(HUNYUAN | {"rope_scaling": HUNYUAN["rope_scaling"] | {"factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (GEMMA, {"hidden_act": "silu"}),
        (COMMAND_R7B, {"use_parallel_block": False}),
        (COMMAND_R7B, {"rotary_pct": 0.5}),
        (CWM, {"attention_bias": True}),
        (HUNYUAN, {"use_qk_norm": False}),
        (HUNYUAN, {"use_cla": True}),
    ],
)
def test_what_is_refused(config, change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(config | change)


def test_command_r_plus_and_stablelm_2_12b_norm_each_head(goldens):
    assert read_config(COMMAND_R | {"use_qk_norm": True}).attn.qk_norm == "layer"
    assert read_config(STABLELM_2 | {"qk_layernorm": True}).attn.qk_norm == "layer"
    for name in ("cohere_plus", "stablelm_12b"):
        assert open_checkpoint(goldens / name / "model.gguf").spec.attn.qk_norm == "layer"


def test_a_file_may_call_stablelm_parallel_that_is_not(gguf_with, goldens):
    key = "stablelm.use_parallel_residual"
    said = open_checkpoint(gguf_with("stablelm", metadata=lambda metadata: metadata.update({key: True})))
    assert said.spec == open_checkpoint(goldens / "stablelm" / "model.gguf").spec
    assert open_checkpoint(goldens / "stablelm_parallel" / "model.gguf").spec.parallel
