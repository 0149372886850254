"""Hugging Face folders as GGUF files: what is written is what llama.cpp's own converter would have written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.backend.cpu.quantize import quantize
from penstock.errors import ConfigError, MalformedFile, ModelError, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.gguf.export import Export, export, file_tensors
from penstock.model.gguf.metadata import OWN, config_keys, difference
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.writer import encoded, write_gguf
from penstock.model.load import CONFIG, open_checkpoint
from penstock.model.quantize_choice import choose
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Format, Tensor, some_rows

GOLDENS = Path(__file__).parent / "goldens"
ENCODERS = Path(__file__).parent / "encoders"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
WRITTEN = [name for name in NAMES if open_checkpoint(GOLDENS / name).spec.arch in OWN]

WHOLE = ".attn_kv_b.weight"
OLDER = ("attention.key_length", "attention.value_length", "attention.head_count_kv")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def encode(tensor: Tensor, format: Format) -> Tensor:
    return quantize(tensor, format, threads=1)


def written(path: Path, made: Export) -> Path:
    write_gguf(path, made.keys, made.tensors, lambda name, size: None)
    return path


@pytest.fixture(autouse=True)
def no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goldens have no tokenizers."""
    monkeypatch.setattr("penstock.text.gguf_export.text_keys", lambda path, size: {"tokenizer.ggml.model": "none"})


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_says_what_the_folder_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where that is refused, because llama.cpp does not compute what its own converter wrote."""
    monkeypatch.setattr("penstock.model.gguf.metadata.check_read_alike", lambda spec: None)
    check_alike(written(tmp_path / "model.gguf", export(GOLDENS / name, "f32", encode)), GOLDENS / name / "model.gguf")


def check_alike(path: Path, golden: Path) -> None:
    made, expected = read_gguf(path), read_gguf(golden)
    wanted, found = open_checkpoint(golden), open_checkpoint(path)
    assert not difference(wanted.spec, found.spec)
    unused = f"blk.{wanted.spec.layers}."
    values = values_of(made.tensors, wanted.spec, joined=any(name.endswith(WHOLE) for name in expected.tensors))
    assert values.keys() == {name for name in expected.tensors if not name.startswith(unused)}
    for key, found_values in values.items():
        expected_values = dequantize(expected.tensors[key])
        assert found_values.shape == expected_values.shape
        assert np.allclose(found_values, expected_values, rtol=1e-3, atol=1e-6), key
    said = {key: value for key, value in expected.metadata.items() if key != "general.name"}
    if wanted.spec.unused_layers:  # which are not written
        said = {key: value for key, value in said.items() if not key.endswith(("block_count", "nextn_predict_layers"))}
    if any(name.endswith(WHOLE) for name in expected.tensors):  # older files, whose heads are not those of latents
        said = {key: value for key, value in said.items() if not key.endswith(OLDER)}
    texts = {key: value for key, value in said.items() if isinstance(value, str | list)}
    numbers = {key: value for key, value in said.items() if key not in texts}
    assert {key: made.metadata[key] for key in texts} == texts
    assert {key: made.metadata[key] for key in numbers} == pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("name", ["bert", "distilbert", "nomic"])
def test_encoders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And their tokenizers."""
    monkeypatch.undo()
    folder = tmp_path / name
    shutil.copytree(ENCODERS / name, folder, ignore=shutil.ignore_patterns("sentence_bert_config.json"))
    check_alike(written(tmp_path / "model.gguf", export(folder, "f32", encode)), ENCODERS / name / "model.gguf")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_positions_that_an_encoder_uses(name: str, tmp_path: Path) -> None:
    """As many as texts are long at most, and the first of them is the first row."""
    folder = open_checkpoint(ENCODERS / name)
    found = open_checkpoint(written(tmp_path / "model.gguf", export(ENCODERS / name, "f32", encode)))
    first = folder.spec.first_position
    rows = dequantize(folder.tensors["positions"])[first : first + 50]
    assert np.array_equal(dequantize(found.tensors["positions"]), rows)
    assert (found.spec.max_len, found.spec.pooling) == (50, folder.spec.pooling)


def test_attention_in_odd_layers_is_refused() -> None:
    checkpoint = open_checkpoint(GOLDENS / "qwen35")
    odd = replace(checkpoint.spec, recurrent=frozenset((1, 2)))
    with pytest.raises(UnsupportedModel, match=r"a GGUF file of qwen35 cannot express .* recurrent is"):
        config_keys(ConfigReader(checkpoint.metadata, CONFIG), odd, {"token_embd.weight": checkpoint.tensors["embed"]})


def test_shapes_are_checked_first(folder_with: Callable[..., Path]) -> None:
    def shortened(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
        tensors[name] = some_rows(tensors[name], 0, 90)

    with pytest.raises(MalformedFile, match=r"in_proj_qkvz.* needs \(96, 32\)"):
        export(folder_with("qwen3next", tensors=shortened), "q8_0", encode)


def test_sections_of_the_rope_are_kept(folder_with: Callable[..., Path], tmp_path: Path) -> None:
    def sections(config: dict[str, Any]) -> None:
        config["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [0, 1, 1]}
        text = {key: config.pop(key) for key in [*config] if key != "architectures"}
        config |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
        config["tie_word_embeddings"] = True

    path = written(tmp_path / "model.gguf", export(folder_with("qwen35", sections), "f32", encode))
    assert read_gguf(path).metadata["qwen35.rope.dimension_sections"] == [0, 1, 1, 0]


def values_of(tensors: Mapping[str, Tensor], spec: ModelSpec, joined: bool) -> dict[str, np.ndarray]:
    """`joined`: keys' and values' halves become one tensor, as older files of DeepSeek have them."""
    values = {name: dequantize(tensor) for name, tensor in tensors.items()}
    for layer in range(spec.layers) if joined else ():
        keys, others = (values.pop(f"blk.{layer}.attn_{half}.weight") for half in ("k_b", "v_b"))
        heads = np.concatenate([keys.swapaxes(1, 2), others], axis=1)
        values[f"blk.{layer}{WHOLE}"] = heads.reshape(-1, heads.shape[2])
    return values


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_all_products_of_experts_and_latents_are_quantized(name: str) -> None:
    """But for rows that are too short, which goldens have and published models do not."""
    tensors = {
        part.name: replace(tensor, name=key, shape=(*tensor.shape[:-1], 256))
        for key, part in file_tensors(open_checkpoint(GOLDENS / name)).items()
        for tensor in part.sources[:1]
        if len(tensor.shape) > 1
    }
    formats, notes = choose({tensor.name: tensor for tensor in tensors.values()}, "Q4_K")
    plain = {file_name for file_name, tensor in tensors.items() if tensor.name not in formats}
    assert not notes
    assert all(".ffn_gate_inp." in file_name for file_name in plain)


@pytest.mark.parametrize("to", ["q8_0", "f32"])
def test_experts_published_in_four_bits_stay_so(to: str, tmp_path: Path) -> None:
    made = export(GOLDENS.parent / "mxfp4", to, encode)
    file = read_gguf(written(tmp_path / "model.gguf", made))
    assert made.notes == (f"weights in MXFP4 stay as they are: {to.upper()} is for plain ones",)
    formats = {key.rpartition("_exps.weight")[1] or key: tensor.format.name for key, tensor in file.tensors.items()}
    assert formats["_exps.weight"] == "MXFP4"
    assert formats["blk.0.attn_q.weight"] == to.upper()
    assert {tensor.format.name for key, tensor in file.tensors.items() if key.endswith((".bias", "sinks.weight"))} == {
        "F32"
    }
    wanted, found = (open_checkpoint(path).tensors for path in (GOLDENS.parent / "mxfp4", tmp_path / "model.gguf"))
    experts = [key for key in wanted if ".experts." in key and not key.endswith(".bias")]
    assert len(experts) == 2 * 4 * 3
    assert all(np.array_equal(wanted[key].data, found[key].data) for key in experts)
    again = export(tmp_path / "model.gguf", "q4_0", encode, again=True)
    assert {tensor.format.name for tensor in again.tensors} == {"F32", "Q4_0", "Q8_0"}


def test_families_without_words_for_it_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OWN, "llama")
    with pytest.raises(UnsupportedModel, match="the family llama cannot be written as GGUF yet; supported: qwen2"):
        export(GOLDENS / "tied", "f32", encode)


@pytest.mark.parametrize("name", ["opt", "vaultgemma"])
def test_families_that_llama_cpp_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"llama.cpp has no architecture for {name}"):
        export(GOLDENS.parent / "folders" / name, "f32", encode)


def test_others_read_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", export(GOLDENS / "qwen2", "q8_0", encode))
    reader = gguf.GGUFReader(path)
    expected = read_gguf(path)
    assert {tensor.name: tensor.tensor_type.name for tensor in reader.tensors} == {
        name: tensor.format.name for name, tensor in expected.tensors.items()
    }
    assert all(np.array_equal(t.data.reshape(-1).view(np.uint8), expected.tensors[t.name].data) for t in reader.tensors)
    assert reader.fields["qwen2.block_count"].contents() == 2
    assert reader.fields["general.file_type"].contents() == 7


def test_a_gguf_file_keeps_its_keys(tmp_path: Path) -> None:
    source = read_gguf(GOLDENS / "gemma3" / "model.gguf")
    path = written(tmp_path / "model.gguf", export(GOLDENS / "gemma3" / "model.gguf", "q8_0", encode))
    made = read_gguf(path)
    kept = {key: made.metadata[key] for key in made.metadata if key != "general.file_type"}
    assert kept == {key: source.metadata[key] for key in source.metadata}
    assert made.metadata["general.file_type"] == 7
    assert made.tensors["blk.0.attn_q.weight"].format.name == "Q8_0"
    assert made.tensors["blk.0.attn_norm.weight"].format.name == "F32"


def test_quantized_weights_need_a_word(tmp_path: Path) -> None:
    first = written(tmp_path / "first.gguf", export(GOLDENS / "untied", "q8_0", encode))
    with pytest.raises(ConfigError, match=r"in Q8_0: .* --again"):
        export(first, "q4_0", encode)
    second = written(tmp_path / "second.gguf", export(first, "q4_0", encode, again=True))
    assert read_gguf(second).tensors["blk.0.attn_q.weight"].format.name == "Q4_0"


def test_windows_that_a_file_cannot_tell_of_are_refused(folder_with: Callable[..., Path]) -> None:
    def windows(config: dict[str, object]) -> None:
        config |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
        config.pop("layer_types", None)

    with pytest.raises(UnsupportedModel, match="a GGUF file of qwen2 cannot express"):
        export(folder_with("qwen2", windows), "q8_0", encode)


@pytest.mark.parametrize(
    ("golden", "key", "value", "words"),
    [
        ("glm_moe_dsa", "index_head_dim", 20, "glmdsa cannot express index_head_dim = 20"),
        ("deepseek_v3", "rope_interleave", False, "rope_interleave = False"),
        ("deepseek_v3", "rope_parameters.mscale", 2.0, "deepseek2 cannot express what config.json says: scale is 1.1"),
        ("gpt_oss", "layer_types", ["sliding_attention"] * 2, "layer_types .* every other layer"),
        ("mistral", "sliding_window", 9, "llama cannot express sliding_window = 9: .* --config sliding_window=null"),
        ("mixtral", "sliding_window", 9, "mixtral cannot express sliding_window = 9"),
        ("phi3", "sliding_window", 9, "phi3 cannot express sliding_window = 9"),
        ("starcoder2", "sliding_window", 9, "starcoder2 cannot express sliding_window = 9"),
        ("llama4", "no_rope_layers", [1] * 4, "llama4 cannot express what config.json says"),
        ("cohere_plus", "use_qk_norm", True, "cohere cannot express use_qk_norm = true in a model of 2 layers"),
        ("qwen3_moe", "norm_topk_prob", False, "qwen3moe cannot express norm_topk_prob = false"),
        ("qwen3next", "norm_topk_prob", False, "qwen3next cannot express norm_topk_prob = false"),
        ("deepseek_v2", "topk_method", "greedy", "deepseek2 cannot express q_lora_rank = null in a model of 2 layers"),
        ("qwen2_moe", "norm_topk_prob", True, "qwen2moe cannot express norm_topk_prob = true"),
        ("olmoe", "norm_topk_prob", True, "olmoe cannot express norm_topk_prob = true"),
        ("olmoe", "norm_topk_prob", False, "olmoe cannot express num_key_value_heads = 2: .* expects 4"),
        ("dots1", "norm_topk_prob", True, "dots1 cannot express num_key_value_heads = 2"),
        ("ernie4_5_moe", "moe_layer_interval", 2, "ernie45 cannot express moe_layer_interval above 1"),
        ("falcon", "num_ln_in_parallel_attn", 2, "a Falcon with two norms in each layer cannot be written"),
        ("gpt_neox", "hidden_act", "gelu_new", "gptneox cannot express .* act is 'gelu_tanh'"),
        ("stablelm", "tie_word_embeddings", True, "stablelm cannot express tie_word_embeddings = true"),
        ("seed_oss", "rope_parameters", LLAMA3, "seedoss cannot express rope_type = llama3"),
        ("deepseek_v2", "n_group", 2, "deepseek2 cannot express topk_method = group_limited_greedy"),
    ],
)
def test_what_files_have_no_words_for_is_refused(
    folder_with: Callable[..., Path], golden: str, key: str, value: object, words: str
) -> None:
    def change(config: dict[str, Any]) -> None:
        *tables, last = key.split(".")
        for table in tables:
            config = config[table]
        config[last] = value

    with pytest.raises(UnsupportedModel, match=words):
        export(folder_with(golden, change), "q8_0", encode)


def test_biases_that_files_have_no_tensors_for_are_refused(
    folder_with: Callable[..., Path], floats: Callable[..., Tensor]
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            if name.endswith("_proj.weight") and ".self_attn." in name:
                tensors[name.removesuffix("weight") + "bias"] = floats(tensors[name].shape[0])

    folder = folder_with("qwen3", lambda config: config.update(attention_bias=True), add)
    with pytest.raises(UnsupportedModel, match=r"qwen3 cannot express attention_bias = true: .* biases of o"):
        export(folder, "q8_0", encode)


@pytest.mark.parametrize(("golden", "window"), [("mistral", None), ("mistral", 64), ("phi3", None)])
def test_windows_that_change_nothing_are_written(
    folder_with: Callable[..., Path], tmp_path: Path, golden: str, window: int | None
) -> None:
    folder = folder_with(golden, lambda config: config.update(sliding_window=window))
    path = written(tmp_path / "model.gguf", export(folder, "f32", encode))
    assert open_checkpoint(path).spec.attn.window == (window or 0)


def test_a_folder_can_be_changed_before(tmp_path: Path) -> None:
    changes = ["sliding_window=null", "colour=red"]
    made = export(GOLDENS / "mistral", "f32", encode, changes=changes)
    assert open_checkpoint(written(tmp_path / "model.gguf", made)).spec.attn.window == 0
    assert made.notes == ("config.json has fields that this engine does not know: colour",)
    with pytest.raises(UnsupportedModel, match="colour"):
        export(GOLDENS / "mistral", "f32", encode, changes=changes, strict=True)


def test_nothing_is_left_of_a_file_that_failed(tmp_path: Path) -> None:
    def fail(tensor: Tensor, format: Format) -> Tensor:
        raise KeyboardInterrupt

    (tmp_path / "model.gguf").write_text("before")
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "model.gguf", export(GOLDENS / "tied", "q8_0", fail))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("model.gguf", "before")]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelError, match="1000 bytes free"):
        written(tmp_path / "model.gguf", export(GOLDENS / "tied", "q8_0", encode))
    assert not list(tmp_path.iterdir())


def test_values_of_every_kind(tmp_path: Path) -> None:
    values = {"a": "ä", "b": True, "c": 7, "d": 0.5, "e": ["x", "yz"], "f": [1, -2], "g": [0.25], "h": []}
    write_gguf(tmp_path / "m.gguf", {key: encoded(value) for key, value in values.items()}, (), lambda *_: None)
    assert dict(read_gguf(tmp_path / "m.gguf").metadata) == values
