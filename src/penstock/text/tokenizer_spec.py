"""Defines a tokenizer's inputs: the library's tokenizer, and token facts that the library does not expose."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers

SPACE = "\u2581"  # replaces a space in SentencePiece vocabularies

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
class TokenizerSpec:
    """Describes a vocabulary and its use."""

    library: tokenizers.Tokenizer
    size: int
    spell: Callable[[str], bytes]  # returns the bytes of a token
    literal: frozenset[int]  # tokens whose text is literal, and not passed to `spell`
    added: frozenset[int]  # tokens found before a text is split: special and user-defined ones
    special: frozenset[int]  # structural tokens, not text
    ends: frozenset[int]  # tokens that end an answer
    names: Mapping[str, str]  # texts of special tokens by template name: bos_token, eos_token, ...
    after_bos: tuple[int, ...] = ()  # more tokens after BOS, if any
    bos: int | None
    add_bos: bool
    prefix_space: bool  # encoding adds a leading space
    closing: tuple[int, ...] = ()  # tokens at the end of a complete text, such as one to embed


def end_ids(literal: Mapping[str, int]) -> set[int]:
    ends = {literal[text] for text in _END_TOKENS if text in literal}
    if "<|return|>" in literal:  # there <|end|> only ends one message of an answer
        ends.discard(literal.get("<|end|>", -1))
    return ends


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()
BYTE_NAMES = {byte: char for char, byte in _BYTES.items()}  # spelling of each byte in byte-level vocabularies


def byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    return characters(token.replace(SPACE, " "))


def characters(token: str) -> bytes:
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.encode()
