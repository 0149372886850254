"""Tells the samplers of mirostat how surprising the tokens were that they chose."""

from __future__ import annotations

from penstock.engine.feature import End, Feature
from penstock.engine.request_record import RequestRecord
from penstock.types import StepPlan, StepResult


class Mirostat(Feature):
    """Follows the requests whose next choice depends on the surprise of the last one."""

    def __init__(self) -> None:
        self._following: set[int] = set()

    def started(self, record: RequestRecord, generated: tuple[int, ...]) -> None:
        if record.mirostat:
            self._following.add(record.request.id)

    def ended(self, record: RequestRecord, event: End | None) -> None:
        self._following.discard(record.request.id)

    def revise(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        for row, answer in zip(plan.rows, result.rows, strict=True) if self._following else ():
            if answer.surprise is not None and row.seq in self.engine.records:
                self.engine.records[row.seq].sampler.observe(answer.surprise)
        return result
