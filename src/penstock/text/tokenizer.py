"""Turns text into token ids and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from penstock.errors import ContextTooLong, MalformedFile
from penstock.templates import MAX_CHARACTERS
from penstock.text.gguf_tokenizer import spec_from_gguf
from penstock.text.hf_tokenizer import spec_from_folder
from penstock.text.panics import panics_as, refusal
from penstock.text.tokenizer_spec import TokenizerSpec

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one: threads do not help


class PairTokens(NamedTuple):
    """Holds the tokens of a text pair in the model's order, with separators."""

    ids: list[int]
    types: list[int]  # token type: 1 for the second text
    texts: list[int | None]  # the text that each token is part of, 0 or 1; None for a separator

    def cut_to(self, longest: int) -> PairTokens:
        """Truncates to `longest` tokens, first at the end of the second text, then of the first."""
        excess = max(len(self.ids) - longest, 0)
        within = [at for text in (0, 1) for at, each in enumerate(self.texts) if each == text]
        dropped = set(within[len(within) - min(excess, len(within)) :])
        kept = [at for at in range(len(self.ids)) if at not in dropped][:longest]
        ids, types = ([each[at] for at in kept] for each in (self.ids, self.types))
        return PairTokens(ids, types, [self.texts[at] for at in kept])


class Tokenizer:
    """Encodes and decodes. It is immutable, so several threads may use it."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.vocab_size = spec.size
        self.bos_id = spec.bos
        self.eos_ids = spec.ends
        self._after_bos = spec.after_bos
        self.special_ids = spec.special
        self.names = spec.names
        self.prefix_space = spec.prefix_space
        self.closing = spec.closing
        self._add_bos = spec.add_bos
        self._parsing = spec.library
        self._literal = _without_parsing(spec.library)
        self._bytes = _TokenBytes(spec)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        with panics_as(MalformedFile, "the file's tokenizer cannot be read"):
            return cls(spec_from_gguf(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        with panics_as(MalformedFile, f"the tokenizer in {path} cannot be read"):
            return cls(spec_from_folder(path))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Encodes a text. With `special`, texts of special tokens become those tokens. With `bos`, BOS is added if the
        model uses it and the text lacks it. A lone surrogate counts as U+FFFD. Releases the GIL.
        """
        _check_length(text)
        library = self._parsing if special else self._literal
        try:
            batch = library.encode_batch_fast([_well_formed(text)], add_special_tokens=False)  # encode keeps the GIL
        except BaseException as error:
            raise refusal(error) from None
        ids = list(batch[0].ids)
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids[:0] = self.bos_id, *self._after_bos
        return ids

    def encode_pair(self, first: str, second: str) -> PairTokens:
        """Encodes two texts, joined as in the tokenizer's own post-processor. Texts of special tokens are plain text.
        Without a post-processor, BOS comes first and each text ends with the closing tokens.
        """
        for text in (first, second):
            _check_length(text)
        if self._literal.post_processor is not None:
            pairs = [(_well_formed(first), _well_formed(second))]
            try:
                [found] = self._literal.encode_batch_fast(pairs, add_special_tokens=True)
            except BaseException as error:
                raise refusal(error) from None
            return PairTokens(found.ids, found.type_ids, found.sequence_ids)
        left, right, closing = self.encode(first, bos=True), self.encode(second), list(self.closing)
        before = len(left) - len(self.encode(first))
        return PairTokens(
            [*left, *closing, *right, *closing],
            [0] * (len(left) + len(closing)) + [1] * (len(right) + len(closing)),
            [None] * before + [0] * (len(left) - before) + [None] * len(closing) + [1] * len(right)
            + [None] * len(closing),
        )  # fmt: skip

    def decode(self, ids: Sequence[int], *, special: bool = False, continuing: bool = False) -> str:
        """Decodes a whole answer or prompt, without special tokens unless `special`. The space that encoding added is
        removed, unless the ids are `continuing` another text.
        """
        shown = ids if special else [id for id in ids if id not in self.special_ids]
        text = b"".join([self._bytes[id] for id in shown])
        if self.prefix_space and not continuing:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes that a token adds to a text; empty for an id beyond the vocabulary (padded models)."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        return self._bytes[id].decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    """Keeps the bytes of each token once they are known."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self._spec = spec

    def __missing__(self, id: int) -> bytes:
        token = self._spec.library.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        self[id] = token.encode() if id in self._spec.literal else self._spec.spell(token)
        return self[id]


def _without_parsing(parsing: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the same model that treats texts of special tokens as plain text. The library's switch
    is per tokenizer, not per call.
    """
    literal = tokenizers.Tokenizer(parsing.model)
    literal.normalizer = parsing.normalizer
    literal.pre_tokenizer = parsing.pre_tokenizer
    added = parsing.get_added_tokens_decoder()
    literal.add_tokens([added[id] for id in sorted(added)])
    literal.encode_special_tokens = True
    literal.post_processor = parsing.post_processor
    return literal


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ContextTooLong(f"the text has {len(text)} characters; the limit is {MAX_CHARACTERS}: shorten it")


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
