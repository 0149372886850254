"""From a request's sampling parameters to the numbers one step's rows need."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import LogitEdit, SampleRows
from penstock.types import Request

Numbers = tuple[float, float, int, float, int]  # temperature, top_p, top_k, min_p, logprobs
Wanted = tuple["Sampler", list[int], int]  # who, its tokens so far, the position whose logits are wanted


class Sampler:
    """One sequence's way of choosing tokens."""

    __slots__ = ("_counted", "_counts", "_prompt", "_prompt_len", "_request", "numbers", "scoring", "seed")

    def __init__(self, request: Request) -> None:
        params = request.sampling
        self._request = request
        self._prompt_len = len(request.prompt)
        self._prompt = set(request.prompt) if params.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()  # of the answer's tokens
        self._counted = self._prompt_len
        self.seed = secrets.randbits(64) if params.seed is None else params.seed & (2**64 - 1)
        logprobs = -1 if params.logprobs is None else params.logprobs
        self.scoring = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.numbers: Numbers = (params.temperature, params.top_p, params.top_k, params.min_p, logprobs)

    @staticmethod
    def needs_history(request: Request) -> bool:
        """Whether the next token cannot be chosen before the last one is known here."""
        params = request.sampling
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def edit(self, tokens: list[int], position: int) -> LogitEdit | None:
        """The changes to the logits at `position`, which choose the token after it."""
        request, params = self._request, self._request.sampling
        ban = request.stop_ids if position + 1 - self._prompt_len < params.min_tokens else frozenset[int]()
        if not (ban or params.logit_bias or self.needs_history(request)):
            return None
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


def sample_rows(wanted: list[Wanted]) -> SampleRows:
    """What to do at each wanted position: score the known token that follows it, or sample one."""
    target = [tokens[at + 1] if at + 1 < len(tokens) else -1 for _, tokens, at in wanted]
    numbers = [sampler.numbers for sampler, _, _ in wanted]
    columns = tuple(zip(*numbers, strict=True)) if numbers else ((),) * 5
    return SampleRows(
        target=np.array(target, np.int32),
        temperature=np.array(columns[0], np.float32),
        top_p=np.array(columns[1], np.float32),
        top_k=np.array(columns[2], np.int32),
        min_p=np.array(columns[3], np.float32),
        seed=_draws([sampler.seed for sampler, _, _ in wanted], [at for _, _, at in wanted]),
        logprobs=np.array(
            [s.scoring if known >= 0 else s.numbers[4] for (s, _, _), known in zip(wanted, target, strict=True)],
            np.int32,
        ),
        edits=tuple(
            sampler.edit(tokens, at) if known < 0 else None
            for (sampler, tokens, at), known in zip(wanted, target, strict=True)
        ),
    )


def _draws(seeds: list[int], positions: list[int]) -> NDArray[np.uint64]:
    """One number per (seed, position), whatever else is in the batch: splitmix64's finalizer."""
    with np.errstate(over="ignore"):
        z: NDArray[np.uint64] = np.array(seeds, np.uint64) + np.array(positions, np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z


def _ints(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)
