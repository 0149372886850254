"""Lets an engine exchange KV blocks with others: it offers its own, and reads theirs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from penstock.backend.base import Backend
from penstock.backend.block_rows import BlockRows
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import PromptCost
from penstock.engine.carry.messages import Offer, Prefill, Release
from penstock.engine.carry.pulls import NO_ROOM, BlockPulls
from penstock.engine.host_blocks import HostMemory
from penstock.engine.record import RequestRecord
from penstock.engine.waiting import Need
from penstock.types import (
    Event,
    Finished,
    Limits,
    Offered,
    PeerCounts,
    Request,
    SamplingParams,
    Tokens,
    WeightState,
)

if TYPE_CHECKING:
    from penstock.engine.carry.offers import BlockOffers


class CarryOptions(NamedTuple):
    """Says what an engine needs to exchange blocks."""

    identity: bytes  # of its blocks: a digest of all that their contents depend on
    listen: tuple[str, ...] = ()  # where it offers blocks (offers.py has the forms); nowhere: it only reads


NOT_CARRIED = CarryOptions(b"")


class PeerBlocks:
    """Answers Offers and Releases, and has the blocks read that were offered for requests."""

    def __init__(
        self,
        options: CarryOptions,
        cache: KvCache,
        host: HostMemory,
        backend: Backend,
        limits: Limits,
        prompts: PromptCost,
        chain: hashing.Chain,
    ) -> None:
        self._size = limits.block_size
        self._failures: Counter[str] = Counter()
        self._pulls: BlockPulls | None = None
        movable = host.states is not None or not limits.states
        sharing = None if limits.states else backend.sharing  # states travel through host memory alone
        rows = backend.kv if isinstance(backend.kv, BlockRows) and not limits.states else None
        if movable and (host.blocks is not None or sharing is not None or rows is not None):
            about = options.identity, self._failures, len(backend.kv.export_blocks([0]))
            self._pulls = BlockPulls(cache, host, limits, prompts, chain, *about, sharing, rows)
        self._prefills: dict[int, Prefill] = {}  # that are being computed; once they are, with the request that did it
        self._offers: BlockOffers | None = None
        if options.listen and movable and not limits.encoder:
            from penstock.engine.carry.offers import open_offers  # with sockets, which take long

            of_engine = cache, host, backend.kv, limits, chain, backend.sharing
            self._offers = open_offers(options.listen, options.identity, *of_engine)

    def answer(self, message: Offer | Release) -> list[Event]:
        """Offers blocks, or ends an offer; returns the answer, if there is one."""
        if isinstance(message, Offer):
            return [self._offer(message)]
        if self._offers is not None:
            self._offers.end(message.offer)
        return []

    def prefill(self, message: Prefill) -> Request:
        """Returns the request that computes a prompt which is to be offered. Its events go to `offered`."""
        asked = message.request
        self._prefills[message.id] = message
        return Request(
            message.id,
            asked.prompt + asked.generated,
            SamplingParams(temperature=0),
            1,
            priority=asked.priority,
            salt=asked.salt,
            owner=asked.owner,
            background=asked.background,
            adapters=asked.adapters,
            speculation=0,
            claim=asked.claim,
            durable=asked.durable,
            pull=asked.pull,
        )

    def offered(self, events: list[Event]) -> list[Event]:
        """Returns events with an Offered in the place of those of a prompt that was computed to be offered."""
        if not self._prefills:
            return events
        return [each for event in events for each in self._translate(event)]

    def _translate(self, event: Event) -> list[Event]:
        message = self._prefills.get(event.seq)
        if message is None:
            return [event]
        if isinstance(event, Tokens):
            return []
        del self._prefills[event.seq]
        if not isinstance(event, Finished):
            return [Offered(event.seq)]
        return [self._offer(Offer(event.seq, message.request.prompt, message.request.salt, *message[2:]))]

    def _offer(self, message: Offer) -> Offered:
        return Offered(message.id) if self._offers is None else self._offers.offer(message)

    def needs(self, record: RequestRecord, weights: WeightState) -> list[Need]:
        """Returns what a request that could run now should wait for; once for each request."""
        if record.request.pull is None:
            return []
        if self._pulls is not None:
            return self._pulls.needs(record, weights)
        record.request = record.request._replace(pull=None)
        self._failures[NO_ROOM] += 1
        return []

    def end(self, record: RequestRecord) -> None:
        """Takes note of a request that has ended."""
        if (message := self._prefills.get(record.request.id)) is not None:
            self._prefills[record.request.id] = message._replace(request=record.request)
        if self._pulls is not None:
            self._pulls.end(record)

    def clear(self) -> None:
        """Ends all offers: what they hold is not to be used."""
        if self._offers is not None:
            self._offers.clear()

    def release_device(self) -> None:
        """Gives back what offers take of the device's memory, while the engine sleeps."""
        if self._offers is not None:
            self._offers.release_device()

    def counts(self) -> PeerCounts:
        """Returns what was counted so far."""
        counts = PeerCounts(failures=tuple(sorted(self._failures.items())))
        if (pulls := self._pulls) is not None:
            tokens = pulls.blocks * self._size
            counts = counts._replace(
                pulls=pulls.pulls,
                pulled_blocks=pulls.blocks,
                pulled_tokens=tokens,
                pull_seconds=pulls.seconds,
                carriers=tuple(sorted(pulls.carriers.items())),
                passed_over=tuple(sorted(pulls.passed_over.items())),
            )
        return counts if self._offers is None else self._offers.count(counts)

    def close(self) -> None:
        """Offers and reads nothing any more."""
        if self._pulls is not None:
            self._pulls.close()
        if self._offers is not None:
            self._offers.close()
