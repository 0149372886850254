"""GPT-NeoX, Phi-2, Falcon, MiniCPM and OPT: what their published configs say, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, ModelError
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.model.spec import ModelSpec
from penstock.model.tensor import FORMATS, Scales, Tensor, rows_of_groups, some_rows
from tests.models.config_json import read_config

FOLDERS = Path(__file__).parent / "folders"
PYTHIA = {  # as EleutherAI/pythia-2.8b has it
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
PHI_2 = {  # as microsoft/phi-2 has it
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 51200,
}
FALCON_7B = {  # as tiiuae/falcon-7b has it
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "bias": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
MINICPM = {  # as openbmb/MiniCPM-2B-sft-bf16 has it
    "architectures": ["MiniCPMForCausalLM"],
    "dim_model_base": 256,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 5760,
    "max_position_embeddings": 4096,
    "num_attention_heads": 36,
    "num_hidden_layers": 40,
    "num_key_value_heads": 36,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 122753,
}
OPT = {  # as facebook/opt-125m has it
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def known(config: dict[str, Any]) -> ModelSpec:
    reader = ConfigReader(config, "config.json")
    spec = read_fields(reader)
    assert reader.unknown == []
    return spec


def rotated(spec: ModelSpec) -> int:
    return 2 * len(spec.attn.rope.inv_freq)


def test_pythia():
    spec = known(PYTHIA)
    assert (spec.parallel, spec.act, spec.tied, rotated(spec), spec.attn.head_dim) == (True, "gelu", False, 20, 80)
    assert "q" in (spec.biases or ())
    assert spec.attn.rope.inv_freq == known(PYTHIA | {"rope_scaling": {"rope_theta": 10000.0}}).attn.rope.inv_freq
    assert spec.attn.rope.inv_freq != known(PYTHIA | {"rotary_emb_base": 500}).attn.rope.inv_freq
    assert rotated(known({key: value for key, value in PYTHIA.items() if key != "rotary_pct"})) == 20


def test_phi_2():
    spec = known(PHI_2)
    assert (spec.parallel, spec.act, rotated(spec), spec.attn.head_dim) == (True, "gelu_tanh", 32, 80)
    assert "head" in (spec.biases or ())
    assert rotated(known({key: value for key, value in PHI_2.items() if key != "partial_rotary_factor"})) == 40


def test_falcon():
    small, large = known(FALCON_7B), known(FALCON_40B)
    assert (small.attn.heads, small.attn.kv_heads, small.hidden, small.max_len) == (71, 1, 4 * 4544, 2048)
    assert (large.attn.heads, large.attn.kv_heads, large.attn.head_dim) == (128, 8, 64)
    assert small.tied
    assert small.parallel
    assert known(FALCON_7B | {"multi_query": False}).attn.kv_heads == 71
    assert "up" in (known(FALCON_7B | {"bias": True}).biases or ())


def test_minicpm_multiplies_as_granite_does():
    spec = known(MINICPM)
    residual = 1.4 / 40**0.5
    assert spec.embed_scale == pytest.approx(12 / residual)
    assert spec.eps == pytest.approx(1e-5 / residual**2)
    assert spec.logit_scale == pytest.approx(256 / 2304)
    assert spec.tied


def test_opt():
    spec = known(OPT)
    assert (spec.first_position, spec.max_len, spec.act, rotated(spec), spec.tied) == (2, 2048, "relu", 0, True)
    assert "q" not in (known(OPT | {"enable_bias": False}).biases or ())
    assert not spec.norm_last
    small = known(OPT | {"do_layer_norm_before": False, "hidden_size": 1024, "word_embed_proj_dim": 512})
    assert (small.norm_last, small.dim, small.embed_dim) == (True, 1024, 512)


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (PYTHIA, {"hidden_act": "tanh"}),
        (PYTHIA, {"layer_norm_eps": None}),
        (PHI_2, {"qk_layernorm": True}),
        (PHI_2, {"tie_word_embeddings": True}),
        (PHI_2, {"hidden_act": None}),
        (FALCON_7B, {"alibi": True}),
        (FALCON_7B, {"apply_residual_connection_post_layernorm": True}),
        (FALCON_40B, {"parallel_attn": False}),
        (MINICPM, {"num_experts": 8}),
        (OPT, {"word_embed_proj_dim": 512}),
        (OPT, {"layer_norm_elementwise_affine": False}),
    ],
    ids=lambda value: "" if "architectures" in value else next(iter(value)),
)
def test_what_is_computed_otherwise_is_refused(config: dict[str, Any], change: dict[str, Any]):
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config(config | change)


@pytest.mark.parametrize("key", ["embedding_scale", "logit_scale", "residual_scale"])
def test_a_minicpm_file_states_its_multipliers(gguf_with, key: str):
    with pytest.raises(MalformedFile, match=key):
        open_checkpoint(gguf_with("minicpm", lambda metadata: metadata.pop(f"minicpm.{key}")))


@pytest.mark.parametrize("make", [partial(CpuBackend, 2, kv="f32"), RefBackend], ids=["cpu", "ref"])
def test_a_falcon_file_with_two_norms(make):
    """It gives the name of the only norm to that of the MLP."""
    folder, backend = FOLDERS / "falcon_grouped", make()
    with np.load(folder / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist(), file["logits"]
    backend.load(load_model(open_checkpoint(folder / "model.gguf"), backend))
    backend.reserve_kv(3, 16)
    assert np.abs(backend.logits(greedy_batch([Chunk(tokens, 0, range(3))])) - wanted).max() < 1e-4


def test_a_falcon_file_has_two_norms_in_all_layers_or_in_none(gguf_with):
    def second(tensors: dict[str, Tensor]) -> None:
        for kind in ("weight", "bias"):
            tensors[f"blk.0.attn_norm_2.{kind}"] = tensors[f"blk.0.attn_norm.{kind}"]

    with pytest.raises(MalformedFile, match=r"layers\.1\.attn_norm"):
        load_model(open_checkpoint(gguf_with("falcon", tensors=second)), RefBackend())


def test_rows_of_groups_are_found_with_their_scales():
    values = np.arange(12 * 4, dtype=np.float32).reshape(12, 4)
    scales = Scales(np.arange(1, 5, dtype=np.float32).reshape(4, 1), 3, 4)
    whole = Tensor("made up", FORMATS["F32"], (12, 4), values.reshape(-1).view(np.uint8), scales)
    taken = rows_of_groups(whole, groups=3, first=1, last=3)
    wanted = dequantize(whole)[[1, 2, 5, 6, 9, 10]]
    assert np.array_equal(dequantize(taken), wanted)
    for first in range(6):
        assert np.array_equal(dequantize(some_rows(taken, first, 6)), wanted[first:])
        assert np.array_equal(dequantize(some_rows(taken, first, first + 1)), wanted[first : first + 1])
