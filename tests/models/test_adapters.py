"""Adapters of tiny models against logits of PEFT's merged ones (scripts/make_adapter_goldens.py), on both backends and
from both kinds of file; and what is refused, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend, _native
from penstock.backend.quantize_at_load import quantized
from penstock.backend.ref import RefBackend
from penstock.config import configure
from penstock.errors import AdapterError
from penstock.model.adapter_files import (
    REORDERED_PAIRS,
    SAME_PAIRS,
    AdapterBase,
    LoraAdapter,
    read_adapter,
    updates_of,
)
from penstock.model.load import load_placed, open_checkpoint

MODELS = Path(__file__).parent
ADAPTERS = MODELS / "adapters"
NAMES = sorted(folder.name for folder in ADAPTERS.iterdir())
FOLDER_ONLY = {"qwen35"}  # its GGUF files have the rows of delta nets in another order
TOLERANCE = 1e-3
BLOCKS = 13  # of 4 tokens, for a prompt


class Adapted(NamedTuple):
    """A loaded model with an adapter in slot 0."""

    backend: Any
    base: AdapterBase
    adapter: LoraAdapter
    tokens: list[int]

    def logits(self, slots: Sequence[int]) -> np.ndarray:
        """Returns the logits of the golden's prompt in rows with these adapter slots: [rows, tokens, vocab]."""
        batch = rows_of(self.tokens, slots)
        return self.backend.logits(batch).reshape(len(slots), len(self.tokens), -1)


def rows_of(tokens: list[int], slots: Sequence[int]) -> Batch:
    chunks = [Chunk(tokens, 0, range(row * BLOCKS, (row + 1) * BLOCKS), row) for row in range(len(slots))]
    adapters = np.array(slots if max(slots) >= 0 else (), np.int32)
    return replace(greedy_batch(chunks), adapters=adapters)


def load(name: str, backend: Any, path: Path, gguf: bool = False, to: str = "") -> Adapted:
    golden = MODELS / "goldens" / name
    checkpoint = open_checkpoint(golden / "model.gguf" if gguf else golden)
    checkpoint = quantized(checkpoint, configure(golden, {"quantize": to, "device": "cpu"}))
    model, placements = load_placed(checkpoint, backend)
    backend.load(model)
    backend.reserve_kv(8 * BLOCKS, 4, 8)
    base = AdapterBase.of(checkpoint, placements)
    adapter = read_adapter(path, base)
    backend.adapters.load(0, backend.adapters.pack(updates_of([(adapter, 1.0)], placements)))
    with np.load(golden / "expected.npz") as file:
        return Adapted(backend, base, adapter, file["tokens"].tolist())


def cpu(isa: str = "auto") -> CpuBackend:
    return CpuBackend(2, kv="f32", isa=isa)


def expected(name: str) -> np.ndarray:
    with np.load(ADAPTERS / name / "expected.npz") as file:
        return file["logits"]


def test_goldens_cover_what_families_differ_in():
    assert NAMES == ["deepseek_v2", "gemma2", "gpt2", "phi3", "qwen2", "qwen35", "tied", "untied"]


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("make", [RefBackend, cpu])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_merged_model(name: str, make: Any, kind: str):
    if name in FOLDER_ONLY and kind == "gguf":
        with pytest.raises(AdapterError, match="another order in GGUF files of qwen35"):
            load(name, make(), ADAPTERS / name, gguf=True)
        return
    adapted = load(name, make(), ADAPTERS / name, gguf=kind == "gguf")
    (logits,) = adapted.logits([0])
    tolerance = TOLERANCE if (kind, make) == ("folder", RefBackend) else 1e-2  # F16 has rounded B times its scale
    np.testing.assert_allclose(logits, expected(name), atol=tolerance)
    (plain,) = adapted.logits([-1])
    assert np.abs(plain - expected(name)).max() > 0.1


@pytest.mark.parametrize("gguf", [False, True])
def test_a_gguf_adapter_is_the_same_on_both_kinds_of_base(gguf: bool):
    adapted = load("tied", RefBackend(), ADAPTERS / "tied" / "adapter.gguf", gguf)
    np.testing.assert_allclose(adapted.logits([0])[0], expected("tied"), atol=5e-3)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("name", ["tied", "untied", "phi3"])
def test_rows_alone_and_mixed_are_equal_to_the_bit(name: str, isa: str):
    adapted = load(name, cpu(isa), ADAPTERS / name)
    other = updates_of([(adapted.adapter, -0.5)], adapted.base.placements)
    adapted.backend.adapters.load(3, adapted.backend.adapters.pack(other))
    slots = [0, -1, 3, 0, 0, -1, 3]
    alone = {slot: adapted.logits([slot])[0] for slot in set(slots)}
    for slot, row in zip(slots, adapted.logits(slots), strict=True):
        np.testing.assert_array_equal(row, alone[slot])
    adapted.backend.adapters.drop(3)
    with pytest.raises(ValueError, match="no adapter in slot 3"):
        adapted.logits([3])


@pytest.mark.parametrize("isa", _native.isas())
def test_quantized_bases_have_adapters_too(isa: str):
    """The base is quantized on both sides; the CPU's activations and its matrices A are, too."""
    exact, fast = (load("tied", backend, ADAPTERS / "tied", to="q8_0") for backend in (RefBackend(), cpu(isa)))
    slots = [0, -1, 0]
    rows = fast.logits(slots)
    for row, wanted, slot in zip(rows, exact.logits(slots), slots, strict=True):
        np.testing.assert_array_equal(row, fast.logits([slot])[0])
        assert np.abs(row - wanted).mean() < 0.1
    assert np.abs(rows[0] - rows[1]).max() > 1


def test_several_adapters_add_up():
    adapted = load("tied", RefBackend(), ADAPTERS / "tied")
    both = updates_of([(adapted.adapter, 0.25), (adapted.adapter, 0.75)], adapted.base.placements)
    adapted.backend.adapters.load(1, adapted.backend.adapters.pack(both))
    np.testing.assert_allclose(adapted.logits([1]), adapted.logits([0]), atol=1e-4)


@pytest.mark.parametrize("golden", sorted((MODELS / "goldens").iterdir()), ids=lambda folder: folder.name)
def test_it_is_known_which_families_reorder_q_and_k(golden: Path):
    folder, gguf = (open_checkpoint(golden / file).spec for file in ("", "model.gguf"))
    if gguf.attn.rope.interleaved and not gguf.attn.v_dim:
        assert gguf.arch in (SAME_PAIRS if folder.attn.rope.interleaved else REORDERED_PAIRS)
    elif gguf.attn.rope.inv_freq:
        assert gguf.arch not in REORDERED_PAIRS


# ---- what is refused ----


@pytest.fixture
def base() -> AdapterBase:
    checkpoint = open_checkpoint(MODELS / "goldens" / "tied")
    _, placements = load_placed(checkpoint, RefBackend())
    return AdapterBase.of(checkpoint, placements)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(ADAPTERS / "tied", tmp_path / "adapter")


def with_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora = True: DoRA is not supported"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4'"),
        ({"r": 7}, "have rank 4; r and rank_pattern of adapter_config.json say 7"),
        ({"r": "four"}, "r = 'four'"),
        ({"rank_pattern": {"q_proj(": 4}}, "the pattern 'q_proj('"),
        ({"spectral_gate": 3}, "spectral_gate"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    base: AdapterBase, copy: Path, fields: dict[str, Any], named: str
):
    with_config(copy, **fields)
    with pytest.raises(AdapterError) as error:
        read_adapter(copy, base)
    assert named in error.value.message


PREFIX = "base_model.model.model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        (f"{PREFIX}.q_proj.lora_magnitude_vector", (32,), "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 64), "embeddings"),
        (f"{PREFIX}.q_proj.bias", (32,), "is no LoRA matrix"),
        ("base_model.model.lm_head.weight", (64, 32), "is no LoRA matrix"),
        (f"{PREFIX}.q_proj.lora_B.bias", (32,), "lora_bias"),
        (f"{PREFIX}.w_proj.lora_A.weight", (4, 32), "matrix A without"),
    ],
)
def test_a_tensor_that_would_not_be_computed_is_refused(
    base: AdapterBase, copy: Path, name: str, shape: tuple[int, ...], named: str
):
    file = copy / "adapter_model.safetensors"
    save_file(load_file(file) | {name: np.zeros(shape, np.float32)}, file)
    with pytest.raises(AdapterError, match=named):
        read_adapter(copy, base)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("model.layers.0.self_attn.w_proj", "'model.layers.0.self_attn.w_proj', which this model does not have"),
        ("model.layers.7.self_attn.q_proj", "'layers.7.q', which this model does not have"),
        ("lm_head", "shares with its embedding"),
        ("model.embed_tokens", "changes the embedding"),
    ],
)
def test_a_module_that_cannot_be_adapted_is_refused_by_name(base: AdapterBase, copy: Path, module: str, named: str):
    pair = {"A": np.zeros((4, 32), np.float32), "B": np.zeros((32, 4), np.float32)}
    tensors = {f"base_model.model.{module}.lora_{kind}.weight": value for kind, value in pair.items()}
    save_file(tensors, copy / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=named):
        read_adapter(copy, base)


def test_an_adapter_of_another_base_is_refused(base: AdapterBase):
    with pytest.raises(AdapterError, match=r"weight of shape .* this model's is .*another base"):
        read_adapter(ADAPTERS / "qwen2", base)
    with pytest.raises(AdapterError, match="which this model does not have"):
        read_adapter(ADAPTERS / "gpt2", base)


def test_a_truncated_file_is_refused(base: AdapterBase, copy: Path):
    file = copy / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="fetch it again"):
        read_adapter(copy, base)


def test_what_is_no_adapter_is_refused(base: AdapterBase, copy: Path, tmp_path: Path):
    with pytest.raises(AdapterError, match="there is no adapter at"):
        read_adapter(tmp_path / "nothing", base)
    (copy / "adapter_model.safetensors").rename(copy / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors: give a folder"):
        read_adapter(copy, base)
    with pytest.raises(AdapterError, match=r"general\.type is 'model'"):
        read_adapter(MODELS / "goldens" / "tied" / "model.gguf", base)


def test_a_gguf_adapter_of_another_architecture_is_refused():
    checkpoint = open_checkpoint(MODELS / "goldens" / "qwen2")
    _, placements = load_placed(checkpoint, RefBackend())
    with pytest.raises(AdapterError, match="made for the architecture 'llama'; this model is 'qwen2'"):
        read_adapter(ADAPTERS / "tied" / "adapter.gguf", AdapterBase.of(checkpoint, placements))


def test_absorbed_and_expert_weights_are_refused_by_name(tmp_path: Path):
    checkpoint = open_checkpoint(MODELS / "goldens" / "deepseek_v2")
    _, placements = load_placed(checkpoint, RefBackend())
    base = AdapterBase.of(checkpoint, placements)
    folder = shutil.copytree(ADAPTERS / "deepseek_v2", tmp_path / "adapter")
    for module, named in (("self_attn.kv_b_proj", "absorbed into the attention"), ("mlp.experts.0.up_proj", "experts")):
        pair = {"A": np.zeros((4, 8), np.float32), "B": np.zeros((8, 4), np.float32)}
        prefix = f"base_model.model.model.layers.1.{module}"
        save_file(
            {f"{prefix}.lora_{kind}.weight": value for kind, value in pair.items()},
            folder / "adapter_model.safetensors",
        )
        with pytest.raises(AdapterError, match=named):
            read_adapter(folder, base)


def test_the_digest_tells_contents_and_scales_apart(base: AdapterBase, copy: Path):
    first = read_adapter(copy, base).digest()
    assert read_adapter(ADAPTERS / "tied", base).digest() == first
    with_config(copy, lora_alpha=9)
    scaled = read_adapter(copy, base).digest()
    assert scaled != first
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, file)
    assert read_adapter(copy, base).digest() not in (first, scaled)
