"""GPT-2 and StarCoder2: what their published configs and tensors say, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.dequantize import dequantize
from penstock.model.load import load_model, open_checkpoint
from penstock.model.tensor import FORMATS, FP8, Scales, Tensor, some_rows, transposed
from tests.models.config_json import read_config

GPT2 = {  # as openai-community/gpt2 has it
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
STARCODER2 = {  # as bigcode/starcoder2-3b has it
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


def test_gpt2():
    spec = read_config(GPT2)
    assert (spec.dim, spec.hidden, spec.max_len, spec.eps, spec.act) == (768, 3072, 1024, 1e-5, "gelu_tanh")
    assert (spec.attn.heads, spec.attn.kv_heads, spec.attn.head_dim, spec.attn.scale) == (12, 12, 64, 0.125)
    assert spec.tied
    assert not spec.attn.rope.inv_freq
    assert read_config(GPT2 | {"n_inner": 99, "activation_function": "relu"}).hidden == 99
    assert read_config(GPT2 | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}) == spec
    assert read_config(GPT2 | {"n_special": 0, "predict_special_tokens": True}) == spec  # as gpt2-medium


def test_gpt2_may_scale_its_scores_otherwise():
    unscaled = read_config(GPT2 | {"scale_attn_weights": False})
    assert {unscaled.attention(layer).scale for layer in range(12)} == {1}
    deeper = read_config(GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    assert [deeper.attention(layer).scale for layer in (0, 1, 11)] == [1 / 8, 1 / 16, 1 / 96]


@pytest.mark.parametrize("change", [{"add_cross_attention": True}, {"activation_function": "mish"}, {"n_special": 4}])
def test_what_gpt2_does_not_do(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(GPT2 | change)


def test_gpt2_has_no_rope(gguf_with):
    path = gguf_with("gpt2", metadata=lambda metadata: metadata.update({"gpt2.rope.freq_base": 10000.0}))
    with pytest.raises(UnsupportedModel, match=r"gpt2\.rope\.freq_base"):
        open_checkpoint(path)


def test_gpt2_is_published_under_two_names(goldens, folder_with, floats):
    def inner(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = floats(1, 1, 64, 64)
        tensors["h.0.attn.masked_bias"] = floats()

    one, other = open_checkpoint(goldens / "gpt2"), open_checkpoint(folder_with("gpt2", tensors=inner))
    load_model(other, RefBackend())
    assert one.tensors.keys() == other.tensors.keys()
    assert all(np.array_equal(one.tensors[name].data, other.tensors[name].data) for name in one.tensors)


def test_two_names_at_once_are_one_too_many(folder_with):
    folder = folder_with(
        "gpt2", tensors=lambda tensors: tensors.update({"wte.weight": tensors["transformer.wte.weight"]})
    )
    with pytest.raises(MalformedFile, match=r"'transformer\.wte\.weight' and 'wte\.weight' are the same part"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ("transformer.h.1.ln_1.bias", "blk.1.attn_norm.bias", r"layers\.1\.attn_norm\.bias"),
        ("transformer.h.1.attn.c_attn.bias", "blk.1.attn_qkv.bias", r"layers\.1\.k\.bias"),
        ("transformer.h.1.mlp.c_fc.bias", "blk.1.ffn_up.bias", r"layers\.1\.up\.bias"),
        ("transformer.ln_f.bias", "output_norm.bias", r"norm\.bias"),
    ],
)
def test_gpt2_has_biases_everywhere(folder_with, gguf_with, ours, theirs, named):
    for path in (
        folder_with("gpt2", tensors=lambda tensors: tensors.pop(ours)),
        gguf_with("gpt2", tensors=lambda tensors: tensors.pop(theirs)),
    ):
        with pytest.raises(MalformedFile, match=f"'{named}' is missing"):
            open_checkpoint(path)


def test_the_positions_table_has_the_context(folder_with, gguf_with, floats):
    for path in (
        folder_with("gpt2", tensors=lambda tensors: tensors.update({"transformer.wpe.weight": floats(63, 32)})),
        gguf_with("gpt2", tensors=lambda tensors: tensors.update({"position_embd.weight": floats(63, 32)})),
    ):
        with pytest.raises(MalformedFile, match=r"has shape \(63, 32\); the model's config needs \(64, 32\)"):
            load_model(open_checkpoint(path), RefBackend())


@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
def test_a_transposed_matrix_is_the_same_matrix(format):
    rng = np.random.default_rng(0)
    values = np.frombuffer(rng.bytes(15 * FORMATS[format].bytes), np.uint8)
    tensor = Tensor("c_fc", FORMATS[format], (3, 5), values)
    turned = transposed(tensor)
    assert turned.shape == (5, 3)
    assert np.array_equal(dequantize(turned), dequantize(tensor).T, equal_nan=True)
    assert np.array_equal(transposed(turned).data, tensor.data)
    assert np.array_equal(some_rows(turned, 1, 4).data, turned.data.reshape(5, -1)[1:4].ravel())
    assert turned.size == tensor.size


def test_what_cannot_be_transposed(floats):
    quantized = Tensor("c_fc", FORMATS["Q8_0"], (32, 32), np.zeros(32 * 34, np.uint8))
    scaled = Tensor("c_fc", FP8["F8_E4M3"], (4, 4), np.zeros(16, np.uint8), Scales(np.ones((1, 1), np.float32), 4, 4))
    for tensor in (quantized, scaled, floats(4), floats(2, 2, 2)):
        with pytest.raises(UnsupportedModel, match="is stored transposed"):
            transposed(tensor)


def test_starcoder2():
    spec = read_config(STARCODER2)
    assert (spec.arch, spec.act, spec.eps, spec.tied, spec.attn.window) == ("starcoder2", "gelu_tanh", 1e-5, True, 4096)
    assert {"q", "down", "norm"} <= (spec.biases or set())
    assert read_config(STARCODER2 | {"sliding_window": None}).attn.window == 0
    assert read_config(STARCODER2 | {"use_bias": False}).biases == {"attn_norm", "mlp_norm", "norm"}


@pytest.mark.parametrize("change", [{"norm_type": "rms_norm"}, {"mlp_type": "gated"}, {"hidden_act": "silu"}])
def test_what_starcoder2_does_not_do(change):
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        read_config(STARCODER2 | change)


@pytest.mark.parametrize("key", ["norm_epsilon", "hidden_act"])
def test_what_starcoder2_must_say(key):
    with pytest.raises(MalformedFile, match=key):
        read_config({name: value for name, value in STARCODER2.items() if name != key})


@pytest.mark.parametrize("golden", ["gpt2", "starcoder2"])
def test_epsilons_of_other_norms(gguf_with, golden):
    key = f"{golden}.attention.layer_norm_rms_epsilon"
    with pytest.raises(UnsupportedModel, match=key):
        open_checkpoint(gguf_with(golden, metadata=lambda metadata: metadata.update({key: 1e-5})))
