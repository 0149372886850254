"""From a request's events to text: the same for the server, streaming or not, and for the Python API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import EngineUnavailable, error_of
from penstock.text.detok import TextStream
from penstock.types import Aborted, Event, Failed, Finished, TokenLogprob, Tokens


class Delta(NamedTuple):
    """What one step added to one answer. Text may lag behind its tokens: never half a character, never the beginning
    of a stop string."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, when asked for
    scores: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens
    cached: int = 0  # prompt tokens whose KV was reused
    finish: str | None = None  # "stop", "length" or "pooled", in the last one
    silent: int = 0  # how many of `tokens`, at the end, are not part of the text: 1 for a stop token
    stop: str | None = None  # the stop string that ended it
    pooled: bytes = b""  # the hidden state that was asked for in place of tokens


def read_step(stream: TextStream, events: Sequence[Event]) -> Delta:
    """A request's share of a step: Tokens, or the event that ends it, or both. After a stop string there may be more
    in the engine: it is the caller's to abort."""
    first, last = events[0], events[-1]
    if isinstance(last, Failed):
        raise error_of(last.code, last.message)
    if isinstance(last, Aborted):
        raise EngineUnavailable("the engine aborted the request: send it again")
    _, tokens, logprobs, scores, cached = first if isinstance(first, Tokens) else Tokens(first.seq, ())
    silent = int(isinstance(last, Finished) and last.stop_token is not None)
    before = stream.consumed
    text = stream.push(tokens[: len(tokens) - silent])
    if stream.stopped is not None:
        count = stream.consumed - before
        return Delta(text, tokens[:count], logprobs[:count], scores, cached, "stop", stop=stream.stopped)
    if isinstance(last, Finished):
        whole = text + stream.finish()
        return Delta(whole, tokens, logprobs, scores, cached, last.reason, silent, pooled=last.pooled)
    return Delta(text, tokens, logprobs, scores, cached)
