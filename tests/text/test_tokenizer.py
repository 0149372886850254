from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import ContextTooLong, MalformedFile, UnsupportedModel
from penstock.model.gguf.reader import read_gguf
from penstock.templates import MAX_CHARACTERS
from penstock.text import Text, Tokenizer
from penstock.text.pretokenize import PRETOKENIZERS


def encoded(tokenizer, cases, **how):
    return {case["text"]: tokenizer.encode(case["text"], **how) for case in cases}


def expected(cases, mode):
    return {case["text"]: case[mode] for case in cases}


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2: Path):
    return read_gguf(smollm2).metadata


@pytest.fixture(scope="module")
def smollm2_text(smollm2_metadata) -> Text:
    return Text.from_gguf(smollm2_metadata)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_byte_level_ids_are_those_of_tiktoken(byte_level_vectors, pre):
    tokenizer = Tokenizer.from_gguf(byte_level_vectors["metadata"] | {"tokenizer.ggml.pre": pre})
    cases = byte_level_vectors["cases"][pre]
    assert encoded(tokenizer, cases) == expected(cases, "literal")
    assert encoded(tokenizer, cases, special=True) == expected(cases, "special")


def test_sentencepiece_ids_are_those_of_sentencepiece(sentencepiece, sentencepiece_vectors):
    cases = sentencepiece_vectors["cases"]
    assert encoded(sentencepiece, cases) == expected(cases, "literal")


def test_smollm2_ids_are_those_of_llama_cpp(smollm2_text, smollm2_vectors):
    cases = smollm2_vectors["cases"]
    assert encoded(smollm2_text.tokenizer, cases) == expected(cases, "literal")
    assert encoded(smollm2_text.tokenizer, cases, special=True) == expected(cases, "special")


def test_smollm2_decodes_to_what_was_encoded(smollm2_text, smollm2_vectors):
    for case in smollm2_vectors["cases"]:
        if "\U0010fffd" not in case["text"]:  # this vocabulary has no token for the byte 0xf4
            assert smollm2_text.tokenizer.decode(case["special"], special=True) == case["text"]


def test_smollm2_knows_its_special_tokens(smollm2_text):
    tokenizer = smollm2_text.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.bos_id == 1
    assert tokenizer.special_ids == set(range(17))
    assert tokenizer.decode([1, 2, 19556]) == "Hello"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_smollm2_chat_prompt(smollm2_text):
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = smollm2_text.encode_chat(messages)
    assert smollm2_text.tokenizer.decode(ids, special=True) == prompt
    assert ids == smollm2_text.encode_prompt(prompt)
    assert ids[0] == 1
    assert ids.count(2) == 2


def test_arrays_of_other_kinds_do(byte_level, byte_level_vectors):
    metadata = dict(byte_level_vectors["metadata"])
    metadata["tokenizer.ggml.tokens"] = tuple(token.encode() for token in metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.token_type"] = array("i", metadata["tokenizer.ggml.token_type"])
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"})
    cases = byte_level_vectors["cases"]["gpt-2"]
    assert encoded(tokenizer, cases) == encoded(byte_level, cases)


def test_unigram_ids_are_those_of_sentencepiece_and_llama_cpp(unigram_vectors):
    """But for the text of a special token, which the library takes for the token."""
    tokenizer = Tokenizer.from_gguf(unigram_vectors["metadata"])
    cases = [case for case in unigram_vectors["cases"] if "<unk>" not in case["text"]]
    assert len(cases) > 50
    assert encoded(tokenizer, cases) == expected(cases, "literal")
    assert tokenizer.decode(tokenizer.encode("the water stands above")) == "the water stands above"
    assert tokenizer.encode("ＷＡＴＥＲ  x") == tokenizer.encode("WATER x")
    with pytest.raises(MalformedFile, match="precompiled_charsmap cannot be read"):
        Tokenizer.from_gguf(unigram_vectors["metadata"] | {"tokenizer.ggml.precompiled_charsmap": [1, 2, 3]})


def test_ids_of_every_family_are_those_of_llama_cpp(byte_level_vectors):
    cut = set()
    for name, answers in byte_level_vectors["families"].items():
        tokenizer = Tokenizer.from_gguf(byte_level_vectors["metadata"] | {"tokenizer.ggml.pre": name})
        known = {text: ids for text, ids in zip(byte_level_vectors["texts"], answers, strict=True) if ids is not None}
        assert {text: tokenizer.encode(text) for text in known} == known, name
        cut.add(PRETOKENIZERS[name].splits)
    assert cut == {entry.splits for entry in PRETOKENIZERS.values() if not entry.characters}


@pytest.mark.parametrize(
    "name", ["gemma4 gemma4", "gpt2 granite-embed-multi-311m", "gpt2 sarvam-moe", "gpt2 whitespace"]
)
def test_merges_over_characters_are_those_of_llama_cpp(name, sentencepiece_vectors, character_vectors):
    model, pre = name.split()
    metadata = sentencepiece_vectors["metadata"] | {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": character_vectors["merges"]})
    answers = character_vectors["answers"][name]
    assert len(answers) > 40
    assert {text: tokenizer.encode(text) for text in answers} == answers
    if pre != "whitespace":
        text = "the water  stands\n\nabove é 水"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_some_families_compose_characters_first(byte_level_vectors):
    metadata = byte_level_vectors["metadata"]
    qwen2 = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert qwen2.decode(qwen2.encode("e\u0301")) == "\u00e9"


def test_marks_stay_with_their_letters(byte_level_vectors):
    """Where llama.cpp is not followed: tekken and gpt-4o take a mark for a part of its word."""
    metadata = with_added(byte_level_vectors["metadata"], ["aÌĤ", "ÌĤ"], kind=1)
    metadata["tokenizer.ggml.merges"] = ["Ì Ĥ", "a ÌĤ", *metadata["tokenizer.ggml.merges"]]
    for name, pieces in (("tekken", ["a\u0302"]), ("gpt-4o", ["a\u0302"]), ("gpt-2", ["a", "\u0302"])):
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": name})
        assert [tokenizer.token_text(id) for id in tokenizer.encode("a\u0302")] == pieces


def test_sentencepiece_decodes_as_sentencepiece_does(sentencepiece, sentencepiece_vectors):
    decoded = sentencepiece_vectors["decoded"]
    assert [sentencepiece.decode(case["ids"]) for case in decoded] == [case["text"] for case in decoded]


def test_sentencepiece_prefix_space(sentencepiece, sentencepiece_vectors):
    ids = sentencepiece.encode("water")
    assert sentencepiece.token_text(ids[0]).startswith(" ")
    assert sentencepiece.decode(ids) == "water"
    assert sentencepiece.decode(ids, continuing=True) == " water"
    metadata = sentencepiece_vectors["metadata"] | {"tokenizer.ggml.add_space_prefix": False}
    plain = Tokenizer.from_gguf(metadata)
    assert plain.token_text(plain.encode("water")[0]).startswith("w")
    assert plain.decode(plain.encode(" water")) == " water"


def test_text_never_spells_a_control_token_unless_asked(byte_level, sentencepiece):
    for tokenizer in (byte_level, sentencepiece):
        (end,) = tokenizer.encode("<|im_end|>", special=True)[-1:]
        assert end in tokenizer.special_ids
        assert end not in tokenizer.encode("<|im_end|>")
        assert tokenizer.decode(tokenizer.encode("<|im_end|>")) == "<|im_end|>"


def test_bos_is_added_once_and_only_when_wanted(sentencepiece, byte_level, sentencepiece_vectors):
    ids = sentencepiece.encode("water")
    assert sentencepiece.encode("water", bos=True) == [1, *ids]
    assert sentencepiece.encode("<s>water", special=True, bos=True) == [1, *ids]
    assert sentencepiece.encode("", bos=True) == [1]
    unwanted = Tokenizer.from_gguf(sentencepiece_vectors["metadata"] | {"tokenizer.ggml.add_bos_token": False})
    assert unwanted.encode("water", bos=True) == ids
    assert byte_level.bos_id is None
    assert byte_level.encode("water", bos=True) == byte_level.encode("water")


def test_a_piece_that_is_a_token_is_taken_whole_where_the_family_does_so(byte_level_vectors):
    metadata = with_added(byte_level_vectors["metadata"], ["zqzqz"], kind=1)
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    for name, taken in (("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)):
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": name})
        assert (tokenizer.encode("zqzqz") == [whole]) is taken


def test_control_tokens_are_never_made_by_merging(sentencepiece_vectors):
    tokens = sentencepiece_vectors["metadata"]["tokenizer.ggml.tokens"]
    letters = [token for token in tokens if len(token) == 1]
    word = next(a + b for a in letters for b in letters if a + b not in tokens)
    metadata = with_added(sentencepiece_vectors["metadata"], [word])
    metadata["tokenizer.ggml.scores"] = [*metadata["tokenizer.ggml.scores"], 0.0]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode(word, special=True) == [len(tokens)]
    assert len(tokens) not in tokenizer.encode(word)


def test_end_tokens(sentencepiece, byte_level_vectors):
    assert sentencepiece.eos_ids == {2, sentencepiece.encode("<|im_end|>", special=True)[-1]}
    metadata = with_added(byte_level_vectors["metadata"], ["<|end|>", "<|return|>", "<|call|>", "<|eom_id|>"])
    assert ends(metadata) == {"<|im_end|>", "<|return|>", "<|call|>", "<|eom_id|>"}
    metadata = with_added(byte_level_vectors["metadata"], ["<|end|>", "<stop>"])
    named = metadata["tokenizer.ggml.tokens"].index("<stop>")
    assert ends(metadata) == {"<|im_end|>", "<|end|>"}
    assert ends(metadata | {"tokenizer.ggml.eot_token_id": named}) == {"<|im_end|>", "<|end|>", "<stop>"}


def with_added(metadata, texts, kind=3):
    return metadata | {
        "tokenizer.ggml.tokens": metadata["tokenizer.ggml.tokens"] + texts,
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"] + [kind] * len(texts),
    }


def ends(metadata):
    tokenizer = Tokenizer.from_gguf(metadata)
    return {tokenizer.token_text(id) for id in tokenizer.eos_ids}


def test_user_defined_tokens_are_text_that_is_always_one_token(byte_level):
    tool = byte_level.vocab_size - 1
    assert byte_level.encode("<tool>") == [tool]
    assert byte_level.decode([tool]) == "<tool>"
    assert tool not in byte_level.special_ids


def test_a_token_outside_the_byte_alphabet_stands_for_its_own_text(byte_level_vectors):
    tokenizer = Tokenizer.from_gguf(with_added(byte_level_vectors["metadata"], ["水路"], kind=1))
    assert tokenizer.token_text(tokenizer.vocab_size - 1) == "水路"


def test_unused_token_without_text(byte_level_vectors, byte_level):
    tokenizer = Tokenizer.from_gguf(with_added(byte_level_vectors["metadata"], ["", ""], kind=5))
    assert tokenizer.vocab_size == byte_level.vocab_size + 2
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""


@pytest.mark.parametrize("id", [-1, 762, 2**31, 2**40])
def test_ids_past_the_vocabulary_have_no_text(byte_level, id):
    assert byte_level.vocab_size == 762
    assert byte_level.token_bytes(id) == b""
    assert byte_level.decode([id]) == ""


def test_lone_surrogates_count_as_the_replacement_character(byte_level):
    assert byte_level.encode("a\ud800b") == byte_level.encode("a\ufffdb")
    assert byte_level.encode("\ude00") == byte_level.encode("\ufffd")
    assert byte_level.encode("\ud83d\ude42") == byte_level.encode("🙂")


def test_bytes_that_are_no_utf8_decode_to_the_replacement_character(byte_level, sentencepiece):
    wave = byte_level.encode("𒀀")
    assert len(wave) == 4
    assert byte_level.decode(wave[:3]) == "\ufffd"
    assert byte_level.decode([wave[1], *wave, wave[3]]) == "\ufffd𒀀\ufffd"
    assert byte_level.token_text(wave[0]) == "\ufffd"
    fallback = sentencepiece.encode("𒀀")[1:]
    assert sentencepiece.decode(fallback[:2]) == "\ufffd"


def test_a_text_beyond_all_measure_is_refused(byte_level):
    with pytest.raises(ContextTooLong, match=str(MAX_CHARACTERS)):
        byte_level.encode("a" * (MAX_CHARACTERS + 1))


def test_several_threads_encode_at_once(byte_level, byte_level_vectors):
    cases = byte_level_vectors["cases"]["gpt-2"]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: encoded(byte_level, cases), range(16)))
    assert all(result == expected(cases, "literal") for result in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "nobody-knows"}, "'nobody-knows'"),
    ],
)
def test_unsupported_tokenizers_are_named(byte_level_vectors, change, message):
    with pytest.raises(UnsupportedModel, match=message):
        Tokenizer.from_gguf(byte_level_vectors["metadata"] | change)


@pytest.mark.parametrize("name", ["model", "tokens", "token_type", "merges"])
def test_a_missing_array_is_malformed(byte_level_vectors, name):
    refuses_without(byte_level_vectors["metadata"], name)


@pytest.mark.parametrize("name", ["tokens", "token_type", "scores"])
def test_a_missing_array_of_sentencepiece_is_malformed(sentencepiece_vectors, name):
    refuses_without(sentencepiece_vectors["metadata"], name)


def refuses_without(metadata, name):
    kept = {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}
    with pytest.raises(MalformedFile, match=rf"tokenizer\.ggml\.{name} (is missing|must name)"):
        Tokenizer.from_gguf(kept)


@pytest.mark.parametrize(
    ("vectors", "change", "message"),
    [
        ("byte_level_vectors", {"model": 7}, "model must name a tokenizer; got 7"),
        ("byte_level_vectors", {"pre": ["gpt-2"]}, "pre must name a tokenizer"),
        ("byte_level_vectors", {"token_type": [float("inf")] * 762}, "token_type"),
        ("byte_level_vectors", {"token_type": [1]}, "token_type has 1 entries for 762 tokens"),
        ("byte_level_vectors", {"token_type": 7}, "token_type"),
        ("byte_level_vectors", {"tokens": [1, 2]}, "tokens"),
        ("byte_level_vectors", {"tokens": ["a"] * 762}, "same token twice"),
        ("byte_level_vectors", {"tokens": [b"\xff"] * 762}, "tokens"),
        ("byte_level_vectors", {"merges": ["a"]}, "merges"),
        ("byte_level_vectors", {"merges": ["no such"]}, "merges"),
        ("byte_level_vectors", {"eos_token_id": 762}, "eos_token_id is 762"),
        ("byte_level_vectors", {"bos_token_id": -1}, "bos_token_id is -1"),
        ("byte_level_vectors", {"eot_token_id": "2"}, "eot_token_id is '2'"),
        ("sentencepiece_vectors", {"scores": [0.5]}, "scores has 1 entries"),
        ("sentencepiece_vectors", {"scores": ["high"] * 640}, "scores"),
    ],
)
def test_malformed_metadata(request, vectors, change, message):
    metadata = request.getfixturevalue(vectors)["metadata"]
    changed = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    with pytest.raises(MalformedFile, match=message):
        Tokenizer.from_gguf(metadata | changed)


def test_sentencepiece_needs_an_unknown_token(sentencepiece_vectors):
    metadata = dict(sentencepiece_vectors["metadata"])
    del metadata["tokenizer.ggml.unknown_token_id"]
    assert Tokenizer.from_gguf(metadata).vocab_size == 640
    metadata["tokenizer.ggml.token_type"] = [3 if kind == 2 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    with pytest.raises(MalformedFile, match="unknown"):
        Tokenizer.from_gguf(metadata)
