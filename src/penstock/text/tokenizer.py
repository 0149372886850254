"""Turns text into token ids and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from penstock.errors import ContextTooLong
from penstock.text.gguf_tokenizer import spec_from_gguf
from penstock.text.hf_tokenizer import spec_from_folder
from penstock.text.tokenizer_spec import TokenizerSpec

MAX_CHARACTERS = 2**22  # in one text; the library's regular expressions fail not far above

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one: threads do not help


class Tokenizer:
    """Encodes and decodes. It never changes, so several threads may use it."""

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
        return cls(spec_from_gguf(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        return cls(spec_from_folder(path))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """Returns the token ids of a text. With `special`, the text of a special token becomes that token. With `bos`,
        the model's BOS is added if the model uses it and it is not there already. A lone surrogate counts as U+FFFD.
        The GIL is released meanwhile."""
        if len(text) > MAX_CHARACTERS:
            raise ContextTooLong(f"the text has {len(text)} characters; the limit is {MAX_CHARACTERS}: shorten it")
        library = self._parsing if special else self._literal
        batch = library.encode_batch_fast([_well_formed(text)], add_special_tokens=False)  # encode would keep the GIL
        ids = list(batch[0].ids)
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids[:0] = self.bos_id, *self._after_bos
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False, continuing: bool = False) -> str:
        """Returns the text of a whole answer or prompt, without special tokens unless `special`. The space that
        encoding put before the text is removed, unless the ids are `continuing` another text."""
        shown = ids if special else [id for id in ids if id not in self.special_ids]
        text = b"".join([self._bytes[id] for id in shown])
        if self.prefix_space and not continuing:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """Returns the bytes that a token adds to a text; none for an id past the vocabulary (padded models)."""
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
    """Returns a tokenizer with the same model that treats the text of special tokens as ordinary text. The library's
    switch for this is one per tokenizer, not per call."""
    literal = tokenizers.Tokenizer(parsing.model)
    literal.normalizer = parsing.normalizer
    literal.pre_tokenizer = parsing.pre_tokenizer
    added = parsing.get_added_tokens_decoder()
    literal.add_tokens([added[id] for id in sorted(added)])
    literal.encode_special_tokens = True
    return literal


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
