"""Quantizing: the definition, the native quantizer against it to the bit, and models quantized as they are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from penstock.backend.base import Footprint
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend, _native
from penstock.backend.cpu.quantize import quantize as quantize_natively
from penstock.backend.quantize_at_load import quantized
from penstock.backend.ref import RefBackend
from penstock.config import Config
from penstock.engine.build import build_engine
from penstock.errors import ConfigError, MalformedFile
from penstock.model.dequantize import dequantize
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from penstock.model.quantize import quantize
from penstock.model.quantize_choice import choose
from penstock.model.roles import Role, role_of
from penstock.model.tensor import FORMATS, Tensor

CODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
STEPS = {"Q4_0": 16, "Q4_1": 16, "Q5_0": 32, "Q5_1": 32, "Q8_0": 255, "Q4_K": 16, "Q5_K": 32, "Q6_K": 64}


def tensor_of(values: np.ndarray, format_name: str = "F32") -> Tensor:
    plain = Tensor("made up", FORMATS["F32"], values.shape, values.astype("<f4").reshape(-1).view(np.uint8))
    return plain if format_name == "F32" else quantize(plain, FORMATS[format_name])


def samples(kind: str) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    values = (0.02 * rng.standard_t(4, (24, 768))).astype(np.float32)
    values[3:6] = np.array([[0.0], [0.5], [-0.25]])
    if kind == "sparse":
        values *= rng.random(values.shape) < 0.02
    if kind == "one-sided":
        values = -np.abs(values)
    if kind == "tiny":
        values *= np.float32(1e-24)
    return values


def error(values: np.ndarray, coded: Tensor) -> float:
    return float(np.sqrt(np.mean((dequantize(coded).astype(np.float64) - values) ** 2)))


@pytest.mark.parametrize("format_name", CODED)
def test_no_value_is_further_off_than_its_group_is_wide(format_name: str) -> None:
    values = samples("plain")
    found = dequantize(quantize(tensor_of(values), FORMATS[format_name]))
    groups = values.reshape(-1, 16 if format_name == "Q6_K" else 32)
    reach = 2 * np.abs(groups).max(1) / STEPS[format_name]
    assert (np.abs(found - values).reshape(groups.shape).max(1) <= 1.2 * reach + 1e-7).all()
    assert np.array_equal(found[3], np.zeros(768, np.float32))


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_no_worse_than_the_usual_way(format_name: str) -> None:
    """From the lowest value to the highest, as the gguf package does it."""
    values = samples("plain")
    usual = gguf.quantize(values, gguf.GGMLQuantizationType[format_name])
    format = FORMATS[format_name]
    ours = error(values, quantize(tensor_of(values), format))
    assert ours <= error(values, Tensor("usual", format, values.shape, usual.reshape(-1)))


@pytest.mark.parametrize("format_name", CODED)
def test_others_read_it_alike(format_name: str) -> None:
    coded = quantize(tensor_of(samples("plain")), FORMATS[format_name])
    theirs = gguf.dequantize(coded.data.reshape(24, -1), gguf.GGMLQuantizationType[format_name])
    assert np.array_equal(dequantize(coded), theirs)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kind", ["plain", "sparse", "one-sided", "tiny"])
def test_the_native_quantizer_agrees_to_the_bit(kind: str, isa: str) -> None:
    tensor = tensor_of(samples(kind))
    for format_name in CODED:
        expected = quantize(tensor, FORMATS[format_name]).data
        out = np.empty_like(expected)
        assert _native.quantize("F32", tensor.data, format_name, out, 2, isa)
        assert np.array_equal(out, expected), format_name


@pytest.mark.parametrize("source", ["F16", "BF16"])
def test_the_native_quantizer_reads_plain_formats(source: str) -> None:
    tensor = tensor_of(samples("plain"), source)
    coded = quantize_natively(tensor, FORMATS["Q4_K"], threads=2)
    assert np.array_equal(coded.data, quantize(tensor, FORMATS["Q4_K"]).data)


def test_blocks_that_fill_no_vector() -> None:
    tensor = tensor_of(samples("plain")[:1, :96])
    for format_name in ("Q4_0", "Q4_1", "Q8_0"):
        coded = quantize_natively(tensor, FORMATS[format_name], threads=2)
        assert np.array_equal(coded.data, quantize(tensor, FORMATS[format_name]).data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 70000.0])
def test_what_float16_cannot_hold_is_refused(bad: float) -> None:
    values = samples("plain")
    values[2, 5] = bad
    with pytest.raises(MalformedFile, match="made up"):
        quantize(tensor_of(values), FORMATS["Q4_0"])
    with pytest.raises(MalformedFile, match="made up"):
        quantize_natively(tensor_of(values), FORMATS["Q4_0"], threads=1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    tensor = tensor_of(samples("plain"))
    with pytest.raises(ValueError, match="cannot become"):
        _native.quantize("F32", tensor.data[:-4], "Q4_0", np.empty(18, np.uint8), 1)
    with pytest.raises(ValueError, match="no native quantizer"):
        _native.quantize("F32", tensor.data, "IQ2_XXS", np.empty(18, np.uint8), 1)


def test_what_becomes_what() -> None:
    shapes = {
        "embed": (300, 256),
        "layers.0.attn_norm": (256,),
        "layers.0.q": (256, 256),
        "layers.0.q.bias": (256,),
        "layers.0.router": (8, 256),
        "layers.0.down": (256, 96),
        "layers.0.up": (40, 256),
        "head": (300, 256),
    }
    tensors = {name: tensor_of(np.ones(shape, np.float32)) for name, shape in shapes.items()}
    tensors["layers.0.up"] = tensor_of(np.ones((40, 256), np.float32), "Q8_0")
    tensors = {name: replace(tensor, role=role_of(name.removeprefix("layers.0."))) for name, tensor in tensors.items()}
    formats, notes = choose(tensors, "Q4_K")
    assert {name: format.name for name, format in formats.items()} == {
        "embed": "Q6_K",
        "layers.0.q": "Q4_K",
        "layers.0.down": "Q5_0",
        "head": "Q6_K",
    }
    assert notes == (
        "weights with rows of 96, no multiple of 256, become Q5_0",
        "weights in Q8_0 stay as they are: Q4_K is for plain ones",
    )
    assert choose(tensors, "Q4_K", again=True).formats["layers.0.up"].name == "Q4_K"
    odd, notes = choose(
        {"layers.0.o": replace(tensor_of(np.ones((4, 40), np.float32)), role=Role.ATTENTION_OUT)}, "Q8_0"
    )
    assert not odd
    assert "rows of 40" in notes[0]


# ---- at load ----


def config_of(path: Path, quantize: str, device: str = "cpu") -> Config:
    return Config(model=str(path), device=device, threads=2, quantize=quantize, max_rows=1, kv_memory=1 << 20)


@pytest.mark.parametrize("to", ["q8_0", "q4_k", "int4"])
def test_a_model_is_quantized_while_it_is_loaded(goldens: Path, to: str, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(goldens / "untied")
    config = config_of(goldens / "untied", to)
    loaded = quantized(checkpoint, config)
    assert all(tensor.data.nbytes == tensor.size for tensor in loaded.tensors.values())
    wanted = {"q8_0": "Q8_0", "q4_k": "Q5_0", "int4": "Q4_1"}[to]
    assert loaded.tensors["layers.0.q"].format.name == wanted
    assert loaded.tensors["layers.0.attn_norm"].format.name in ("F32", "F16", "BF16")
    assert ("no multiple of 256" in caplog.text) == (to != "q8_0")
    build_engine(config, checkpoint).close()


def logits_of(backend: CpuBackend | RefBackend, checkpoint: Checkpoint) -> np.ndarray:
    backend.load(load_model(checkpoint, backend))
    backend.reserve_kv(8, 4, 1)
    return backend.logits(greedy_batch([Chunk(list(range(16)), 0, range(4))]))


def test_cpu_and_reference_compute_with_the_same_weights(goldens: Path) -> None:
    checkpoint = open_checkpoint(goldens / "qwen3")
    loaded = quantized(checkpoint, config_of(goldens / "qwen3", "int4"))
    plain, expected = logits_of(RefBackend(), checkpoint), logits_of(RefBackend(), loaded)
    found = logits_of(CpuBackend(2), loaded)
    reach = np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.05 * reach
    assert np.abs(found - expected).mean() < 0.3 * np.abs(plain - expected).mean()


@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.parametrize("file", ["", "model.gguf"])
def test_all_large_weights_are_quantized(goldens: Path, name: str, file: str) -> None:
    loaded = quantized(open_checkpoint(goldens / name / file), config_of(goldens / name, "q8_0"))
    matrices = {name: t.format.name for name, t in loaded.tensors.items() if len(t.shape) > 1 and t.shape[-1] % 32 == 0}
    plain = {name.rpartition(".")[2] for name, kind in matrices.items() if kind != "Q8_0"}
    assert plain <= {"router"}
    assert "Q8_0" in matrices.values()


@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "qwen35moe"])
def test_delta_nets_compute_with_quantized_weights(goldens: Path, name: str) -> None:
    checkpoint = open_checkpoint(goldens / name)
    loaded = quantized(checkpoint, config_of(goldens / name, "q4_k"))
    assert loaded.tensors["layers.0.delta_o"].format.name == "Q5_0"
    plain, expected = logits_of(RefBackend(), checkpoint), logits_of(RefBackend(), loaded)
    found = logits_of(CpuBackend(2), loaded)
    assert np.abs(found - expected).mean() < 0.4 * np.abs(plain - expected).mean()


LATENT = {"q_a", "latent", "k_rope", "v_b", "gate", "up", "embed", "head"}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("deepseek_v2", LATENT - {"q_a"} | {"q"}),
        ("deepseek_v3", LATENT),
        ("gpt_oss", {"q", "k", "v", "o", "gate", "up", "embed", "head"}),
    ],
)
def test_latents_and_experts_are_quantized_too(goldens: Path, name: str, changed: set[str]) -> None:
    """Other rows of these are shorter than a block."""
    checkpoint, config = open_checkpoint(goldens / name), config_of(goldens / name, "q8_0")
    loaded = quantized(checkpoint, config)
    matrices = {key: tensor for key, tensor in loaded.tensors.items() if len(tensor.shape) > 1}
    assert {key.rpartition(".")[2] for key, one in matrices.items() if one.format.name == "Q8_0"} == changed
    short = [key for key, one in matrices.items() if one.format.name != "Q8_0" and not key.endswith("router")]
    assert all(matrices[key].shape[-1] % 32 for key in short)
    plain, expected = logits_of(RefBackend(), checkpoint), logits_of(RefBackend(), loaded)
    found, reach = logits_of(CpuBackend(2), loaded), np.abs(plain).max()
    assert 0 < np.median(np.abs(expected - plain).max(1)) < 0.05 * reach  # a few tokens choose other experts
    assert np.median(np.abs(found - expected).max(1)) < 0.05 * reach
    on_a_gpu = quantized(checkpoint, replace(config, device="cuda"))
    assert not any(key.endswith(("k_b", "v_b")) and one.format.name == "Q8_0" for key, one in on_a_gpu.tensors.items())
    assert on_a_gpu.tensors["layers.1.experts.0.up"].format.name == "Q8_0"


def test_quantized_weights_stay_as_they_are(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(smollm2)
    loaded = quantized(checkpoint, config_of(smollm2, "q4_k"))
    assert all(tensor is checkpoint.tensors[name] for name, tensor in loaded.tensors.items())
    assert "weights in Q4_1 stay as they are" in caplog.text


def test_less_memory_is_planned(goldens: Path) -> None:
    from penstock.backend import open_backend

    checkpoint = open_checkpoint(goldens / "untied")

    def footprint(to: str) -> Footprint:
        config = config_of(goldens / "untied", to)
        return open_backend(config).footprint(checkpoint.spec, quantized(checkpoint, config).tensors.values())

    assert footprint("int4").weights < footprint("q8_0").weights < footprint("").weights


@pytest.mark.parametrize(
    ("device", "to", "words"), [("cpu", "fp8", "q8_0"), ("cpu", "q3", "q4_k, int4"), ("ref", "fp8", "GPU")]
)
def test_what_cannot_be_is_refused(goldens: Path, device: str, to: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_engine(config_of(goldens / "untied", to, device), open_checkpoint(goldens / "untied"))
