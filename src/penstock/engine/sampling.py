"""Turns a request's sampling parameters into the numbers that the rows of one step need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Ints, LogitEdit, LogitEdits, SampleRows
from penstock.engine.grammar import Constraint
from penstock.types import Request, SamplingParams

Numbers = tuple[float, float, int, float, int]  # temperature, top_p, top_k, min_p, logprobs
NUMBER_TYPES = (np.float32, np.float32, np.int32, np.float32, np.int32)
WORD = 2**64 - 1
Wanted = tuple["Sampler", list[int], int]  # its sampler, its tokens so far, the position whose logits are wanted


class Sampler:
    """Chooses the tokens of one sequence."""

    __slots__ = (
        "_constraint",
        "_counted",
        "_counts",
        "_edits",
        "_penalizes",
        "_prompt",
        "_prompt_len",
        "_request",
        "numbers",
        "scoring",
        "seed",
    )

    def __init__(self, request: Request, constraint: Constraint | None = None) -> None:
        params = request.sampling
        self._request = request
        self._constraint = constraint
        self._prompt_len = len(request.prompt)
        self._prompt = set(request.prompt) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()  # of the answer's tokens
        self._counted = self._prompt_len
        self._penalizes = _penalizes(params)
        self._edits = bool(params.min_tokens or params.logit_bias or self._penalizes)
        self.seed = (params.seed or 0) & WORD  # make_request draws one for a request without
        cuts = (params.temperature, params.top_p, params.top_k, params.min_p)
        self.numbers: Numbers = (*cuts, -1 if params.logprobs is None else params.logprobs)
        self.scoring: Numbers = (*cuts, -1 if params.prompt_logprobs is None else params.prompt_logprobs)

    @staticmethod
    def needs_history(request: Request) -> bool:
        """Returns True if the next token cannot be chosen before the host knows the last one."""
        return _penalizes(request.sampling) or request.sampling.grammar is not None

    @property
    def constrained(self) -> bool:
        """Returns True if a grammar restricts the next token: the step needs `bitmask` then."""
        return self._constraint is not None and self._constraint.active

    def bitmask(self) -> Ints:
        """Returns the tokens that the grammar allows next, a bit for each: [ceil(vocab / 32)]."""
        assert self._constraint is not None
        return self._constraint.bitmask()

    def edit(self, tokens: list[int], position: int) -> LogitEdit | None:
        """Returns the changes to the logits at `position`, which choose the token after it; None if there are none."""
        if not self._edits:
            return None
        request, params = self._request, self._request.sampling
        ban = request.stop_ids if position + 1 - self._prompt_len < params.min_tokens else frozenset[int]()
        if not (ban or params.logit_bias or self._penalizes):
            return None
        if self._penalizes:
            self._count(tokens, position + 1)
        added = {t: -params.presence_penalty - params.frequency_penalty * n for t, n in self._counts.items()}
        for token, bias in params.logit_bias.items():
            added[token] = added.get(token, 0.0) + bias
        return LogitEdit(
            seen=_ints(self._prompt | self._counts.keys()),
            repetition=params.repetition_penalty,
            add_ids=_ints(added),
            add_values=np.fromiter(added.values(), np.float32, len(added)),
            ban=_ints(ban),
        )

    def _count(self, tokens: list[int], end: int) -> None:
        self._counts.update(tokens[self._counted : end])
        self._counted = max(self._counted, end)


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def sample_rows(wanted: list[Wanted]) -> SampleRows:
    """Says what to do at each wanted position: score the known token that follows it, or sample one."""
    target = [tokens[at + 1] if at + 1 < len(tokens) else -1 for _, tokens, at in wanted]
    samplers = [sampler for sampler, _, _ in wanted]
    numbers = [s.numbers if known < 0 else s.scoring for s, known in zip(samplers, target, strict=True)]
    temperature, top_p, top_k, min_p, logprobs = _columns(tuple(numbers))
    return SampleRows(
        target=np.array(target, np.int32),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=np.array([_draw(sampler.seed, at) for sampler, _, at in wanted], np.uint64),
        logprobs=logprobs,
        edits=LogitEdits.of(
            [
                (s, edit)
                for s, ((sampler, tokens, at), known) in enumerate(zip(wanted, target, strict=True))
                if known < 0 and (edit := sampler.edit(tokens, at)) is not None
            ]
        ),
    )


def constrained_positions(wanted: list[Wanted]) -> Ints:
    """Returns the indices of those wanted positions whose token is sampled and restricted by a grammar."""
    found = [s for s, (sampler, tokens, at) in enumerate(wanted) if sampler.constrained and at + 1 >= len(tokens)]
    return np.array(found, np.int32)


@lru_cache(maxsize=16)
def _columns(numbers: tuple[Numbers, ...]) -> tuple[NDArray[Any], ...]:
    """Returns an array of each number. Steps that follow each other mostly share them, so nobody may write to them."""
    columns = zip(*numbers, strict=True) if numbers else ((),) * len(NUMBER_TYPES)
    arrays = tuple(np.array(column, type) for column, type in zip(columns, NUMBER_TYPES, strict=True))
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _draw(seed: int, position: int) -> int:
    """Returns one number per (seed, position), whatever else is in the batch: splitmix64's finalizer."""
    z = (seed + position * 0x9E3779B97F4A7C15) & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def _ints(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)
