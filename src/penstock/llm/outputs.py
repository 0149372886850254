"""Defines what `LLM` and `AsyncLLM` return. Classes and fields have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

from penstock.text.embedding import Vector
from penstock.types import WeightSpan

T = TypeVar("T")


class RequestOutputKind(IntEnum):
    """Selects the content of each output of `AsyncLLM.generate`."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # new since the last output
    FINAL_ONLY = 2  # only the whole answer, at the end


class Logprob(NamedTuple):
    """Gives a token's logarithmic probability."""

    logprob: float
    rank: int | None = None  # 1: the most likely token; None: beyond the requested alternatives
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # token id: logprob


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """Holds one answer to a prompt."""

    index: int  # index of the choice
    text: str
    token_ids: list[int]  # includes the token that ended the answer
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # stop, length or abort; None while running
    stop_reason: int | str | None = None  # the stop token or stop string, or "repetition"; None: the model's own end
    # weight versions that computed the answer, once it has ended; empty after a stop string
    weights: tuple[WeightSpan, ...] = ()

    def finished(self) -> bool:
        """Returns True if the answer has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Holds a prompt and its answers. `text`, `tokens` and `finish_reason` are the first answer's."""

    request_id: str
    prompt: str | None  # None if the prompt was token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # None for the first token
    num_cached_tokens: int = 0  # prompt tokens with reused KV

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
    """Holds a prompt and its embedding, classification, score or pooled states."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Holds the pooled final hidden states of a prompt."""

    data: Vector


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Holds an embedding, normalized to length 1."""

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
    """Holds the score of a text pair."""

    score: float
