from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.text import TextStream


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


TEXTS = st.text(st.sampled_from("ab <|im_end>水🙂é\n\ufffd"), max_size=30)
FLAGS = st.booleans()


@st.composite
def answers(draw):
    """Token ids as a model may sample them: any bytes in any order, cut into pushes anywhere."""
    ids = draw(st.lists(st.integers(0, 762), max_size=25))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return ids, cuts


def pushed(stream, ids, cuts):
    ends = [*cuts, len(ids)]
    parts = [stream.push(ids[start:end]) for start, end in zip([0, *cuts], ends, strict=True)]
    return "".join(parts) + stream.finish()


def until_stop(text, stops):
    """The definition: cut where the stop string that ends first begins."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(answers(), FLAGS, FLAGS)
def test_pushes_give_what_decode_gives(tokenizer, answer, special, continuing):
    ids, cuts = answer
    stream = TextStream(tokenizer, keep_special=special, continuing=continuing)
    assert pushed(stream, ids, cuts) == tokenizer.decode(ids, special=special, continuing=continuing)
    assert stream.consumed == len(ids)


@given(answers(), TEXTS, st.data())
def test_stop_strings_cut_the_same_however_tokens_come(tokenizer, answer, text, data):
    ids, cuts = answer
    ids = ids[:5] + tokenizer.encode(text) + ids[5:]
    whole = tokenizer.decode(ids)
    inside = st.integers(0, max(0, len(whole) - 1)).flatmap(
        lambda start: st.integers(1, 6).map(lambda size: whole[start : start + size])
    )
    stops = [stop for stop in data.draw(st.lists(inside | TEXTS, max_size=4)) if stop]
    stream, one_by_one = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    shown, met = until_stop(whole, stops)
    assert pushed(stream, ids, cuts) == shown
    assert stream.stopped == met
    assert pushed(one_by_one, ids, range(1, len(ids))) == shown
    assert stream.consumed == one_by_one.consumed
    including = TextStream(tokenizer, stops, include_stop=True)
    assert pushed(including, ids, cuts) == shown + (met or "")
    assert including.stopped == met


HALF_SURROGATES = {bytes([0xED, second]) for second in range(0xA0, 0xC0)}
HALF_SURROGATE = ([241, 164], [])  # the bytes ED A0 of the SentencePiece vocabulary


@given(answers())
@example(HALF_SURROGATE)
def test_no_more_is_held_back_than_must_be(tokenizer, answer):
    ids, _ = answer
    stream = TextStream(tokenizer)
    shown = ""
    for count, id in enumerate(ids, 1):
        shown += stream.push([id])
        so_far = tokenizer.decode(ids[:count])
        assert so_far.startswith(shown)
        assert set(so_far[len(shown) :]) <= {"\ufffd"}
        # The decoder waits for the third byte of an encoded surrogate, though two already make no character.
        said = [tokenizer.token_bytes(id) for id in ids[:count] if id not in tokenizer.special_ids]
        half_surrogate = b"".join(said)[-2:] in HALF_SURROGATES
        assert len(so_far) - len(shown) <= 1 + half_surrogate


def test_a_character_is_shown_when_its_last_byte_has_come(byte_level):
    stream = TextStream(byte_level)
    assert [stream.push([id]) for id in byte_level.encode("𒀀")] == ["", "", "", "𒀀"]
    assert stream.finish() == ""


def test_bytes_left_over_become_the_replacement_character(byte_level):
    stream = TextStream(byte_level)
    assert stream.push(byte_level.encode("𒀀")[:2]) == ""
    assert stream.finish() == "\ufffd"


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not(byte_level):
    a, b, c = (byte_level.encode(char)[0] for char in "abc")
    stream = TextStream(byte_level, ["aab"])
    assert [stream.push([id]) for id in (a, a, a, c, a, a)] == ["", "", "a", "aac", "", ""]
    assert stream.finish() == "aa"
    stream = TextStream(byte_level, ["aab"])
    assert [stream.push([id]) for id in (a, a, a, b, c)] == ["", "", "a", "", ""]
    assert stream.stopped == "aab"
    assert stream.consumed == 4
    assert stream.finish() == ""


def test_a_stop_string_may_end_with_the_last_replacement_character(byte_level):
    stream = TextStream(byte_level, ["a\ufffd"])
    assert stream.push(byte_level.encode("a") + byte_level.encode("𒀀")[:2]) == ""
    assert stream.finish() == ""
    assert stream.stopped == "a\ufffd"


def test_of_stop_strings_that_end_together_the_longest_counts(byte_level):
    stream = TextStream(byte_level, ["b", "ab"])
    assert stream.push(byte_level.encode("xab")) == "x"
    assert stream.stopped == "ab"


def test_special_tokens_are_shown_only_when_kept(byte_level):
    ids = byte_level.encode("a<|im_end|>b", special=True)
    assert TextStream(byte_level).push(ids) == "ab"
    assert TextStream(byte_level, keep_special=True).push(ids) == "a<|im_end|>b"


def test_first_space_of_a_text_that_goes_on(sentencepiece):
    ids = sentencepiece.encode("water")
    assert TextStream(sentencepiece).push(ids) == "water"
    assert TextStream(sentencepiece).push([sentencepiece.vocab_size, *ids]) == "water"
    assert TextStream(sentencepiece, continuing=True).push(ids) == " water"
