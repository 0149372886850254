"""Turns a request's sampling parameters into the numbers that the rows of one step need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import copy, deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.base import ChainRow, Ints, LogitEdit, LogitEdits, SampleRows
from penstock.engine.grammars.grammar import Constraint
from penstock.engine.samplers.dry import DryHistory
from penstock.engine.samplers.mersenne import MersenneDraws
from penstock.types import BANNED, DryPenalty, Request, Row, SamplingParams

Numbers = tuple[float, float, int, float, int]  # temperature, top_p, top_k, min_p, logprobs
GREEDY = 0.0, 1.0, 0, 0.0  # greedy, on positions where a chain chooses
NUMBER_TYPES = (np.float32, np.float32, np.int32, np.float32, np.int32)
WORD = 2**64 - 1
MANY = 32  # positions whose random bits are computed together
NOTHING: frozenset[int] = frozenset()


class Wanted(NamedTuple):
    """Names a position whose logits are wanted."""

    sampler: Sampler
    tokens: Sequence[int]  # tokens of its sequence and of the draft
    at: int
    target: int = -1  # the token that is to be scored there; -1: one is to be sampled


class Sampler:
    """Chooses the tokens of one sequence. `vocab` is the number of logits, for the bitmask of allowed tokens."""

    __slots__ = (
        "_allowed",
        "_bans",
        "_constraint",
        "_draws",
        "_dry",
        "_excludes",
        "_penalties",
        "_prompt_len",
        "_request",
        "edits",
        "mu",
        "numbers",
        "scoring",
        "seed",
        "steers",
    )

    def __init__(self, request: Request, constraint: Constraint | None = None, vocab: int = 0) -> None:
        params = request.sampling
        self._request = request
        self._constraint = constraint
        self._allowed = None if params.allowed_token_ids is None else bits_of(params.allowed_token_ids, vocab)
        self._prompt_len = len(request.prompt)
        self._penalties = PenaltyCounts(request) if _penalizes(params) else None
        self._dry = DryHistory(params.dry, request.dry_breakers) if params.dry and _repeats(params.dry) else None
        self._draws = MersenneDraws(params.seed or 0) if params.chain is not None and params.chain.mersenne else None
        self.mu = 2 * params.chain.mirostat_tau if params.chain is not None else 0.0
        if request.mirostat_mu is not None:
            self.mu = request.mirostat_mu
        self._bans = bool(params.min_tokens or request.bad_words)
        self._excludes = self._bans or BANNED in params.logit_bias.values()
        self.edits = bool(self._bans or params.logit_bias or self._penalties or self._dry)
        self.steers = self.edits or params.chain is not None  # it may have more to say than `numbers`
        self.seed = (params.seed or 0) & WORD  # make_request draws one for a request without
        cuts = (params.temperature, params.top_p, params.top_k, params.min_p)
        if params.chain is not None:
            cuts = GREEDY
        self.numbers: Numbers = (*cuts, -1 if params.logprobs is None else params.logprobs)
        self.scoring: Numbers = (*cuts, -1 if params.prompt_logprobs is None else params.prompt_logprobs)

    @staticmethod
    def needs_history(request: Request) -> bool:
        """Returns True if the next token cannot be chosen before the host knows the last one."""
        params = request.sampling
        steered = params.grammar is not None or params.chain is not None
        penalized = _penalizes(params) or (params.dry is not None and _repeats(params.dry))
        return steered or penalized or bool(request.bad_words)

    @property
    def constrained(self) -> bool:
        """Returns True if only some tokens may come next: the step needs `bitmask` then."""
        return self._allowed is not None or (self._constraint is not None and self._constraint.active)

    def bitmasks(self, draft: Sequence[int]) -> list[Ints]:
        """Returns the tokens that may come next and those that may follow each token of a draft, a bit for each:
        [ceil(vocab / 32)]."""
        if self._allowed is not None:
            return [self._allowed] * (1 + len(draft))
        assert self._constraint is not None
        return self._constraint.bitmasks(draft)

    def possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """Returns after how many of the drafted tokens the request leaves a token possible, counted up to the first
        position that has none: 0 means that nothing may follow `tokens`."""
        if not (self.constrained and self._excludes):
            return len(draft) + 1
        text, biases = [*tokens, *draft], self._request.sampling.logit_bias
        excluded = [token for token, bias in biases.items() if bias == BANNED]
        for at, allowed in enumerate(self.bitmasks(draft)):
            banned = bits_of([*excluded, *self._banned(text, len(tokens) + at)], 32 * len(allowed))
            if not (allowed & ~banned).any():
                return at
        return len(draft) + 1

    def fork(self) -> Sampler:
        """Returns a sampler that can be asked about tokens which may turn out wrong."""
        if not (self._penalties or self._dry):
            return self
        forked = copy(self)
        forked._penalties, forked._dry = deepcopy(self._penalties), deepcopy(self._dry)
        return forked

    def for_draft(self, own_vocab: bool = False) -> Sampler:
        """Returns a sampler for tokens that a draft model chooses: it chooses as this one does, and wants the logprob
        of each and of no others. One with a vocabulary of its own knows nothing of edits and allowed tokens."""
        forked = copy(self if own_vocab else self.fork())
        forked.numbers = (*self.numbers[:-1], 0)
        if own_vocab:
            forked.edits, forked._allowed, forked._constraint = False, None, None
        return forked

    def edit(self, tokens: Sequence[int], position: int) -> LogitEdit | None:
        """Returns the changes to the logits at `position`, which choose the token after it; None if there are none."""
        if not self.edits:
            return None
        params, end = self._request.sampling, position + 1
        ban = self._banned(tokens, end) if self._bans else NOTHING
        if not (ban or params.logit_bias or self._penalties or self._dry):
            return None
        seen, added = self._penalties.after(tokens, end) if self._penalties else (NOTHING, {})
        for token, bias in params.logit_bias.items():
            added[token] = added.get(token, 0.0) + bias
        if self._dry:
            for token, penalty in self._dry.penalties(tokens, end).items():
                added[token] = added.get(token, 0.0) - penalty
        return LogitEdit(
            seen=_ints(seen),
            repetition=params.repetition_penalty,
            add_ids=_ints(added),
            add_values=np.fromiter(added.values(), np.float32, len(added)),
            ban=_ints(ban),
        )

    def _banned(self, tokens: Sequence[int], end: int) -> Collection[int]:
        """Returns the tokens that would end the answer too soon or complete a bad word. Where a grammar has come to its
        end, the answer ends with it."""
        request, answered = self._request, end - self._prompt_len
        early = answered < request.sampling.min_tokens
        complete = early and self._constraint is not None and self._constraint.complete
        ban = request.stop_ids if early and not complete else NOTHING
        if not request.bad_words:
            return ban
        return ban | {
            word[-1]
            for word in request.bad_words
            if len(word) <= answered + 1 and tuple(tokens[end + 1 - len(word) : end]) == word[:-1]
        }

    def chain_row(self, row: int) -> ChainRow | None:
        """Returns how the host samples position `row` of a step; None if the device does."""
        params = self._request.sampling
        if params.chain is None:
            return None
        return ChainRow(row, params.chain, params.temperature, params.top_p, params.top_k, params.min_p, self.mu)

    @property
    def draws_in_order(self) -> bool:
        return self._draws is not None

    def draw(self, position: int) -> int:
        if self._draws is not None:
            return self._draws.at(position + 1 - self._prompt_len)
        return _draw(self.seed, position)

    def observe(self, surprise: float) -> None:
        """Takes over the surprise of a committed token, in bits: mirostat steers towards its target with it."""
        chain = self._request.sampling.chain
        assert chain is not None
        self.mu -= chain.mirostat_eta * (surprise - chain.mirostat_tau)


class PenaltyCounts:
    """Counts tokens for presence, frequency and repetition penalties: in the answer, or in a window over prompt and
    answer. Without a window, repetition counts the prompt's tokens too."""

    def __init__(self, request: Request) -> None:
        params = request.sampling
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._window = params.penalty_window
        whole = self._window < 0
        self._prompt = set(request.prompt) if whole and params.repetition_penalty != 1.0 else set[int]()
        self._counts: Counter[int] = Counter()  # counts of tokens[_first:_last]
        self._first = self._last = len(request.prompt) if whole else 0

    def after(self, tokens: Sequence[int], end: int) -> tuple[Collection[int], dict[int, float]]:
        self._counts.update(tokens[self._last : end])
        self._last = max(self._last, end)
        if self._window >= 0 and (first := max(end - self._window, 0)) > self._first:
            self._counts.subtract(tokens[self._first : first])
            self._counts = +self._counts
            self._first = first
        added = {token: -self._presence - self._frequency * count for token, count in self._counts.items()}
        return self._prompt | self._counts.keys(), added


def _penalizes(params: SamplingParams) -> bool:
    asked = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return bool(asked) and params.penalty_window != 0


def _repeats(dry: DryPenalty) -> bool:
    return dry.multiplier > 0 and dry.window != 0


def bits_of(tokens: Iterable[int], vocab: int) -> Ints:
    """Returns a bitmask of a vocabulary in which the tokens are set: [ceil(vocab / 32)]."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def wanted_positions(sampler: Sampler, tokens: list[int], row: Row) -> list[Wanted]:
    """Returns the positions of a row whose logits are wanted: known tokens are scored, all others sampled."""
    end, length = row.start + row.count, len(tokens)
    known = end - len(row.draft)
    places = range(end - row.sample, known)
    wanted = [Wanted(sampler, tokens, at, tokens[at + 1] if at + 1 < length else -1) for at in places]
    if row.draft:
        tokens = [*tokens, *row.draft] if sampler.steers else tokens
        sampler = sampler.fork()
        wanted += [Wanted(sampler, tokens, at) for at in range(known, end)]
    return wanted


def sample_rows(wanted: list[Wanted]) -> SampleRows:
    """Describes a wanted position: score the known token that follows it, or sample one."""
    samplers, _, _, target = zip(*wanted, strict=True) if wanted else ((),) * 4
    numbers = [s.numbers if known < 0 else s.scoring for s, known in zip(samplers, target, strict=True)]
    temperature, top_p, top_k, min_p, logprobs = _columns(tuple(numbers))
    steered = [
        s for s, (sampler, known) in enumerate(zip(samplers, target, strict=True)) if sampler.steers and known < 0
    ]
    edits = [(s, edit) for s in steered if (edit := samplers[s].edit(wanted[s].tokens, wanted[s].at)) is not None]
    chains = [chain for s in steered if (chain := samplers[s].chain_row(s)) is not None]
    return SampleRows(
        target=np.array(target, np.int32),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=draws(wanted),
        logprobs=logprobs,
        edits=LogitEdits.of(edits),
        chains=tuple(chains),
    )


def draws(wanted: list[Wanted]) -> NDArray[np.uint64]:
    """Returns the 64 random bits of each wanted position: all at once where that is the faster way."""
    if len(wanted) < MANY or any(sampler.draws_in_order for sampler, *_ in wanted):
        return np.array([sampler.draw(at) for sampler, _, at, _ in wanted], np.uint64)
    z = np.array([sampler.seed for sampler, *_ in wanted], np.uint64)
    z += np.array([at for _, _, at, _ in wanted], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def constrained_positions(wanted: list[Wanted]) -> Ints:
    found = [s for s, (sampler, _, _, target) in enumerate(wanted) if sampler.constrained and target < 0]
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
    """Returns one number per (seed, position), independent of the batch: splitmix64's finalizer."""
    z = (seed + position * 0x9E3779B97F4A7C15) & WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & WORD
    return z ^ z >> 31


def _ints(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, np.int32)
