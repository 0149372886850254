from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError, ModelNotFound
from penstock.model.registry import GGUF
from penstock.store import hub
from penstock.store.catalogue import CATALOGUE, CatalogueModel, tags_of
from penstock.store.quantizations import BITS, choose, fit, quantization_of
from penstock.store.refs import ALIASES, HubRepo, full_name, is_spelled_like_model, name_of, parse

GB = 10**9


@pytest.mark.parametrize("model", CATALOGUE, ids=lambda model: model.full_name)
def test_every_model_of_the_catalogue_can_be_run(model: CatalogueModel) -> None:
    assert model.arch in GGUF
    assert set(model.quantizations) <= BITS.keys()
    assert model.default(10 * GB) in model.quantizations
    source = parse(model.full_name)
    assert source == HubRepo(model.repo)
    assert name_of(source) == model.full_name
    quantized = f"{model.full_name}-{model.quantizations[0].lower()}"
    assert name_of(parse(quantized)) == quantized
    assert is_spelled_like_model(model.name)


def test_names_and_repositories_are_unique() -> None:
    assert len({model.full_name for model in CATALOGUE}) == len({model.repo for model in CATALOGUE}) == len(CATALOGUE)


def test_names_are_read_as_ollama_writes_them() -> None:
    source = HubRepo("bartowski/Llama-3.2-3B-Instruct-GGUF")
    for ref in ("llama3.2", "llama3.2:latest", "Llama3.2:3B", "llama3.2:3b-instruct"):
        assert parse(ref) == source
    for ref in ("llama3.2:3b-q8_0", "llama3.2:3b-Q8_0", "llama3.2:3b-instruct-q8_0"):
        assert parse(ref) == HubRepo(source.repo, quantization="Q8_0")
    assert full_name("llama3.2") == "llama3.2:3b"
    assert full_name("mine") == "mine"
    assert full_name("smollm2") == "smollm2"  # the default model is a file of its own, not a tag of the catalogue
    assert parse("qwen3:30b-a3b-q4_k_m") == HubRepo("Qwen/Qwen3-30B-A3B-GGUF", quantization="Q4_K_M")


def test_the_default_model_and_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("smollm2") == parse("smollm2:latest") == ALIASES["smollm2"]
    assert parse("smollm2:135m") == HubRepo("bartowski/SmolLM2-135M-Instruct-GGUF")
    monkeypatch.chdir(tmp_path)
    for word in ("llama3.2", "llama3.2:1b"):
        Path(word).mkdir()
        assert parse(word) == Path(word)


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("lama3.2", "did you mean llama3.2"),
        ("qwen3:9b", f"qwen3 has the tags {', '.join(tags_of('qwen3'))}"),
        ("deepsek-r1:7b", "did you mean deepseek-r1:7b"),
        ("llama3.2:1b-q9", "llama3.2 has the tags 3b, 1b"),
    ],
)
def test_mistyped_names_are_told_the_nearest(ref: str, hint: str) -> None:
    with pytest.raises(ModelNotFound, match=hint):
        parse(ref)


def test_the_quantization_follows_the_memory() -> None:
    sizes = {"Q2_K": 3 * GB, "Q4_K_M": 5 * GB, "Q8_0": 9 * GB, "UD-Q4_K_XL": 5 * GB}
    assert choose(sizes, 64 * GB) == "Q4_K_M"
    assert choose(sizes, 5 * GB) == "Q2_K"
    assert choose(sizes, 3 * GB) == ""
    assert choose({"Q4_K_M": GB // 4, "Q8_0": GB // 2}, 64 * GB) == "Q8_0"
    assert choose({"Q8_0": 2 * GB, "F16": 4 * GB}, 64 * GB) == "Q8_0"
    assert choose({"IQ1_S": GB, "model": 2 * GB}, 64 * GB) == "IQ1_S"
    assert [fit(4 * GB, memory) for memory in (8 * GB, 5 * GB, 4 * GB)] == ["fits", "tight", "too large"]


def needed(source: HubRepo, sizes: dict[str, int]) -> list[str]:
    return hub.RepoFiles(source, sizes, "main").needed().names


def test_a_model_that_does_not_fit_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "available_memory", lambda: GB)
    sizes = {"m-Q4_K_M.gguf": 5 * GB, "m-Q2_K.gguf": 3 * GB}
    with pytest.raises(ConfigError, match=r"Q2_K\) needs 3\.6 GB of memory, and 1\.0 GB are free.* Q2_K, Q4_K_M"):
        needed(HubRepo("a/b"), sizes)
    assert needed(HubRepo("a/b", quantization="Q4_K_M"), sizes) == ["m-Q4_K_M.gguf"]


def test_of_a_whole_and_a_split_file_the_whole_is_taken() -> None:
    sizes = {"m-q4_k_m.gguf": 2, "m-q4_k_m-00001-of-00002.gguf": 1, "m-q4_k_m-00002-of-00002.gguf": 1}
    assert needed(HubRepo("a/b", quantization="Q4_K_M"), sizes) == ["m-q4_k_m.gguf"]
    assert needed(HubRepo("a/b"), sizes) == ["m-q4_k_m.gguf"]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("tiny.q8_0.gguf", "Q8_0"),
        ("a/gpt-oss-120b-mxfp4-00001-of-00003.gguf", "MXFP4"),
        ("m-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("m-fp16.gguf", "F16"),
        ("m-BF16.gguf", "BF16"),
        ("Q8_0.gguf", "Q8_0"),
        ("model.gguf", ""),
        ("q4-model.gguf", ""),
    ],
)
def test_file_names_tell_the_quantization(file: str, name: str) -> None:
    assert quantization_of(file) == name
