"""A journal makes of an answer that was cut the request for the rest: whoever reads both parts sees one answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from penstock.ipc.request_journal import RequestJournal
from penstock.types import Aborted, Event, Failed, Finished, Report, Request, SamplingParams, TokenLogprob, Tokens

VOCAB = 50
REQUESTS = st.tuples(
    st.just(7),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12).map(tuple),
    st.sampled_from([SamplingParams(), SamplingParams(prompt_logprobs=1)]),
    st.integers(1, 20),
).map(lambda fields: Request(*fields))
SHARES = st.lists(st.integers(1, 4), min_size=1, max_size=8)  # of an answer in each event, again and again
CUTS = st.lists(st.integers(0, 12), max_size=6)  # events that each engine gets to deliver before it dies


class Answer(NamedTuple):
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    mu: float | None = None
    cached: tuple[int, ...] = ()
    end: Event | None = None


def answer_to(request: Request, shares: list[int], cached: int) -> Iterator[Event]:
    """Answers as an engine does: scores of the prompt, then tokens, each of which depends on all before and on what was
    learned from them. `cached` is what this engine has of the prompt."""
    prompt, told = request.prompt, 0
    scored = len(prompt) - 1 if request.sampling.prompt_logprobs and not request.generated else 0
    for place in range(request.scored, scored):
        yield Tokens(request.id, (), (), (score(prompt, place),), cached)
    said, mu = list(request.generated), request.mirostat_mu or 1.0
    while len(said) < request.max_tokens:
        new = []
        for _ in range(min(shares[told % len(shares)], request.max_tokens - len(said))):
            token = (sum((*prompt, *said, *new)) * 31 + len(said) + len(new) + int(mu * 1000)) % VOCAB
            mu = mu * 0.75 + token / VOCAB
            new.append(token)
        said += new
        told += 1
        yield Tokens(request.id, tuple(new), (), (), cached, mu)
    yield Finished(request.id, "length", report=Report(cached=cached, waited=(("grammar", 0.5),)))


def score(prompt: tuple[int, ...], place: int) -> TokenLogprob:
    return TokenLogprob(prompt[place + 1], -float(place + prompt[place]), ())


def read(events: list[Event]) -> Answer:
    answer = Answer()
    for event in events:
        if isinstance(event, Tokens):
            answer = answer._replace(
                tokens=answer.tokens + event.tokens,
                scores=answer.scores + event.scores,
                mu=event.mirostat_mu,
                cached=(*answer.cached, event.cached),
            )
        else:
            answer = answer._replace(end=event)
    return answer


@given(request=REQUESTS, shares=SHARES, other_shares=SHARES, cuts=CUTS, cached=st.integers(0, 8))
def test_an_answer_that_is_cut_anywhere_and_resumed_is_the_answer_without_cuts(
    request: Request, shares: list[int], other_shares: list[int], cuts: list[int], cached: int
) -> None:
    whole = read(list(answer_to(request, [1], cached)))
    journal, told = RequestJournal(request), list[Event]()

    def deliver(event: Event) -> None:
        if isinstance(event, Tokens):
            journal.note(event)
        told.append(journal.told(event, (("restart", 2.0),) if cuts else ()))

    delivered, engines = 0, 0
    for count in cuts:
        for event, _ in zip(answer_to(journal.so_far(), shares, cached + engines), range(count), strict=False):
            if not isinstance(event, Tokens):
                break
            deliver(event)
            delivered += 1
        engines += delivered > 0  # every engine after the one that began has reused something else
        shares, other_shares = other_shares, shares
    for event in answer_to(journal.so_far(), shares, cached + engines):
        deliver(event)

    answer = read(told)
    assert answer.tokens == whole.tokens
    assert answer.scores == whole.scores
    assert answer.mu == whole.mu
    assert set(answer.cached) == {cached}
    assert isinstance(answer.end, Finished)
    waited = (("grammar", 0.5), ("restart", 2.0)) if cuts else (("grammar", 0.5),)
    assert answer.end == Finished(request.id, "length", report=Report(cached=cached, waited=waited))
    assert journal.delivered == len(whole.tokens)


@given(request=REQUESTS, first=st.integers(0, 12), second=st.integers(0, 12))
def test_a_journal_of_a_request_that_was_resumed_goes_on_from_there(request: Request, first: int, second: int) -> None:
    events = [event for event in answer_to(request, [2], 0) if isinstance(event, Tokens)]
    one = RequestJournal(request)
    for event in events[: first + second]:
        one.note(event)
    other = RequestJournal(request)
    for event in events[:first]:
        other.note(event)
    other = RequestJournal(other.so_far())
    for event in events[first : first + second]:
        other.note(event)
    assert other.so_far() == one.so_far()


def test_a_request_that_ends_before_any_token_is_told_as_its_engine_said() -> None:
    journal = RequestJournal(Request(7, (1, 2), SamplingParams(), 4))
    assert journal.so_far() == journal.request
    ended = Aborted(7, Report(cached=3))
    assert journal.told(ended, ()) == ended
    assert journal.told(Aborted(7), (("restart", 1.0),)) == Aborted(7)
    assert journal.told(Failed(7, "code", "text"), (("restart", 1.0),)) == Failed(7, "code", "text")
