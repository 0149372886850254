"""Makes requests for embeddings, and vectors from their results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.types import Limits, Request, SamplingParams

POOLINGS = ("mean", "last", "cls")  # pooled states: mean of all tokens, last token, first token
Vector = NDArray[np.float32]


def embedding_request(
    id: int, prompt: Sequence[int], context: int, pooling: str = "mean", *, param: str, advice: str = "shorten it"
) -> Request:
    """Makes an embedding request. `context` limits its tokens, `param` is the prompt's field for errors, and `advice`
    explains how to fix a long prompt.
    """
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be mean, last or cls; got {pooling!r}", param="pooling")
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt) > context:
        raise ContextTooLong(f"{param} has {len(prompt)} tokens and the context holds {context}: {advice}", param=param)
    return Request(id, tuple(prompt), SamplingParams(), 0, pooling=pooling)


def pooling_of(asked: str | None, limits: Limits) -> str:
    if asked == "cls" and not limits.encoder:
        raise InvalidRequest(
            "pooling cls works only with encoders: the first token of this model sees no other; use mean or last",
            param="pooling",
        )
    return asked or limits.pooling


def truncate_prompt(prompt: Sequence[int], context: int, closing: Sequence[int]) -> Sequence[int]:
    if len(prompt) <= context or len(closing) >= context:
        return prompt[:context]
    return [*prompt[: context - len(closing)], *closing]


def check_dimensions(dimensions: int | None, dim: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequest(
            f"dimensions must be from 1 to {dim}, the size of this model's embeddings; got {dimensions}",
            param="dimensions",
        )


def embedding(pooled: bytes, dimensions: int | None = None) -> Vector:
    """Returns the first `dimensions` values of a pooled hidden state, normalized to length 1."""
    return shortened(state_of(pooled), dimensions)


def shortened(state: Vector, dimensions: int | None = None) -> Vector:
    """Returns the first `dimensions` values of a vector, normalized to length 1."""
    vector = state[:dimensions].astype(np.float64)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4")


def state_of(pooled: bytes) -> Vector:
    return np.frombuffer(pooled, "<f4")
