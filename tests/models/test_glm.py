"""GLM-4, first and 0414: what published configs and tensors say, and what is refused."""

from __future__ import annotations

import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.load import load_model, open_checkpoint
from penstock.model.tensor import some_rows
from tests.models.config_json import read_config

GLM4 = {  # as zai-org/GLM-4-9B-0414 has it
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0",
    "use_cache": True,
    "vocab_size": 151552,
}
GLM = GLM4 | {"architectures": ["GlmForCausalLM"], "model_type": "glm", "rms_norm_eps": 1.5625e-07}


@pytest.mark.parametrize(("config", "arch"), [(GLM, "glm"), (GLM4, "glm4")], ids=["glm", "glm4"])
def test_half_of_a_head_is_turned_in_pairs(config, arch):
    spec = read_config(config)
    assert (spec.arch, spec.biases, spec.tied, spec.attn.head_dim) == (arch, {"q", "k", "v"}, False, 128)
    assert (len(spec.attn.rope.inv_freq), spec.attn.rope.interleaved) == (32, True)
    assert spec.attn.rope.inv_freq[1] == pytest.approx(10000 ** (-1 / 32))
    assert read_config(config | {"attention_bias": False}).biases == frozenset()
    newer = {key: value for key, value in config.items() if key not in ("partial_rotary_factor", "rope_theta")}
    ropes = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert read_config(newer | {"rope_parameters": ropes}) == spec


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rms_norm_eps", "head_dim", "num_key_value_heads"])
def test_what_silence_would_mean_something_else_for(key):
    with pytest.raises(MalformedFile, match=f"no {key}"):
        read_config({name: value for name, value in GLM4.items() if name != key})


def test_yarn_over_a_part_of_a_head():
    longer = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read_config(GLM4 | {"rope_scaling": longer, "max_position_embeddings": 131072}).attn.rope
    assert (len(rope.inv_freq), rope.interleaved) == (32, True)
    assert rope.inv_freq[-1] == pytest.approx(10000 ** (-31 / 32) / 4)


def test_fused_biases_are_taken_apart(goldens):
    """Files of the first GLM-4 have q, k and v in one tensor, and their biases in another."""
    file, folder = open_checkpoint(goldens / "glm" / "model.gguf"), open_checkpoint(goldens / "glm")
    assert all("attn_qkv" in file.tensors[f"layers.1.{part}.bias"].name for part in "qkv")
    assert all(
        file.tensors[f"layers.1.{part}.bias"].shape == folder.tensors[f"layers.1.{part}.bias"].shape for part in "qkv"
    )


def test_fused_biases_must_fit(gguf_with, floats):
    for shape in ((63,), (64, 1)):
        path = gguf_with(
            "glm", tensors=lambda tensors, shape=shape: tensors.update({"blk.0.attn_qkv.bias": floats(*shape)})
        )
        with pytest.raises(MalformedFile, match="needs 64 rows"):
            open_checkpoint(path)


def test_values_of_a_vector_as_a_view(floats):
    piece = some_rows(floats(10), 3, 7)
    assert (piece.shape, len(piece.data), piece.data.flags.owndata) == ((4,), 16, False)


def test_layers_that_predict_further_tokens_are_refused(gguf_with, floats):
    path = gguf_with("glm4", tensors=lambda tensors: tensors.update({"blk.1.nextn.eh_proj.weight": floats(32, 64)}))
    with pytest.raises(UnsupportedModel, match="nextn"):
        load_model(open_checkpoint(path), RefBackend())


@pytest.mark.parametrize("golden", ["glm", "glm4"])
def test_biases_that_the_config_speaks_of(folder_with, golden):
    path = folder_with(golden, tensors=lambda tensors: tensors.pop("model.layers.0.self_attn.v_proj.bias"))
    with pytest.raises(MalformedFile, match=r"'layers\.0\.v\.bias' is missing"):
        open_checkpoint(path)
