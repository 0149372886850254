"""Families with experts: what their published configs say, what is refused, and tensors that hold all experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.load import load_model, open_checkpoint
from penstock.model.spec import ExpertSpec
from penstock.model.tensor import Tensor
from tests.models.config_json import read_config

ALL = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "output_router_logits": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
MIXTRAL = ALL | {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "vocab_size": 32000,
}
QWEN3_30B = ALL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GLM_AIR = {key: value for key, value in ALL.items() if key != "output_router_logits"} | {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX_M2 = ALL | {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_mixtral():
    spec = read_config(MIXTRAL)
    assert spec.experts == ExpertSpec(8, 2, 14336, renormalize=True)
    assert (spec.dense, spec.shared_hidden, spec.attn.window, spec.biases) == (frozenset(), 0, 0, frozenset())
    assert read_config(MIXTRAL | {"sliding_window": 4096}).attention(31).window == 4096


def test_qwen3_moe():
    spec = read_config(QWEN3_30B)
    assert spec.experts == ExpertSpec(128, 8, 768, renormalize=True)
    assert (spec.attn.qk_norm, spec.attn.q_width, spec.dense) == ("head", 4096, frozenset())
    newer = {key: value for key, value in QWEN3_30B.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read_config(newer) == spec


def test_qwen3_moe_says_which_layers_have_experts():
    spec = read_config(QWEN3_30B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert spec.dense == {0, 1, 2, 4}
    for wrong in ([-1], [1.5], "none"):
        with pytest.raises(MalformedFile, match="mlp_only_layers"):
            read_config(QWEN3_30B | {"mlp_only_layers": wrong})


def test_glm_4_5_air():
    spec = read_config(GLM_AIR)
    assert spec.experts == ExpertSpec(128, 8, 1408, scoring="sigmoid", renormalize=True, choice_bias=True)
    assert (spec.dense, spec.shared_hidden, spec.unused_layers) == ({0}, 1408, 1)
    assert (spec.attn.qk_norm, len(spec.attn.rope.inv_freq), spec.biases) == ("", 32, {"q", "k", "v"})


def test_glm_4_5_norms_each_head():
    larger = {"use_qk_norm": True, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_routed_experts": 160}
    spec = read_config(GLM_AIR | larger)
    assert (spec.attn.qk_norm, spec.dense, spec.experts.scale, spec.experts.count) == ("head", {0, 1, 2}, 2.5, 160)
    silent = {key: value for key, value in GLM_AIR.items() if key != "partial_rotary_factor"}
    with pytest.raises(MalformedFile, match="no partial_rotary_factor"):
        read_config(silent)


def test_minimax_m2():
    spec = read_config(MINIMAX_M2)
    assert spec.experts == ExpertSpec(256, 8, 1536, scoring="sigmoid", renormalize=True, choice_bias=True)
    assert (spec.attn.qk_norm, len(spec.attn.rope.inv_freq), spec.unused_layers) == ("all", 32, 3)


@pytest.mark.parametrize(
    ("config", "change", "error"),
    [
        (MINIMAX_M2, {"scoring_func": "softmax"}, UnsupportedModel),
        (MINIMAX_M2, {"attn_type_list": [1] * 61 + [0]}, UnsupportedModel),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, UnsupportedModel),
        (MINIMAX_M2, {"use_routing_bias": False}, UnsupportedModel),
        (MINIMAX_M2, {"shared_intermediate_size": 512}, UnsupportedModel),
        (MINIMAX_M2, {"sliding_window": 128}, UnsupportedModel),
        (MINIMAX_M2, {"rotary_dim": 256}, MalformedFile),
        (MINIMAX_M2, {"rotary_dim": 63}, UnsupportedModel),
        (MINIMAX_M2, {"head_dim": None}, MalformedFile),
        (MIXTRAL, {"num_local_experts": 10**9}, MalformedFile),
        (MIXTRAL, {"num_experts_per_tok": 0}, MalformedFile),
        (MIXTRAL, {"num_local_experts": None}, MalformedFile),
        (QWEN3_30B, {"shared_expert_intermediate_size": 512}, UnsupportedModel),
        (QWEN3_30B, {"moe_intermediate_size": None}, MalformedFile),
        (GLM_AIR, {"topk_method": "noaux_tc"}, UnsupportedModel),
        (GLM_AIR, {"first_k_dense_replace": -1}, MalformedFile),
    ],
)
def test_what_is_not_computed(config: dict[str, Any], change: dict[str, Any], error: type[Exception]):
    with pytest.raises(error, match=next(iter(change))):
        read_config(config | change)


@pytest.mark.parametrize(
    "change", [{"num_experts_per_tok": 5}, {"n_group": 3}, {"topk_group": 3}, {"n_group": 4, "topk_group": 1}]
)
def test_experts_that_cannot_be_chosen(folder_with, change):
    with pytest.raises(MalformedFile, match="experts cannot be chosen from"):
        open_checkpoint(
            folder_with("glm4_moe", config=lambda config: config.update(change | {"num_experts_per_tok": 5}))
        )


@pytest.mark.parametrize("golden", ["mixtral", "qwen3_moe", "glm4_moe", "minimax_m2"])
def test_each_expert_is_a_view(goldens: Path, golden: str):
    for path in (goldens / golden, goldens / golden / "model.gguf"):
        checkpoint = open_checkpoint(path)
        experts, last = checkpoint.spec.experts, checkpoint.spec.layers - 1
        for expert in range(experts.count):
            shapes = [checkpoint.tensors[f"layers.{last}.experts.{expert}.{part}"].shape for part in ("gate", "down")]
            assert shapes == [(experts.hidden, 32), (32, experts.hidden)]
        assert not any(tensor.data.flags.owndata for tensor in checkpoint.tensors.values())


def logits(path: Path) -> np.ndarray:
    backend = RefBackend()
    backend.load(load_model(open_checkpoint(path), backend))
    backend.reserve_kv(1, 16)
    return backend.logits(greedy_batch([Chunk(range(16), 0, [0])]))


def joined(tensors: dict[str, Tensor], pattern: str, name: str) -> None:
    """All that match become one, a matrix for each in the order of their numbers."""
    found = sorted((int(match[1]), key) for key in tensors if (match := re.fullmatch(pattern, key)))
    parts = [tensors.pop(key) for _, key in found]
    tensors[name] = replace(
        parts[0], name=name, shape=(len(parts), *parts[0].shape), source=np.concatenate([part.data for part in parts])
    )


def test_all_experts_in_one_tensor(goldens: Path, folder_with: Callable[..., Path]):
    """As transformers computes with them."""

    def join(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            start = f"model.layers.{layer}.mlp.experts"
            for expert in range(6):
                up = tensors.pop(f"{start}.{expert}.up_proj.weight")
                gate = tensors.pop(f"{start}.{expert}.gate_proj.weight")
                tensors[f"{start}.{expert}.gate_up"] = replace(
                    gate, shape=(2 * gate.shape[0], 32), source=np.concatenate([gate.data, up.data])
                )
            joined(tensors, rf"{re.escape(start)}\.(\d+)\.gate_up", f"{start}.gate_up_proj")
            joined(tensors, rf"{re.escape(start)}\.(\d+)\.down_proj\.weight", f"{start}.down_proj")

    assert np.array_equal(logits(folder_with("qwen3_moe", tensors=join)), logits(goldens / "qwen3_moe"))


def test_a_tensor_for_each_expert_in_older_files(goldens: Path, gguf_with: Callable[..., Path]):
    def part(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_exps." in name]:
            bank = tensors.pop(name)
            for expert, data in enumerate(np.split(bank.data, bank.shape[0])):
                own = name.replace("_exps.", f".{expert}.")
                tensors[own] = replace(bank, name=own, shape=bank.shape[1:], source=data)

    assert np.array_equal(logits(gguf_with("mixtral", tensors=part)), logits(goldens / "mixtral" / "model.gguf"))


def test_the_number_of_experts_must_be_the_config_s(gguf_with):
    path = gguf_with("mixtral", metadata=lambda metadata: metadata.update({"llama.expert_count": 3}))
    with pytest.raises(MalformedFile, match=r"ffn_.*_exps.* the config says 3 experts"):
        open_checkpoint(path)


def test_an_expert_that_is_missing(folder_with):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    folder = folder_with("minimax_m2", tensors=lambda tensors: tensors.pop(name))
    with pytest.raises(MalformedFile, match=r"no tensor for 'layers\.1\.experts\.2\.up'"):
        load_model(open_checkpoint(folder), RefBackend())


def test_an_expert_too_many(folder_with, floats):
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    folder = folder_with("mixtral", tensors=lambda tensors: tensors.update({name: floats(16, 32)}))
    with pytest.raises(MalformedFile, match="1 tensors of the checkpoint have no place"):
        load_model(open_checkpoint(folder), RefBackend())


def test_layers_that_guess_further_tokens_are_left_out(goldens, folder_with, floats):
    extra = {
        f"model.layers.2.{part}.weight": floats(4)
        for part in ("eh_proj", "enorm", "shared_head.norm", "self_attn.q_proj", "mlp.experts.0.up_proj")
    }
    folder = folder_with("glm4_moe", tensors=lambda tensors: tensors.update(extra))
    assert not any(name.startswith("layers.2.") for name in open_checkpoint(folder).tensors)
    assert np.array_equal(logits(folder), logits(goldens / "glm4_moe"))


def test_layers_beyond_those(folder_with, floats):
    folder = folder_with(
        "glm4_moe", tensors=lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": floats(4)})
    )
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.3\.eh_proj\.weight"):
        open_checkpoint(folder)


def test_other_ways_to_score(gguf_with):
    path = gguf_with("glm4_moe", metadata=lambda metadata: metadata.update({"glm4moe.expert_gating_func": 4}))
    with pytest.raises(UnsupportedModel, match="expert_gating_func = 4"):
        open_checkpoint(path)


def test_experts_where_a_family_has_none(gguf_with):
    path = gguf_with("qwen3", metadata=lambda metadata: metadata.update({"qwen3.expert_count": 8}))
    with pytest.raises(UnsupportedModel, match=r"qwen3\.expert_count = 8"):
        open_checkpoint(path)
