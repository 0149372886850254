"""Has replicas read KV blocks from each other before they answer: what one holds, or computes for another.

A request that is to begin with another replica's blocks is held back until they are offered. Whatever goes wrong, it is
sent without them. For the thread of one event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from penstock.fleet.replica import Replica
from penstock.types import Aborted, BlockOffer, Event, Offered, Request
from penstock.types.messages import Abort, Add, Control, Message, Offer, Prefill, Release

OFFER_SECONDS = 2.0  # that an offer may take: the engine may be within a step
PREFILL_SECONDS = 60.0  # that a prompt may take on another replica

Ask = Callable[[Replica, Control[Any]], Awaitable[Event]]


class PullPlan(NamedTuple):
    """Says where the blocks of a prompt come from."""

    source: Replica
    salt: str  # that engines give the prompt's blocks
    first: int  # block that is missing where the request is answered
    compute: bool = False  # the source has to compute them first


class FleetPulls:
    """Holds requests back for which a plan was made, until their blocks are offered. `ask` sends a control message,
    `deliver` takes events in a replica's name, `next_id` numbers messages."""

    def __init__(self, ask: Ask, deliver: Callable[[Replica, list[Event]], None], next_id: Callable[[], int]) -> None:
        self.counts: Counter[str] = Counter()
        self._ask = ask
        self._deliver = deliver
        self._next_id = next_id
        self._plans: dict[int, PullPlan] = {}
        self._held: dict[int, asyncio.Task[None]] = {}

    def plan(self, id: int, plan: PullPlan | None) -> None:
        """Says where the blocks of a request that is sent next come from; None: they are computed where it goes."""
        self._plans.pop(id, None)
        if plan is not None:
            self._plans[id] = plan

    def hold(self, replica: Replica, message: Message) -> bool:
        """Returns whether a message is not to be sent to a replica now: a request waits for its blocks, or it did and
        is aborted."""
        if not isinstance(message, Add | Abort):
            return False
        id = message.request.id if isinstance(message, Add) else message.id
        held = self._held.pop(id, None)  # by another replica, which was lost, or by this one
        if held is not None:
            held.cancel()
        if isinstance(message, Abort):
            if held is not None:
                asyncio.get_running_loop().call_soon(lambda: self._deliver(replica, [Aborted(id)]))
            return held is not None
        plan = self._plans.pop(id, None)
        if plan is not None:
            self._held[id] = asyncio.create_task(self._send(replica, message.request, plan))
        return plan is not None

    def close(self) -> None:
        """Holds nothing back any more."""
        for task in self._held.values():
            task.cancel()
        self._held.clear()

    async def warm(self, replica: Replica, request: Request, plan: PullPlan) -> None:
        """Has a replica read the blocks of a prompt that nobody waits for."""
        offer = await self._offered(plan, request, replica)
        if offer is not None:
            self.counts["warmed"] += 1
            background = request._replace(pull=offer, background=True)
            await self._answered(replica, Prefill(background, seconds=0.0, id=self._next_id()), PREFILL_SECONDS)

    async def _send(self, replica: Replica, request: Request, plan: PullPlan) -> None:
        """Sends a request once its blocks are offered, or cannot be."""
        offer = await self._offered(plan, request, replica)
        if self._held.get(request.id) is asyncio.current_task():
            del self._held[request.id]
            replica.transmit(Add(request._replace(pull=offer)))
        elif offer is not None:
            plan.source.send(Release(offer.id))

    async def _offered(self, plan: PullPlan, request: Request, reader: Replica) -> BlockOffer | None:
        """Returns what a source offers of a prompt to a replica; None: nothing."""
        device = reader.hello.device
        if plan.compute:
            message: Offer | Prefill = Prefill(request, plan.first, device=device, id=self._next_id())
            offer = await self._answered(plan.source, message, PREFILL_SECONDS)
        else:
            tokens = request.prompt + request.generated
            message = Offer(tokens, plan.salt, plan.first, device=device, id=self._next_id())
            offer = await self._answered(plan.source, message, OFFER_SECONDS)
        self.counts["offered" if offer is not None else "not_offered"] += 1
        return offer

    async def _answered(self, source: Replica, message: Offer | Prefill, seconds: float) -> BlockOffer | None:
        try:
            event = await asyncio.wait_for(self._ask(source, message), seconds)
        except asyncio.CancelledError:
            source.send(Abort(message.id))  # nobody will read what it may still compute
            raise
        except TimeoutError:
            source.send(Abort(message.id))
            return None
        except PenstockError:
            return None
        return event.offer if isinstance(event, Offered) else None
