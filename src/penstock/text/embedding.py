"""Requests for embeddings, and the vectors that their answers become."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.types import Limits, Request, SamplingParams

POOLINGS = ("mean", "last", "cls")  # of the hidden states of all tokens, of the last one, of the first one
Vector = NDArray[np.float32]


def embedding_request(
    id: int, prompt: Sequence[int], context: int, pooling: str = "mean", *, param: str, advice: str = "shorten it"
) -> Request:
    """Returns the request for an embedding. `context` is the most tokens that it may have, `param` the field that the
    prompt came in, `advice` what to do if it is too long."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be mean, last or cls; got {pooling!r}", param="pooling")
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt) > context:
        raise ContextTooLong(f"{param} has {len(prompt)} tokens and the context holds {context}: {advice}", param=param)
    return Request(id, tuple(prompt), SamplingParams(), 0, pooling=pooling)


def pooling_of(asked: str | None, limits: Limits) -> str:
    """Returns the pooling that was asked for, or else the model's own."""
    if asked == "cls" and not limits.encoder:
        raise InvalidRequest(
            "pooling cls works only with encoders: the first token of this model sees no other; use mean or last",
            param="pooling",
        )
    return asked or limits.pooling


def truncate_prompt(prompt: Sequence[int], context: int, closing: Sequence[int]) -> Sequence[int]:
    """Returns the beginning of a prompt that fits in the context together with the tokens that end a text."""
    if len(prompt) <= context or len(closing) >= context:
        return prompt[:context]
    return [*prompt[: context - len(closing)], *closing]


def check_dimensions(dimensions: int | None, dim: int) -> None:
    """Raises InvalidRequest if an embedding of `dim` values cannot be shortened to so many."""
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequest(
            f"dimensions must be from 1 to {dim}, the size of this model's embeddings; got {dimensions}",
            param="dimensions",
        )


def embedding(pooled: bytes, dimensions: int | None = None) -> Vector:
    """Returns the first `dimensions` values of a pooled hidden state, scaled to a length of 1."""
    return shortened(state_of(pooled), dimensions)


def shortened(state: Vector, dimensions: int | None = None) -> Vector:
    """Returns the first `dimensions` values of a vector, scaled to a length of 1."""
    vector = state[:dimensions].astype(np.float64)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4")


def state_of(pooled: bytes) -> Vector:
    """Returns a pooled hidden state as a vector."""
    return np.frombuffer(pooled, "<f4")
