"""A vocabulary: the library's tokenizer, and what the library does not know about its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers

SPACE = "\u2581"  # how SentencePiece writes a space

_END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    library: tokenizers.Tokenizer
    size: int
    spell: Callable[[str], bytes]  # the bytes an ordinary token stands for
    literal: frozenset[int]  # tokens that stand for their own text: special ones and those a user defined
    special: frozenset[int]  # those that carry structure, not text
    ends: frozenset[int]
    names: Mapping[str, str]  # what templates call some special tokens: bos_token, eos_token, ...
    after_bos: tuple[int, ...] = ()  # what belongs to it, in families where a text begins with more than one token
    bos: int | None
    add_bos: bool
    prefix_space: bool  # text is encoded as if a space came before it
    closing: tuple[int, ...] = ()  # what comes after a text that is whole, as those are that become embeddings


def end_ids(literal: Mapping[str, int]) -> set[int]:
    """The tokens that are known to end an answer in some model family."""
    ends = {literal[text] for text in _END_TOKENS if text in literal}
    if "<|return|>" in literal:  # where answers end with <|return|>, <|end|> only closes one of their messages
        ends.discard(literal.get("<|end|>", -1))
    return ends


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
