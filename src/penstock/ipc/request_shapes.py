"""Makes requests without their text that cost an engine the same work."""

from __future__ import annotations

from penstock.types import Request, SamplingParams


def without_text(request: Request, vocab: int) -> Request:
    return with_made_up(shape_of(request), len(request.prompt), len(request.generated), vocab)


def shape_of(request: Request) -> Request:
    """Returns a request without tokens and other contents."""
    params = request.sampling
    sampling = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        chain=params.chain,
        penalty_window=params.penalty_window,
    )
    return Request(
        id=request.id,
        prompt=(),
        sampling=sampling,
        max_tokens=request.max_tokens,
        priority=request.priority,
        pooling=request.pooling,
        background=request.background,
        speculation=request.speculation,
        scored=request.scored,
        mirostat_mu=request.mirostat_mu,
    )


def with_made_up(shape: Request, prompt: int, generated: int, vocab: int) -> Request:
    made_up = tuple((shape.id * 31 + place * 7) % vocab for place in range(prompt + generated))
    return shape._replace(prompt=made_up[:prompt], generated=made_up[prompt:])
