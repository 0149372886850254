"""Two small vocabularies with what other implementations make of texts; scripts/make_tokenizer_vectors.py made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.text import Tokenizer

DATA = Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def byte_level_vectors() -> dict[str, Any]:
    return load("byte_level")


@pytest.fixture(scope="session")
def sentencepiece_vectors() -> dict[str, Any]:
    return load("sentencepiece")


@pytest.fixture(scope="session")
def character_vectors() -> dict[str, Any]:
    return load("characters")


@pytest.fixture(scope="session")
def unigram_vectors() -> dict[str, Any]:
    return load("unigram")


@pytest.fixture(scope="session")
def smollm2_vectors() -> dict[str, Any]:
    return load("smollm2")


@pytest.fixture(scope="session")
def byte_level(byte_level_vectors: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_vectors["metadata"] | {"tokenizer.ggml.pre": "gpt-2"})


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_vectors: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_vectors["metadata"])
