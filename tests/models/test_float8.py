"""FP8 checkpoints: every code as torch reads it, whole models as transformers computes them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.weights import bf16_of
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.dequantize import dequantize
from penstock.model.formats.fp8 import TABLES
from penstock.model.load import load_model, open_checkpoint
from penstock.model.safetensors import read_safetensors
from penstock.model.tensor import FORMATS, FP8, Scales, Tensor, some_rows

FOLDER = Path(__file__).parent / "float8"
KINDS = ["block", "channel", "tensor"]
BLOCK_SIZE = 4


def expected(kind: str) -> tuple[list[int], np.ndarray]:
    with np.load(FOLDER / kind / "expected.npz") as file:
        return file["tokens"].tolist(), file["logits"]


@pytest.mark.parametrize("name", FP8)
def test_codes_are_those_of_torch(name: str) -> None:
    with np.load(FOLDER / "values.npz") as file:
        assert np.array_equal(TABLES[name], file[name], equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "tolerance"), [(RefBackend, 1e-5), (lambda: CpuBackend(2, kv="f32"), 2e-2)])
def test_logits_are_those_of_transformers(kind: str, make: Callable[[], Any], tolerance: float) -> None:
    """On a CPU, values times scales are rounded to BF16."""
    tokens, wanted = expected(kind)
    backend = make()
    backend.load(load_model(open_checkpoint(FOLDER / kind), backend))
    prompts = [tokens, tokens[:5]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE)
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        parts = np.concatenate([wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.linalg.norm(backend.logits(greedy_batch(chunks)) - parts) < tolerance * np.linalg.norm(parts)


def test_a_cpu_says_what_becomes_of_float8(caplog: pytest.LogCaptureFixture) -> None:
    backend = CpuBackend(1)
    with caplog.at_level("INFO"):
        backend.load(load_model(open_checkpoint(FOLDER / "tensor"), backend))
    assert caplog.text.count("become BF16 on a CPU") == 1
    assert "14 static scales of activations are not used" in caplog.text


def test_rows_keep_their_scales() -> None:
    scales = Scales(np.arange(1, 7, dtype=np.float32).reshape(3, 2), 2, 3)
    whole = Tensor("x", FP8["F8_E4M3"], (5, 4), np.arange(0x30, 0x44, dtype=np.uint8), scales)
    values = dequantize(whole)
    assert np.array_equal(values[[0, 1, 4], [0, 3, 3]], TABLES["F8_E4M3"][[0x30, 0x37, 0x43]] * [1, 2, 6])
    for first, last in [(0, 5), (1, 4), (3, 5)]:
        assert np.array_equal(dequantize(some_rows(whole, first, last)), values[first:last])


def test_bf16_is_the_nearest() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(2.0**-133), np.nan, np.inf], np.float32)
    read = dequantize(Tensor("x", FORMATS["BF16"], (7,), bf16_of(values).view(np.uint8)))
    wanted = [1, 1, 1 + 2**-6, 1 + 2**-7, -(2.0**-133), np.nan, np.inf]
    assert np.array_equal(read, np.array(wanted, np.float32), equal_nan=True)


# Refused


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A golden's folder with other fields in its quantization_config, or other tensors."""

    def make(kind: str, change: dict[str, Any], tensors: Callable[[dict[str, Any]], None] = lambda _: None) -> Path:
        folder = tmp_path / kind
        shutil.copytree(FOLDER / kind, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        file = folder / "model.safetensors"
        size = int.from_bytes(file.read_bytes()[:8], "little")
        header = json.loads(file.read_bytes()[8 : 8 + size])
        tensors(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + file.read_bytes()[8 + size :])
        return folder

    return make


def group(**weights: Any) -> dict[str, Any]:
    """compressed-tensors' groups, the weights of one described otherwise."""
    known = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    return {"config_groups": {"a": {"weights": known | weights}}}


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        (
            "tensor",
            {"quant_method": "hqq"},
            UnsupportedModel,
            "quant_method = 'hqq'.*supported: fp8, awq, gptq",
        ),
        ("tensor", {"quant_method": None}, UnsupportedModel, "quant_method = ''"),
        ("tensor", {"group_size": 64}, UnsupportedModel, "group_size = 64 in quantization_config"),
        ("tensor", {"activation_scheme": "none"}, UnsupportedModel, "activation_scheme = 'none'"),
        ("block", {"weight_block_size": [128]}, MalformedFile, "weight_block_size"),
        ("block", {"weight_block_size": [0, 128]}, MalformedFile, "weight_block_size"),
        ("block", {"weight_block_size": [128, 128]}, MalformedFile, r"fits neither the matrix"),
        ("block", {"weight_block_size": None}, MalformedFile, r"fits neither the matrix"),
        ("channel", {"format": "marlin-24"}, UnsupportedModel, "format = 'marlin-24'"),
        ("channel", {"format": "pack-quantized"}, UnsupportedModel, "type = 'float'"),
        ("channel", {"config_groups": {}}, UnsupportedModel, "describe 0 ways to quantize"),
        ("channel", {"config_groups": [1]}, MalformedFile, "config_groups"),
        ("channel", group(num_bits=4), UnsupportedModel, "num_bits = 4"),
        ("channel", group(type="int"), UnsupportedModel, "type = 'int'"),
        ("channel", group(strategy="group"), UnsupportedModel, "strategy = 'group'"),
        ("channel", group(strategy="block"), MalformedFile, "has no block_structure"),
        ("channel", {"transform_config": {"r1": {}}}, UnsupportedModel, "r1"),
    ],
)
def test_refused_configs(changed: Any, kind: str, change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(changed(kind, change))


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda header: header.pop(f"{Q}_scale"), r"q_proj\.weight' is stored as F8_E4M3 without a scale"),
        (lambda header: header.pop(Q), "its FP8 matrix is missing"),
        (lambda header: header[f"{Q}_scale"].update(dtype="F8_E4M3", shape=[2, 2]), "without a scale|fits neither"),
    ],
)
def test_refused_tensors(changed: Any, edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(MalformedFile, match=message):
        open_checkpoint(changed("tensor", {}, edit))


def test_scales_need_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "tensor"
    shutil.copytree(FOLDER / "tensor", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MalformedFile, match="without a scale"):
        open_checkpoint(folder)


def test_other_weights_are_as_they_were() -> None:
    stored = read_safetensors(FOLDER / "channel" / "model.safetensors")
    assert {tensor.format.name for name, tensor in stored.items() if "proj" not in name} == {"BF16"}
