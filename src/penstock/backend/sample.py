"""Chooses tokens from logits, in NumPy: this is the definition that faster samplers are tested against.

A sampled row: its logits are edited and divided by the temperature, and every token gets a weight, 1 for the most
likely. Three thresholds cut it (the k-th largest weight; the smallest set of most likely tokens whose mass reaches
top_p, counted among those top_k and min_p left; min_p itself). One of the remaining tokens is drawn, in vocabulary
order, with one uniform number that depends only on the seed. Ties at a threshold all stay. Logprobs are the model's
own: before edits, temperature and cuts. Chains of samplers are defined in sampler_chain.py.

A logit that is not a number (NaN) counts as impossible. If no logit, after edits, is finite or one is infinite, no
token can be chosen: the position's token is NO_TOKEN, and its row is reported as not finite.

Every sampler must choose the same token, so nothing depends on the order of a sum or on a library's exponential:
weights follow from single-precision operations named here one by one, and masses are integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Bitmasks, Floats, Ints, LogitEdit, SampleRows
from penstock.types import RowResult, StepResult, TokenLogprob

NO_TOKEN = -1
MASS_OF_ONE = np.float32(2.0**40)  # the mass of the most likely token


def sample(logits: Floats, batch: Batch, masks: Bitmasks | None = None) -> StepResult:
    tokens = choose(logits, batch.sample, masks).tolist()
    logprobs = [
        token_logprob(logits[s], tokens[s], top) if tokens[s] != NO_TOKEN else TokenLogprob(0, 0.0, ())
        for s, top in enumerate(batch.sample.logprobs.tolist())
        if top >= 0
    ]
    return answers(batch, tokens, logprobs)


def answers(batch: Batch, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> StepResult:
    broken: tuple[int, ...] = ()
    if tokens and min(tokens) < 0:
        owners = np.searchsorted(batch.sample_start, np.flatnonzero(np.less(tokens, 0)), side="right") - 1
        broken = tuple(sorted(set(owners.tolist())))
        tokens = [max(token, 0) for token in tokens]
    known = [target >= 0 for target in batch.sample.target.tolist()]
    rows = []
    asked, left = batch.sample.logprobs.tolist() if logprobs else [], iter(logprobs)
    for first, last in pairwise(batch.sample_start.tolist()):
        sampled = tuple([tokens[s] for s in range(first, last) if not known[s]])
        if not logprobs:
            rows.append(RowResult(sampled))
            continue
        entries = [(known[s], next(left)) for s in range(first, last) if asked[s] >= 0]
        scores = tuple([entry for scored, entry in entries if scored])
        rows.append(RowResult(sampled, tuple([entry for scored, entry in entries if not scored]), scores))
    return StepResult(batch.step, tuple(rows), broken)


def choose(logits: Floats, rows: SampleRows, masks: Bitmasks | None = None) -> NDArray[np.int64]:
    """Returns one token for each position [S]: the target where there is one, else a sampled one."""
    if np.isnan(logits).any():
        logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    tokens = np.asarray(logits.argmax(axis=1)) if len(logits) else np.zeros(0, np.int64)
    edited = {int(s): apply_edit(logits[s], rows.edits.edit(e)) for e, s in enumerate(rows.edits.rows)}
    for s, words in zip(*masks, strict=True) if masks else ():
        edited[int(s)] = apply_bitmask(edited.get(int(s), logits[s]), words)
    for s in range(len(logits)):
        if rows.target[s] >= 0:
            tokens[s] = rows.target[s]
        elif not np.isfinite(edited.get(s, logits[s]).max()):
            tokens[s] = NO_TOKEN
        elif s in edited or rows.temperature[s] > 0:
            tokens[s] = _choose_one(edited.get(s, logits[s]), rows, s)
    return tokens


def apply_edit(logits: Floats, edit: LogitEdit) -> Floats:
    logits = logits.copy()
    seen = logits[edit.seen]
    logits[edit.seen] = np.where(seen > 0, seen / edit.repetition, seen * edit.repetition)
    logits[edit.add_ids] += edit.add_values
    logits[edit.ban] = -np.inf
    return logits


def apply_bitmask(logits: Floats, words: Ints) -> Floats:
    allowed = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), count=len(logits), bitorder="little")
    return np.where(allowed == 1, logits, np.float32(-np.inf))


def _choose_one(logits: Floats, rows: SampleRows, s: int) -> int:
    if rows.temperature[s] == 0:
        return int(logits.argmax())
    weights = weigh(logits, rows.temperature[s])
    weights[weights < _threshold(weights, int(rows.top_k[s]), float(rows.top_p[s]), float(rows.min_p[s]))] = 0
    mass = _mass(weights).cumsum()
    uniform = int(rows.seed[s]) >> 11  # 53 bits
    return int(np.searchsorted(mass, uniform * int(mass[-1]) >> 53, side="right"))


def weigh(logits: Floats, temperature: np.float32) -> Floats:
    """Returns e^((logits - highest) / temperature), computed in just these steps: 2^n * e^r with |r| <= ln(2) / 2."""
    with np.errstate(invalid="ignore"):
        scaled = logits / temperature
        x = scaled - scaled.max()
        bounded = np.maximum(x, np.float32(-100))
        n = np.rint(bounded * np.float32(1.44269504))
        r = bounded - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
        power = np.full_like(r, 1 / 5040)
        for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
            power = power * r + np.float32(factor)
        return np.where(x >= -87, np.ldexp(power, n.astype(np.int32)), np.float32(0))


def _mass(weights: Floats) -> NDArray[np.int64]:
    return (weights * MASS_OF_ONE).astype(np.int64)


def _threshold(weights: Floats, top_k: int, top_p: float, min_p: float) -> float:
    least = min_p
    if 0 < top_k < len(weights):
        least = max(least, float(np.partition(weights, -top_k)[-top_k]))
    if top_p < 1:
        ordered = np.sort(weights[weights >= least])[::-1]
        mass = _mass(ordered).cumsum()
        needed = math.ceil(top_p * float(mass[-1])) if len(mass) else 0
        least = max(least, float(ordered[np.searchsorted(mass, needed)])) if len(mass) else least
    return least


def token_logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    highest = float(logits.max())
    norm = highest + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    best = np.argsort(-logits, kind="stable")[:top]
    return TokenLogprob(
        token, float(logits[token]) - norm, tuple((int(other), float(logits[other]) - norm) for other in best)
    )
