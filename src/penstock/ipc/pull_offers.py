"""Gets offers of KV blocks from one engine for another: blocks that it holds, or computes first.

After any failure, the reader computes the blocks itself. For the thread of one event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.ipc.control_answers import ControlAnswers
from penstock.ipc.dispatch import Pull, RequestEngine
from penstock.types import BlockOffer, Offered, Request
from penstock.types.messages import Abort, Offer, Prefill

OFFER_SECONDS = 2.0  # limit for an offer: the engine may be within a step
PREFILL_SECONDS = 60.0  # limit for a prompt that another engine computes


class PullOffers:
    """Asks engines for offers, and counts the outcomes. `next_id` numbers messages."""

    def __init__(self, answers: ControlAnswers, next_id: Callable[[], int]) -> None:
        self.counts: Counter[str] = Counter()
        self._answers = answers
        self._next_id = next_id

    async def offered(self, pull: Pull, request: Request) -> BlockOffer | None:
        """Returns the source's offer; None: it has nothing, or did not answer in time."""
        if pull.compute:
            prefill = Prefill(request, pull.first, device=pull.device, id=self._next_id())
            offer = await self._answered(pull.source, prefill, PREFILL_SECONDS)
        else:
            tokens = request.prompt + request.generated
            message = Offer(tokens, pull.salt, pull.first, device=pull.device, id=self._next_id())
            offer = await self._answered(pull.source, message, OFFER_SECONDS)
        self.counts["offered" if offer is not None else "not_offered"] += 1
        return offer

    async def warm(self, reader: RequestEngine, request: Request, pull: Pull) -> None:
        offer = await self.offered(pull, request)
        if offer is not None:
            self.counts["warmed"] += 1
            background = request._replace(pull=offer, background=True)
            await self._answered(reader, Prefill(background, seconds=0.0, id=self._next_id()), PREFILL_SECONDS)

    async def _answered(self, engine: RequestEngine, message: Offer | Prefill, seconds: float) -> BlockOffer | None:
        try:
            event = await asyncio.wait_for(self._answers.ask(engine, message), seconds)
        except asyncio.CancelledError:
            engine.send(Abort(message.id))  # nobody will read the blocks
            raise
        except TimeoutError:
            engine.send(Abort(message.id))
            return None
        except PenstockError:
            return None
        return event.offer if isinstance(event, Offered) else None
