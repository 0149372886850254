"""Reads tiktoken.model, which Kimi-K2 and Moonlight folders have instead of tokenizer.json: one line per token, with
its bytes in base64 and its rank.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.text.gguf_tokenizer import library_pre_tokenizer
from penstock.text.pretokenize import PRETOKENIZERS
from penstock.text.tokenizer_spec import BYTE_NAMES

FILE = "tiktoken.model"
CLASS = "TikTokenTokenizer"  # in tokenizer_config.json
RESERVED = 256  # ids of special tokens after the ordinary ones


def from_tiktoken(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Builds the library's tokenizer; `config` is tokenizer_config.json."""
    if config.get("tokenizer_class") != CLASS:
        raise UnsupportedModel(
            f"{path} belongs to a tokenizer of class {config.get('tokenizer_class')!r}; supported: {CLASS} of Kimi-K2"
        )
    ranks = _ranks(path)
    library = tokenizers.Tokenizer(models.BPE(vocab=ranks, merges=list(_merges(ranks))))
    library.pre_tokenizer = library_pre_tokenizer(PRETOKENIZERS["kimi-k2"])
    library.decoder = decoders.ByteLevel()
    library.add_tokens(list(_special_tokens(len(ranks), config)))
    return library


def _ranks(path: Path) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            ranks["".join(BYTE_NAMES[byte] for byte in base64.b64decode(encoded, validate=True))] = int(rank)
        except ValueError:
            raise MalformedFile(f"line {number} of {path} must be a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise MalformedFile(f"{path} must have one token for each rank from 0 to {len(ranks) - 1}")
    return ranks


def _merges(ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the merges. tiktoken merges the neighbours that form the token with the lowest rank, so every split of a
    token into two others is a merge.
    """
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        yield from sorted((one for one in splits if one[0] in ranks and one[1] in ranks), key=lambda one: ranks[one[0]])


def _special_tokens(first: int, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yields the special tokens; unnamed ones are reserved."""
    named = config.get("added_tokens_decoder") or {}
    for id in range(first, first + RESERVED):
        entry = named.get(str(id), {})
        content = entry.get("content", f"<|reserved_token_{id}|>")
        yield AddedToken(content, special=bool(entry.get("special", True)), normalized=False)
