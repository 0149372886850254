"""Embeddings of text: the engine's request for one, and the vector its answer becomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.types import Limits, Request, SamplingParams

POOLINGS = ("mean", "last", "cls")  # of the hidden states of all tokens; the last one alone; the first
Vector = NDArray[np.float32]


def embedding_request(
    id: int, prompt: Sequence[int], context: int, pooling: str = "mean", *, param: str, advice: str = "shorten it"
) -> Request:
    """`context` is how many tokens it may have; `param` is the field that the prompt came in; `advice` is what to do
    when it is too long."""
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be mean, last or cls; got {pooling!r}", param="pooling")
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt) > context:
        raise ContextTooLong(f"{param} has {len(prompt)} tokens and the context holds {context}: {advice}", param=param)
    return Request(id, tuple(prompt), SamplingParams(), 0, pooling=pooling)


def pooling_of(asked: str | None, limits: Limits) -> str:
    """What was asked for, or else what the model was made for."""
    if asked == "cls" and not limits.encoder:
        raise InvalidRequest(
            "pooling cls is for encoders: the first token of this model has seen no other; use mean or last",
            param="pooling",
        )
    return asked or limits.pooling


def cut(prompt: Sequence[int], context: int, closing: Sequence[int]) -> Sequence[int]:
    """As much of the beginning as the context holds together with what closes a text."""
    if len(prompt) <= context or len(closing) >= context:
        return prompt[:context]
    return [*prompt[: context - len(closing)], *closing]


def check_dimensions(dimensions: int | None, dim: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= dim:
        raise InvalidRequest(
            f"dimensions must be from 1 to {dim}, which this model's embeddings have; got {dimensions}",
            param="dimensions",
        )


def embedding(pooled: bytes, dimensions: int | None = None) -> Vector:
    """The first `dimensions` of a pooled hidden state, scaled to a length of 1."""
    vector = state_of(pooled)[:dimensions].astype(np.float64)
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4")


def state_of(pooled: bytes) -> Vector:
    return np.frombuffer(pooled, "<f4")
