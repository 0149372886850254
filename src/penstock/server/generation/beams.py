"""Runs beam search for OpenAI's routes: asks the engine for the likeliest next tokens of every beam, step by step.

A beam's next request repeats all tokens before it; the prefix cache has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial

from penstock.errors import InvalidRequest
from penstock.server.chat.schema_check import Deltas, TakeDelta
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.fields import GenerationFields
from penstock.server.http.bodies import ignore_unsupported
from penstock.server.models.served_model import ServedModel
from penstock.server.telemetry.metrics import RequestTimer
from penstock.text import Delta, TextStream, read_step
from penstock.text.beam_search import Beam, BeamSearch
from penstock.types import Request, SamplingParams, TokenLogprob

WITHOUT_EFFECT = (  # beam search does not sample
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)


def check_beams(context: RequestContext, fields: GenerationFields, params: SamplingParams) -> None:
    """Raises if beam search does not support a request's fields; lists the fields that it ignores."""
    if params.grammar is not None:
        raise InvalidRequest(
            "use_beam_search cannot be combined with structured output: send one of them", param="use_beam_search"
        )
    for name in WITHOUT_EFFECT:
        if value := getattr(fields, name):
            ignore_unsupported(context, name, value)


def beam_deltas(
    served: ServedModel,
    context: RequestContext,
    requests: Sequence[Request],
    fields: GenerationFields,
    *,
    continuing: bool = False,
    shown: Collection[int] = (),
) -> Deltas:
    """Returns each answer whole, when its search has ended: the best beams of every prompt, the best first. `requests`
    has one entry for each answer of each prompt."""
    return partial(_search, served, context, requests, fields, continuing, shown)


async def _search(
    served: ServedModel,
    context: RequestContext,
    requests: Sequence[Request],
    fields: GenerationFields,
    continuing: bool,
    shown: Collection[int],
    take: TakeDelta,
) -> None:
    width = fields.choices
    for first in range(0, len(requests), width):
        request = requests[first]
        penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
        search = BeamSearch(len(request.prompt), width, request.max_tokens, request.stop_ids, penalty)
        with context.answer(), RequestTimer(served.metrics, context, request, served.client) as timer:
            while not search.done:
                timer.tokens(len(search.running), 0)
                search.advance(await _next_tokens(served, request, search))
            timer.reason = "stop"
        for choice, beam in enumerate(search.best(width), first):
            stream = TextStream(
                served.text.tokenizer,
                request.sampling.stop,
                continuing=continuing,
                shown=shown,
                include_stop=request.sampling.include_stop_str_in_output,
            )
            take(choice, _delta(stream, request, beam))


async def _next_tokens(served: ServedModel, request: Request, search: BeamSearch) -> list[TokenLogprob]:
    """Returns the likeliest next tokens of every running beam. If one request fails, all do."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=search.alternatives, seed=0)
    asked = [
        request._replace(
            id=served.client.next_id(),
            prompt=(*request.prompt, *beam.tokens),
            sampling=sampling,
            max_tokens=1,
            stop_ids=frozenset(),
            explain=False,
        )
        for beam in search.running
    ]
    tasks = [asyncio.create_task(_next_token(served, each)) for each in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _next_token(served: ServedModel, request: Request) -> TokenLogprob:
    found: list[TokenLogprob] = []
    stream = TextStream(served.text.tokenizer)
    await served.client.run(request, lambda events: found.extend(read_step(stream, events).logprobs))
    return found[0]


def _delta(stream: TextStream, request: Request, beam: Beam) -> Delta:
    text = stream.push(beam.tokens)
    count = stream.consumed
    wanted = request.sampling.logprobs
    logprobs = [each._replace(top=each.top[:wanted]) for each in beam.logprobs] if wanted is not None else []
    if stream.stopped is not None:
        return Delta(text, beam.tokens[:count], tuple(logprobs[:count]), finish="stop", stop=stream.stopped)
    tokens = beam.tokens
    if beam.stop_token is not None:
        tokens = (*tokens, beam.stop_token)
        if wanted is not None:
            logprobs.append(TokenLogprob(beam.stop_token, beam.total - sum(each.logprob for each in beam.logprobs)))
    silent = len(tokens) - len(beam.tokens)
    return Delta(text + stream.finish(), tokens, tuple(logprobs), finish=beam.finish, silent=silent)
