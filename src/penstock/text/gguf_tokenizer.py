"""Builds the tokenizer of a GGUF file from its metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.system.runtime import no_collection
from penstock.text import wordpiece
from penstock.text.pretokenize import PRETOKENIZERS, PreTokenizer
from penstock.text.tokenizer_spec import SPACE, TokenizerSpec, byte_level, characters, end_ids, sentencepiece

GgufMetadata = Mapping[str, Any]
T = TypeVar("T")

KEY = "tokenizer.ggml."

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # values of token_type


class _Tokens(NamedTuple):
    """Holds the vocabulary in the file's order."""

    texts: list[str]
    kinds: list[int]
    ids: dict[str, int]
    named: dict[str, int]  # "bos" -> id, and so on


class _Encoder(NamedTuple):
    """Holds a library tokenizer and the defaults of its kind."""

    library: tokenizers.Tokenizer
    spell: Callable[[str], bytes]
    add_bos: bool  # default
    prefix_space: bool
    bos: int | None = None  # default
    closing: tuple[int, ...] = ()


@no_collection()  # a vocabulary is a hundred thousand objects
def spec_from_gguf(metadata: GgufMetadata) -> TokenizerSpec:
    """Returns a GGUF file's tokenizer; raises MalformedFile or UnsupportedModel."""
    builder = _named_entry(metadata, "model", _BUILDERS)
    tokens = _tokens(metadata)
    named = tokens.named
    literal = {id for id, kind in enumerate(tokens.kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    literal |= set(named.values())
    ends = {named[name] for name in ("eos", "eot", "eom") if name in named}
    ends |= end_ids({tokens.texts[id]: id for id in literal})
    special = {id for id in literal if tokens.kinds[id] != USER_DEFINED} | set(named.values()) | ends

    encoder = builder(metadata, tokens)
    closing = encoder.closing or ((named["eos"],) if "eos" in named and metadata.get(f"{KEY}add_eos_token") else ())
    encoder.library.add_tokens(
        [AddedToken(tokens.texts[id], special=id in special, normalized=False) for id in sorted(literal)]
    )
    return TokenizerSpec(
        library=encoder.library,
        size=len(tokens.texts),
        spell=encoder.spell,
        literal=frozenset(literal),
        added=frozenset(literal),
        special=frozenset(special),
        ends=frozenset(ends),
        names={f"{name}_token": tokens.texts[id] for name, id in named.items()},
        bos=named.get("bos", encoder.bos),
        add_bos=bool(metadata.get(f"{KEY}add_bos_token", encoder.add_bos)),
        prefix_space=encoder.prefix_space,
        closing=closing,
    )


def _byte_level_encoder(metadata: GgufMetadata, tokens: _Tokens) -> _Encoder:
    pre = _named_entry(metadata, "pre", PRETOKENIZERS, "default")
    if pre.characters:
        return _character_encoder(metadata, tokens, pre)
    merges = _stored_merges(metadata)
    library = tokenizers.Tokenizer(_bpe(vocab=tokens.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = library_pre_tokenizer(pre)
    return _Encoder(library, byte_level, pre.add_bos, prefix_space=False)


def _gemma4_encoder(metadata: GgufMetadata, tokens: _Tokens) -> _Encoder:
    return _character_encoder(metadata, tokens, PRETOKENIZERS["gemma4"])


def _character_encoder(metadata: GgufMetadata, tokens: _Tokens, pre: PreTokenizer) -> _Encoder:
    bpe = _bpe(vocab=tokens.ids, merges=_stored_merges(metadata), byte_fallback=True, ignore_merges=pre.ignore_merges)
    library = tokenizers.Tokenizer(bpe)
    if pre.escaped:
        library.normalizer = normalizers.Replace(" ", SPACE)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    )
    return _Encoder(library, sentencepiece if pre.escaped else characters, pre.add_bos, prefix_space=False)


def _stored_merges(metadata: GgufMetadata) -> list[tuple[str, ...]]:
    return [tuple(merge.split(" ", 1)) for merge in _array(metadata, "merges", _strings)]


def library_pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    splits = (pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits)
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_encoder(metadata: GgufMetadata, tokens: _Tokens) -> _Encoder:
    scores = _array(metadata, "scores", lambda values: list(map(float, values)))
    _check_length("scores", scores, tokens.texts)
    bpe = _bpe(
        vocab=tokens.ids,
        merges=_merges(tokens, scores),
        unk_token=_unknown(tokens),
        fuse_unk=True,
        byte_fallback=True,
    )
    library = tokenizers.Tokenizer(bpe)
    prefix_space = bool(metadata.get(f"{KEY}add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix_space else spaces
    return _Encoder(library, sentencepiece, add_bos=True, prefix_space=prefix_space)


def _unigram_encoder(metadata: GgufMetadata, tokens: _Tokens) -> _Encoder:
    """Builds a SentencePiece Unigram tokenizer, which splits a text into the tokens with the highest sum of scores."""
    scores = _array(metadata, "scores", lambda values: list(map(float, values)))
    _check_length("scores", scores, tokens.texts)
    unknown = tokens.ids[_unknown(tokens)]
    library = tokenizers.Tokenizer(models.Unigram(list(zip(tokens.texts, scores, strict=True)), unknown, False))
    steps: list[normalizers.Normalizer] = []
    if charsmap := metadata.get(f"{KEY}precompiled_charsmap"):
        steps.append(_charsmap(charsmap))
    if metadata.get(f"{KEY}remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    library.normalizer = normalizers.Sequence(steps)
    prefix_space = bool(metadata.get(f"{KEY}add_space_prefix", True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always" if prefix_space else "never")
    return _Encoder(library, sentencepiece, add_bos=False, prefix_space=prefix_space)


def _charsmap(values: Iterable[int]) -> normalizers.Normalizer:
    """Returns SentencePiece's own normalization, stored as bytes; some readers decode them as signed."""
    try:
        return normalizers.Precompiled(bytes(value % 256 for value in values))
    except Exception as error:  # the library raises bare Exception
        raise MalformedFile(f"{KEY}precompiled_charsmap cannot be read: {error}") from None


def _wordpiece_encoder(metadata: GgufMetadata, tokens: _Tokens) -> _Encoder:
    """Builds a WordPiece tokenizer. GGUF files mark pieces that begin a word with a space, and leave others
    unmarked.
    """
    kinds = dict(zip(tokens.texts, tokens.kinds, strict=True))
    words = [text for text, kind in kinds.items() if kind == NORMAL]
    vocab = {_piece(text) if kinds[text] == NORMAL else text: id for text, id in tokens.ids.items()}
    begins, ends, unknown = (
        _token_id(tokens, name, text)
        for name, text in (("bos", wordpiece.BEGINS), ("sep", wordpiece.ENDS), ("unk", wordpiece.UNKNOWN))
    )
    library = wordpiece.wordpiece(vocab, tokens.texts[unknown], lowercase=not wordpiece.is_cased(words))
    return _Encoder(library, wordpiece.spell, add_bos=True, prefix_space=True, bos=begins, closing=(ends,))


def _piece(text: str) -> str:
    return text.removeprefix(SPACE) if text.startswith(SPACE) else wordpiece.INSIDE + text


def _token_id(tokens: _Tokens, name: str, text: str) -> int:
    id = tokens.named.get(name, tokens.ids.get(text))
    if id is None:
        raise MalformedFile(f"{KEY}tokens has no {text!r}, and no key says which token is {name}")
    return id


_BUILDERS = {
    "gpt2": _byte_level_encoder,
    "llama": _sentencepiece_encoder,
    "bert": _wordpiece_encoder,
    "gemma4": _gemma4_encoder,
    "t5": _unigram_encoder,
}


def _merges(tokens: _Tokens, scores: list[float]) -> list[tuple[str, str]]:
    """Returns the merges of a SentencePiece vocabulary. Neighbours that form the best-scoring token merge first, so
    every split of a token into two others is a merge, ranked by the token's score.
    """
    texts = [text for text, kind in zip(tokens.texts, tokens.kinds, strict=True) if kind == NORMAL]
    mergeable = set(texts)
    merged = sorted((text for text in texts if len(text) > 1), key=lambda text: -scores[tokens.ids[text]])
    return [
        (left, right)
        for text in merged
        for cut in range(1, len(text))
        if (left := text[:cut]) in mergeable and (right := text[cut:]) in mergeable
    ]


def _unknown(tokens: _Tokens) -> str:
    if "unk" in tokens.named:
        return tokens.texts[tokens.named["unk"]]
    if UNKNOWN in tokens.kinds:
        return tokens.texts[tokens.kinds.index(UNKNOWN)]
    raise MalformedFile(f"{KEY}unknown_token_id is missing, and no token has the type unknown")


def _bpe(**arguments: Any) -> models.BPE:
    try:
        return models.BPE(**arguments)
    except Exception as error:  # the library raises bare Exception
        raise MalformedFile(f"the tokenizer's merges do not fit its tokens: {error}") from None


def _tokens(metadata: GgufMetadata) -> _Tokens:
    texts = _array(metadata, "tokens", _strings)
    kinds = _array(metadata, "token_type", lambda values: list(map(int, values)))
    _check_length("token_type", kinds, texts)
    ids = dict(zip(texts, range(len(texts)), strict=True))
    ids.pop("", None)
    if len(ids) != len(texts) - texts.count(""):
        raise MalformedFile(f"{KEY}tokens has the same token twice: {len(texts)} tokens, {len(ids)} distinct")
    return _Tokens(texts, kinds, ids, _named_ids(metadata, len(texts)))


def _named_entry(metadata: GgufMetadata, name: str, table: Mapping[str, T], default: str | None = None) -> T:
    key = metadata.get(f"{KEY}{name}", default)
    if not isinstance(key, str):
        raise MalformedFile(f"{KEY}{name} must name a tokenizer; got {key!r}")
    if key not in table:
        raise UnsupportedModel(f"{KEY}{name} {key!r} is not supported; supported: {', '.join(table)}")
    return table[key]


def _array(metadata: GgufMetadata, name: str, read: Callable[[Iterable[Any]], list[T]]) -> list[T]:
    if f"{KEY}{name}" not in metadata:
        raise MalformedFile(f"{KEY}{name} is missing: the file's tokenizer is incomplete")
    try:
        return read(metadata[f"{KEY}{name}"])
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedFile(f"{KEY}{name} cannot be read as an array of its kind: {error}") from None


def _strings(values: Iterable[Any]) -> list[str]:
    given = list(values)
    return given if set(map(type, given)) <= {str} else [str(value, "utf-8") for value in given]


def _check_length(name: str, values: list[Any], tokens: list[str]) -> None:
    if len(values) != len(tokens):
        raise MalformedFile(f"{KEY}{name} has {len(values)} entries for {len(tokens)} tokens")


def _named_ids(metadata: GgufMetadata, size: int) -> dict[str, int]:
    keys = {name: f"{KEY}{name}_token_id" for name in ("bos", "eos", "eot", "eom")}
    keys |= {"unk": f"{KEY}unknown_token_id", "sep": f"{KEY}seperator_token_id"}
    named = {name: metadata[key] for name, key in keys.items() if key in metadata}
    for name, id in named.items():
        if not isinstance(id, int) or not 0 <= id < size:
            raise MalformedFile(f"{keys[name]} is {id!r}, which is not a token: the vocabulary has {size} tokens")
    return named
