"""A Hugging Face folder's vocabulary and chat templates as the metadata of a GGUF file: metadata.py reads it back."""

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
    cutting,
    vocabulary_from_metadata,
)
from penstock.text.hf_tokenizer import vocabulary_from_folder
from penstock.text.pretokenize import PRETOKENIZERS, PreTokenizer
from penstock.text.vocabulary import SPACE, Vocabulary, byte_level, end_ids

# what tokenizers differ in: digits, spaces, lines, endings, marks, scripts, punctuation beside letters
SAMPLE = (
    "Hello  world, it's 1234567 o'clock; IT'S $9.99!\n\n\tdef f_x(a): return a['k']  # ok\r\n   end   \n"
    "naïve e\u0301le\u0300ve, ÄÖÜß, CamelCaseHTMLWord x2y3 1/3 ³²½ Ⅷ 東京タワー12は한국어 русский 42-го हिन्दी ไทย "
    "https://a.b/c?d=e&f=%20 <|x|> ~~~ ... --- == != /* */ 🙂👍🏽 \u200b…“q”‘r’ I'LL we've  \t \n x"
)

Keys = dict[str, Any]


def text_keys(path: Path, size: int) -> Keys:
    """For a model with so many output rows; rows that no token has get names of their own."""
    vocabulary = vocabulary_from_folder(path)
    state = json.loads(vocabulary.library.to_str())
    if state["model"]["type"] not in ("BPE", "WordPiece"):
        raise UnsupportedModel(
            f"a tokenizer of kind {state['model']['type']} cannot be written to a GGUF file; BPE and WordPiece ones can"
        )
    unknown = vocabulary.names.get("unk_token", state["model"].get("unk_token"))
    keys = token_keys(vocabulary, size, unknown)
    if vocabulary.spell is wordpiece.spell:
        keys |= wordpiece_keys(vocabulary, keys)
    elif vocabulary.spell is byte_level:
        keys |= {"model": "gpt2", "pre": cutting_name(vocabulary.library, state), "merges": merges_of(state)}
    else:
        keys |= {
            "model": "llama",
            "pre": "default",
            "scores": scores_of(keys["tokens"], state),
            "add_space_prefix": vocabulary.prefix_space,
        }
    metadata = {f"{KEY}{name}": value for name, value in keys.items()} | template_keys(path)
    check_same(vocabulary, vocabulary_from_metadata(metadata))
    return metadata


def token_keys(vocabulary: Vocabulary, size: int, unknown: str | None) -> Keys:
    texts = vocabulary.library.get_vocab(with_added_tokens=True)
    if max(texts.values()) >= size:
        raise UnsupportedModel(f"the tokenizer has token {max(texts.values())}; the model knows {size} of them")
    tokens, kinds = [f"[PAD{id}]" for id in range(size)], [UNUSED] * size
    for text, id in texts.items():
        tokens[id], kinds[id] = text, kind_of(vocabulary, text, id, unknown)
    ids = named_ids(vocabulary, texts, unknown)
    return ids | {
        "tokens": tokens,
        "token_type": kinds,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": bool(closed_by(vocabulary)),
    }


def closed_by(vocabulary: Vocabulary) -> tuple[int, ...]:
    """What is put after whole texts, where the kind of tokenizer does not tell."""
    return () if vocabulary.spell is wordpiece.spell else vocabulary.closing


def wordpiece_keys(vocabulary: Vocabulary, keys: Keys) -> Keys:
    """Pieces that begin a word are marked, with a space, and not those inside of one."""
    kinds = [CONTROL if kind == UNKNOWN else kind for kind in keys["token_type"]]
    tokens = [beginning(token) if kind == NORMAL else token for token, kind in zip(keys["tokens"], kinds, strict=True)]
    ids = dict(zip(keys["tokens"], range(len(tokens)), strict=True))
    names = {"seperator": ("sep", wordpiece.ENDS), "padding": ("pad", "[PAD]"), "mask": ("mask", "[MASK]")}
    texts = {key: vocabulary.names.get(f"{name}_token", text) for key, (name, text) in names.items()}
    named = {f"{key}_token_id": ids[text] for key, text in texts.items() if text in ids}
    return {"model": "bert", "pre": "default", "tokens": tokens, "token_type": kinds} | named


def beginning(token: str) -> str:
    return token.removeprefix(wordpiece.INSIDE) if token.startswith(wordpiece.INSIDE) else SPACE + token


def kind_of(vocabulary: Vocabulary, text: str, id: int, unknown: str | None) -> int:
    pieces = vocabulary.spell is not byte_level
    if pieces and text == unknown:
        return UNKNOWN
    if id in vocabulary.special:
        return CONTROL
    if id in vocabulary.literal:
        return USER_DEFINED
    return BYTE if pieces and re.fullmatch("<0x[0-9A-F]{2}>", text) else NORMAL


def named_ids(vocabulary: Vocabulary, texts: dict[str, int], unknown: str | None) -> Keys:
    """There is a place for a second token that ends answers; those that go by a usual name need none."""
    names = {"eos": vocabulary.names.get("eos_token"), "unknown": unknown, "padding": vocabulary.names.get("pad_token")}
    ids = {name: texts[text] for name, text in names.items() if text in texts}
    if vocabulary.bos is not None:
        ids["bos"] = vocabulary.bos
    if closing := closed_by(vocabulary):
        ids["eos"] = closing[0]
    others = sorted(vocabulary.ends - {ids.get("eos")}, key=lambda id: (id in end_ids(texts), id))
    if others and "eos" not in ids:
        ids["eos"] = others[0]
    elif others and others[0] not in end_ids(texts):
        ids["eot"] = others[0]
    return {f"{name}_token_id": id for name, id in ids.items()}


def merges_of(state: Any) -> list[str]:
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]


def scores_of(tokens: list[str], state: Any) -> list[float]:
    """SentencePiece prefers what scores higher: what is merged earlier does. Tokens that no merge makes come last."""
    ranks: dict[str, int] = {}
    for merge in merges_of(state):
        ranks.setdefault(merge.replace(" ", "", 1), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def cutting_name(library: tokenizers.Tokenizer, state: Any) -> str:
    """The name by which readers of GGUF know how this tokenizer cuts text."""
    pieces = library.pre_tokenizer.pre_tokenize_str(SAMPLE) if library.pre_tokenizer else None
    alike = [name for name, pre in PRETOKENIZERS.items() if cutting(pre).pre_tokenize_str(SAMPLE) == pieces]
    if not alike:
        raise UnsupportedModel("the tokenizer cuts text in a way that GGUF files have no name for")
    return max(alike, key=lambda name: likeness(PRETOKENIZERS[name], state))


def likeness(pre: PreTokenizer, state: Any) -> int:
    """In what else tokenizers of one name have in common."""
    composed = (state["normalizer"] or {}).get("type") == "NFC"
    return int(pre.nfc == composed) + int(pre.ignore_merges == bool(state["model"].get("ignore_merges")))


def check_same(one: Vocabulary, other: Vocabulary) -> None:
    left, right = (each.library.encode(SAMPLE, add_special_tokens=False).ids for each in (one, other))
    if left != right or one.ends - other.ends or (one.bos, one.closing) != (other.bos, other.closing):
        raise UnsupportedModel("the tokenizer would encode text differently from a GGUF file; it cannot be written")


def template_keys(path: Path) -> Keys:
    sources = templates_in_folder(path)
    keys: Keys = {f"tokenizer.chat_template.{name}": text for name, text in sources.items() if name != "default"}
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in sources if name != "default"]
    return keys | ({"tokenizer.chat_template": sources["default"]} if "default" in sources else {})
