"""Exchanges KV blocks with other engines: offers its own blocks, and reads theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.backend.base import Backend
from penstock.backend.blocks.rows import BlockRows
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.config import Config
from penstock.core import hashing
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import PromptCost
from penstock.engine.feature import End, Feature
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_transfer.pulls import BlockPulls, NoPulls, PullCounts
from penstock.engine.request_record import RequestRecord
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
from penstock.types.messages import Add, Offer, Prefill, Release

if TYPE_CHECKING:
    from penstock.engine.kv_transfer.offers import BlockOffers


class TransferOptions(NamedTuple):
    """Describes how an engine exchanges blocks."""

    identity: bytes  # digest of everything that block contents depend on
    listen: tuple[str, ...] = ()  # where it offers blocks (offers.py has the forms); nowhere: it only reads


NO_TRANSFER = TransferOptions(b"")


class NoOffers:
    """Offers nothing."""

    def offer(self, message: Offer) -> Offered:
        """Returns the offer of a prompt's blocks; without blocks if none can be offered."""
        return Offered(message.id)

    def end(self, id: bytes) -> None: ...

    def clear(self) -> None: ...

    def release_device(self) -> None: ...

    def count(self, counts: PeerCounts) -> PeerCounts:
        return counts

    def close(self) -> None: ...


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
        self._counts = PullCounts()
        self._pulls = NoPulls(self._counts)
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
                self._counts,
                lambda: self.engine.pipeline.distrust_cache(),
            )
        self._prefills: dict[int, Prefill] = {}  # in progress; afterwards with the request that computed the prompt
        self._offers: BlockOffers | NoOffers = NoOffers()
        if options.listen and movable and not limits.encoder:
            from penstock.engine.kv_transfer.offers import open_offers  # imports sockets, which take long

            self._offers = open_offers(
                options.listen, options.identity, cache, host, backend.kv, limits, chain, backend.sharing
            )

    def answer(self, message: Any) -> Sequence[Event]:
        if isinstance(message, Offer):
            return [self._offers.offer(message)]
        if isinstance(message, Prefill):
            if isinstance(self._offers, NoOffers):
                return [Offered(message.id)]
            self.engine.handle(Add(self.prefill(message)))
        if isinstance(message, Release):
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
        return self._offers.offer(Offer(prompt, salt, message.first, message.seconds, message.device, id=message.id))

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        return self._pulls.needs(record, self.engine.weights)

    def ended(self, record: RequestRecord, event: End | None) -> None:
        if (message := self._prefills.get(record.request.id)) is not None:
            self._prefills[record.request.id] = message._replace(request=record.request)
        self._pulls.end(record)

    def flush(self) -> None:
        self.distrust_cache()

    def distrust_cache(self) -> None:
        self._offers.clear()

    def release_device(self) -> None:
        self._offers.release_device()

    def stats(self) -> Mapping[str, Any]:
        return {"peers": self.counts()}

    def hello(self) -> Mapping[str, Any]:
        return {"device": self._device}

    def counts(self) -> PeerCounts:
        counts = self._counts
        pulled = PeerCounts(
            pulls=counts.pulls,
            pulled_blocks=counts.blocks,
            pulled_tokens=counts.blocks * self._size,
            pull_seconds=counts.seconds,
            failures=tuple(sorted(counts.failures.items())),
            carriers=tuple(sorted(counts.carriers.items())),
            passed_over=tuple(sorted(counts.passed_over.items())),
        )
        return self._offers.count(pulled)

    def close(self) -> None:
        self._pulls.close()
        self._offers.close()


def transfer_options(config: Config, identity: bytes, sharing: DeviceSharing | None) -> TransferOptions:
    return TransferOptions(identity, offer_addresses(config, sharing))


def offer_addresses(config: Config, sharing: DeviceSharing | None = None) -> tuple[str, ...]:
    """Returns where an engine offers KV blocks: one that several clients may join does so on its device, on its machine
    and, if they may be on others, on the network."""
    if config.offers or not config.listen:
        return config.offers
    scheme, _, rest = config.listen.partition("://")
    here = ("shm",) if sharing is None else ("cuda_ipc", "shm")
    if scheme == "ipc":
        return here
    from penstock.engine.kv_transfer import nixl  # imports sockets, which take long

    host = rest.rpartition(":")[0]
    return (*here, *([f"nixl:{host}:0"] if nixl.preferable() else []), f"tcp:{host}:0")
