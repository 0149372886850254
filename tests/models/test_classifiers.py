"""Tiny classifiers and rerankers against the logits that transformers computed (scripts/make_classifier_goldens.py), on
the reference and on the CPU; what their folders say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.errors import InvalidRequest
from penstock.text.pairs import PairPrompts, scores

CLASSIFIERS = Path(__file__).parent / "classifiers"
NAMES = sorted(folder.name for folder in CLASSIFIERS.iterdir())
FILES = {name: CLASSIFIERS / name for name in NAMES} | {"bert gguf": CLASSIFIERS / "bert" / "model.gguf"}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(CLASSIFIERS / name.split()[0] / "expected.npz") as file:
        return dict(file)


def logits(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The logits of all prompts, computed together."""
    pending = [llm._maker.classification(prompt) for prompt in prompts]
    llm._complete(pending, False)
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
