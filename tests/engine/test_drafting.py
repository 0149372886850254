"""Tests what is proposed to come next, from which source, and what is learned of it."""

from __future__ import annotations

import builtins
import random
from typing import Any

import pytest

from penstock.core.drafting import suffixes
from penstock.core.drafting.lengths import NOTHING
from penstock.engine.drafts import drafting
from penstock.engine.drafts.drafting import Drafting, RequestDrafter
from penstock.types import Request, SamplingParams

TEXT = list(range(100, 160))


def asked(prompt: list[int], prediction: tuple[int, ...] = (), owner: str = "") -> Request:
    return Request(0, tuple(prompt), SamplingParams(), 100, owner=owner, prediction=prediction)


def opened(shared: Drafting, prompt: list[int], prediction: tuple[int, ...] = (), owner: str = "") -> RequestDrafter:
    drafter = shared.open(asked(prompt, prediction, owner))
    shared.index()
    return drafter


def test_a_request_copies_its_own_text() -> None:
    drafter = opened(Drafting(), [*TEXT, 1, 2])
    assert drafter.propose(8) == NOTHING
    drafter.append(TEXT[10:20])
    proposal = drafter.propose(8)
    assert proposal.tokens == tuple(TEXT[20:28])
    assert (proposal.source, proposal.match) == ("text", 10)
    assert len(proposal.survival) == 8
    assert drafter.propose(3).tokens == tuple(TEXT[20:23])


def test_a_prediction_is_drafted_from_its_beginning_and_found_again_after_a_change() -> None:
    drafter = opened(Drafting(), [1, 2], tuple(TEXT))
    assert drafter.propose(4).tokens == tuple(TEXT[:4])
    assert drafter.propose(4).source == "prediction"
    drafter.append([*TEXT[:3], 7, 8])
    assert drafter.propose(4) == NOTHING
    drafter.append(TEXT[30:33])
    assert drafter.propose(4).tokens == tuple(TEXT[33:37])


def test_recent_answers_of_the_same_owner_are_drafted_from() -> None:
    shared = Drafting()
    first = opened(shared, [1, 2, 3], owner="me")
    first.append(TEXT)
    shared.close(first)
    shared.index()
    mine, yours = opened(shared, [1, 2, 3], owner="me"), opened(shared, [1, 2, 3], owner="you")
    assert mine.propose(4).tokens == tuple(TEXT[:4])
    assert mine.propose(4).source == "recent"
    assert yours.propose(4) == NOTHING
    mine.append(TEXT[40:42])
    assert mine.propose(4).tokens == tuple(TEXT[42:46])


def test_an_answer_that_ends_meanwhile_is_drafted_from() -> None:
    shared = Drafting()
    slow, fast = opened(shared, [1]), opened(shared, [2])
    slow.append(TEXT[:5])
    assert slow.propose(4) == NOTHING
    fast.append(TEXT)
    shared.close(fast)
    shared.index()
    assert slow.propose(4).tokens == tuple(TEXT[5:9])
    slow.append(TEXT[5:7])
    assert slow.propose(4).tokens == tuple(TEXT[7:11])


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    shared = Drafting()
    drafter, other = shared.open(asked([*TEXT, *TEXT[10:20]])), shared.open(asked([5, 6, 5]))
    for token, size in ((TEXT[20], 40), (TEXT[21], 20)):
        shared.index(size)
        assert drafter.propose(4) == NOTHING, "its own text is not indexed yet"
        drafter.append([token])
    shared.index(10)
    assert drafter.propose(4).tokens == tuple(TEXT[22:26]), "what was committed meanwhile counts"
    assert other.propose(2) == NOTHING
    shared.index(100)
    assert other.propose(2).tokens == (6, 5)


def test_a_long_answer_is_indexed_in_pieces_when_it_ends() -> None:
    shared = Drafting()
    first = opened(shared, [1])
    first.append(TEXT)
    shared.close(first)
    shared.index(20)
    second = shared.open(asked([1, *TEXT[40:43]]))
    shared.index(4)
    assert second.propose(1) == NOTHING
    shared.index(100)
    second.append(TEXT[43:44])
    assert second.propose(1).tokens == (TEXT[44],)


def test_a_request_that_ends_early_is_not_indexed_further() -> None:
    shared = Drafting()
    drafter = shared.open(asked(TEXT))
    shared.close(drafter)
    shared.index()
    assert not drafter.texts.indexed
    assert shared.nbytes == 0


def test_recent_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "RECENT_TOKENS", 200)
    shared = Drafting()
    for owner in "abc":
        drafter = opened(shared, [1], owner=owner)
        drafter.append(TEXT)
        shared.close(drafter)
        shared.index()
        shared.index()
    assert [shared.recent(("", owner)) is None for owner in "abcd"] == [False, False, False, True]
    drafter = opened(shared, [1], owner="d")
    drafter.append(TEXT)
    shared.close(drafter)
    shared.index()
    assert [shared.recent(("", owner)) is None for owner in "abcd"] == [True, False, False, False]
    assert shared.nbytes > 0


def test_proposals_that_are_not_drafted_teach_too() -> None:
    """A stream that copies makes drafts likelier although nobody drafts. One that does not makes them less likely."""
    shared = Drafting()
    copying = opened(shared, [*TEXT, *TEXT[:3]], owner="a")
    before = copying.propose(8).survival
    for token in TEXT[3:50]:
        copying.append([token])
        copying.propose(8)
    assert opened(shared, [*TEXT, *TEXT[:3]], owner="b").propose(8).survival[4] > before[4]
    shared = Drafting()
    writing = opened(shared, [*TEXT, *TEXT[:3]], owner="a")
    for token in range(40):
        writing.propose(8)
        writing.append([1000 + token, *TEXT[token : token + 3]])
    assert writing.propose(8).survival[0] < before[0] / 2


def test_poor_streams_propose_less_when_there_are_many() -> None:
    shared = Drafting()
    streams = [opened(shared, [*TEXT, 1], owner=str(number)) for number in range(16)]
    chance, proposed = random.Random(0), 0
    for _ in range(100):
        for stream in streams:
            proposed += bool(stream.propose(4).tokens)
            stream.append([chance.choice(TEXT)])
    assert 50 * 16 / 8 < proposed < 100 * 16 / 3
    copying = streams[0]
    for token in TEXT[10:40]:
        copying.propose(4)
        copying.append([token])
    assert copying.propose(4).tokens == tuple(TEXT[40:44]), "it was noticed that it copies now"
    assert copying.propose(4).tokens == tuple(TEXT[40:44])


def test_what_was_proposed_stays_until_something_is_committed() -> None:
    drafter = opened(Drafting(), [*TEXT, 1, *TEXT[:5]])
    assert drafter.propose(8).tokens == tuple(TEXT[5:13])
    assert drafter.propose(2).tokens == tuple(TEXT[5:7])
    assert drafter.propose(9).tokens == tuple(TEXT[5:14])
    drafter.append(TEXT[5:7])
    assert drafter.propose(8).tokens == tuple(TEXT[7:15])


def test_rows_are_computed_by_turns_where_a_device_would_wait_longer_than_a_step_takes() -> None:
    shared = Drafting((8, 64, 256))
    assert not shared.halves(64), "nothing is known"
    shared.observe(1, 1, 0.004)
    shared.observe(64, 64, 0.009)
    for _ in range(8):
        shared.observe_gap(64, 0.0072)
    assert shared.halves(64)
    assert not shared.halves(8), "those take the host less"
    assert not shared.halves(1), "one row has no halves"
    for _ in range(40):
        shared.observe_gap(64, 0.002)
    assert not shared.halves(64)


def test_a_device_leaves_time_to_index_long_prompts() -> None:
    for shared, steps in ((Drafting(), 3), (Drafting((8, 64)), 1)):
        drafter = shared.open(asked(list(range(5000))))
        for step in range(steps):
            assert not drafter.texts.indexed, step
            shared.index()
        assert drafter.texts.indexed


def test_the_source_that_promises_most_is_taken() -> None:
    shared = Drafting()
    drafter = opened(shared, [*TEXT, 9, TEXT[7], 5], tuple(TEXT[:40]))
    drafter.append([1, TEXT[7]])
    assert drafter.propose(2).match == 1
    drafter.append(TEXT[8:12])
    assert drafter.propose(2).tokens == tuple(TEXT[12:14])


def test_python_stands_in_where_the_extension_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.endswith("_native"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert drafting.suffix_classes() == (suffixes.SuffixAutomaton, suffixes.SuffixCursor)
    drafter = opened(Drafting(), [*TEXT, 1, *TEXT[:5]])
    assert drafter.propose(2).tokens == tuple(TEXT[5:7])
