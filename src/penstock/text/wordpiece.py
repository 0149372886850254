"""Builds WordPiece tokenizers, which split text at spaces and punctuation, and words into the longest pieces from the
left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import MalformedFile

INSIDE = "##"  # prefix of pieces within a word
UNKNOWN, BEGINS, ENDS = "[UNK]", "[CLS]", "[SEP]"
SPECIAL = ("[PAD]", UNKNOWN, BEGINS, ENDS, "[MASK]")


def wordpiece(
    vocab: Mapping[str, int],
    unknown: str = UNKNOWN,
    *,
    lowercase: bool,
    strip_accents: bool | None = None,  # None: if `lowercase`
    split_chinese: bool = True,  # every Chinese character is a word
) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(vocab=dict(vocab), unk_token=unknown, max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=INSIDE)
    return library


def from_vocab_txt(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Reads vocab.txt, which has one token per line; `config` is tokenizer_config.json."""
    try:
        tokens = path.read_text("utf-8").removesuffix("\n").split("\n")  # splitlines would split tokens
    except UnicodeDecodeError as error:
        raise MalformedFile(f"{path} is not UTF-8: {error}") from None
    vocab = {token: id for id, token in enumerate(tokens)}
    for token in (UNKNOWN, BEGINS, ENDS):
        if token not in vocab:
            raise MalformedFile(f"{path} has no token {token!r}")
    library = wordpiece(
        vocab,
        lowercase=config.get("do_lower_case", True) is True,
        strip_accents=config.get("strip_accents"),
        split_chinese=config.get("tokenize_chinese_chars", True) is True,
    )
    library.add_special_tokens([token for token in SPECIAL if token in vocab])
    library.post_processor = processors.BertProcessing((ENDS, vocab[ENDS]), (BEGINS, vocab[BEGINS]))
    return library


def spell(token: str) -> bytes:
    """Returns the bytes of a token. A word begins with a space; decoding removes the first one."""
    return (token.removeprefix(INSIDE) if token.startswith(INSIDE) else f" {token}").encode()


def is_cased(tokens: Sequence[str]) -> bool:
    """Returns True if a vocabulary is case-sensitive: about a third of its words then have capitals, else hardly
    any.
    """
    return sum(token != token.lower() for token in tokens) > len(tokens) / 100
