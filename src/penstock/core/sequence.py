"""One token stream and how far it has come. The scheduler alone writes its progress, the KV cache its blocks."""

from __future__ import annotations

from penstock.core.prefix import Node
from penstock.types import Nearest, Report


class Ledger:
    """What has happened to a sequence. Times are of whoever steps the scheduler; None: not yet."""

    __slots__ = ("admitted", "answered", "arrived", "lost", "nearest", "preemptions", "recomputed")

    def __init__(self) -> None:
        self.arrived = 0.0
        self.admitted: float | None = None
        self.answered: float | None = None
        self.preemptions = 0
        self.lost = 0  # tokens whose KV a preemption took, while it waits
        self.recomputed = 0
        self.nearest: Nearest | None = None

    def report(self, cached: int, now: float) -> Report:
        admitted = now if self.admitted is None else self.admitted
        answered = now if self.answered is None else self.answered
        return Report(
            cached=max(cached, 0),
            queued=admitted - self.arrived,
            prefill=answered - admitted,
            decode=now - answered,
            preemptions=self.preemptions,
            recomputed=self.recomputed,
            nearest=self.nearest,
        )


class Sequence:
    """Positions of `tokens`, from left to right:

    0 ........ computed ........ planned ........ len(tokens) ........ end
      KV written        in flight        to do               sampled in flight, value unknown
    """

    __slots__ = (
        "arrival",
        "awaits",
        "blocks",
        "cached",
        "computed",
        "end",
        "explain",
        "id",
        "ledger",
        "lockstep",
        "max_len",
        "nodes",
        "owner",
        "planned",
        "priority",
        "private",
        "promises",
        "prompt_len",
        "rolling",
        "salt",
        "saving",
        "score",
        "scored",
        "since",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        id: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        priority: int = 0,
        salt: str = "",
        score: bool = False,
        lockstep: bool = False,
        private: bool = False,
        owner: str = "",
        explain: bool = False,
    ) -> None:
        self.id = id
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.max_len = len(prompt) + max_tokens
        self.stop_ids = stop_ids
        self.priority = priority
        self.salt = salt
        self.score = score  # the prompt's own tokens are to be scored, so none of them may come from the cache
        self.lockstep = lockstep  # its next row must know its last token: no row while one is in flight
        self.private = private  # it takes nothing from the prefix cache and leaves nothing there
        self.owner = owner
        self.explain = explain
        self.ledger = Ledger()
        self.arrival = 0
        self.computed = 0
        self.planned = 0
        self.end = len(prompt)
        self.scored = 1 if score else len(prompt)  # nothing precedes the first token to score it by
        self.cached = -1  # prompt tokens reused at its first admission; -1: not admitted yet
        self.since = 0  # rows of steps before this one belong to a life that preemption ended
        self.blocks: list[int] = []
        self.nodes: list[Node] = []  # the first len(nodes) blocks are shared through the prefix cache
        self.promises: list[int] = []  # chain hashes of its full prompt blocks, see kvcache
        self.awaits: int | None = None  # a promised block worth waiting for
        self.saving: list[int] = []  # positions at which its state is still to be saved, or just being
        self.rolling: Node | None = None  # where its state was saved last in its answer
