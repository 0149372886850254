"""Keeps a gateway's knowledge of its replicas, and routes requests by it.

Only the replicas' step messages feed the index and the ledger: gateways do not talk to each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.hashing import SIZE, Chain
from penstock.fleet.calibration import TimingFit
from penstock.fleet.holders import DEVICE, REMOVED, BlockChange, chain_hash_table
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, Load
from penstock.fleet.queue import has_room, without_full
from penstock.fleet.route import Route, RoutedPrompt, Router, RoutingWeights
from penstock.fleet.split import PromptToSplit, SplitRule
from penstock.fleet.timing import EngineTiming
from penstock.types import (
    AdapterInfo,
    BlockEvent,
    BlockSnapshot,
    BlockStored,
    Limits,
    Request,
    Stats,
    WeightState,
)


class FleetView:
    """Routes requests of one model. Replicas are small integers; times are milliseconds of the caller's clock."""

    def __init__(
        self, limits: Limits, chain: Chain, weights: RoutingWeights | None = None, split: SplitRule | None = None
    ) -> None:
        self._limits = limits
        self._chain = chain
        self._index = BlockIndex(chain_hash_table())
        self._ledger = Ledger()
        self._reports: dict[int, tuple[Load, int]] = {}  # the last of each replica, with the requests that it knows of
        self._fit = TimingFit(limits)
        self._router = Router(self._fit.timing, self._index, self._ledger, weights)
        self._split = split or SplitRule()

    def open(self, replica: int) -> None:
        if not self._ledger.knows(replica):
            self._ledger.join(replica)
            if (report := self._reports.get(replica)) is not None:
                self._ledger.report(replica, *report)

    def shut(self, replica: int) -> None:
        """Stops choosing a replica. Its blocks are still followed."""
        self._ledger.leave(replica)

    def lose(self, replica: int) -> None:
        """Notes a lost connection: the next one counts requests anew."""
        self._ledger.leave(replica)
        self._reports.pop(replica, None)

    def drop(self, replica: int) -> None:
        self.lose(replica)
        self._index.drop(replica)

    @property
    def open_replicas(self) -> int:
        return len(self._ledger)

    def load(self, replica: int) -> Load:
        if self._ledger.knows(replica):
            return self._ledger.load(replica)
        return self._reports.get(replica, (Load(), 0))[0]

    @property
    def timing(self) -> EngineTiming:
        return self._fit.timing

    @property
    def seconds_per_token(self) -> float:
        timing = self._fit.timing
        return timing.prefill_ms(timing.step_tokens) / timing.step_tokens / 1000

    # -- messages of replicas ------------------------------------------------------------------------------------

    def report(self, replica: int, stats: Stats, received: int) -> None:
        self._reports[replica] = report = _load(stats, self._limits), received
        self._router.gateways = max(stats.clients, 1)
        if self._ledger.knows(replica):
            self._ledger.report(replica, *report)
        pulled = self._fit.observe_pulls(stats.peers.pulled_tokens, stats.peers.pull_seconds)
        if self._fit.observe(stats.step_seconds) or pulled:
            self._router.use(self._fit.timing)

    def follow(self, replica: int, epoch: int, blocks: list[BlockEvent]) -> bool:
        """Applies a step's block events, in order; returns False if earlier ones are missing."""
        changes: list[BlockChange] = [
            (DEVICE if isinstance(event, BlockStored) else REMOVED, event.hash) for event in blocks
        ]
        return self._index.apply(replica, epoch, blocks[0].number, changes)

    def restore(self, replica: int, blocks: BlockSnapshot) -> None:
        held = blocks.hashes
        hashes = (held[at : at + SIZE] for at in range(0, len(held), SIZE))
        self._index.restore(replica, blocks.epoch, blocks.following, [(DEVICE, hash) for hash in hashes])

    # -- where requests go ---------------------------------------------------------------------------------------

    def has_room(self, request: Request, avoid: int | None = None) -> bool:
        background, timing, duty = request.background, self._fit.timing, self._split.duty
        return any(
            has_room(self._ledger.load(replica), timing, background)
            for replica in self._ledger.replicas()
            if replica != avoid and (replica not in duty or len(duty) == len(self._ledger))
        )

    def uncached(self, request: Request, salt: str) -> int:
        hashes = self._hashes(request, salt)
        depth = max([depth for depth, _ in self._index.lookup(hashes)], default=0)
        return len(request.prompt) - min(depth * self._limits.block_size, len(request.prompt) - 1)

    def route(self, request: Request, salt: str, now: float) -> Route | None:
        """Returns where a request goes, and counts it there; None: no replica can be chosen. Full replicas are avoided
        if another has a row."""
        if not len(self._ledger):
            return None
        prompt = RoutedPrompt(
            self._hashes(request, salt),
            len(request.prompt) + len(request.generated),
            self._limits.block_size,
            request.background,
        )
        loads = self._loads()
        return self._router.route(prompt, now, without_full(loads, self._split.on_duty(loads, now), self._fit.timing))

    def _hashes(self, request: Request, salt: str) -> list[bytes]:
        if not _reuses(request, self._limits):
            return []
        tokens = request.prompt + request.generated if request.generated else request.prompt
        return self._chain(salt, tokens, self._limits.block_size)

    def holders(self, request: Request, salt: str) -> list[int]:
        return self._index.lookup(self._chain(salt, request.prompt, self._limits.block_size)).deepest(2)

    def prefill_elsewhere(self, route: Route, request: Request, now: float) -> int | None:
        """Returns the replica that is to compute the prompt of a request which another answers; None: no other."""
        if not _reuses(request, self._limits):
            return None
        ttft, itl = (None if target is None else 1000 * target for target in (request.claim.ttft, request.claim.itl))
        prompt = PromptToSplit(route.uncached, route.cached, ttft, itl)
        return self._split.decide(prompt, route.replica, self._loads(), self._fit.timing, now)

    def _loads(self) -> dict[int, Load]:
        return {replica: self._ledger.load(replica) for replica in self._ledger.replicas()}


def _load(stats: Stats, limits: Limits) -> Load:
    queued = stats.uncached_tokens
    used = stats.blocks_used * limits.block_size // len(limits.windows)
    return Load(
        queued=queued,
        pending=queued,
        rows=stats.running,
        kv_tokens=used + queued,
        waiting=stats.waiting,
        background=stats.background,
        background_tokens=stats.background_tokens,
    )


def _reuses(request: Request, limits: Limits) -> bool:
    scored = request.sampling.prompt_logprobs is not None and not request.generated
    return not scored and request.pooling != "mean" and not limits.encoder


def salt_of(request: Request, adapters: Mapping[str, AdapterInfo], weights: WeightState) -> str:
    """Returns the salt that an engine gives a request's blocks: from the caller, its adapters, and updated weights. An
    adapter's digest is known once it was loaded; until then its blocks are not found."""
    salt = request.salt
    for use in request.adapters:
        info = adapters.get(use.name)
        if use.scale and info is not None:
            salt += f"\0adapter {info.digest} {info.scale * use.scale!r}"
    return f"{salt}\0weights {weights.updates} {weights.version}" if weights.updates else salt
