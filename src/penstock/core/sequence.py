"""Defines a sequence: one token stream and its progress.

The scheduler writes the progress, Tenants and the scheduler the standing, the KV cache the blocks, and StateSaving the
states.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from penstock.core.loop_guard import EVERY, TAIL, lengths_to_check, loop_phrase
from penstock.core.prefix import PrefixNode
from penstock.types import NO_CLAIM, Claim, Nearest, Report, TokenLogprob

if TYPE_CHECKING:
    from penstock.core.tenants import Tenant


class RequestTimes:
    """Records the times of a sequence's events, by the scheduler's clock; None: not yet."""

    __slots__ = (
        "admitted",
        "answered",
        "arrived",
        "cached",
        "loop",
        "lost",
        "nearest",
        "preemptions",
        "recomputed",
        "reused",
    )

    def __init__(self) -> None:
        self.arrived = 0.0
        self.admitted: float | None = None
        self.answered: float | None = None
        self.cached = -1  # prompt tokens reused at the first admission; -1: not admitted yet
        self.preemptions = 0
        self.lost = 0  # tokens whose KV the last preemption took
        self.recomputed = 0
        self.loop = 0  # tokens of the phrase that it repeated when the loop guard ended it
        self.nearest: Nearest | None = None
        self.reused: tuple[tuple[str, int], ...] = ()  # prompt tokens by the tier that their KV came from, at first

    def report(self, now: float) -> Report:
        admitted = now if self.admitted is None else self.admitted
        answered = now if self.answered is None else self.answered
        return Report(
            cached=max(self.cached, 0),
            queued=admitted - self.arrived,
            prefill=answered - admitted,
            decode=now - answered,
            preemptions=self.preemptions,
            recomputed=self.recomputed,
            nearest=self.nearest,
            reused=self.reused,
            loop=self.loop,
        )


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """The request's settings that the core needs."""

    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    score: bool = False  # the prompt's own tokens are scored, so none of them may come from the cache
    lockstep: bool = False  # each row must know its last token: no row while one is in flight
    owner: str = ""
    explain: bool = False
    background: bool = False
    claim: Claim = NO_CLAIM
    guarded_from: int | None = None  # answer tokens after which a loop ends the answer; None: never


DEFAULT_PARAMS = SequenceParams()


class Standing:
    """Decides when a sequence runs, compared with others."""

    __slots__ = ("admission_epoch", "arrival", "charged", "due", "rank", "tenant")

    def __init__(self) -> None:
        self.tenant: Tenant  # is set when the sequence is added to a scheduler
        self.arrival, self.rank = 0, 0.0  # where nothing else decides, the least rank goes first
        self.due = inf  # time at which its first token is due; infinite: no target, or one that cannot be met
        self.charged = 0  # prompt tokens that its tenant has paid for, or that were cached
        self.admission_epoch = 0  # the step of its last admission or preemption: rows of earlier steps are stale


class SequenceBlocks:
    """Holds the KV blocks of a sequence."""

    __slots__ = (
        "awaited",
        "capacity",
        "hashes",
        "next_full",
        "nodes",
        "prefix_cache",
        "prefix_ends",
        "salt",
        "tables",
        "window_starts",
    )

    def __init__(self, salt: str, prefix_cache: bool) -> None:
        self.salt = salt
        self.prefix_cache = prefix_cache  # False: it takes nothing from the prefix cache and leaves nothing there
        self.tables: list[list[int]] = []  # a block table for each layer group; empty: the sequence waits
        self.window_starts: list[int] = []  # in each group's table, the entries before it are -1, see prefix.py
        self.capacity = 0  # positions that the block tables cover
        self.next_full = 0  # once this many positions are computed, another block is full
        self.prefix_ends: tuple[int, ...] = ()  # blocks after which other streams are likely to diverge
        self.nodes: list[PrefixNode] = []  # the first len(nodes) blocks are shared through the prefix cache
        self.hashes: list[bytes] = []  # chain hashes of the full prompt blocks, see in_flight.py
        self.awaited: bytes | None = None  # the block in flight that the sequence waits to reuse


class SequenceStates:
    """Holds the positions at which a sequence saves its recurrent state."""

    __slots__ = ("restore", "rolling", "saving")

    def __init__(self) -> None:
        self.saving: list[int] = []  # positions still to be saved, or just being saved
        self.rolling: PrefixNode | None = None  # the node at whose end the answer's state was last saved
        self.restore = -1  # the place of the state that the next row begins with; -1: its own


class Sequence:
    """Holds the tokens of one stream and its progress. From left to right:

    0 ........ computed ........ planned ........ len(tokens) ........ end
      KV written        in flight        to do               sampled in flight, value unknown
    """

    __slots__ = (
        "awaits_drafts",
        "blocks",
        "computed",
        "drafted",
        "end",
        "id",
        "max_len",
        "params",
        "planned",
        "prompt_len",
        "scored",
        "standing",
        "states",
        "times",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        params: SequenceParams = DEFAULT_PARAMS,
        *,
        salt: str = "",
        prefix_cache: bool = True,
        generated: tuple[int, ...] = (),
        scored: int = 0,
    ) -> None:
        self.id = id
        self.params = params
        self.tokens = [*prompt, *generated]
        self.prompt_len = len(prompt)
        self.max_len = len(prompt) + max_tokens
        self.end = len(self.tokens)
        self.computed = 0
        self.planned = 0
        self.scored = 1 + scored if params.score and not generated else len(prompt)  # nothing precedes the first token
        self.drafted = False  # a row with a draft is in flight: how many tokens it yields is not known yet
        self.awaits_drafts = False  # its next row must know its last token, because drafts are likely to follow
        self.times = RequestTimes()
        self.standing = Standing()
        self.blocks = SequenceBlocks(salt, prefix_cache)
        self.states = SequenceStates()

    def arrive(self, number: int, now: float) -> None:
        claim = self.params.claim
        self.standing.arrival, self.times.arrived = number, now
        self.standing.due = now + min([time for time in (claim.deadline, claim.ttft) if time is not None], default=inf)

    @property
    def waits(self) -> bool:
        return not self.blocks.tables

    @property
    def begun(self) -> bool:
        return self.times.admitted is not None or len(self.tokens) > self.prompt_len

    def new_prompt_work(self, start: int) -> int:
        """Returns how many prompt tokens from `start` on are planned for the first time, and counts them as charged."""
        standing = self.standing
        first = max(start, standing.charged)
        standing.charged = max(standing.charged, min(self.planned, self.prompt_len))
        return max(standing.charged - first, 0)

    @property
    def must_wait(self) -> bool:
        return self.end > len(self.tokens) and (self.params.lockstep or self.drafted or self.awaits_drafts)

    def append(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], int | None]:
        """Appends tokens up to where they end it; returns those appended, and the token that ended it, if one did. A
        loop ends it by making its length so far the most that it may have."""
        tokens = tokens[: self.max_len - len(self.tokens)]
        stop, stop_ids = None, self.params.stop_ids
        for count, token in enumerate(tokens, 1):
            if token in stop_ids:
                tokens, stop = tokens[:count], token
                break
        if self.params.guarded_from is not None and (len(self.tokens) - self.prompt_len) % EVERY + len(tokens) >= EVERY:
            tokens, stop = self._until_loop(tokens, stop)
        self.tokens += tokens
        self.end = max(self.end, len(self.tokens))  # more may come than were asked for: their KV is still to do
        return tokens, stop

    def _until_loop(self, tokens: tuple[int, ...], stop: int | None) -> tuple[tuple[int, ...], int | None]:
        before = len(self.tokens) - self.prompt_len
        after = before + len(tokens) - (stop is not None)
        for length in lengths_to_check(before, after, self.params.guarded_from or 0):
            new = tokens[: length - before]
            if self._is_loop(new):
                return new, None
        return tokens, stop

    def _is_loop(self, new: tuple[int, ...]) -> bool:
        """Returns whether it is a loop once it has these tokens too, and lets it be no longer if it is."""
        answered = self.tokens[max(self.prompt_len, len(self.tokens) - TAIL) :]
        self.times.loop = loop_phrase([*answered, *new])
        if self.times.loop:
            self.max_len = len(self.tokens) + len(new)
        return self.times.loop > 0

    @property
    def looped(self) -> bool:
        answered = len(self.tokens) - self.prompt_len
        checked = lengths_to_check(answered - 1, answered, self.params.guarded_from or 0)
        return self.params.guarded_from is not None and bool(checked) and self._is_loop(())

    def new_scores(self, start: int, scores: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Returns the new ones of a row's scores, and counts them: scores[i] is for token start + 1 + i, and a resumed
        prompt may repeat some."""
        scores = scores[max(self.scored - start - 1, 0) :] if scores else scores
        self.scored += len(scores)
        return scores

    @property
    def reuses_prefix(self) -> bool:
        """Returns whether it may begin with cached blocks: scores are not cached, so it may not while it needs some."""
        return self.blocks.prefix_cache and self.scored >= self.prompt_len
