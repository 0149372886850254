"""Samples by llama.cpp's ordered chain of samplers, in NumPy on the host: every backend uses this one implementation.

A row's candidates begin as the whole vocabulary, edits and bitmask applied. Each sampler of the order removes
candidates or changes their logits; one of the rest is drawn with one uniform number that depends only on the seed: in
vocabulary order, or most likely first where the seed must answer as in llama.cpp. Mirostat replaces the cuts. Where
llama.cpp leaves the choice among equal candidates to its sort, the lowest token id stays here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import Batch, Bitmasks, ChainRow, Floats
from penstock.backend.sample import apply_bitmask, apply_edit, token_logprob
from penstock.types import RowResult, StepResult

MIROSTAT_TOKENS = 100  # the most likely tokens that mirostat 1 estimates Zipf's exponent from
FEW = 1024  # candidates that are sorted at first
SMALLEST = 1e-30  # temperature that is not 0
IMPOSSIBLE = 1e-300  # stands for a probability of 0 where its logarithm is wanted
XTC_DRAW = 0xA0761D6478BD642F  # xor of a row's seed: the number that decides whether XTC acts is not the one that draws


class Candidates(NamedTuple):
    """Holds the tokens that may still be drawn, in vocabulary order, and their logits."""

    tokens: NDArray[np.int64]
    logits: Floats

    def keep(self, kept: NDArray[np.bool_]) -> Candidates:
        return Candidates(self.tokens[kept], self.logits[kept])

    def keep_best(self, count: int) -> Candidates:
        return self if count >= len(self.logits) else self.keep(best(self.logits, count))

    def by_likelihood(self) -> Candidates:
        order = np.argsort(-self.logits, kind="stable")
        return Candidates(self.tokens[order], self.logits[order])

    def probabilities(self) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):
            weights: NDArray[np.float64] = np.exp(self.logits - self.logits.max()).astype(np.float64)
        weights /= weights.sum()
        return weights


class ChainChoice(NamedTuple):
    """Holds the token that a chain chose."""

    token: int
    surprise: float | None  # bits, among mirostat's candidates; None without mirostat


def with_chains(result: StepResult, batch: Batch, logits: Floats, masks: Bitmasks | None) -> StepResult:
    """Returns a step's result with what chains choose from `logits`, the model's own at the positions that have one:
    [positions, vocab]."""
    rows, answers = batch.sample, list(result.rows)
    edits = {int(s): e for e, s in enumerate(rows.edits.rows)}
    allowed = dict(zip(masks.rows.tolist(), masks.words, strict=True)) if masks else {}
    for row, own in zip(rows.chains, logits, strict=True):
        edited = apply_edit(own, rows.edits.edit(edits[row.row])) if row.row in edits else own
        if row.row in allowed:
            edited = apply_bitmask(edited, allowed[row.row])
        chosen = choose_by_chain(edited, row, int(rows.seed[row.row]))
        owner, behind = sampled_place(batch, row.row)
        answers[owner] = _answered(answers[owner], behind, chosen, own, int(rows.logprobs[row.row]))
    return result._replace(rows=tuple(answers))


def chained_positions(batch: Batch) -> NDArray[np.int64]:
    return np.array([row.row for row in batch.sample.chains], np.int64)


def sampled_place(batch: Batch, position: int) -> tuple[int, int]:
    """Returns the row that samples a position, and how far the position is from the end of those that it samples."""
    owner = int(np.searchsorted(batch.sample_start, position, side="right")) - 1
    return owner, int(batch.sample_start[owner + 1]) - position


def _answered(answer: RowResult, behind: int, chosen: ChainChoice, logits: Floats, top: int) -> RowResult:
    tokens, logprobs = list(answer.tokens), list(answer.logprobs)
    tokens[-behind] = chosen.token
    if top >= 0:
        logprobs[-behind] = token_logprob(logits, chosen.token, top)
    return answer._replace(tokens=tuple(tokens), logprobs=tuple(logprobs), surprise=chosen.surprise)


def choose_by_chain(logits: Floats, row: ChainRow, seed: int) -> ChainChoice:
    """Returns the token for one row of logits, to which edits and bitmask have been applied."""
    if np.isnan(logits.max()):
        logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    if not np.isfinite(logits.max()):  # the row is not finite
        return ChainChoice(int(logits.argmax()), None)
    left = candidates(logits, row, seed)
    if row.temperature == 0:
        left = left.keep_best(1)
    if row.chain.mersenne:
        left = left.by_likelihood()
    chances = left.probabilities()
    mass = chances.cumsum()
    drawn = np.searchsorted(mass, (seed >> 11) / 2**53 * mass[-1], side="right")
    at = int(min(drawn, np.searchsorted(mass, mass[-1])))  # the last one, should rounding reach the whole mass
    surprise = -math.log2(chances[at]) if row.chain.mirostat else None
    return ChainChoice(int(left.tokens[at]), surprise)


def candidates(logits: Floats, row: ChainRow, seed: int) -> Candidates:
    """Returns the candidates that the chain leaves of a row of logits. The seed decides whether XTC acts."""
    left = Candidates(np.arange(len(logits)), logits)
    if row.chain.mirostat:
        cut = mirostat_1 if row.chain.mirostat == 1 else mirostat_2
        return cut(divide(left, row.temperature), row, len(logits))
    for name in row.chain.order:
        left = SAMPLER_OF[name](left, row, seed)
    return left


def best(scores: NDArray[np.floating], count: int) -> NDArray[np.bool_]:
    """Returns a mask of the `count` highest scores, at least one; of equal ones, the first."""
    possible = scores[scores > -np.inf]  # a partition is slow where many are equal
    least = np.partition(possible, -count)[-count] if count <= len(possible) else -np.inf
    mask: NDArray[np.bool_] = scores > least
    equal = np.flatnonzero(scores == least)
    mask[equal[: count - int(np.count_nonzero(mask))]] = True
    return mask


def count_reaching(scores: Floats, chances: NDArray[np.float64], mass: float, side: Literal["left", "right"]) -> int:
    """Returns how many of the candidates with the highest scores have this mass together, or exceed it (side "right").
    Mostly these are few, so at first only some are sorted."""
    for count in (FEW, len(scores)):
        if count > len(scores):
            continue
        top = np.argpartition(scores, -count)[-count:] if count < len(scores) else np.arange(count)
        reached = chances[top[np.argsort(-scores[top])]].cumsum()
        if (found := int(np.searchsorted(reached, mass, side=side))) < count:
            return found + 1
    return len(scores)


# -- samplers -----------------------------------------------------------------------------------------------------


def top_n_sigma(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    """Rules out logits further below the highest than n standard deviations. They stay in the count of candidates."""
    if row.chain.top_n_sigma <= 0 or len(left.logits) <= 1:
        return left
    possible = left.logits[np.isfinite(left.logits)]
    spread = math.sqrt(np.square(possible - possible.mean(dtype=np.float64), dtype=np.float64).mean())
    kept = left.logits >= possible.max() - np.float32(row.chain.top_n_sigma * spread)
    return left._replace(logits=np.where(kept, left.logits, np.float32(-np.inf)))


def top_k(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    return left.keep_best(row.top_k) if row.top_k > 0 else left


def typical_p(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    """Keeps those whose surprise is nearest to the entropy, until their mass exceeds typical_p."""
    if row.chain.typical_p >= 1:
        return left
    chances = left.probabilities()
    surprises = -np.log(np.maximum(chances, IMPOSSIBLE))
    nearness = -np.abs(surprises - (chances * surprises).sum()).astype(np.float32)
    count = count_reaching(nearness, chances, row.chain.typical_p, "right")
    return left.keep(best(nearness, min(max(count, row.chain.min_keep), len(nearness))))


def top_p(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    if row.top_p >= 1:
        return left
    count = count_reaching(left.logits, left.probabilities(), row.top_p, "left")
    return left.keep_best(max(count, row.chain.min_keep))


def min_p(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    if row.min_p <= 0:
        return left
    kept = left.logits >= left.logits.max() + np.float32(math.log(row.min_p))
    if np.count_nonzero(kept) < row.chain.min_keep:
        return left.keep_best(row.chain.min_keep)
    return left.keep(kept)


def xtc(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    """Excludes top choices: of those whose probability reaches the threshold only the least likely stays."""
    chain = row.chain
    if chain.xtc_probability <= 0 or chain.xtc_threshold > 0.5 or len(left.logits) < 2:
        return left
    if uniform(seed ^ XTC_DRAW) >= chain.xtc_probability:
        return left
    chances = left.probabilities()
    excluded = int(np.count_nonzero((chances >= chain.xtc_threshold) & (chances > 0))) - 1
    if excluded <= 0 or len(chances) - excluded < chain.min_keep:
        return left
    return left.keep(~best(left.logits, excluded))


def temperature(left: Candidates, row: ChainRow, seed: int) -> Candidates:
    """Divides by the temperature; a dynamic one is nearer to its highest value, the nearer the entropy is to its."""
    chain = row.chain
    if chain.dynatemp_range <= 0 or row.temperature == 0:
        return divide(left, row.temperature)
    if len(left.logits) <= 1:
        return left
    chances = left.probabilities()
    chances = chances[chances > 0]
    entropy = -(chances * np.log(chances)).sum() / math.log(len(left.logits))
    lowest, highest = max(0.0, row.temperature - chain.dynatemp_range), row.temperature + chain.dynatemp_range
    return divide(left, lowest + (highest - lowest) * max(entropy, 0.0) ** chain.dynatemp_exponent)


def divide(left: Candidates, by: float) -> Candidates:
    """Divides the logits, counted from the highest, so that a small divisor leaves that one finite. Division by less
    than SMALLEST keeps only the most likely candidate."""
    if by < SMALLEST:
        return left.keep_best(1)
    with np.errstate(over="ignore"):
        return left._replace(logits=(left.logits - left.logits.max()) / np.float32(by))


Cut = Callable[[Candidates, ChainRow, int], Candidates]
SAMPLER_OF: dict[str, Cut] = {
    cut.__name__: cut for cut in (top_n_sigma, top_k, typical_p, top_p, min_p, xtc, temperature)
}


def uniform(seed: int) -> float:
    """Returns the number in [0, 1) that follows from a seed: splitmix64's finalizer."""
    mixed = seed & (2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return ((mixed ^ mixed >> 31) >> 11) / 2**53


# -- mirostat -----------------------------------------------------------------------------------------------------


def mirostat_1(left: Candidates, row: ChainRow, vocab: int) -> Candidates:
    """Keeps the k most likely. If the tokens follow Zipf's law, these have the surprise that is aimed at."""
    top = left.keep_best(MIROSTAT_TOKENS).logits
    ordered = np.sort(top[np.isfinite(top)].astype(np.float64))[::-1]
    if len(ordered) < 2:
        return left.keep_best(1)
    ranks = np.log(np.arange(2, len(ordered) + 1) / np.arange(1, len(ordered)))
    exponent = float(ranks @ -np.diff(ordered) / (ranks @ ranks))
    return left.keep_best(max(_zipf_count(exponent, row.mu, vocab), 1))


def _zipf_count(exponent: float, mu: float, vocab: int) -> int:
    """Returns how many tokens of a vocabulary that follows Zipf's law have surprises of at most mu bits."""
    excess = exponent - 1
    try:
        share = excess * 2.0**mu / (1 - float(vocab) ** -excess)
        return int(min(share ** (1 / exponent), vocab))
    except (OverflowError, ZeroDivisionError):
        return vocab


def mirostat_2(left: Candidates, row: ChainRow, vocab: int) -> Candidates:
    """Keeps those whose surprise is at most mu bits, and the most likely in any case."""
    chances = left.probabilities()
    kept = chances >= 2.0 ** min(-row.mu, 1.0)
    return left.keep(kept) if kept.any() else left.keep_best(1)
