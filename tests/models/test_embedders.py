"""Decoders that are published without an output head, to make embeddings: they are the model within one that has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu.quantize import quantize
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.errors import InvalidRequest, MalformedFile, UnsupportedModel
from penstock.model.classifier import Affine, DenseHead
from penstock.model.config_reader import ConfigReader
from penstock.model.gguf.export import export
from penstock.model.gguf.writer import write_gguf
from penstock.model.load import load_model, open_checkpoint, read_fields
from penstock.text import check_answers
from penstock.text.pairs import check_scores
from penstock.types import Finished, Limits, Request, SamplingParams

POOLED = Path(__file__).parent / "pooled.npz"
ARCHITECTURES = {"llama3": "LlamaModel", "mistral": "MistralModel", "qwen3": "Qwen3Model", "gemma2": "Gemma2Model"}
EMBEDDINGGEMMA = Path(__file__).parent / "folders" / "embeddinggemma"
BACKENDS = {"ref": RefBackend, "cpu": lambda: CpuBackend(2, kv="f32")}
LIMITS = Limits(max_len=64, max_rows=2, step_tokens=16, block_size=4, num_blocks=32, vocab=48, pooling="last")


@pytest.fixture
def bare(folder_with):
    def make(golden: str, architecture: str) -> Path:
        def renamed(tensors):
            tensors.pop("lm_head.weight", None)
            for name in list(tensors):
                tensors[name.removeprefix("model.")] = tensors.pop(name)

        return folder_with(golden, lambda config: config.update(architectures=[architecture]), renamed)

    return make


def with_last_pooling(folder: Path) -> Path:
    """As Qwen3-Embedding is published."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    modules += [{"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    said = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    return folder


def state(path: Path, tokens: list[int], kind: str, backend) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    backend.load(load_model(checkpoint, backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size, 4)
    limits = LIMITS._replace(generates=False, vocab=64, encoder=checkpoint.spec.encoder, step_tokens=64)
    engine = assemble(backend, limits, dense=checkpoint.dense)
    engine.add(Request(1, tuple(tokens), SamplingParams(), 0, pooling=kind))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return np.frombuffer(event.pooled, "<f4")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("golden", ARCHITECTURES)
def test_states_are_those_of_transformers(golden, backend, bare, goldens):
    folder = bare(golden, ARCHITECTURES[golden])
    spec = open_checkpoint(folder, strict=True).spec
    assert (spec.generates, spec.tied) == (False, True)
    with np.load(goldens / golden / "expected.npz") as file:
        tokens = file["tokens"].tolist()
    with np.load(POOLED) as file:
        for kind in ("mean", "last"):
            assert np.abs(state(folder, tokens, kind, BACKENDS[backend]()) - file[f"{golden}.{kind}"]).max() < 1e-4


def test_the_architecture_may_be_that_of_a_model_with_a_head(bare, goldens):
    """Qwen3-Embedding says Qwen3ForCausalLM. The smallest has tied embeddings, so it could make text, too."""
    folder = with_last_pooling(bare("qwen3", "Qwen3ForCausalLM"))
    spec = open_checkpoint(folder).spec
    assert (spec.generates, spec.pooling) == (True, "last")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert not open_checkpoint(folder).spec.generates
    load_model(open_checkpoint(folder), RefBackend())


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
def test_files_say_how_to_pool(architecture, bare, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.text.gguf_export.text_keys", lambda path, size: {"tokenizer.ggml.model": "none"})
    folder = with_last_pooling(bare("qwen3", architecture))
    made = export(folder, "f32", lambda tensor, format: quantize(tensor, format, threads=1))
    write_gguf(tmp_path / "model.gguf", made.keys, made.tensors, lambda name, size: None)
    file = open_checkpoint(tmp_path / "model.gguf")
    assert (file.metadata["qwen3.pooling_type"], file.spec.pooling) == (3, "last")


def test_other_poolings_of_a_file_are_refused(gguf_with):
    path = gguf_with("qwen3", metadata=lambda metadata: metadata.update({"qwen3.pooling_type": 9}))
    with pytest.raises(UnsupportedModel, match=r"qwen3\.pooling_type = 9"):
        open_checkpoint(path)


def test_it_makes_embeddings_that_can_be_compared_and_no_text():
    limits = LIMITS._replace(generates=False)
    with pytest.raises(InvalidRequest, match="a decoder without an output head, which returns embeddings and no text"):
        check_answers(limits)
    check_scores(limits)
    with pytest.raises(InvalidRequest, match="cannot score"):
        check_scores(LIMITS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("file", ["", "model.gguf"], ids=["folder", "gguf"])
def test_embeddinggemma_sees_to_both_sides_and_has_dense_layers(file, backend):
    checkpoint = open_checkpoint(EMBEDDINGGEMMA / file)
    assert (checkpoint.spec.encoder, checkpoint.spec.pooling, checkpoint.embedding_width) == (True, "mean", 24)
    assert {checkpoint.spec.attention(layer).window for layer in range(6)} == {6, 0}
    with np.load(EMBEDDINGGEMMA / "expected.npz") as wanted:
        found = state(EMBEDDINGGEMMA / file, wanted["tokens"].tolist(), "mean", BACKENDS[backend]())
        assert np.abs(found - wanted["embedding"]).max() < 5e-4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.ReLU"}, UnsupportedModel, "activation_function"),
        ({"in_features": 33}, UnsupportedModel, "in_features = 33"),
        ({"out_features": 41}, MalformedFile, "2_Dense/model.safetensors must hold"),
        ({"bias": True}, MalformedFile, "linear.bias"),
        ({"unknown": 1}, UnsupportedModel, "unknown = 1"),
    ],
)
def test_other_dense_layers_are_refused(tmp_path, changes, error, message):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDINGGEMMA, folder)
    config = folder / "2_Dense" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


def test_texts_pass_through_dense_layers(tmp_path):
    """As LaBSE is published."""
    folder, rng = tmp_path / "bert", np.random.default_rng(0)
    shutil.copytree(Path(__file__).parent / "encoders" / "bert", folder)
    weight, bias = rng.standard_normal((20, 32)).astype(np.float32), rng.standard_normal(20).astype(np.float32)
    (folder / "2_Dense").mkdir()
    said = {"in_features": 32, "out_features": 20, "activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(said | {"bias": True}))
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with np.load(folder / "expected.npz") as file:
        tokens, states = file["tokens"].tolist(), file["states"]
    wanted = np.tanh(weight @ states.mean(0) + bias)
    with LLM(folder, device="cpu", threads=1) as llm:
        found = llm.embed(tokens)[0].outputs
        assert found.hidden_size == 20
        assert np.abs(found.vector - wanted / np.linalg.norm(wanted)).max() < 1e-5
        with pytest.raises(InvalidRequest, match="dimensions"):
            llm.embed(tokens, dimensions=21)


EMBEDDINGGEMMA_300M = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "transformers_version": "4.57.0.dev0",
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 262144,
}


def test_embeddinggemma_as_it_is_published():
    reader = ConfigReader(EMBEDDINGGEMMA_300M, "config.json")
    spec = read_fields(reader)
    assert (spec.encoder, spec.generates, reader.unknown) == (True, False, [])
    assert [spec.attention(layer).window for layer in range(6)] == [257] * 5 + [0]


def test_dense_layers_are_not_lost_in_a_file():
    with pytest.raises(UnsupportedModel, match="dense layers after its pooling cannot be written as GGUF"):
        export(EMBEDDINGGEMMA, "f32", lambda tensor, format: tensor)


def test_dense_layers_may_have_a_bias_and_tanh():
    weight, bias = np.array([[2, 0], [0, -1], [1, 1]], np.float32), np.array([0, 1, 0], np.float32)
    head = DenseHead(((Affine(weight, bias), "tanh"),))
    found = np.frombuffer(head.answer(np.array([0.5, 2], "<f4").tobytes()), "<f4")
    assert head.width == 3
    assert found == pytest.approx(np.tanh([1, -1, 2.5]))
