"""Turns the events of a request into text, for the server and for the Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.errors import EngineUnavailable, error_of
from penstock.text.detok import TextStream
from penstock.types import Aborted, Event, Failed, Finished, Report, TokenLogprob, Tokens

REPETITION = "repetition"  # the reason why the loop guard stops an answer


class Delta(NamedTuple):
    """Holds what one step added to one answer. Text may lag behind its tokens: it never ends within a character or
    within what may become a stop string."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, when asked for
    scores: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens
    cached: int = 0  # prompt tokens whose KV was reused
    finish: str | None = None  # "stop", "length" or "pooled", in the last one
    silent: int = 0  # how many of the last `tokens` are not part of the text: 1 for a stop token that is not included
    stop: str | None = None  # the stop string that ended it
    pooled: bytes = b""  # the hidden state that was asked for in place of tokens
    report: Report | None = None  # in the last one, unless a stop string ended it before the engine did

    @property
    def loop(self) -> int:
        """Returns how many tokens the phrase has that the answer repeated, if that ended it; 0: it did not."""
        return self.report.loop if self.report is not None and self.finish == "length" else 0


def one_by_one(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Yields the events of a step as if each token had come in a step of its own."""
    first, *rest = events
    if not isinstance(first, Tokens) or len(first.tokens) < 2:
        yield events
        return
    last = len(first.tokens) - 1
    single = first._replace(tokens=first.tokens[:1], logprobs=first.logprobs[:1])
    for at in range(last):
        yield (single,)
        single = first._replace(
            tokens=first.tokens[at + 1 : at + 2], logprobs=first.logprobs[at + 1 : at + 2], scores=()
        )
    yield (single, *rest)


def read_step(stream: TextStream, events: Sequence[Event]) -> Delta:
    """Returns what the events of one step add to an answer: Tokens, the event that ends it, or both. After a stop
    string the engine would go on: the caller must abort the request."""
    first, last = events[0], events[-1]
    if type(last) is Tokens and not stream.may_stop:
        _, tokens, logprobs, scores, cached, _ = last
        return Delta(stream.push(tokens), tokens, logprobs, scores, cached)
    if isinstance(last, Failed):
        raise error_of(last.code, last.message, last.retry_after)
    if isinstance(last, Aborted):
        raise EngineUnavailable("the engine aborted the request: send it again")
    _, tokens, logprobs, scores, cached, _ = first if isinstance(first, Tokens) else Tokens(first.seq, ())
    ended = last if isinstance(last, Finished) else None
    silent = int(ended is not None and ended.stop_token is not None and not stream.include_stop)
    before = stream.consumed
    text = stream.push(tokens[: len(tokens) - silent])
    if stream.stopped is not None:
        count = stream.consumed - before
        report = ended.report if ended else None
        delta = Delta(text, tokens[:count], logprobs[:count], scores, cached, "stop")
        return delta._replace(stop=stream.stopped, report=report)
    if ended is not None:
        delta = Delta(text + stream.finish(), tokens, logprobs, scores, cached, ended.reason, silent)
        return delta._replace(pooled=ended.pooled, report=ended.report)
    return Delta(text, tokens, logprobs, scores, cached)
