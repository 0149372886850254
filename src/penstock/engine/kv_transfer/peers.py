"""Lets an engine exchange KV blocks with others: it offers its own, and reads theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backend.base import Backend
from penstock.backend.blocks.rows import BlockRows
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import PromptCost
from penstock.engine.feature import End, Feature
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_transfer.pulls import NO_ROOM, BlockPulls
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
)
from penstock.types.messages import Offer, Prefill, Release

if TYPE_CHECKING:
    from penstock.engine.kv_transfer.offers import BlockOffers


class TransferOptions(NamedTuple):
    """Says what an engine needs to exchange blocks."""

    identity: bytes  # of its blocks: a digest of all that their contents depend on
    listen: tuple[str, ...] = ()  # where it offers blocks (offers.py has the forms); nowhere: it only reads


NO_TRANSFER = TransferOptions(b"")


class PeerBlocks(Feature):
    """Answers Offers, Releases and Prefills, and has the blocks read that were offered for requests."""

    answers = (Offer, Release, Prefill)

    def __init__(
        self,
        options: TransferOptions,
        cache: KvCache,
        host: HostMemory,
        backend: Backend,
        limits: Limits,
        prompts: PromptCost,
        chain: hashing.Chain,
    ) -> None:
        self._size = limits.block_size
        self._device = "" if backend.sharing is None else backend.sharing.name
        self._failures: Counter[str] = Counter()
        self._pulls: BlockPulls | None = None
        movable = host.states is not None or not limits.states
        direct = not limits.states and (backend.sharing is not None or isinstance(backend.kv, BlockRows))
        if movable and (host.blocks is not None or direct):
            self._pulls = BlockPulls(
                cache,
                host,
                limits,
                backend.kv,
                backend.sharing,
                prompts,
                chain,
                options.identity,
                self._failures,
                lambda: self.engine.distrust_cache(),
            )
        self._prefills: dict[int, Prefill] = {}  # that are being computed; once they are, with the request that did it
        self._offers: BlockOffers | None = None
        if options.listen and movable and not limits.encoder:
            from penstock.engine.kv_transfer.offers import open_offers  # with sockets, which take long

            of_engine = cache, host, backend.kv, limits, chain, backend.sharing
            self._offers = open_offers(options.listen, options.identity, *of_engine)

    def answer(self, message: Any) -> Sequence[Event]:
        if isinstance(message, Offer):
            return [self._offer(message)]
        if isinstance(message, Prefill):
            if self._offers is None:
                return [Offered(message.id)]
            self.engine.take(self.prefill(message))
        if isinstance(message, Release) and self._offers is not None:
            self._offers.end(message.offer)
        return ()

    def prefill(self, message: Prefill) -> Request:
        """Returns the request that computes a prompt which is to be offered. `translate` gets its events."""
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

    def translate(self, events: list[Event]) -> list[Event]:
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
        return [self._offer_prefilled(message)]

    def _offer_prefilled(self, message: Prefill) -> Offered:
        prompt, salt = message.request.prompt, message.request.salt
        return self._offer(Offer(prompt, salt, message.first, message.seconds, message.device, id=message.id))

    def _offer(self, message: Offer) -> Offered:
        return Offered(message.id) if self._offers is None else self._offers.offer(message)

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        if record.request.pull is None:
            return ()
        if self._pulls is not None:
            return self._pulls.needs(record, self.engine.weights)
        record.request = record.request._replace(pull=None)
        self._failures[NO_ROOM] += 1
        return ()

    def ended(self, record: RequestRecord, event: End | None) -> None:
        if (message := self._prefills.get(record.request.id)) is not None:
            self._prefills[record.request.id] = message._replace(request=record.request)
        if self._pulls is not None:
            self._pulls.end(record)

    def flush(self) -> None:
        self.distrust_cache()

    def distrust_cache(self) -> None:
        """Ends all offers: their blocks are not to be used."""
        if self._offers is not None:
            self._offers.clear()

    def release_device(self) -> None:
        if self._offers is not None:
            self._offers.release_device()

    def stats(self) -> Mapping[str, Any]:
        return {"peers": self.counts()}

    def hello(self) -> Mapping[str, Any]:
        return {"device": self._device}

    def counts(self) -> PeerCounts:
        """Returns the counts of pulls and offers so far."""
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
        if self._pulls is not None:
            self._pulls.close()
        if self._offers is not None:
            self._offers.close()
