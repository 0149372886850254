"""Text between a prefix and a suffix, for vocabularies that have tokens to ask for it."""

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
    """Token ids before the prefix, between it and the suffix, and after that; and those that end the answer too."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]


@lru_cache(maxsize=8)
def infill_of(tokenizer: Tokenizer) -> Infill | None:
    special = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    for markers in _MARKERS:
        if all(marker in special for marker in markers):
            prefix, suffix, middle = (special[marker] for marker in markers)
            ends = (special[end] for end in _ENDS if end in special)
            return Infill(prefix, suffix, middle, (prefix, suffix, middle, *ends))
    return None


def infill_prompt(tokenizer: Tokenizer, infill: Infill, before: str, after: str) -> list[int]:
    """The texts are taken as they are: what spells a special token in them is text."""
    begin = [*tokenizer.encode("", bos=True), infill.prefix]
    return [*begin, *tokenizer.encode(before), infill.suffix, *tokenizer.encode(after), infill.middle]
