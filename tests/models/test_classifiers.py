"""Tiny classifiers and rerankers against the logits that transformers computed (scripts/make_classifier_goldens.py), on
the reference and on the CPU; what their folders say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM
from penstock.text.pairs import PairPrompts, classify_request

CLASSIFIERS = Path(__file__).parent / "classifiers"
NAMES = sorted(folder.name for folder in CLASSIFIERS.iterdir())
FILES = {name: CLASSIFIERS / name for name in NAMES} | {"bert gguf": CLASSIFIERS / "bert" / "model.gguf"}


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(CLASSIFIERS / name.split()[0] / "expected.npz") as file:
        return dict(file)


def logits(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    """The logits of all prompts, computed together."""
    pending = [llm._pooling(prompt, "mean") for prompt in prompts]
    for entry in pending:
        request = entry.request
        entry.request = classify_request(request.id, list(request.prompt), llm._limits, "prompt")
    llm._complete(pending)
    return np.stack([np.frombuffer(entry.pooled, "<f4") for entry in pending])


def pair_prompts(llm: LLM, **how: Any) -> PairPrompts:
    return PairPrompts(llm._text.tokenizer, llm._text.pair_template, llm._limits, **how)


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, device: str):
    expected = golden(name)
    with LLM(FILES[name], device=device, threads=2, kv="auto" if device == "ref" else "f32") as llm:
        pairs = pair_prompts(llm)
        found = logits(llm, [pairs.encode(*pair, "document") for pair in expected["pairs"].tolist()])
        texts = logits(llm, [llm._text.encode_whole(text) for text in expected["texts"].tolist()])
    assert np.abs(found - expected["pair_logits"]).max() < 1e-5 * max(1, np.abs(found).max())
    assert np.abs(texts - expected["text_logits"]).max() < 1e-5 * max(1, np.abs(texts).max())
