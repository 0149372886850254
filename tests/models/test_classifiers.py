"""Tiny classifiers and rerankers against the logits that transformers computed (scripts/make_classifier_goldens.py), on
the reference and on the CPU; what their folders say, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.errors import InvalidRequest, MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.load import load_text, open_checkpoint, read_fields
from penstock.text.pairs import PairPrompts, PairTemplate, pair_template, scores
from penstock.text.tokenizer import PairTokens
from tests.models.config_json import read_config

CLASSIFIERS = Path(__file__).parent / "classifiers"
NAMES = sorted(folder.name for folder in CLASSIFIERS.iterdir())
FILES = {name: CLASSIFIERS / name for name in NAMES}
FILES |= {f"{name} gguf": CLASSIFIERS / name / "model.gguf" for name in ("bert", "yes_no")}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(CLASSIFIERS / name.split()[0] / "expected.npz") as file:
        return dict(file)


def logits(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The logits of all prompts, computed together."""
    pending = [llm._maker.classification(prompt) for prompt in prompts]
    llm._engine.complete(pending, False)
    return np.stack([np.frombuffer(entry.choices[0].pooled, "<f4") for entry in pending])


def pair_prompts(llm: LLM, **how: Any) -> PairPrompts:
    return PairPrompts(llm._maker.text.tokenizer, llm._maker.text.pair_template, llm._maker.limits, **how)


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, device: str):
    expected = golden(name)
    with LLM(FILES[name], device=device, threads=2, kv="auto" if device == "ref" else "f32") as llm:
        pairs = pair_prompts(llm)
        found = logits(llm, [pairs.encode(*pair, "document") for pair in expected["pairs"].tolist()])
        texts = logits(llm, [llm._maker.text.encode_whole(text) for text in expected["texts"].tolist()])
    assert np.abs(found - expected["pair_logits"]).max() < 1e-5 * max(1, np.abs(found).max())
    assert np.abs(texts - expected["text_logits"]).max() < 1e-5 * max(1, np.abs(texts).max())


@pytest.mark.parametrize("name", ["bert", "xlmr", "yes_no"])
def test_a_script_scores_pairs(name: str):
    expected = golden(name)
    ones, others = zip(*expected["pairs"].tolist(), strict=True)
    with LLM(FILES[name], device="ref") as llm:
        found = [output.outputs.score for output in llm.score(list(ones), list(others))]
        activation = llm._maker.limits.activation
    assert found == pytest.approx([scores(each, activation)[0] for each in expected["pair_logits"]], abs=1e-5)


def test_a_script_classifies_texts():
    expected = golden("bert_labels")
    with LLM(FILES["bert_labels"], device="ref") as llm:
        found = llm.classify(expected["texts"].tolist())
        labels, activation = llm._maker.limits.labels, llm._maker.limits.activation
        with pytest.raises(InvalidRequest, match="a score needs a model with one"):
            llm.score("a", "b")
    assert {output.outputs.num_classes for output in found} == {len(labels)}
    for output, logits in zip(found, expected["text_logits"], strict=True):
        assert output.outputs.probs == pytest.approx(scores(logits, activation), abs=1e-5)


# -- what folders say ---------------------------------------------------------------------------------------------


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CLASSIFIERS / name / "config.json").read_text())


def test_labels_and_what_scores_them():
    for name, labels, activation in (
        ("bert", ("LABEL_0",), "sigmoid"),
        ("bert_labels", ("no", "maybe", "yes"), "softmax"),
        ("llama", ("no", "maybe", "yes"), "softmax"),
        ("modernbert", ("LABEL_0",), "sigmoid"),
    ):
        told = read_config(config_of(name)).classifier
        assert told is not None
        assert (told.labels, told.activation) == (labels, activation)
    for change, activation in (
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}}, "identity"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ):
        told = read_config(config_of("bert_labels") | change).classifier
        assert told is not None
        assert told.activation == activation


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"problem_type": "other"}, "problem_type = 'other'"),
        ("bert", {"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "activation_fn = 'torch.nn.Tanh'"),
        ("bert", {"architectures": ["DebertaV2ForSequenceClassification"]}, "architectures = .*Deberta"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling = 'max'"),
        ("modernbert", {"attention_bias": True}, "attention_bias = True"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("modernbert", {"local_attention": 1}, "local_attention = 1"),
    ],
)
def test_what_is_computed_otherwise_is_refused(name: str, change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModel, match=message):
        read_config(config_of(name) | change)


def test_an_unknown_field_of_a_classifier_is_noted():
    reader = ConfigReader(config_of("llama") | {"score_scale": 2}, "config.json")
    read_fields(reader)
    assert reader.unknown == ["score_scale"]


def test_the_older_words_of_modernbert():
    config = config_of("modernbert")
    older = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    older |= {"global_rope_theta": 500.0, "local_rope_theta": 20.0}
    assert read_config(older) == read_config(config)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(CLASSIFIERS / name, tmp_path / name))


def test_a_head_that_does_not_fit_is_named(folder: Callable[[str], Path]):
    for name, change, message in (
        ("bert", {"id2label": {"0": "a", "1": "b"}}, r"classifier.bias' has shape \(1,\).*needs \(2,\)"),
        ("llama", {"id2label": {"0": "a"}}, r"score.weight' has shape \(3, 32\)"),
    ):
        path = folder(name)
        (path / "config.json").write_text(json.dumps(config_of(name) | change))
        with pytest.raises(MalformedFile, match=message):
            open_checkpoint(path)


def test_a_model_card_says_that_it_is_qwens_reranker(folder: Callable[[str], Path]):
    path = folder("yes_no")
    for file in ("modules.json", "config_sentence_transformers.json", "chat_template.jinja"):
        (path / file).unlink()
    assert open_checkpoint(path).classifier is None
    assert load_text(path).pair_template is None
    (path / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n# Qwen3-Reranker-0.6B\n")
    vocab = json.loads((path / "tokenizer.json").read_text())
    vocab["model"]["vocab"] |= {"yes": 61, "no": 62}
    (path / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(MalformedFile, match="have no rows in the output head"):
        open_checkpoint(path)
    vocab["model"]["vocab"] = {token: id for token, id in vocab["model"]["vocab"].items() if id not in (5, 6)}
    vocab["model"]["vocab"] |= {"yes": 5, "no": 6}
    (path / "tokenizer.json").write_text(json.dumps(vocab))
    spec = open_checkpoint(path).spec
    assert spec.classifier is not None
    assert spec.classifier.tokens == (5, 6)
    template = load_text(path).pair_template
    assert template is not None
    prompt = template.render("q", "d")
    assert "<Instruct>: Given a web search query" in prompt
    assert "<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n" in prompt
    assert "<Instruct>: sort" in template.render("q", "d", "sort")


def test_templates_of_files_have_their_own_slots():
    template = pair_template({"rerank": "Q {query} D {document} {x}", "default": "chat"}, {}, None)
    assert template == PairTemplate("Q {query} D {document} {x}")
    assert template.render("{document}", "d") == "Q {document} D d {x}"
    assert pair_template({"default": "{{ messages[0].content }}"}, {}, None) is None


# -- pairs and scores ---------------------------------------------------------------------------------------------


def test_a_pair_is_cut_in_its_second_text_first():
    pair = PairTokens([1, 5, 6, 2, 7, 8, 9, 2], [0, 0, 0, 0, 1, 1, 1, 1], [None, 0, 0, None, 1, 1, 1, None])
    assert pair.cut_to(8) == pair
    assert pair.cut_to(6).ids == [1, 5, 6, 2, 7, 2]
    assert pair.cut_to(4).ids == [1, 5, 2, 2]
    assert pair.cut_to(1).ids == [1]


def test_scores():
    logits = np.array([1000.0, 0.0, -1000.0], np.float32)
    assert scores(logits, "sigmoid") == [1.0, 0.5, 0.0]
    assert scores(logits, "softmax") == [1.0, 0.0, 0.0]
    assert scores(logits, "identity") == [1000.0, 0.0, -1000.0]


def test_an_engine_without_a_head_refuses():
    with LLM(CLASSIFIERS.parent / "encoders" / "bert", device="ref") as llm:
        [choice] = llm._maker.pooling("the", None).choices
        with pytest.raises(InvalidRequest, match="no classification head"):
            llm._engine.inner.engine.add(choice.request._replace(pooling="classify"))
    with LLM(CLASSIFIERS / "llama", device="ref") as llm:
        with pytest.raises(InvalidRequest, match="classifies texts and generates none"):
            llm.generate("the")
        assert llm.embed("the")[0].outputs.vector.shape == (32,)
