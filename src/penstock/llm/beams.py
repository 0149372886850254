"""Runs beam search for `LLM.beam_search`, with vLLM's parameters and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.llm.pending import PendingChoice
from penstock.llm.requests import RequestMaker
from penstock.llm.shared_engine import SharedEngine
from penstock.text import TextStream
from penstock.text.beam_search import Beam, BeamSearch
from penstock.types import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Sets the parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    temperature: float = 0.0  # no effect: nothing is sampled


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """Holds one continuation, including its prompt."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None
    stop_reason: int | None = None  # the token that ended it


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Holds the continuations of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class PromptSearch(NamedTuple):
    """Holds the search for one prompt, and the template of its beams' requests."""

    request: Request
    search: BeamSearch


def search_beams(
    make: RequestMaker, engine: SharedEngine, prompts: Sequence[Any], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Returns the continuations of every prompt. The beams of all prompts advance together by one token per round; the
    prefix cache has the earlier tokens.
    """
    searches = [_begin(make, prompt, params) for prompt in prompts]
    while running := [each for each in searches if not each.search.done]:
        asked = [[_next_token(make, each, beam) for beam in each.search.running] for each in running]
        choices = [choice for beams in asked for choice in beams]
        with engine.running(choices):
            while not all(choice.ended() for choice in choices):
                engine.advance()
        for each, beams in zip(running, asked, strict=True):
            each.search.advance([choice.deltas[0].logprobs[0] for choice in beams])
    return [
        BeamSearchOutput([_sequence(make, each.request, beam) for beam in each.search.best(params.beam_width)])
        for each in searches
    ]


def _begin(make: RequestMaker, prompt: Any, params: BeamSearchParams) -> PromptSearch:
    sampling = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, seed=0)
    request = make.generation(make.prompt(prompt), sampling).choices[0].request
    search = BeamSearch(
        len(request.prompt), params.beam_width, params.max_tokens, request.stop_ids, params.length_penalty
    )
    return PromptSearch(request, search)


def _next_token(make: RequestMaker, search: PromptSearch, beam: Beam) -> PendingChoice:
    request = search.request._replace(
        id=make.next_id(),
        prompt=(*search.request.prompt, *beam.tokens),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=search.search.alternatives, seed=0),
        max_tokens=1,
        stop_ids=frozenset(),
    )
    return PendingChoice(request, TextStream(make.text.tokenizer))


def _sequence(make: RequestMaker, request: Request, beam: Beam) -> BeamSearchSequence:
    ending = [] if beam.stop_token is None else [beam.stop_token]
    tokens = [*request.prompt, *beam.tokens, *ending]
    return BeamSearchSequence(tokens, make.text.tokenizer.decode(tokens), beam.total, beam.finish, beam.stop_token)
