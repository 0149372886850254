"""Defines what `LLM` and `AsyncLLM` return. Classes and fields have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from penstock.text.embedding import Vector
from penstock.types import WeightSpan

T = TypeVar("T")


class RequestOutputKind(IntEnum):
    """Says what each output of `AsyncLLM.generate` holds."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what is new since the last one
    FINAL_ONLY = 2  # nothing before the whole answer


class Logprob(NamedTuple):
    """Gives a token's logarithmic probability."""

    logprob: float
    rank: int | None = None  # 1: the most likely token; None: beyond the alternatives that were asked for
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # by token id


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Holds one answer to a prompt."""

    index: int  # among the prompt's choices
    text: str
    token_ids: list[int]  # the one that ended it included
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # stop, length or abort; None while it goes on
    stop_reason: int | str | None = None  # the stop token or stop string, or "repetition"; None: the model itself
    weights: tuple[WeightSpan, ...] = ()  # that computed it, once it has ended; empty if a stop string ended it

    def finished(self) -> bool:
        """Returns whether the answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Holds a prompt and its answers. `text`, `tokens` and `finish_reason` are those of the first answer."""

    request_id: str
    prompt: str | None  # None for a prompt that was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # the first token has none
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def tokens(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """Holds a prompt and what the model made of it in place of an answer."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Holds the pooled hidden states of a prompt, as they left the last norm."""

    data: Vector


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Holds an embedding, scaled to a length of 1."""

    vector: Vector

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.vector.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return len(self.vector)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Holds the score of each of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Holds how well two texts go together."""

    score: float
