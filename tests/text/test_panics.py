"""A panic inside the tokenizer library is an error like any other."""

from __future__ import annotations

import pytest
import tokenizers

from penstock.errors import InvalidRequest, MalformedFile
from penstock.text import Tokenizer
from penstock.text.panics import panics_as

LONG = "one two three four five six seven eight nine ten"


def panicking(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns the tokenizer with a truncation that the library does not survive."""
    twin = tokenizers.Tokenizer.from_str(library.to_str())
    twin.enable_truncation(5, stride=5)
    return twin


def test_a_text_that_makes_it_panic_is_refused(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level, "_literal", panicking(byte_level._literal))
    with pytest.raises(InvalidRequest, match="the model's tokenizer fails on this text: `stride` must be"):
        byte_level.encode(LONG)
    assert byte_level.encode("one")


def test_a_file_that_makes_it_panic_is_malformed(byte_level: Tokenizer) -> None:
    library = panicking(byte_level._literal)
    with (
        pytest.raises(MalformedFile, match="it cannot be read: the tokenizer library failed: `stride`"),
        panics_as(MalformedFile, "it cannot be read"),
    ):
        library.encode_batch_fast([LONG])
    with pytest.raises(KeyboardInterrupt), panics_as(MalformedFile, "it cannot be read"):
        raise KeyboardInterrupt
