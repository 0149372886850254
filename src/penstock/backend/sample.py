"""Choosing tokens from logits, in NumPy: the definition that faster samplers are tested against.

A sampled row: its logits are edited, divided by the temperature, and cut by three thresholds (the k-th largest logit;
the smallest set of most likely tokens whose mass reaches top_p, counted among those top_k left; min_p times the
largest probability). What is left is drawn from in vocabulary order with one uniform number, which the seed alone
decides. Ties at a threshold all stay. Logprobs are the model's own: before edits, temperature and cuts.
"""

from __future__ import annotations

import numpy as np

from penstock.backend.base import Batch, Floats, LogitEdit, SampleRows
from penstock.types import RowResult, StepResult, TokenLogprob


def sample(logits: Floats, batch: Batch) -> StepResult:
    """Answers every row of the batch; `logits` is [S, vocab]."""
    tokens = choose(logits, batch.sample)
    logprobs = [
        _logprob(logits[s], int(tokens[s]), int(top)) if top >= 0 else None
        for s, top in enumerate(batch.sample.logprobs)
    ]
    known = batch.sample.target >= 0
    rows = []
    for first, last in zip(batch.sample_start[:-1], batch.sample_start[1:], strict=True):
        sampled = [s for s in range(first, last) if not known[s]]
        rows.append(
            RowResult(
                tokens=tuple(int(tokens[s]) for s in sampled),
                logprobs=tuple(entry for s in sampled if (entry := logprobs[s])),
                scores=tuple(entry for s in range(first, last) if known[s] and (entry := logprobs[s])),
            )
        )
    return StepResult(batch.step, tuple(rows))


def choose(logits: Floats, rows: SampleRows) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """One token for each position [S]: the target where there is one, else a sampled one."""
    tokens = np.asarray(logits.argmax(axis=1)) if len(logits) else np.zeros(0, np.int64)
    for s, edit in enumerate(rows.edits):
        if rows.target[s] >= 0:
            tokens[s] = rows.target[s]
        elif edit is not None or rows.temperature[s] > 0:
            tokens[s] = _choose_one(apply_edit(logits[s], edit), rows, s)
    return tokens


def apply_edit(logits: Floats, edit: LogitEdit | None) -> Floats:
    if edit is None:
        return logits
    logits = logits.copy()
    seen = logits[edit.seen]
    logits[edit.seen] = np.where(seen > 0, seen / edit.repetition, seen * edit.repetition)
    logits[edit.add_ids] += edit.add_values
    logits[edit.ban] = -np.inf
    return logits


def _choose_one(logits: Floats, rows: SampleRows, s: int) -> int:
    if rows.temperature[s] == 0:
        return int(logits.argmax())
    scaled = logits / rows.temperature[s]
    weights = np.exp(scaled - scaled.max())  # [vocab], the most likely token weighs 1
    weights[weights < _threshold(weights, int(rows.top_k[s]), float(rows.top_p[s]), float(rows.min_p[s]))] = 0
    mass = np.cumsum(weights, dtype=np.float64)
    uniform = (int(rows.seed[s]) >> 11) * 2.0**-53
    return int(np.searchsorted(mass, uniform * mass[-1], side="right"))


def _threshold(weights: Floats, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest weight that may be drawn."""
    least = min_p
    if 0 < top_k < len(weights):
        least = max(least, float(np.partition(weights, -top_k)[-top_k]))
    if top_p < 1:
        ordered = np.sort(weights[weights >= least])[::-1]
        mass = np.cumsum(ordered, dtype=np.float64)
        least = max(least, float(ordered[min(np.searchsorted(mass, top_p * mass[-1]), len(ordered) - 1)]))
    return least


def _logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    highest = float(logits.max())
    norm = highest + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    best = np.argpartition(logits, -top)[-top:] if top else np.zeros(0, np.int64)
    best = best[np.lexsort((best, -logits[best]))]
    return TokenLogprob(
        token, float(logits[token]) - norm, tuple((int(other), float(logits[other]) - norm) for other in best)
    )
