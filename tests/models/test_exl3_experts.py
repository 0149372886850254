"""A mixture of experts in EXL3, with the tensors that its quantizer writes: routers and embeddings are plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.model.formats.trellis import Trellis
from penstock.model.load import load_model, open_checkpoint
from penstock.model.random_tensor import random_tensor
from penstock.model.tensor import FORMATS, INTEGERS, Tensor
from tests.models.conftest import write_safetensors

GOLDEN = Path(__file__).parent / "goldens" / "qwen3_moe" / "config.json"
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 1, "vocab_size": 256}
SIZES |= {"tie_word_embeddings": False}
LAYER = "model.layers.0."
PLAIN = {
    "model.embed_tokens": (256, 128),
    "model.norm": (128,),
    f"{LAYER}input_layernorm": (128,),
    f"{LAYER}post_attention_layernorm": (128,),
    f"{LAYER}self_attn.q_norm": (64,),
    f"{LAYER}self_attn.k_norm": (64,),
    f"{LAYER}mlp.gate": (6, 128),
}
QUANTIZED = {
    "lm_head": (256, 128),
    f"{LAYER}self_attn.q_proj": (256, 128),
    f"{LAYER}self_attn.k_proj": (128, 128),
    f"{LAYER}self_attn.v_proj": (128, 128),
    f"{LAYER}self_attn.o_proj": (128, 256),
    **{f"{LAYER}mlp.experts.{i}.{part}_proj": (128, 128) for i in range(6) for part in ("gate", "up", "down")},
}


def stored(array: Any, format: str) -> Tensor:
    known = FORMATS.get(format) or INTEGERS[format]
    return Tensor("", known, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def checkpoint(folder: Path) -> Path:
    """Writes a checkpoint of random weights."""
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": stored((rng.normal(0, 0.5, shape) + (len(shape) == 1)).astype(np.float16), "F16")
        for name, shape in PLAIN.items()
    }
    for name, shape in QUANTIZED.items():
        trellis = random_tensor(rng, "EXL3-3", *shape).source
        assert isinstance(trellis, Trellis)
        tensors[f"{name}.trellis"] = stored(trellis.tiles, "I16")
        tensors[f"{name}.suh"] = stored(trellis.suh.astype(np.float16), "F16")
        tensors[f"{name}.svh"] = stored(trellis.svh.astype(np.float16), "F16")
        tensors[f"{name}.mcg"] = stored(np.array(0xCBAC1FED, np.uint32).view(np.int32), "I32")
    config = json.loads(GOLDEN.read_text()) | SIZES
    config["quantization_config"] = {"quant_method": "exl3", "version": "0.0.6", "bits": 3.0, "head_bits": 3}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_experts_keep_their_bits_and_answer_as_the_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_checkpoint(checkpoint(tmp_path))
    backends = CpuBackend(2), RefBackend()
    for backend in backends:
        backend.load(load_model(opened, backend))
        backend.reserve_kv(2, 16)
    tokens = np.random.default_rng(1).integers(0, 256, 20).tolist()
    got, wanted = (backend.logits(greedy_batch([Chunk(tokens, 0, range(2))])) for backend in backends)
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()
    assert {backends[0].stored_as(opened.tensors[f"layers.0.experts.5.{part}"]).kind for part in ("gate", "down")} == {
        "EXL3-3"
    }
    assert "become" not in caplog.text
