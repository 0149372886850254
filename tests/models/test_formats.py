"""Quantized formats of safetensors: every value as the format's own package or definition has it, whole models as
transformers computes them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.weights import stored_as
from penstock.backend.quantize_at_load import quantized
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.config import Config
from penstock.errors import MalformedFile, ModelError, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.formats.checkpoint import weights_of
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.load import load_model, open_checkpoint, read_safetensors_shards
from penstock.model.open_files import read_json
from penstock.model.random_tensor import random_tensor
from penstock.model.safetensors import read_safetensors
from penstock.model.tensor import FORMATS, FP8, INTEGERS, Tensor, factor_of, some_rows
from tests.models.conftest import write_safetensors

FOLDER = Path(__file__).parent / "formats"
KINDS = sorted(path.name for path in FOLDER.iterdir())
BLOCK_SIZE = 4


def expected(kind: str) -> Any:
    return np.load(FOLDER / kind / "expected.npz")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "exl3"])
def test_every_value_is_exact(kind: str) -> None:
    folder, file = FOLDER / kind, expected(kind)
    stored = weights_of(
        read_safetensors_shards(folder), ConfigReader(read_json(folder / "config.json"), "config.json"), folder
    )
    for name, checksum in zip(file["names"].tolist(), file["checksums"].tolist(), strict=True):
        assert crc32((dequantize(stored[name]) + np.float32(0)).tobytes()) == checksum, name


def test_turned_values_are_those_of_the_definition() -> None:
    """Sums of many numbers: to the last bit, they depend on the order."""
    tensors, file = open_checkpoint(FOLDER / "exl3").tensors, expected("exl3")
    for name, part in {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "mlp.up_proj": "up"}.items():
        wanted = file[f"model.layers.0.{name}.weight"]
        got = dequantize(tensors[f"layers.0.{part}"])[[0, 77]]
        assert np.abs(got - wanted).max() < 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "tolerance"), [(RefBackend, 1e-5), (lambda: CpuBackend(2, kv="f32"), 0.06)])
def test_logits_are_those_of_transformers(kind: str, make: Callable[[], Any], tolerance: float) -> None:
    """On a CPU, activations are rounded to 8 bits."""
    file = expected(kind)
    tokens, wanted = file["tokens"].tolist(), file["logits"]
    backend = make()
    backend.load(load_model(open_checkpoint(FOLDER / kind), backend))
    prompts = [tokens, tokens[:5]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE)
    for chunks in random_steps(np.random.default_rng(0), prompts, BLOCK_SIZE):
        parts = np.concatenate([wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.linalg.norm(backend.logits(greedy_batch(chunks)) - parts) < tolerance * np.linalg.norm(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_made_alone(kind: str) -> None:
    """What fused tensors are split with."""
    tensor = open_checkpoint(FOLDER / kind).tensors["layers.0.q"]
    values = dequantize(tensor)
    for first, last in [(0, 64), (5, 41), (63, 64)]:
        assert np.array_equal(dequantize(some_rows(tensor, first, last)), values[first:last])


def test_rows_of_exl3_between_hadamard_matrices_keep_their_bits() -> None:
    """What fused tensors are split with, if their parts are multiples of 128."""
    tensor = random_tensor(np.random.default_rng(0), "EXL3-3", 384, 128)
    values = dequantize(tensor)
    for first, last, stored in [(0, 128, "EXL3-3"), (128, 384, "EXL3-3"), (64, 128, "BF16"), (0, 100, "BF16")]:
        part = some_rows(tensor, first, last)
        assert np.array_equal(dequantize(part), values[first:last])
        assert stored_as(part).kind == stored


# What becomes of them in memory

KEPT = {  # their matrices, in storage blocks that kernels know
    "awq": {"U4_ZERO_32"},
    "gptq": {"Q4_0"},
    "gptq-3-8": {"Q4_0", "Q8_0"},
    "gptq-ordered": {"GPTQ with desc_act"},
    "autoround-gptq": {"Q4_0", "Q8_0", "BF16"},
    "autoround-awq": {"U4_ZERO_32", "BF16"},
    "int4": {"Q4_0"},
    "int4-zeros": {"U4_ZERO_32"},
    "int8-packed": {"Q8_0"},
    "int8": {"Q8_0"},
    "mxfp4": {"MXFP4"},
    "mlx": {"Q4_1", "U8_MIN_32", "BF16"},
    "mlx-3-6": {"Q4_1", "U6_MIN_32"},
    "mlx-floats": {"MXFP4", "F8_E4M3", "NVFP4"},
    "mxfp8": {"F8_E4M3"},
    "w4afp8": {"Q4_0"},
    "torchao": {"I8", "torchao's int8", "F8_E4M3"},
    "torchao-int4": {"Q4_1"},
    "nvfp4": {"NVFP4"},
    "modelopt": {"NVFP4"},
    "nf4": {"NF4"},
    "fp4": {"bitsandbytes fp4"},
    "bytes": {"I8"},
    "exl3": {"EXL3"},
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_loses_nothing_stays_quantized(kind: str) -> None:
    tensors = open_checkpoint(FOLDER / kind).tensors
    assert {tensor.format.name for name, tensor in tensors.items() if name[-2:] in (".q", ".k", ".o")} == KEPT[kind]


def test_exl3_keeps_its_bits_beside_plain_weights_that_are_quantized() -> None:
    notes: list[str] = []
    config = Config(model=str(FOLDER / "exl3"), device="cpu", quantize="q8_0")
    checkpoint = quantized(open_checkpoint(FOLDER / "exl3"), config, notes.append)
    assert notes == ["weights in EXL3 stay as they are: Q8_0 is for plain ones"]
    kinds = {name: stored_as(tensor).kind for name, tensor in checkpoint.tensors.items()}
    assert (kinds["embed"], kinds["layers.0.q"], kinds["layers.0.k"]) == ("Q8_0", "EXL3-2", "EXL3-3")
    backend, file = CpuBackend(2, kv="f32"), expected("exl3")
    backend.load(load_model(checkpoint, backend))
    backend.reserve_kv(1, 32)
    got = backend.logits(greedy_batch([Chunk(file["tokens"].tolist(), 0, [0])]))
    assert np.linalg.norm(got - file["logits"]) < 0.06 * np.linalg.norm(file["logits"])


def test_a_factor_of_all_values_is_of_rows_too() -> None:
    tensor = open_checkpoint(FOLDER / "nvfp4").tensors["layers.0.q"]
    assert tensor.scales is not None
    assert factor_of(tensor) == factor_of(some_rows(tensor, 3, 9)) == tensor.scales.values[0, 0] != 1
    assert factor_of(open_checkpoint(FOLDER / "bytes").tensors["layers.0.q"]) is None


def test_scales_without_a_number_are_widened(changed: Any) -> None:
    def edit(stored: dict[str, Tensor]) -> None:
        scale = stored[f"{Q}.weight_scale"]
        data = scale.data.copy()
        data[5] = 0x7F
        stored[f"{Q}.weight_scale"] = replace(scale, source=data)

    tensor = open_checkpoint(changed("nvfp4", {}, edit)).tensors["layers.0.q"]
    assert tensor.format.name == "odd NVFP4"
    same = open_checkpoint(FOLDER / "nvfp4").tensors["layers.0.q"]
    odd = np.isnan(dequantize(tensor))
    assert odd.sum() == 16
    assert np.array_equal(dequantize(tensor)[~odd], dequantize(same)[~odd])


def test_a_cpu_says_what_it_widens(caplog: pytest.LogCaptureFixture) -> None:
    backend = CpuBackend(1)
    backend.load(load_model(open_checkpoint(FOLDER / "gptq-ordered"), backend))
    assert caplog.text.count("GPTQ with desc_act weights become BF16 on a CPU") == 1


def test_scales_of_rows_are_rounded_for_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """The reference keeps float32 ones."""
    tensor = open_checkpoint(FOLDER / "bytes").tensors["layers.0.q"]
    blocks = as_near_blocks(tensor)
    assert blocks is not None
    exact, near = dequantize(tensor), dequantize(blocks)
    assert 0 < np.abs(near - exact).max() <= 2**-11 * np.abs(exact).max()
    assert stored_as(tensor).bytes(tensor) == blocks.size == len(blocks.data) == 64 * 64 * 34 // 32
    tiny = replace(tensor, scales=tensor.scales._replace(values=tensor.scales.values * np.float32(1e-4)))
    assert as_near_blocks(tiny) is None
    backend = CpuBackend(1)
    backend.load(load_model(open_checkpoint(FOLDER / "bytes"), backend))
    assert "BF16" not in caplog.text


def test_minima_are_rounded_for_kernels(changed: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The reference keeps float32 ones."""

    def edit(stored: dict[str, Tensor]) -> None:
        zero = stored[f"{Q}._weight_zero_point"]
        values = np.full(prod(zero.shape), 0x3C01, "<u2")  # 0.00787, whose sum with a scale needs more bits
        stored[f"{Q}._weight_zero_point"] = replace(zero, source=values.view(np.uint8))

    tensor = open_checkpoint(folder := changed("torchao-int4", {}, edit)).tensors["layers.0.q"]
    blocks = as_near_blocks(tensor)
    assert blocks is not None
    assert (tensor.format.name, blocks.format.name) == ("torchao's int4", "Q4_1")
    exact, near = dequantize(tensor), dequantize(blocks)
    assert 0 < np.abs(near - exact).max() <= 2**-10 * np.abs(exact).max()
    assert stored_as(tensor).bytes(tensor) == blocks.size == len(blocks.data)
    backend = CpuBackend(1)
    backend.load(load_model(open_checkpoint(folder), backend))
    assert "BF16" not in caplog.text


def test_bytes_are_not_made_before_they_are_read() -> None:
    tensor = open_checkpoint(FOLDER / "awq").tensors["layers.0.q"]
    assert callable(tensor.source)
    assert tensor.size == len(tensor.data)


# Refused

Change = dict[str, Any]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A golden's folder with other fields in its quantization_config, or other tensors."""

    def make(kind: str, change: Change, tensors: Callable[[dict[str, Any]], Any] = lambda _: None) -> Path:
        folder = tmp_path / kind
        shutil.copytree(FOLDER / kind, folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization" if "quantization" in config else "quantization_config"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        stored = read_safetensors(FOLDER / kind / "model.safetensors")
        tensors(stored)
        write_safetensors(folder / "model.safetensors", stored)
        return folder

    return make


def weights(**change: Any) -> Change:
    known = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}
    return {"config_groups": {"a": {"weights": known | change}}}


@pytest.mark.parametrize(("factor", "stored"), [(0, "EXL3-2"), (0x83DCD12D, "EXL3-2"), (1, ""), (0xCBAC1FED, "")])
def test_the_code_book_of_exl3_is_one_that_is_known(factor: int, stored: str, changed: Any) -> None:
    """It is 0 in a file of which only the header was fetched, to plan its memory."""

    def edit(tensors: dict[str, Tensor]) -> None:
        old = tensors["model.layers.0.mlp.down_proj.mul1"]
        made = replace(old, source=np.array([factor], np.uint32).view(np.uint8))
        tensors["model.layers.0.mlp.down_proj.mul1"] = made

    folder = changed("exl3", {}, edit)
    if stored:
        assert stored_as(open_checkpoint(folder).tensors["layers.0.down"]).kind == stored
    else:
        with pytest.raises(UnsupportedModel, match="unknown code book; supported: 3inst, mcg, mul1"):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("awq", {"version": "gemv"}, UnsupportedModel, "version = 'gemv'.*supported: gemm"),
        ("awq", {"zero_point": False}, UnsupportedModel, "zero_point = False"),
        ("awq", {"bits": 8}, UnsupportedModel, "bits = 8"),
        ("awq", {"group_size": "32"}, MalformedFile, "group_size"),
        ("awq", {"smooth": 1}, UnsupportedModel, "smooth = 1 in quantization_config"),
        ("gptq", {"bits": 5}, UnsupportedModel, "bits = 5"),
        ("gptq", {"checkpoint_format": "marlin"}, UnsupportedModel, "checkpoint_format = 'marlin'"),
        ("gptq", {"pack_dtype": "int16"}, UnsupportedModel, "pack_dtype"),
        ("gptq", {"rotation": "hadamard"}, UnsupportedModel, "rotation"),
        ("autoround-gptq", {"packing_format": "auto_round:llm_compressor"}, UnsupportedModel, "packing_format"),
        ("autoround-gptq", {"act_bits": 8}, UnsupportedModel, "act_bits = 8"),
        ("autoround-gptq", {"data_type": "mx_fp"}, UnsupportedModel, "data_type = 'mx_fp'"),
        ("int4", {"format": "marlin-24"}, UnsupportedModel, "format = 'marlin-24'"),
        ("int4", {"config_groups": {}}, UnsupportedModel, "describe 0 ways to quantize"),
        ("int4", weights(num_bits=3), UnsupportedModel, "num_bits = 3"),
        ("int4", weights(strategy="block"), UnsupportedModel, "strategy = 'block'"),
        ("int4", weights(group_size=None), MalformedFile, "has no group_size"),
        ("mxfp4", weights(type="float", group_size=64), UnsupportedModel, "group_size = 64"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, UnsupportedModel, "quant_algo = 'W4A8_AWQ'.*supported: NVFP4, FP8"),
        ("modelopt", {"group_size": 32}, UnsupportedModel, "group_size = 32"),
        ("mlx", {"mode": "nf4"}, UnsupportedModel, "mode = 'nf4'.*supported: affine, mxfp4"),
        ("mlx", {"mode": "mxfp4"}, MalformedFile, "must not have biases"),
        ("mlx-floats", {"mode": "affine"}, MalformedFile, "lacks biases"),
        ("mlx-floats", {"bits": 8}, UnsupportedModel, "bits = 8"),
        ("mlx-floats", {"group_size": 64}, UnsupportedModel, "group_size = 64"),
        ("mxfp8", weights(type="float", num_bits=4), UnsupportedModel, "num_bits = 4"),
        ("torchao", {"smooth": 1}, UnsupportedModel, "smooth = 1"),
        ("mlx", {"bits": 7}, UnsupportedModel, "bits = 7"),
        ("nf4", {"llm_int8_has_fp16_weight": True}, UnsupportedModel, "has_fp16_weight"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, UnsupportedModel, "quant_storage = 'bfloat16'"),
    ],
)
def test_refused_configs(changed: Any, kind: str, change: Change, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(changed(kind, change))


def test_numbers_in_bytes_have_the_bits_that_the_config_says(changed: Any) -> None:
    tensor = open_checkpoint(changed("w4afp8", weights(num_bits=2))).tensors["layers.0.q"]
    with pytest.raises(MalformedFile, match="need more than 2 bits"):
        dequantize(tensor)


Q = "model.layers.0.self_attn.q_proj"


def without(*names: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda stored: [stored.pop(f"{Q}.{name}") for name in names]


def moved(name: str, to: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda stored: stored.update({f"{Q}.{to}": stored.pop(f"{Q}.{name}")})


def shaped(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda stored: stored.update({f"{Q}.{name}": replace(stored[f"{Q}.{name}"], shape=shape)})


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("awq", without("scales"), "lacks .*q_proj.scales"),
        ("awq", without("qweight"), "q_proj.(qzeros|scales)' belongs to a quantized weight that is not there"),
        ("awq", shaped("scales", 4, 32), "q_proj.scales' has shape"),
        ("awq", shaped("qzeros", 1, 16), "q_proj.qzeros' has shape"),
        ("awq", moved("scales", "qzeros"), "lacks"),
        ("gptq-ordered", without("g_idx"), "has no g_idx, but desc_act"),
        ("int4", without("weight_shape"), "lacks .*weight_shape"),
        ("int4-zeros", shaped("weight_zero_point", 2, 8), "weight_zero_point' has shape"),
        ("nvfp4", shaped("weight_scale", 8, 32), "weight_scale' has shape"),
        ("mlx", shaped("biases", 32, 4), "biases' has shape"),
        ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "0 quant_state tensors of bitsandbytes"),
        ("nf4", without("weight.nested_quant_map"), "nested_quant_map, which says how, is missing"),
        ("nf4", shaped("weight.absmax", 8, 8), "absmax' has shape"),
        ("bytes", without("SCB", "weight_format"), "stored as I8; config.json does not say"),
        ("torchao", without("_weight_scale"), "lacks .*_weight_scale"),
        ("torchao-int4", shaped("_weight_scale", 64, 2), "_weight_scale' has shape"),
        ("torchao-int4", shaped("_weight_qdata", 4, 4, 8, 16), "of shape .*packed for one kind of GPU"),
        ("bytes", shaped("SCB", 8, 8), "SCB' has shape"),
    ],
)
def test_refused_tensors(changed: Any, kind: str, edit: Any, message: str) -> None:
    with pytest.raises((MalformedFile, UnsupportedModel), match=message):
        open_checkpoint(changed(kind, {}, edit))


def test_a_weight_is_not_stored_twice(changed: Any) -> None:
    twice = changed("awq", {}, lambda stored: stored.update({f"{Q}.weight": stored[f"{Q}.scales"]}))
    with pytest.raises(MalformedFile, match="stored twice"):
        open_checkpoint(twice)


def test_older_modelopt_has_a_file_of_its_own(changed: Any) -> None:
    folder = changed("modelopt", {})
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": said["quant_algo"], "kv_cache_quant_algo": None, "group_size": 16}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantization}))
    assert np.array_equal(
        *(dequantize(open_checkpoint(path).tensors["layers.0.q"]) for path in (folder, FOLDER / "modelopt"))
    )


ODD_VALUES = (None, -1, 0, 1, 2, 3, 5, 31, 10**9, 2.5, True, "x", [], {}, {"bits": 3})
SAME_SIZE = (("U8", "I8", "F8_E4M3", "F8_E8M0"), ("F16", "BF16", "I16"), ("F32", "I32", "U32"))


def odd_shape(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of as many values."""
    ways = [shape[::-1], (prod(shape),), (1, *shape), (*shape, 1), (prod(shape), 1)]
    if prod(shape) % 2 == 0:
        ways += [(2, prod(shape) // 2), (prod(shape) // 2, 2)]
    return ways[rng.integers(len(ways))]


def damage(rng: np.random.Generator, stored: dict[str, Tensor]) -> None:
    name = sorted(stored)[rng.integers(len(stored))]
    tensor = stored[name]
    match rng.integers(5):
        case 0:
            del stored[name]
        case 1:
            stored[f"{name}.more"] = tensor
        case 2:
            family = next((family for family in SAME_SIZE if tensor.format.name in family), (tensor.format.name,))
            formats = FORMATS | FP8 | INTEGERS
            stored[name] = replace(tensor, format=formats[family[rng.integers(len(family))]])
        case 3:
            stored[name] = replace(tensor, source=rng.permutation(tensor.data))
        case 4:
            stored[name] = replace(tensor, shape=odd_shape(rng, tensor.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_or_nothing(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(crc32(kind.encode()))
    whole = read_safetensors(FOLDER / kind / "model.safetensors")
    config = json.loads((FOLDER / kind / "config.json").read_text())
    key = "quantization" if "quantization" in config else "quantization_config"
    for _ in range(20):
        said, stored = dict(config[key]), dict(whole)
        if rng.integers(3) == 0:
            said[sorted(said)[rng.integers(len(said))]] = ODD_VALUES[rng.integers(len(ODD_VALUES))]
        else:
            damage(rng, stored)
        with suppress(ModelError), np.errstate(all="ignore"):
            found = weights_of(stored, ConfigReader(config | {key: said}, "config.json"), tmp_path)
            for tensor in found.values():
                assert dequantize(tensor).shape == tensor.shape
