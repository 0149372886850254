"""Reads the tokenizer of a Hugging Face folder: tokenizer.json and its companion files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.text import tiktoken_model, wordpiece
from penstock.text.tokenizer_spec import TokenizerSpec, byte_level, end_ids, sentencepiece


def spec_from_folder(path: Path) -> TokenizerSpec:
    """Returns a folder's tokenizer; raises MalformedFile or UnsupportedModel."""
    config = read_json(path / "tokenizer_config.json")
    library = _load(path, config)
    added = library.get_added_tokens_decoder()
    names = _names(config)
    leading, closing = _around(library)
    bos = library.token_to_id(names["bos_token"]) if "bos_token" in names else next(iter(leading), None)
    steps = _decoder_steps(library)
    spell = _spelling(steps)
    ends = _declared_ends(path, library, names) | end_ids({token.content: id for id, token in added.items()})
    return TokenizerSpec(
        library=library,
        size=library.get_vocab_size(),
        spell=spell,
        literal=frozenset() if spell is sentencepiece else frozenset(added),
        added=frozenset(added),
        special=frozenset({id for id, token in added.items() if token.special} | ends),
        ends=frozenset(ends),
        after_bos=_after(bos, library),
        names=names,
        bos=bos,
        add_bos=bool(config.get("add_bos_token", leading == [bos])),
        prefix_space=bool({"Strip", "WordPiece"} & steps.keys())
        or steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never",
        closing=tuple(closing),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise MalformedFile(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise MalformedFile(f"{path} must be a JSON object; got {type(content).__name__}")
    return content


def _after(bos: int | None, library: tokenizers.Tokenizer) -> tuple[int, ...]:
    whole = library.encode("a")
    leading = whole.ids[: [*whole.special_tokens_mask, 0].index(0)]
    return tuple(leading[1:]) if leading[:1] == [bos] else ()


def _names(config: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of special tokens by name. tokenizer_config.json has the text, or an object with the text."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _load(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists() and (folder / "vocab.txt").exists():
        return wordpiece.from_vocab_txt(folder / "vocab.txt", config)
    if not path.exists() and (folder / tiktoken_model.FILE).exists():
        return tiktoken_model.from_tiktoken(folder / tiktoken_model.FILE, config)
    if not path.exists():
        raise UnsupportedModel(
            f"{folder} has no tokenizer.json, vocab.txt or {tiktoken_model.FILE}; other tokenizers are not supported"
        )
    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise MalformedFile(f"{path} is not a tokenizer: {error}") from None
    library.no_truncation()
    library.no_padding()
    return library


def _around(library: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    whole = library.encode("a")
    special = whole.special_tokens_mask
    after = next((count for count, each in enumerate(reversed(special)) if not each), 0)
    return whole.ids[: special[0] if special else 0], whole.ids[len(special) - after :]


def _spelling(steps: dict[str, dict[str, Any]]) -> Callable[[str], bytes]:
    if "WordPiece" in steps:
        return wordpiece.spell
    return byte_level if "ByteLevel" in steps else sentencepiece


def _decoder_steps(library: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    state = json.loads(library.decoder.__getstate__()) if library.decoder else {"type": "none"}
    steps = {step["type"]: step for step in state.get("decoders", [state])}
    if not steps.keys() & {"ByteLevel", "ByteFallback", "Metaspace", "WordPiece"}:
        raise UnsupportedModel(f"tokenizer.json has the decoder {', '.join(steps)}, which is not supported")
    return steps


def _declared_ends(path: Path, library: tokenizers.Tokenizer, names: dict[str, str]) -> set[int]:
    generation = read_json(path / "generation_config.json").get("eos_token_id")
    ids = generation if isinstance(generation, list) else [generation]
    return {id for id in [*ids, library.token_to_id(names.get("eos_token", ""))] if isinstance(id, int)}
