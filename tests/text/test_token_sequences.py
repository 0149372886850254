"""Bad words and breakers become the token sequences that vLLM and llama.cpp make of them."""

from __future__ import annotations

import pytest

from penstock.text.token_sequences import bad_word_tokens, breaker_tokens


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def test_a_bad_word_counts_with_and_without_a_space_before(byte_level):
    words = bad_word_tokens(byte_level, (" hello",))
    assert [byte_level.decode(word, continuing=True) for word in words][:1] == ["hello"]
    texts = {byte_level.decode(word, continuing=True) for word in words}
    assert texts <= {"hello", " hello"}
    plain, spaced = byte_level.encode("hello"), byte_level.encode(" hello")
    assert (tuple(spaced) in words) == (len(plain) == len(spaced) and plain[0] != spaced[0])


def test_nothing_is_made_of_no_words(tokenizer):
    assert bad_word_tokens(tokenizer, ()) == ()
    assert breaker_tokens(tokenizer, ()) == ()


def test_each_token_with_a_breaker_in_it_breaks(tokenizer):
    found = set(breaker_tokens(tokenizer, ("\n", "a")))
    spelled = {id: tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    assert found == {(id,) for id, piece in spelled.items() if b"\n" in piece or b"a" in piece}


def test_a_longer_breaker_is_found_across_tokens(byte_level):
    found = breaker_tokens(byte_level, ("ab c",))
    for sequence in found:
        assert "ab c" in "".join(byte_level.token_text(id) for id in sequence)
    assert any(len(sequence) > 1 for sequence in found)


def test_a_word_of_spaces_is_a_word(tokenizer):
    assert all(sequence for sequence in bad_word_tokens(tokenizer, ("  ",)))
