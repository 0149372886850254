"""Finds the token sequences that spell a text, for bad words and for breakers of repetitions."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from penstock.text.tokenizer import Tokenizer

TokenSequence = tuple[int, ...]
BREAKER_BYTES = 40  # significant bytes of a breaker
BREAKER_TAIL = 20  # tokens of a breaker after the first


def bad_word_tokens(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
    """Returns a bad word's tokens at the beginning of a text and after a space. As in vLLM, the second counts only if
    the space is part of its first token.
    """
    found: dict[TokenSequence, None] = {}
    for word in words:
        text = word.lstrip()
        plain = tuple(tokenizer.encode(text or word))
        spaced = tuple(tokenizer.encode(f" {text}"))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence)


@lru_cache(maxsize=64)
def breaker_tokens(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> tuple[TokenSequence, ...]:
    """Returns the token sequences that contain a breaker, as in llama.cpp: each token whose text contains one, and each
    token that ends with a beginning of one, followed by the tokens of the rest.
    """
    vocabulary = _vocabulary_bytes(tokenizer)
    found: dict[TokenSequence, None] = {}
    for breaker in breakers:
        spelled = breaker.encode("utf-8", "replace")[:BREAKER_BYTES]
        whole = vocabulary.containing(spelled)
        found |= dict.fromkeys((token,) for token in sorted(whole))
        for length in range(1, len(spelled)):
            if heads := [token for token in vocabulary.ending_with(spelled[:length]) if token not in whole]:
                tail = tokenizer.encode(spelled[length:].decode("utf-8", "replace"))[:BREAKER_TAIL]
                found |= dict.fromkeys((head, *tail) for head in heads)
    return tuple(found)


class VocabularyBytes:
    """Concatenates the bytes of all tokens, to search them at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._bytes = b"".join(pieces)
        self._values = np.frombuffer(self._bytes, np.uint8)
        self._lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self._ends = self._lengths.cumsum()

    def containing(self, text: bytes) -> set[int]:
        """Returns the tokens that contain `text`."""
        if not text:
            return set()
        matches = re.finditer(b"(?=" + re.escape(text) + b")", self._bytes)  # including overlapping matches
        starts = np.fromiter((match.start() for match in matches), np.int64)
        tokens = np.searchsorted(self._ends, starts, side="right")
        return set(tokens[starts + len(text) <= self._ends[tokens]].tolist())

    def ending_with(self, text: bytes) -> list[int]:
        """Returns the tokens that end with `text`."""
        tokens: NDArray[np.int64] = np.flatnonzero(self._lengths >= len(text))
        for back, value in enumerate(reversed(text), 1):
            tokens = tokens[self._values[self._ends[tokens] - back] == value]
        found: list[int] = tokens.tolist()
        return found


@lru_cache(maxsize=8)
def _vocabulary_bytes(tokenizer: Tokenizer) -> VocabularyBytes:
    return VocabularyBytes(tokenizer)
