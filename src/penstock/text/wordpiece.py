"""WordPiece: words are cut at spaces and punctuation, and taken from the vocabulary piece by piece from the left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import MalformedFile

INSIDE = "##"  # before a piece that does not begin a word
UNKNOWN, BEGINS, ENDS = "[UNK]", "[CLS]", "[SEP]"
SPECIAL = ("[PAD]", UNKNOWN, BEGINS, ENDS, "[MASK]")


def wordpiece(
    vocab: Mapping[str, int],
    unknown: str = UNKNOWN,
    *,
    lowercase: bool,
    accents: bool | None = None,  # whether they are taken off; None: where it makes lower case
    chinese: bool = True,  # whether every character of it is a word
) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(vocab=dict(vocab), unk_token=unknown, max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=accents, lowercase=lowercase
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=INSIDE)
    return library


def from_vocab_txt(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A token on every line; `config` is tokenizer_config.json."""
    try:
        tokens = path.read_text("utf-8").removesuffix("\n").split("\n")  # other characters that end lines are tokens
    except UnicodeDecodeError as error:
        raise MalformedFile(f"{path} is not UTF-8: {error}") from None
    vocab = {token: id for id, token in enumerate(tokens)}
    for token in (UNKNOWN, BEGINS, ENDS):
        if token not in vocab:
            raise MalformedFile(f"{path} has no line {token!r}")
    library = wordpiece(
        vocab,
        lowercase=config.get("do_lower_case", True) is True,
        accents=config.get("strip_accents"),
        chinese=config.get("tokenize_chinese_chars", True) is True,
    )
    library.add_special_tokens([token for token in SPECIAL if token in vocab])
    library.post_processor = processors.BertProcessing((ENDS, vocab[ENDS]), (BEGINS, vocab[BEGINS]))
    return library


def spell(token: str) -> bytes:
    """With a space before a word; the first one's is taken away where text is made."""
    return (token.removeprefix(INSIDE) if token.startswith(INSIDE) else f" {token}").encode()


def is_cased(tokens: Sequence[str]) -> bool:
    """A vocabulary with hardly a capital letter was made for text without them; else a third of its words have some."""
    return sum(token != token.lower() for token in tokens) > len(tokens) / 100
