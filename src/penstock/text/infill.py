"""Infill (fill in the middle): prompts for the text between a prefix and a suffix."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from penstock.text.tokenizer import Tokenizer

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<fim_pad>", "<file_sep>", "<fim-pad>")


class Infill(NamedTuple):
    """Holds the token ids that announce prefix, suffix and middle, and those that end the answer."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]


@lru_cache(maxsize=8)
def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """Returns the infill tokens of a vocabulary; None if it has none."""
    special = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    for markers in _MARKERS:
        if all(marker in special for marker in markers):
            prefix, suffix, middle = (special[marker] for marker in markers)
            ends = (special[end] for end in _ENDS if end in special)
            return Infill(prefix, suffix, middle, (prefix, suffix, middle, *ends))
    return None


def infill_prompt(tokenizer: Tokenizer, infill: Infill, before: str, after: str) -> list[int]:
    """Returns the prompt for the text between `before` and `after`. The texts of special tokens in them stay text."""
    begin = [*tokenizer.encode("", bos=True), infill.prefix]
    return [*begin, *tokenizer.encode(before), infill.suffix, *tokenizer.encode(after), infill.middle]
