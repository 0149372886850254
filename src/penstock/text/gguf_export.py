"""Writes a Hugging Face folder's tokenizer and chat templates as GGUF metadata; gguf_tokenizer.py reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from penstock.errors import UnsupportedModel
from penstock.text import wordpiece
from penstock.text.chat import templates_in_folder
from penstock.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    library_pre_tokenizer,
    spec_from_gguf,
)
from penstock.text.hf_tokenizer import spec_from_folder
from penstock.text.pretokenize import PRETOKENIZERS, PreTokenizer
from penstock.text.tokenizer_spec import SPACE, TokenizerSpec, byte_level, end_ids

# Distinguishes pre-tokenizers: digits, spaces, lines, endings, marks, scripts, punctuation next to letters
SAMPLE = (
    "Hello  world, it's 1234567 o'clock; IT'S $9.99!\n\n\tdef f_x(a): return a['k']  # ok\r\n   end   \n"
    "naïve e\u0301le\u0300ve, ÄÖÜß, CamelCaseHTMLWord x2y3 1/3 ³²½ Ⅷ 東京タワー12は한국어 русский 42-го हिन्दी ไทย "
    "https://a.b/c?d=e&f=%20 <|x|> ~~~ ... --- == != /* */ 🙂👍🏽 \u200b…“q”‘r’ I'LL we've  \t \n x"
)

MetadataKeys = dict[str, Any]


def text_keys(path: Path, size: int) -> MetadataKeys:
    """Returns the metadata for a model with `size` rows of logits. Rows without a token get names such as
    [PAD49160].
    """
    spec = spec_from_folder(path)
    state = json.loads(spec.library.to_str())
    if state["model"]["type"] not in ("BPE", "WordPiece"):
        raise UnsupportedModel(
            f"a tokenizer of type {state['model']['type']} cannot be written to a GGUF file; BPE and WordPiece can"
        )
    unknown = spec.names.get("unk_token", state["model"].get("unk_token"))
    keys = token_keys(spec, size, unknown)
    if spec.spell is wordpiece.spell:
        keys |= wordpiece_keys(spec, keys)
    elif spec.spell is byte_level:
        keys |= {"model": "gpt2", "pre": pre_tokenizer_name(spec.library, state), "merges": merges_of(state)}
    else:
        keys |= {
            "model": "llama",
            "pre": "default",
            "scores": scores_of(keys["tokens"], state),
            "add_space_prefix": spec.prefix_space,
        }
    metadata = {f"{KEY}{name}": value for name, value in keys.items()} | template_keys(path)
    check_same(spec, spec_from_gguf(metadata))
    return metadata


def token_keys(spec: TokenizerSpec, size: int, unknown: str | None) -> MetadataKeys:
    texts = spec.library.get_vocab(with_added_tokens=True)
    if max(texts.values()) >= size:
        raise UnsupportedModel(
            f"the tokenizer has token {max(texts.values())}, and the model has logits for {size} tokens"
        )
    tokens, kinds = [f"[PAD{id}]" for id in range(size)], [UNUSED] * size
    for text, id in texts.items():
        kinds[id] = kind_of(spec, text, id, unknown)
        tokens[id] = text if kinds[id] != USER_DEFINED or id in spec.literal else text.replace(SPACE, " ")
    ids = named_ids(spec, texts, unknown)
    return ids | {
        "tokens": tokens,
        "token_type": kinds,
        "add_bos_token": spec.add_bos,
        "add_eos_token": bool(explicit_closing(spec)),
    }


def explicit_closing(spec: TokenizerSpec) -> tuple[int, ...]:
    return () if spec.spell is wordpiece.spell else spec.closing


def wordpiece_keys(spec: TokenizerSpec, keys: MetadataKeys) -> MetadataKeys:
    """Returns the keys of a WordPiece vocabulary. Pieces that begin a word are marked with a space."""
    kinds = [CONTROL if kind == UNKNOWN else kind for kind in keys["token_type"]]
    tokens = [_mark_word(token) if kind == NORMAL else token for token, kind in zip(keys["tokens"], kinds, strict=True)]
    ids = dict(zip(keys["tokens"], range(len(tokens)), strict=True))
    names = {"seperator": ("sep", wordpiece.ENDS), "padding": ("pad", "[PAD]"), "mask": ("mask", "[MASK]")}
    texts = {key: spec.names.get(f"{name}_token", text) for key, (name, text) in names.items()}
    named = {f"{key}_token_id": ids[text] for key, text in texts.items() if text in ids}
    return {"model": "bert", "pre": "default", "tokens": tokens, "token_type": kinds} | named


def _mark_word(token: str) -> str:
    return token.removeprefix(wordpiece.INSIDE) if token.startswith(wordpiece.INSIDE) else SPACE + token


def kind_of(spec: TokenizerSpec, text: str, id: int, unknown: str | None) -> int:
    pieces = spec.spell is not byte_level
    if pieces and text == unknown:
        return UNKNOWN
    if id in spec.special:
        return CONTROL
    if id in spec.added:
        return USER_DEFINED
    return BYTE if pieces and re.fullmatch("<0x[0-9A-F]{2}>", text) else NORMAL


def named_ids(spec: TokenizerSpec, texts: dict[str, int], unknown: str | None) -> MetadataKeys:
    """Returns the ids of special tokens. GGUF has a key for a second end token; tokens with a well-known name need
    none.
    """
    names = {"eos": spec.names.get("eos_token"), "unknown": unknown, "padding": spec.names.get("pad_token")}
    ids = {name: texts[text] for name, text in names.items() if text in texts}
    if spec.bos is not None:
        ids["bos"] = spec.bos
    if closing := explicit_closing(spec):
        ids["eos"] = closing[0]
    others = sorted(spec.ends - {ids.get("eos")}, key=lambda id: (id in end_ids(texts), id))
    if others and "eos" not in ids:
        ids["eos"] = others[0]
    elif others and others[0] not in end_ids(texts):
        ids["eot"] = others[0]
    return {f"{name}_token_id": id for name, id in ids.items()}


def merges_of(state: Any) -> list[str]:
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]


def scores_of(tokens: list[str], state: Any) -> list[float]:
    """Returns SentencePiece scores with the same merge order: earlier merges score higher, other tokens lowest."""
    ranks: dict[str, int] = {}
    for merge in merges_of(state):
        ranks.setdefault(merge.replace(" ", "", 1), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def pre_tokenizer_name(library: tokenizers.Tokenizer, state: Any) -> str:
    """Returns the `tokenizer.ggml.pre` name for this tokenizer's way of splitting text."""
    pieces = library.pre_tokenizer.pre_tokenize_str(SAMPLE) if library.pre_tokenizer else None
    candidates = [
        name
        for name, pre in PRETOKENIZERS.items()
        if pre.written and library_pre_tokenizer(pre).pre_tokenize_str(SAMPLE) == pieces
    ]
    if not candidates:
        raise UnsupportedModel("the tokenizer splits text in a way that GGUF files have no name for")
    return max(candidates, key=lambda name: matching_properties(PRETOKENIZERS[name], state))


def matching_properties(pre: PreTokenizer, state: Any) -> int:
    composed = (state["normalizer"] or {}).get("type") == "NFC"
    return int(pre.nfc == composed) + int(pre.ignore_merges == bool(state["model"].get("ignore_merges")))


def check_same(one: TokenizerSpec, other: TokenizerSpec) -> None:
    left, right = (each.library.encode(SAMPLE, add_special_tokens=False).ids for each in (one, other))
    if left != right or one.ends - other.ends or (one.bos, one.closing) != (other.bos, other.closing):
        raise UnsupportedModel("the tokenizer cannot be written to a GGUF file: it would encode text differently")


def template_keys(path: Path) -> MetadataKeys:
    sources = templates_in_folder(path)
    keys: MetadataKeys = {
        f"tokenizer.chat_template.{name}": text for name, text in sources.items() if name != "default"
    }
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in sources if name != "default"]
    return keys | ({"tokenizer.chat_template": sources["default"]} if "default" in sources else {})
