"""Llama 4: what its published configs say, chunks that leave blocks behind, other names of its tensors, and what is
refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps, with_groups
from penstock.errors import ModelError
from penstock.model.config_reader import ConfigReader
from penstock.model.families import llama4
from penstock.model.gguf.reader import read_gguf
from penstock.model.load import METADATA, load_model, open_checkpoint, read_fields
from penstock.model.spec import ModelSpec
from penstock.model.split_fused import each_expert
from penstock.model.tensor import Tensor, transposed
from tests.models.config_json import read_config

FOLDERS = Path(__file__).parent / "folders"
LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 1.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SCOUT_TEXT = {
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "bos_token_id": 200000,
    "cache_implementation": "hybrid",
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
MAVERICK_TEXT = {key: value for key, value in SCOUT_TEXT.items() if key not in ("layer_types", "moe_layers")} | {
    "attn_temperature_tuning": 4,  # as it was published first
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "no_rope_layers": [],
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}


def seeing(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0.dev0",
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    }


def known(config: dict[str, Any]) -> ModelSpec:
    reader = ConfigReader(config, "config.json")
    spec = read_fields(reader)
    assert reader.unknown == []
    return spec


def test_scout():
    spec = known(seeing(SCOUT_TEXT))
    near, far = spec.attention(0), spec.attention(3)
    assert (near.chunk, near.qk_norm, near.temperature, len(near.rope.inv_freq)) == (8192, "unit", 0.0, 64)
    assert (far.chunk, far.qk_norm, far.temperature, far.temperature_span, far.rope.inv_freq) == (0, "", 0.1, 8192, ())
    assert near.rope.interleaved
    assert near.rope.inv_freq[-1] == pytest.approx(500000.0 ** (-126 / 128) / 16)
    assert spec.windows == (0, 8192, 8192, 8192)
    assert spec.experts is not None
    assert (spec.experts.hidden, spec.shared_hidden, spec.hidden, spec.dense) == (8192, 8192, 16384, frozenset())
    assert (spec.experts.scoring, spec.experts.weigh_inputs, spec.experts.renormalize) == ("sigmoid", True, False)


def test_maverick():
    spec, scout = known(seeing(MAVERICK_TEXT)), known(seeing(SCOUT_TEXT))
    assert spec.attention(0).qk_norm == ""
    assert spec.attention(3) == scout.attention(3)
    assert spec.dense == frozenset(range(0, 48, 2))
    assert known(seeing(MAVERICK_TEXT | {"attn_temperature_tuning": False})).attention(3).temperature == 0


def test_a_context_within_one_chunk_has_none():
    spec = known(seeing(SCOUT_TEXT | {"max_position_embeddings": 8192}))
    assert spec.windows == (0,)
    assert spec.attention(0).chunk == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["sliding_attention"] * 48),
        ("moe_layers", [48]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("no_rope_layers", [1, 0]),
        ("attn_temperature_tuning", "yes"),
        ("hidden_act", "gelu_pytorch_tanh_2"),
        ("rms_norm_eps", None),
    ],
)
def test_what_is_refused(key, value):
    with pytest.raises(ModelError, match="rope_type" if key == "rope_scaling" else key):
        read_config(seeing(SCOUT_TEXT | {key: value}))


@pytest.mark.parametrize("make", [partial(CpuBackend, 2, kv="f32"), RefBackend], ids=["cpu", "ref"])
@pytest.mark.parametrize("block_size", [16, 5])
def test_blocks_behind_a_chunk_are_not_needed(block_size, make):
    """The chunk of 7 positions is no multiple of either block size, and shorter than some steps."""
    with np.load(FOLDERS / "llama4_chunks" / "expected.npz") as file:
        tokens, wanted = file["tokens"].tolist(), file["logits"]
    checkpoint, backend = open_checkpoint(FOLDERS / "llama4_chunks"), make()
    groups = checkpoint.spec.kv_groups
    assert [group.window for group in groups] == [0, 7]
    backend.load(load_model(checkpoint, backend))
    prompts = [tokens, tokens[:5], tokens[:30]]
    backend.reserve_kv(2 * blocks_for(prompts, block_size), block_size, len(prompts), groups)
    for chunks in random_steps(np.random.default_rng(0), prompts, block_size):
        parts = [wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
        batch = with_groups(greedy_batch(chunks), [0, 7], block_size, behind=10**6)
        assert np.abs(backend.logits(batch) - np.concatenate(parts)).max() < 1e-4


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    backend, size = RefBackend(), blocks_for([tokens], 16)
    backend.load(load_model(open_checkpoint(path), backend))
    backend.reserve_kv(size, 16)
    return backend.logits(greedy_batch([Chunk(tokens, 0, range(size))]))


def test_the_text_part_of_a_model_that_sees(folder_with, goldens, floats):
    def inner(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_model.patch_embedding.linear.weight"] = floats(4, 4)
        tensors["multi_modal_projector.linear_1.weight"] = floats(4, 4)

    def outer(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(seeing(text))

    with np.load(goldens / "llama4" / "expected.npz") as file:
        got = logits(folder_with("llama4", config=outer, tensors=inner), file["tokens"].tolist())
        assert np.abs(got - file["logits"]).max() < 1e-4


def test_experts_may_have_tensors_of_their_own(folder_with, goldens):
    """As in checkpoints that are quantized expert by expert."""
    spec = open_checkpoint(goldens / "llama4").spec

    def apart(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            stem, _, part = name.rpartition(".")
            for number, expert in enumerate(each_expert(tensors.pop(name), spec)):
                whole = transposed(expert)
                whole = replace(whole, source=whole.data)
                size, rows = len(whole.data), {"down_proj": ("down_proj",)}.get(part, ("gate_proj", "up_proj"))
                for at, own in enumerate(rows):
                    data = whole.data[at * size // len(rows) : (at + 1) * size // len(rows)]
                    shape = (whole.shape[0] // len(rows), whole.shape[1])
                    tensors[f"{stem}.{number}.{own}.weight"] = replace(whole, shape=shape, source=data)

    with np.load(goldens / "llama4" / "expected.npz") as file:
        got = logits(folder_with("llama4", tensors=apart), file["tokens"].tolist())
        assert np.abs(got - file["logits"]).max() < 1e-4


def test_files_of_128_experts_mean_no_norms(goldens):
    file = read_gguf(goldens / "llama4" / "model.gguf")
    metadata = {**file.metadata, "llama4.context_length": 10**6}
    few, many = (
        llama4.read_gguf(ConfigReader(metadata | {"llama4.expert_count": count}, METADATA, "llama4."), file.tensors)
        for count in (3, 128)
    )
    assert (few.attention(0).qk_norm, many.attention(0).qk_norm) == ("unit", "")
    assert (few.attention(0).chunk, few.attention(3).chunk, few.attention(3).temperature) == (8192, 0, 0.1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.sliding_window", 0), ("attention.sliding_window", 4096), ("expert_gating_func", 1)],
)
def test_what_llama_cpp_reads_otherwise_is_refused(gguf_with, key, value):
    path = gguf_with("llama4", metadata=lambda metadata: metadata.update({f"llama4.{key}": value}))
    with pytest.raises(ModelError, match=f"llama4.{key} = {value}"):
        open_checkpoint(path)
