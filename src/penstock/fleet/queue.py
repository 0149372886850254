"""Orders the requests that wait at a gateway.

A request stays at its replica. So a gateway holds requests back while every replica has enough to do, and routes each
by the fleet's state when its turn comes. The order is the engine's (core/tenants.py and core/policy.py): by priority,
then by the tenant's past work, then by the earliest target that can still be met. Requests that would wait too long are
refused earlier (server/access/expected_wait.py).

The queue is pure: its owner sets `now` before every call, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from penstock.core.deadlines import expire
from penstock.core.policy import StandardPolicy
from penstock.core.sequence import Sequence, SequenceParams
from penstock.core.tenants import PER_GENERATED, Tenants
from penstock.errors import InvalidRequest
from penstock.fleet.ledger import Load
from penstock.fleet.timing import EngineTiming
from penstock.types import Event, Limits, Request

AHEAD = 8  # a replica is sent one request more than it has rows for each so many, which begin when others end


class QueuedRequest(NamedTuple):
    """Remembers a request and the prompt tokens that some replica will compute for it."""

    request: Request
    work: int


class GatewayQueue:
    """Holds the requests that no replica has yet, and the work that tenants have had."""

    def __init__(self, limits: Limits, seconds_per_token: float = 0.0) -> None:
        self.now = 0.0
        self.seconds_per_token = seconds_per_token  # prompt speed of one replica; set by the owner
        self.sequences: dict[int, Sequence] = {}  # requests in flight, waiting or sent
        self._policy = StandardPolicy(limits)
        self.tenants = Tenants(self._policy.order)
        self._queued: dict[int, QueuedRequest] = {}
        self._later = 0  # queued background requests
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._queued)

    def waits(self, id: int) -> bool:
        return id in self._queued

    def is_next(self, request: Request) -> bool:
        """Returns whether nobody waits before whom a request would not go: others wait in the background at most."""
        return len(self._queued) == (0 if request.background else self._later)

    def is_first(self, request: Request) -> bool:
        """Returns whether a request's tenant has no other in flight. It need not wait: an engine serves it before
        further requests of other tenants."""
        return not request.background and request.claim.tenant not in self.tenants

    def enter(self, request: Request, work: int) -> None:
        """Counts a request that does not wait. Its tenant is charged with its work."""
        self._begin(self._add(request), work)

    def add(self, request: Request, work: int) -> None:
        self._queued[self._add(request).id] = QueuedRequest(request, work)
        self._later += request.background

    def _add(self, request: Request) -> Sequence:
        if request.id in self.sequences:
            raise InvalidRequest(f"request id {request.id} is already in use")
        seq = Sequence(
            request.id,
            (),
            request.max_tokens,
            SequenceParams(priority=request.priority, background=request.background, claim=request.claim),
        )
        self._arrivals += 1
        seq.arrive(self._arrivals, self.now)
        self.sequences[request.id] = seq
        self.tenants.add(seq)
        return seq

    def _begin(self, seq: Sequence, work: int) -> None:
        self.tenants.start(seq)
        seq.times.admitted = self.now
        seq.standing.tenant.charge(work)

    def pop(self, has_room: Callable[[Request], bool] = lambda _: True) -> Request | None:
        """Returns the request whose turn it is; None: nobody waits, or no replica has room for it. Its tenant is
        charged with its work."""
        while (seq := self.tenants.next(self._policy.turn)) is not None:
            request, work = self._queued[seq.id]
            if not has_room(request):
                return None
            if (
                self.now + work * self.seconds_per_token > seq.standing.due
            ):  # too late: it lets those pass who can make it
                self.tenants.postpone(seq)
                continue
            self._begin(seq, work)
            self._leave(seq.id)
            return request
        return None

    def waited(self, id: int) -> float:
        """Returns the seconds that a request has waited which had its turn; 0: it is not known any more."""
        seq = self.sequences.get(id)
        return 0.0 if seq is None or seq.times.admitted is None else seq.times.admitted - seq.times.arrived

    @property
    def is_overdue(self) -> bool:
        """Returns whether a deadline has passed that `expire` has not looked at."""
        deadlines = self.tenants.deadlines
        return bool(deadlines) and deadlines[0][0] <= self.now

    def expire(self) -> list[Event]:
        """Ends requests whose deadline has passed; returns the failures."""
        return expire(self)

    def generated(self, id: int, tokens: int) -> None:
        if (seq := self.sequences.get(id)) is not None:
            seq.standing.tenant.charge(PER_GENERATED * tokens)

    def abort(self, id: int) -> None:
        seq = self.sequences.pop(id, None)
        if seq is None:
            return
        if id in self._queued:
            self.tenants.take(seq)
            self._leave(id)
        else:
            self.tenants.stop(seq)
        self.tenants.end(seq)

    def _leave(self, id: int) -> None:
        self._later -= self._queued.pop(id).request.background


def has_room(load: Load, timing: EngineTiming, background: bool = False) -> bool:
    """Returns True if a replica with this load has use for another request: less than a step's prompts wait there, and
    there is a row and memory for it. Those in the background have half of the rows, and hold up no others."""
    if load.is_idle:
        return True
    rows, most = load.rows + load.waiting, most_requests(timing)
    if load.kv_tokens >= timing.kv_tokens:
        return False
    if background:
        return load.queued < timing.step_tokens and load.background < timing.max_rows // 2 and rows < most
    ahead = rows - max(load.background - timing.max_rows // 2, 0)
    return load.queued - load.background_tokens < timing.step_tokens and ahead < most


def most_requests(timing: EngineTiming) -> int:
    return timing.max_rows + timing.max_rows // AHEAD


def without_full(loads: Mapping[int, Load], avoid: AbstractSet[int], timing: EngineTiming) -> AbstractSet[int]:
    """Returns the replicas to avoid: also those without a row for another request or, if all others are full, those
    without room."""
    for most in (timing.max_rows, most_requests(timing)):
        full = {replica for replica, load in loads.items() if load.rows + load.waiting >= most}
        if not full:
            return avoid
        if len(full | avoid) < len(loads):
            return full | avoid
    return avoid
