"""The text parts of models that see, against transformers (scripts/make_vision_goldens.py), and their configs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.model.safetensors import read_safetensors
from tests.models.config_json import read_config
from tests.models.conftest import write_safetensors

FOLDER = Path(__file__).parent / "text_parts"
NAMES = sorted(folder.name for folder in FOLDER.iterdir())
BLOCK_SIZE = 4
QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {"depth": 32, "hidden_size": 1280},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 152064,
}
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {"deepstack_visual_indexes": [8, 16, 24], "depth": 27},
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
INTERNVL_CHAT = {
    "architectures": ["InternVLChatModel"],
    "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        key: value
        for key, value in QWEN2_5_VL.items()
        if "vision" not in key and key not in ("image_token_id", "video_token_id", "rope_scaling")
    }
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "model_type": "internvl_chat",
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internvl2_5",
    "torch_dtype": "bfloat16",
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
    "use_thumbnail": True,
    "vision_config": {"hidden_size": 1024},
}


def expected(name: str) -> tuple[list[int], np.ndarray]:
    with np.load(FOLDER / name / "expected.npz") as file:
        return file["tokens"].tolist(), file["logits"]


@pytest.fixture(params=["ref", "cpu"])
def backend(request: pytest.FixtureRequest) -> Any:
    return RefBackend() if request.param == "ref" else CpuBackend(2, kv="f32")


def check(backend: Any, path: Path, name: str) -> None:
    """Compares random chunks, and the tokens that are chosen after a prompt."""
    tokens, logits = expected(name)
    backend.load(load_model(open_checkpoint(path), backend))
    prompts = [tokens, tokens[:30]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE, 10)
    for chunks in random_steps(np.random.default_rng(3), prompts, BLOCK_SIZE):
        wanted = np.concatenate([logits[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.abs(backend.logits(greedy_batch(chunks)) - wanted).max() < 1e-4
    answer = backend.wait(backend.launch(greedy_batch([Chunk(tokens, 0, range(12), 0, 1)])))
    assert answer.rows[0].tokens == (logits[-1].argmax(),)


@pytest.mark.parametrize("file", ["", "model.gguf"], ids=["folder", "gguf"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(backend: Any, name: str, file: str) -> None:
    check(backend, FOLDER / name / file, name)


def test_experts_as_they_are_published(backend: Any, tmp_path: Path) -> None:
    """Qwen3-VL's are stored as (in, out)."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER / "qwen3_vl_moe", folder)
    tensors = read_safetensors(FOLDER / "qwen3_vl_moe" / "model.safetensors")
    for name, stored in tensors.items():
        if ".experts." in name:
            values = np.frombuffer(stored.data.tobytes(), np.uint16).reshape(stored.shape).swapaxes(1, 2)
            turned = np.ascontiguousarray(values)
            tensors[name] = replace(stored, shape=turned.shape, source=turned.reshape(-1).view(np.uint8))
    write_safetensors(folder / "model.safetensors", tensors)
    check(backend, folder, "qwen3_vl_moe")


@pytest.mark.parametrize("config", [QWEN2_5_VL, QWEN3_VL, INTERNVL_CHAT], ids=lambda config: config["model_type"])
def test_every_field_of_published_configs_is_known(config: dict[str, Any]) -> None:
    reader = ConfigReader(config, "config.json")
    read_fields(reader)
    assert reader.unknown == []


def test_qwen2_5_vl_in_one_config() -> None:
    spec = read_config(QWEN2_5_VL)
    assert (spec.arch, spec.biases, spec.attn.rope.scale) == ("qwen2", {"q", "k", "v"}, 1.0)
    assert spec.attn.rope.inv_freq[1] == pytest.approx(1000000.0 ** (-2 / 128))


def test_qwen3_vl() -> None:
    spec = read_config(QWEN3_VL)
    assert (spec.arch, spec.attn.qk_norm, spec.tied) == ("qwen3", "head", False)
    assert read_config(QWEN3_VL | {"tie_word_embeddings": True}).tied


def test_internvl_chat() -> None:
    assert (read_config(INTERNVL_CHAT).arch, read_config(INTERNVL_CHAT).layers) == ("qwen2", 28)
    with pytest.raises(UnsupportedModel, match="model_type = 'internlm2' in llm_config"):
        read_config(INTERNVL_CHAT | {"llm_config": {"model_type": "internlm2"}})


def test_the_whole_config_says_whether_embeddings_are_tied() -> None:
    """Transformers does not look at what the text part says."""
    config = json.loads((FOLDER / "qwen3_vl_moe" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]) == (False, True)
    assert not read_config(config).tied


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"norm_topk_prob": False}, UnsupportedModel),
        ({"num_local_experts": None}, MalformedFile),
        ({"clip_qkv": 8.0}, UnsupportedModel),
        ({"tie_word_embeddings": "no"}, MalformedFile),
    ],
)
def test_what_the_text_part_cannot_say(change: dict[str, Any], error: type[Exception]) -> None:
    config = json.loads((FOLDER / "qwen3_vl_moe" / "config.json").read_text())
    with pytest.raises(error, match=next(iter(change))):
        read_config(config | {"text_config": config["text_config"] | change})
