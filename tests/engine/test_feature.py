"""A feature joins an engine by one file and one line: engine.py stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backend.fake import FakeBackend
from penstock.engine.assemble import assemble
from penstock.engine.feature import End, Feature
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import InvalidRequest
from penstock.types import Aborted, Failed, Finished, Limits, Request, SamplingParams, StepPlan, StepResult, Tokens
from penstock.types.messages import Add

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=32, block_size=4, num_blocks=64, vocab=100)


class Quota(Feature):
    """Lets each owner have one request at a time, and counts the tokens of all."""

    def __init__(self) -> None:
        self._owners: set[str] = set()
        self.tokens = 0

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        if record.request.owner in self._owners:
            raise InvalidRequest(f"{record.request.owner} has a request already: wait for its end")
        self._owners.add(record.request.owner)
        return ()

    def delivered(self, event: Tokens) -> None:
        self.tokens += len(event.tokens)

    def ended(self, record: RequestRecord, event: End | None) -> None:
        if event is not None:
            self._owners.discard(record.request.owner)

    def stats(self) -> Mapping[str, Any]:
        return {"generated_tokens": self.tokens}


class Log(Feature):
    """Lists the moments of a request."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        self.moments.append("needs")
        return ()

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        self.moments.append("reads")
        return ()

    def started(self, record: RequestRecord, generated: tuple[int, ...]) -> None:
        self.moments.append("started")

    def before_plan(self) -> None:
        self.moments.append("before_plan")

    def launched(self, plan: StepPlan, gap: float) -> None:
        self.moments.append("launched")

    def revise(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        self.moments.append("revise")
        return result

    def delivered(self, event: Tokens) -> None:
        self.moments.append("delivered")

    def ended(self, record: RequestRecord, event: End | None) -> None:
        self.moments.append("ended")

    def after_step(self) -> None:
        self.moments.append("after_step")

    def close(self) -> None:
        self.moments.append("close")


def backend() -> FakeBackend:
    fake = FakeBackend(LIMITS.vocab)
    fake.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return fake


def request(id: int, owner: str = "", max_tokens: int = 4) -> Request:
    return Request(id, (1, 2, 3), SamplingParams(temperature=0), max_tokens, owner=owner)


def test_a_feature_refuses_counts_and_forgets_requests() -> None:
    engine = assemble(backend(), LIMITS, more=(Quota(),))
    engine.handle(Add(request(1, "ann")))
    engine.handle(Add(request(2, "ann")))
    engine.handle(Add(request(3, "bob")))
    events = []
    while not engine.idle:
        events += engine.step()
    ends = {event.seq: type(event) for event in events if not isinstance(event, Tokens)}
    assert ends == {1: Finished, 2: Failed, 3: Finished}
    assert engine.stats().generated_tokens == 8
    engine.add(request(4, "ann"))
    engine.abort(4)
    assert [type(event) for event in engine.step()] == [Aborted]


def test_a_feature_is_called_at_each_moment_of_a_request() -> None:
    log = Log()
    engine = assemble(backend(), LIMITS, more=(log,))
    engine.add(request(1, max_tokens=1))
    engine.step()
    engine.close()
    assert log.moments == [
        "needs",
        "reads",
        "started",
        "before_plan",
        "launched",
        "revise",
        "delivered",
        "ended",
        "after_step",
        "close",
    ]
