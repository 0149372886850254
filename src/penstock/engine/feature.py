"""Defines how a feature takes part in an engine's work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.types import Aborted, Event, Failed, Finished, StepPlan, StepResult, Tokens

if TYPE_CHECKING:
    from penstock.core import Sequence as TokenSequence
    from penstock.engine.engine import Engine

End = Finished | Aborted | Failed


class Feature:
    """Does nothing at any of the moments in which an engine calls its features. A feature overrides the moments that
    it needs. The engine calls its features in their order."""

    answers: tuple[type, ...] = ()  # the messages that it answers
    engine: Engine  # set when the engine has all its features

    # -- a request, from its arrival to its end ------------------------------------------------------------------

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        """Returns the needs of a new request; raises PenstockError to refuse the request."""
        return ()

    def reads(self, record: RequestRecord) -> Sequence[Need]:
        """Returns the KV blocks that a request should wait for once it has everything else. It may be asked again."""
        return ()

    def holds(self, record: RequestRecord, sequence: TokenSequence) -> bool:
        """Returns whether it keeps a request that could start now, to start it later."""
        return False

    def drops(self, id: int) -> bool:
        """Returns whether it held the request with this id, and forgets the request if it did."""
        return False

    def started(self, record: RequestRecord, generated: tuple[int, ...]) -> None:
        """Is called when the scheduler has the request, with the tokens that its answer has already."""

    def delivered(self, event: Tokens) -> None: ...

    def ended(self, record: RequestRecord, event: End | None) -> None:
        """Is called when a request ends; with None, it was refused."""

    # -- a step --------------------------------------------------------------------------------------------------

    def before_plan(self) -> None: ...

    def device_waits(self, plan: StepPlan) -> bool:
        """Returns whether the device had to wait for this plan, so that its step began with the answer before it."""
        return False

    def launched(self, plan: StepPlan, gap: float) -> None:
        """Is called after a launch. The device had nothing to compute for `gap` seconds because the plan was made."""

    def revise(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        """Returns the part of a step's result that the scheduler commits."""
        return result

    def after_step(self) -> None:
        """Is called after each step, also after one that computed nothing."""

    def translate(self, events: list[Event]) -> list[Event]:
        """Returns the events of a step as the engine's caller gets them."""
        return events

    # -- the engine ----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Returns whether the engine must keep stepping, also without requests."""
        return False

    @property
    def slow(self) -> bool:
        """Returns whether the next step may take as long as loading weights does."""
        return False

    @property
    def waiting(self) -> int:
        return 0

    def answer(self, message: Any) -> Sequence[Event]:
        """Returns the events that answer one of its messages at once; raises PenstockError to refuse the message."""
        return ()

    def use_idle_moment(self) -> bool:
        """Prepares for later requests, for a few milliseconds; returns False when nothing is left to prepare."""
        return False

    def weights_changed(self) -> None:
        """Is called when other weights have taken the place of the loaded ones."""

    def flush(self) -> None: ...

    def distrust_cache(self) -> None:
        """Is called when cached blocks may be wrong, and were dropped."""

    def release_device(self) -> None: ...

    def stats(self) -> Mapping[str, Any]:
        return {}

    def hello(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None: ...
