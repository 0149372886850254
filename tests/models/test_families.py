"""What the configs of published models say, family by family, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from itertools import product
from pathlib import Path

import pytest

from penstock.backend.ref import RefBackend
from penstock.config import configure
from penstock.engine.model_loading import open_configured
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf.reader import read_gguf
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.model.registry import family
from penstock.model.spec import ModelSpec
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
ALL = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 32768,
    "num_attention_heads": 24,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000042,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.1",
    "use_cache": True,
    "vocab_size": 131072,
}


def windows(spec: ModelSpec) -> list[int]:
    return [spec.attention(layer).window for layer in range(spec.layers)]


def test_falcon3_is_llama():
    falcon3 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 256, "mlp_bias": False}
    spec = read_config(ALL | falcon3 | {"num_attention_heads": 12, "attention_bias": False, "pretraining_tp": 1})
    assert (spec.arch, spec.attn.head_dim, spec.attn.q_width, spec.biases) == ("llama", 256, 3072, frozenset())


def test_smollm2_says_that_it_is_llama():
    smollm2 = {"architectures": ["LlamaForCausalLM"], "is_llama_config": True, "rope_interleaved": False}
    assert read_config(ALL | smollm2 | {"transformers.js_config": {"dtype": "q4"}}).arch == "llama"
    with pytest.raises(UnsupportedModel, match="rope_interleaved"):
        read_config(ALL | smollm2 | {"rope_interleaved": True})


def test_ministral_has_windows_where_it_says():
    kinds = ["sliding_attention", "full_attention"] * 4
    config = ALL | {"architectures": ["MinistralForCausalLM"], "sliding_window": 32768, "layer_types": kinds}
    assert windows(read_config(config)) == [32768, 0] * 4
    del config["layer_types"]
    assert windows(read_config(config)) == [32768] * 8
    with pytest.raises(UnsupportedModel, match=r"layer_types .* sliding_attention or full_attention for each layer"):
        read_config(config | {"layer_types": kinds[1:]})


QWEN2 = ALL | {
    "architectures": ["Qwen2ForCausalLM"],
    "max_window_layers": 6,
    "sliding_window": 1024,
    "use_sliding_window": False,
}


def test_qwen2_has_windows_only_if_a_flag_says_so():
    assert windows(read_config(QWEN2)) == [0] * 8
    assert windows(read_config(QWEN2 | {"use_sliding_window": True})) == [0] * 6 + [1024] * 2


def test_a_window_that_nobody_reads(gguf_with):
    path = gguf_with("qwen2", metadata=lambda metadata: metadata.update({"qwen2.attention.sliding_window": 9}))
    with pytest.raises(UnsupportedModel, match=r"qwen2\.attention\.sliding_window = 9"):
        open_checkpoint(path)


def test_qwen2_has_biases(folder_with, gguf_with):
    def drop(name):
        return lambda tensors: tensors.pop(name)

    for path in (
        folder_with("qwen2", tensors=drop("model.layers.1.self_attn.k_proj.bias")),
        gguf_with("qwen2", tensors=drop("blk.1.attn_k.bias")),
    ):
        with pytest.raises(MalformedFile, match=r"'layers\.1\.k\.bias' is missing"):
            open_checkpoint(path)


def test_qwen3_norms_each_head():
    config = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "attention_bias": False}
    spec = read_config(config)
    assert (spec.attn.qk_norm, spec.attn.head_dim, spec.biases) == ("head", 128, frozenset())
    with pytest.raises(MalformedFile, match="no head_dim"):
        read_config({key: value for key, value in config.items() if key != "head_dim"})


def test_granite_is_llama_with_another_epsilon():
    granite = {"architectures": ["GraniteForCausalLM"], "attention_bias": False, "mlp_bias": False}
    spec = read_config(ALL | granite)
    assert (spec.embed_scale, spec.logit_scale, spec.attn.scale, spec.eps) == (1, 1, 1, 1e-6)
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0}
    spec = read_config(ALL | granite | multipliers | {"attention_multiplier": 0.015625})
    assert (spec.embed_scale, spec.logit_scale, spec.attn.scale, spec.eps) == (48, 1 / 8, 1 / 64, 1.6e-5)


SMOLLM3 = ALL | {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0],
    "sliding_window": None,
    "use_sliding_window": False,
}


def test_smollm3_says_which_layers_have_a_rope():
    def turned(values):
        spec = read_config(values)
        return [bool(spec.attention(layer).rope.inv_freq) for layer in range(spec.layers)]

    assert turned(SMOLLM3) == [True, True, True, False] * 2
    assert turned(SMOLLM3 | {"no_rope_layers": None}) == [True, True, True, False] * 2
    assert turned(SMOLLM3 | {"no_rope_layers": [1] * 7 + [0]}) == [True] * 7 + [False]
    for wrong in ([1], [2] * 8, "none"):
        with pytest.raises(MalformedFile, match=r"no_rope_layers in config\.json must be a list of 8 zeros and ones"):
            read_config(SMOLLM3 | {"no_rope_layers": wrong})
    for change in ({"use_sliding_window": True}, {"layer_types": ["sliding_attention"] * 8}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read_config(SMOLLM3 | change)


PHI3 = ALL | {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "original_max_position_embeddings": 4096,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "sliding_window": 2047,
}


PHI4_MINI = PHI3 | {
    "bos_token_id": 199999,
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "interpolate_factor": 1,
    "intermediate_size": 8192,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_phi4_mini():
    spec = read_config(PHI4_MINI)
    assert (len(spec.attn.rope.inv_freq), spec.tied, spec.attn.head_dim) == (48, True, 128)
    for change in ({"full_attn_mod": 2}, {"interpolate_factor": 4}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read_config(PHI4_MINI | change)


def test_phi3_turns_what_it_says():
    spec = read_config(PHI3)
    assert (spec.attn.window, len(spec.attn.rope.inv_freq)) == (2047, 64)
    spec = read_config(PHI3 | {"partial_rotary_factor": 0.75, "sliding_window": None})
    assert (spec.attn.window, len(spec.attn.rope.inv_freq)) == (0, 48)
    assert read_config({key: value for key, value in PHI3.items() if key != "sliding_window"}).attn.window == 0
    for wrong in (1.5, 0.337):
        with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
            read_config(PHI3 | {"partial_rotary_factor": wrong})


def test_longrope_follows_the_length_that_is_asked_for():
    stretched = {"type": "longrope", "long_factor": [9.0] * 64, "short_factor": [2.0] * 64}
    original = read_config(PHI3 | {"rope_scaling": stretched})
    long = original.with_room_for(4097)
    assert original.with_room_for(4096) is original
    assert (original.max_len, long.max_len, long.with_room_for(30000)) == (4096, 32768, long)
    assert (original.attn.rope.inv_freq[0], long.attn.rope.inv_freq[0]) == (1 / 2, 1 / 9)
    scale = (1 + math.log(8) / math.log(4096)) ** 0.5
    assert original.attn.rope.scale == long.attn.rope.scale == pytest.approx(scale)
    assert long.attn.window == original.attn.window == 2047
    same = read_config(PHI3 | {"rope_scaling": stretched, "max_position_embeddings": 4096})
    assert (same.long, same.max_len, same.attn.rope.scale) == (None, 4096, 1.0)
    for key, wrong in product(("short_factor", "long_factor"), ([2.0] * 63, [0.0] * 64, ["2"] * 64, 2.0)):
        with pytest.raises(MalformedFile, match=key):
            read_config(PHI3 | {"rope_scaling": stretched | {key: wrong}})
    for change in ({"rope_scaling": stretched | {"attention_scale": 2.0}}, {"rope_scaling": {"type": "dynamic"}}):
        with pytest.raises(UnsupportedModel, match=r"attention_scale|dynamic"):
            read_config(PHI3 | change)


def test_longrope_is_for_phi3_alone():
    stretched = {"type": "longrope", "long_factor": [9.0] * 64, "short_factor": [2.0] * 64}
    with pytest.raises(UnsupportedModel, match="rope_type = 'longrope'"):
        read_config(QWEN2 | {"rope_scaling": stretched})


def test_fused_tensors_become_views(goldens):
    for path, name in (("phi3", "gate_up_proj"), ("phi3/model.gguf", "ffn_up")):
        tensors = open_checkpoint(goldens / path).tensors
        assert [tensors[f"layers.0.{part}"].shape for part in ("q", "k", "gate")] == [(32, 32), (16, 32), (32, 32)]
        assert name in tensors["layers.0.up"].name
        assert not any(tensor.data.flags.owndata for tensor in tensors.values())


def test_fused_tensors_must_fit(folder_with, floats):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    for shape in ((63, 32), (64,)):
        folder = folder_with("phi3", tensors=lambda tensors, shape=shape: tensors.update({name: floats(*shape)}))
        with pytest.raises(MalformedFile, match="the model's config needs 64 rows"):
            open_checkpoint(folder)
        shutil.rmtree(folder)


def test_olmo2_norms_all_heads_at_once():
    spec = read_config(ALL | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False})
    assert (spec.attn.qk_norm, spec.biases) == ("all", frozenset())


GEMMA2 = {key: value for key, value in ALL.items() if key not in ("tie_word_embeddings", "rope_theta")} | {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
}


def test_gemma2_has_windows_in_every_other_layer():
    spec = read_config(GEMMA2)
    assert windows(spec) == [4096, 0] * 4
    assert (spec.attn.soft_cap, spec.logit_cap, spec.attn.scale) == (50, 30, pytest.approx(1 / 12))
    assert (spec.act, spec.tied, spec.gain_offset, spec.embed_scale) == ("gelu_tanh", True, 1, 3072**0.5)
    spec = read_config(GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (spec.attn.soft_cap, spec.logit_cap) == (0, 0)
    silent = {key: value for key, value in GEMMA2.items() if "softcapping" not in key}
    assert (read_config(silent).attn.soft_cap, read_config(silent).logit_cap) == (50, 30)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"use_bidirectional_attention": True}, UnsupportedModel),
        ({"hidden_activation": "gelu"}, UnsupportedModel),
        ({"hidden_activation": ["gelu"]}, UnsupportedModel),
        ({"hidden_activation": "silu"}, UnsupportedModel),
        ({"head_dim": None}, MalformedFile),
    ],
)
def test_what_gemma_does_not_do(change, error):
    with pytest.raises(error, match=next(iter(change))):
        read_config(GEMMA2 | change)


GEMMA3 = {key: value for key, value in GEMMA2.items() if key not in ("hidden_act", "sliding_window_size")} | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_local_base_freq": 10000,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}


def test_gemma3_has_two_ropes():
    spec = read_config(GEMMA3)
    assert windows(spec) == [512] * 5 + [0] + [512] * 2
    near, far = spec.attention(0).rope, spec.attention(5).rope
    assert (near.inv_freq[1], far.inv_freq[1]) == pytest.approx((10000 ** (-1 / 128), 1000000 ** (-1 / 128) / 8))
    assert (spec.attention(0).qk_norm, spec.attention(5).qk_norm, spec.attn.soft_cap, spec.logit_cap) == (
        "head",
        "head",
        0,
        0,
    )


def test_gemma3_says_the_same_in_newer_words():
    newer = {key: value for key, value in GEMMA3.items() if not key.startswith("rope")}
    ropes = {
        "full_attention": GEMMA3["rope_scaling"] | {"rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert read_config(newer | {"rope_parameters": ropes}) == read_config(GEMMA3)
    for change in ({"chunked_attention": {}}, {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}):
        with pytest.raises(UnsupportedModel):
            read_config(newer | {"rope_parameters": ropes | change})


@pytest.mark.parametrize(("golden", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_by_its_width(gguf_with, golden, layers):
    def multiplier(count):
        path = gguf_with(golden, metadata=lambda metadata: metadata.update({f"{golden}.block_count": count}))
        file = read_gguf(Path(path))
        config = ConfigReader(file.metadata, "the GGUF metadata", prefix=f"{golden}.")
        return family(golden).read_gguf(config, file.tensors).attn.multiplier

    head_dim = open_checkpoint(GOLDENS / golden).spec.attn.head_dim
    assert (multiplier(layers), multiplier(layers - 1)) == (8**-0.5, head_dim**-0.5)


@pytest.mark.parametrize("golden", sorted(folder.name for folder in GOLDENS.iterdir() if folder.name != "untied"))
def test_a_field_that_nobody_reads(folder_with, golden):
    folder = folder_with(golden, config=lambda config: config.update(mystery_noise=0.1))
    assert open_checkpoint(folder).unknown == ("mystery_noise",)
    with pytest.raises(UnsupportedModel, match="does not know: mystery_noise"):
        open_checkpoint(folder, strict=True)
    folder = Path(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"mystery_noise": None}))
    load_model(open_checkpoint(folder, strict=True), RefBackend())


SEES = {
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "vision_config": {"hidden_size": 1152},
}
GEMMA3_4B = {  # as it is published: most is left to defaults
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "initializer_range": 0.02,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    **SEES,
}
MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1024},
    "vision_feature_layer": -1,
}


def test_text_parts_of_models_that_see():
    for config, wanted in (
        (GEMMA3_4B, ("gemma3", 34, 2560, 8, 4, 256, 1024, True, 262208)),
        (MISTRAL_SMALL, ("llama", 40, 5120, 32, 8, 128, 0, False, 131072)),
    ):
        reader = ConfigReader(config, "config.json")
        spec = read_fields(reader)
        a = spec.attn
        found = (spec.arch, spec.layers, spec.dim, a.heads, a.kv_heads, a.head_dim, a.window, spec.tied, spec.vocab)
        assert (found, reader.unknown) == (wanted, [])


@pytest.mark.parametrize("names", [("language_model.", ""), ("", "language_model.")])
@pytest.mark.parametrize(
    ("golden", "architecture"),
    [("gemma3", "Gemma3ForConditionalGeneration"), ("mistral", "Mistral3ForConditionalGeneration")],
)
def test_a_model_that_sees_answers_as_its_text_part(folder_with, floats, golden, architecture, names):
    """As older and newer versions of transformers name its tensors."""

    def whole(config):
        text = {key: config.pop(key) for key in [*config] if key != "architectures"}
        config.update(SEES | {"architectures": [architecture], "text_config": text})

    def within(tensors):
        outer, inner = names
        for name in [*tensors]:
            tensors[outer + name.replace("model.", f"model.{inner}", 1)] = tensors.pop(name)
        tensors["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = floats(4, 4)
        tensors["multi_modal_projector.linear.weight"] = floats(4, 4)

    alone, found = open_checkpoint(GOLDENS / golden), open_checkpoint(folder_with(golden, whole, within))
    assert found.spec == alone.spec
    assert found.tensors.keys() == alone.tensors.keys()
    load_model(found, RefBackend())


def test_the_log_says_which_factors_longrope_has(goldens, caplog):
    for max_len, said in ((0, "original one, 48 tokens, with the short factors"), (300, "have the long factors")):
        caplog.clear()
        spec = open_configured(configure(goldens / "longrope", {"max_len": max_len})).spec
        assert (spec.max_len, said in caplog.text) == (512 if max_len else 48, True)
