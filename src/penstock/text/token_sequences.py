"""Finds the token sequences that spell a text: words that an answer must not contain, and what ends a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from penstock.text.tokenizer import Tokenizer

TokenSequence = tuple[int, ...]
BREAKER_BYTES = 40  # of a breaker that count
BREAKER_TAIL = 20  # tokens of a breaker after the one that it begins in


def bad_word_tokens(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
    """Returns the token sequences that a bad word has at the beginning of a text and after a space. As in vLLM, the
    second counts only if the space is part of its first token."""
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
    """Returns the token sequences that contain one of the breakers, as llama.cpp does: each token that has a breaker in
    its text, and each that ends with the beginning of one, followed by the tokens of the rest."""
    spelled = [breaker.encode("utf-8", "replace")[:BREAKER_BYTES] for breaker in breakers if breaker]
    found: dict[TokenSequence, None] = {}
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token)
        for breaker in spelled:
            if breaker in piece:
                found[token,] = None
            elif len(breaker) > 1:
                found.update({(token, *tail): None for tail in _tails(tokenizer, piece, breaker)})
    return tuple(found)


def _tails(tokenizer: Tokenizer, piece: bytes, breaker: bytes) -> Iterator[TokenSequence]:
    """Yields the tokens of what follows, for each beginning of the breaker that the piece ends with."""
    for length in range(1, min(len(piece), len(breaker) - 1) + 1):
        if piece.endswith(breaker[:length]):
            yield _tail(tokenizer, breaker[length:])


@lru_cache(maxsize=4096)
def _tail(tokenizer: Tokenizer, rest: bytes) -> TokenSequence:
    return tuple(tokenizer.encode(rest.decode("utf-8", "replace"))[:BREAKER_TAIL])
