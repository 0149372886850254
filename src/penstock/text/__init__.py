"""Converts between text and token ids: tokenizers, chat templates, requests from prompts, and streamed answers as
text.
"""

from __future__ import annotations

from penstock.text.answer import REPETITION, Delta, one_by_one, read_step
from penstock.text.chat import ChatTemplate
from penstock.text.detok import TextStream
from penstock.text.embedding import check_dimensions, embedding, embedding_request
from penstock.text.request import check_answers, make_request, new_seed, seed_of_choice
from penstock.text.text import ChatPrompt, Text
from penstock.text.tokenizer import Tokenizer

__all__ = [
    "REPETITION",
    "ChatPrompt",
    "ChatTemplate",
    "Delta",
    "Text",
    "TextStream",
    "Tokenizer",
    "check_answers",
    "check_dimensions",
    "embedding",
    "embedding_request",
    "make_request",
    "new_seed",
    "one_by_one",
    "read_step",
    "seed_of_choice",
]
