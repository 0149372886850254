"""WordPiece vocabularies from tokenizer.json, vocab.txt and GGUF metadata: the same ids from all three."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.text import Text
from penstock.text.embedding import truncate_prompt
from penstock.text.gguf_export import text_keys
from penstock.text.wordpiece import SPECIAL, wordpiece

WORDS = ("the", "river", "##s", "run", "##ning", "un", "##der", "u", "caf", "##e", "##é", "!", ",", "漢", "字", "#")
VOCAB = [*SPECIAL, *WORDS]
IDS = {token: id for id, token in enumerate(VOCAB)}
CLS, SEP, UNK = (IDS[token] for token in ("[CLS]", "[SEP]", "[UNK]"))
TEXTS = {
    "The rivers, running under!": ["the", "river", "##s", ",", "run", "##ning", "un", "##der", "!"],
    "Üs  CAFÉ\n\tthe\x00": ["u", "##s", "caf", "##e", "the"],
    "漢字the": ["漢", "字", "the"],
    "riverx [SEP] ##s": ["[UNK]", "[SEP]", "#", "#", "[UNK]"],
    "the" * 34: ["[UNK]"],
    "": [],
}
METADATA = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [
        token if token in SPECIAL else token[2:] if token.startswith("##") else f"▁{token}" for token in VOCAB
    ],
    "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in VOCAB],
    "tokenizer.ggml.unknown_token_id": UNK,
    "tokenizer.ggml.seperator_token_id": SEP,
}


def save_json(folder: Path) -> Text:
    library = wordpiece(IDS, lowercase=True)
    library.add_special_tokens(list(SPECIAL))
    library.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    library.enable_truncation(4)
    library.save(str(folder / "tokenizer.json"))
    return Text.from_folder(folder)


def save_vocab(folder: Path, **config: object) -> Text:
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n", "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Text.from_folder(folder)


@pytest.fixture(params=["json", "vocab.txt", "gguf"])
def text(request: pytest.FixtureRequest, tmp_path: Path) -> Text:
    if request.param == "gguf":
        return Text.from_gguf(METADATA)
    return save_json(tmp_path) if request.param == "json" else save_vocab(tmp_path, do_lower_case=True)


def test_texts_are_cut_into_pieces_and_closed(text: Text):
    for given, pieces in TEXTS.items():
        ids = [IDS[piece] for piece in pieces]
        assert text.encode_whole(given) == [CLS, *ids, SEP], given
        assert text.encode_prompt(given) == [CLS, *ids]
        assert text.tokenizer.encode(given, special=True) == ids


def test_ids_become_text_again(text: Text):
    assert text.tokenizer.decode(text.encode_whole("The rivers, running")) == "the rivers , running"
    assert text.tokenizer.vocab_size == len(VOCAB)
    assert text.tokenizer.special_ids == frozenset(map(IDS.__getitem__, SPECIAL))
    assert text.template is None


def test_a_config_decides_on_case_accents_and_chinese(tmp_path: Path):
    text = save_vocab(tmp_path, do_lower_case=False)
    assert text.tokenizer.encode("The café") == [UNK, IDS["caf"], IDS["##é"]]
    text = save_vocab(tmp_path, do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False)
    assert text.tokenizer.encode("THE CAFÉ 漢字") == [IDS["the"], IDS["caf"], IDS["##é"], UNK]


def test_every_line_is_a_token(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "\u2028", "the"]) + "\n", "utf-8")
    assert Text.from_folder(tmp_path).tokenizer.encode("the") == [len(SPECIAL) + 1]


def test_a_vocabulary_with_capitals_keeps_them():
    tokens = [*METADATA["tokenizer.ggml.tokens"], "▁The"]
    cased = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*METADATA["tokenizer.ggml.token_type"], 1]}
    assert Text.from_gguf(METADATA | cased).tokenizer.encode("The the") == [len(VOCAB), IDS["the"]]


def test_metadata_that_names_no_special_tokens_has_them_by_their_text():
    named = {key: value for key, value in METADATA.items() if not key.endswith("_id")}
    assert Text.from_gguf(named).encode_whole("the") == [CLS, IDS["the"], SEP]
    tokens = [token if token != "[CLS]" else "[BOS]" for token in METADATA["tokenizer.ggml.tokens"]]
    with pytest.raises(MalformedFile, match=r"has no '\[CLS\]', and no key says which token is bos"):
        Text.from_gguf(named | {"tokenizer.ggml.tokens": tokens})


def test_a_damaged_vocabulary(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("the\n")
    with pytest.raises(MalformedFile, match=r"has no token '\[UNK\]'"):
        Text.from_folder(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"\xff")
    with pytest.raises(MalformedFile, match="is not UTF-8"):
        Text.from_folder(tmp_path)


def test_what_closes_a_text_is_put_after_whole_ones_alone(tmp_path: Path):
    """A decoder's embeddings may want it too; its prompts do not."""
    library = tokenizers.Tokenizer.from_str(save_json(tmp_path).tokenizer._parsing.to_str())
    library.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", SEP)])
    library.save(str(tmp_path / "tokenizer.json"))
    text = Text.from_folder(tmp_path)
    assert (text.encode_prompt("the"), text.encode_whole("the")) == ([IDS["the"]], [IDS["the"], SEP])


def test_a_folder_as_metadata_encodes_alike(tmp_path: Path):
    folder = save_json(tmp_path)
    metadata = text_keys(tmp_path, len(VOCAB) + 1)
    assert metadata["tokenizer.ggml.tokens"] == [*METADATA["tokenizer.ggml.tokens"], f"[PAD{len(VOCAB)}]"]
    assert metadata.items() >= {key: value for key, value in METADATA.items() if not isinstance(value, list)}.items()
    for given in TEXTS:
        assert Text.from_gguf(metadata).encode_whole(given) == folder.encode_whole(given)


def test_case_that_metadata_cannot_tell_of_is_refused(tmp_path: Path):
    save_vocab(tmp_path, do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False)
    with pytest.raises(UnsupportedModel, match="would encode text differently"):
        text_keys(tmp_path, len(VOCAB))


def test_a_text_is_cut_before_what_closes_it():
    assert truncate_prompt([1, 2, 3, 9], 4, (9,)) == [1, 2, 3, 9]
    assert truncate_prompt([1, 2, 3, 4, 9], 3, (9,)) == [1, 2, 9]
    assert truncate_prompt([1, 2, 3], 2, ()) == [1, 2]
    assert truncate_prompt([1, 2, 9], 1, (9,)) == [1]
