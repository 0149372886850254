"""Text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from penstock.errors import ContextTooLong
from penstock.text.gguf_tokenizer import vocabulary_from_metadata
from penstock.text.hf_tokenizer import vocabulary_from_folder
from penstock.text.vocabulary import Vocabulary

MAX_CHARACTERS = 2**22  # in one text; the library's regular expressions give up not far above

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one: threads have nothing to share


class Tokenizer:
    """Never changes once built, so that several threads may use it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos
        self.eos_ids = vocabulary.ends
        self._after_bos = vocabulary.after_bos
        self.special_ids = vocabulary.special
        self.names = vocabulary.names
        self.prefix_space = vocabulary.prefix_space
        self.closing = vocabulary.closing
        self._add_bos = vocabulary.add_bos
        self._parsing = vocabulary.library
        self._literal = _without_parsing(vocabulary.library)
        self._bytes = _TokenBytes(vocabulary)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        return cls(vocabulary_from_metadata(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        return cls(vocabulary_from_folder(path))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> list[int]:
        """`special`: text that spells a special token becomes that token. `bos`: begin with the model's BOS, if it
        wants one and it is not there already. A lone surrogate counts as U+FFFD. Other threads run meanwhile."""
        if len(text) > MAX_CHARACTERS:
            raise ContextTooLong(f"a text of {len(text)} characters is too long to encode; at most {MAX_CHARACTERS}")
        library = self._parsing if special else self._literal
        batch = library.encode_batch_fast([_well_formed(text)], add_special_tokens=False)  # encode keeps the GIL
        ids = list(batch[0].ids)
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids[:0] = self.bos_id, *self._after_bos
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False, continuing: bool = False) -> str:
        """The text of whole answers and prompts; special tokens are left out unless asked for. The space that
        encoding put before the text is taken away again, unless the ids are `continuing` another text."""
        shown = ids if special else [id for id in ids if id not in self.special_ids]
        text = b"".join([self._bytes[id] for id in shown])
        if self.prefix_space and not continuing:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text; nothing for an id past the vocabulary, as models with padded output have."""
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        return self._bytes[id].decode("utf-8", "replace")


class _TokenBytes(dict[int, bytes]):
    """Each token's bytes, worked out when first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, id: int) -> bytes:
        token = self._vocabulary.library.id_to_token(id) if 0 <= id < 2**32 else None
        if token is None:
            return b""
        self[id] = token.encode() if id in self._vocabulary.literal else self._vocabulary.spell(token)
        return self[id]


def _without_parsing(parsing: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A twin that shares the model and takes the text of special tokens for ordinary text. The library has a switch
    for this, but it is one per tokenizer, not per call."""
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
