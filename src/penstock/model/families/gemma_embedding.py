"""Reads EmbeddingGemma's GGUF files: Gemma 3 as an encoder. Its Hugging Face folders are read as Gemma 3."""

from __future__ import annotations

from functools import partial

from penstock.model.families import gemma3
from penstock.model.sentence_transformers import DENSE_KEYS

HUGGING_FACE = gemma3.HUGGING_FACE
GGUF = gemma3.GGUF
build = gemma3.build
read_hf = gemma3.read_hf
read_gguf = partial(gemma3.read_gguf, keys=(*gemma3.KEYS, *DENSE_KEYS), encoder=True)
