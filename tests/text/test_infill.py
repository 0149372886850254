"""Text between a prefix and a suffix."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.text.infill import ContextFile, infill_of, infill_prompt

MARKERS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
]


class Bytes:
    """A vocabulary of bytes and the special tokens it is given; it wants a BOS."""

    def __init__(self, *special: str) -> None:
        self._special = dict(enumerate(("<bos>", *special), 1000))
        self.special_ids = frozenset(self._special)

    def token_text(self, id: int) -> str:
        return self._special[id]

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return [1000] * bos + list(text.encode())


@pytest.mark.parametrize("markers", MARKERS)
def test_the_tokens_that_ask_for_it_are_found(markers: tuple[str, str, str]) -> None:
    tokenizer: Any = Bytes(*markers, "<|file_sep|>")
    infill = infill_of(tokenizer)
    assert infill == (1001, 1002, 1003, (1001, 1002, 1003, 1004), None, 1004)
    assert infill is not None
    prompt = infill_prompt(tokenizer, infill, "ab", "<bos>")
    assert prompt == [1000, 1001, *b"ab", 1002, *b"<bos>", 1003]


@pytest.mark.parametrize(
    ("special", "context"),
    [
        (("<|repo_name|>", "<|file_sep|>"), [1004, *b"repository\n", 1005, *b"a.h\nint a;", 1005, *b"current\n"]),
        (("<|file_sep|>",), [1004, *b"a.h\nint a;", 1004, *b"current\n"]),
        ((), [*b"\n\n--- a.h ---\n\nint a;"]),
    ],
)
def test_other_files_come_before_the_prefix(special: tuple[str, ...], context: list[int]) -> None:
    tokenizer: Any = Bytes(*MARKERS[0], *special)
    infill = infill_of(tokenizer)
    assert infill is not None
    prompt = infill_prompt(tokenizer, infill, "b", "c", [ContextFile("a.h", "int a;")])
    assert prompt == [1000, *context, 1001, *b"b", 1002, *b"c", 1003]


def test_vocabularies_without_them() -> None:
    tokenizer: Any = Bytes("<|fim_prefix|>", "<|fim_suffix|>")
    assert infill_of(tokenizer) is None
