"""Builds fill-in-the-middle (FIM) prompts for the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Sequence
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


_REPOSITORIES = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")


class Infill(NamedTuple):
    """Holds the token ids that announce prefix, suffix and middle, the end tokens, and those that announce a repository
    and a file, if any.
    """

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]
    repository: int | None = None
    file: int | None = None


class ContextFile(NamedTuple):
    """Holds a file that an infill may refer to."""

    name: str
    text: str


@lru_cache(maxsize=8)
def infill_of(tokenizer: Tokenizer) -> Infill | None:
    special = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    for markers in _MARKERS:
        if all(marker in special for marker in markers):
            prefix, suffix, middle = (special[marker] for marker in markers)
            ends = (special[end] for end in _ENDS if end in special)
            others = (
                next((special[name] for name in names if name in special), None) for names in (_REPOSITORIES, _FILES)
            )
            return Infill(prefix, suffix, middle, (prefix, suffix, middle, *ends), *others)
    return None


def infill_prompt(
    tokenizer: Tokenizer, infill: Infill, before: str, after: str, files: Sequence[ContextFile] = ()
) -> list[int]:
    """Returns the prompt for the text between `before` and `after`, preceded by other files. Texts of special tokens
    are encoded as plain text.
    """
    begin = [*tokenizer.encode("", bos=True), *_context(tokenizer, infill, files), infill.prefix]
    return [*begin, *tokenizer.encode(before), infill.suffix, *tokenizer.encode(after), infill.middle]


def _context(tokenizer: Tokenizer, infill: Infill, files: Sequence[ContextFile]) -> list[int]:
    """Returns the tokens of the files, each announced by its name, or by a plain line if the model lacks such a
    token.
    """
    if not files:
        return []
    if infill.file is None:
        return [id for file in files for id in tokenizer.encode(f"\n\n--- {file.name} ---\n\n{file.text}")]
    ids = [] if infill.repository is None else [infill.repository, *tokenizer.encode("repository\n")]
    for file in files:
        ids += [infill.file, *tokenizer.encode(f"{file.name}\n{file.text}")]
    return [*ids, infill.file, *tokenizer.encode("current\n")]
