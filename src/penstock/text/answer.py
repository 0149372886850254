"""Turns the events of a request into text, for the server and the Python API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.errors import EngineUnavailable, error_of
from penstock.text.detok import TextStream
from penstock.types import Aborted, Event, Failed, Finished, Report, TokenLogprob, Tokens

REPETITION = "repetition"  # why the loop guard stops an answer


class Delta(NamedTuple):
    """Holds the tokens and text that one step added to one answer. Text may lag behind its tokens: it never ends within
    a character or a possible stop string.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if requested
    scores: tuple[TokenLogprob, ...] = ()  # one per prompt token
    cached: int = 0  # prompt tokens with reused KV
    finish: str | None = None  # in the last delta: "stop", "length" or "pooled"
    silent: int = 0  # trailing `tokens` without text: 1 for a stop token that is not included
    stop: str | None = None  # the stop string that ended the answer
    pooled: bytes = b""  # the requested hidden state, instead of tokens
    report: Report | None = None  # in the last delta, unless a stop string ended the answer before the engine did

    @property
    def loop(self) -> int:
        """Returns the length in tokens of the repeated phrase that ended the answer; 0 if it ended otherwise."""
        return self.report.loop if self.report is not None and self.finish == "length" else 0


def one_by_one(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
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
    """Converts one step's events to a delta: Tokens, the final event, or both. After a stop string the caller must
    abort the request, because the engine would continue.
    """
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
