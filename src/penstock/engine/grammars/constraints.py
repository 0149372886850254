"""Makes answers follow grammars and thinking budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.engine.feature import End, Feature
from penstock.engine.grammars.grammar import Constraint, Grammars
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import InvalidGrammar, InvalidRequest
from penstock.model.load import load_text
from penstock.types import Failed, Limits, Request, Row, RowResult, StepPlan, StepResult


class Constraints(Feature):
    """Compiles the grammars of requests, and adds the tokens that a grammar leaves no choice about. Without `grammars`
    it refuses structured output."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._constrained: set[int] = set()  # requests that have started with a constraint

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        grammar = record.request.sampling.grammar
        if grammar is None:
            return ()
        if grammar.thinking and grammar.thinking.budget is not None:
            refuse_logprobs(record.request)
        if grammar.kind == "free":
            record.constrain(Constraint.free(grammar.thinking))
            return ()
        if self._grammars is None:
            raise InvalidGrammar("structured output is unavailable: this engine was started without a tokenizer")
        grammars, compiling = self._grammars, self._grammars.compile(grammar)
        return [Need("grammar", compiling, lambda: record.constrain(grammars.follow(compiling, grammar)))]

    def started(self, record: RequestRecord, generated: tuple[int, ...]) -> None:
        if record.constraint is not None:
            self._constrained.add(record.request.id)

    def ended(self, record: RequestRecord, event: End | None) -> None:
        self._constrained.discard(record.request.id)

    def revise(self, plan: StepPlan, result: StepResult, seconds: float) -> StepResult:
        if not self._constrained:
            return result
        rows = zip(plan.rows, result.rows, strict=True)
        return StepResult(result.step, tuple(self._follow(row, answer) for row, answer in rows))

    def stats(self) -> Mapping[str, Any]:
        return {} if self._grammars is None else vars(self._grammars.costs)

    def _follow(self, row: Row, answer: RowResult) -> RowResult:
        record = self.engine.records.get(row.seq)
        if record is None or record.constraint is None or not answer.tokens:
            return answer
        try:
            forced = record.constraint.take(*answer.tokens, force=not answer.logprobs)
        except InvalidGrammar as error:
            self.engine.scheduler.abort(row.seq)
            self.engine.emit([Failed(row.seq, error.code, error.message)])
            return answer
        return answer._replace(tokens=answer.tokens + forced)


def open_grammars(config: Config, limits: Limits) -> Grammars:
    """Returns the compiler of grammars; its vocabulary is loaded at once if `grammars_wait`."""
    grammars = Grammars(lambda: load_text(Path(config.model), config.config).tokenizer, limits.vocab)
    if config.grammars_wait:
        grammars.warm_up()
    return grammars


def refuse_logprobs(request: Request) -> None:
    """Raises InvalidRequest for logprobs with a thinking budget: what closes the thinking is not sampled."""
    if request.sampling.logprobs is not None:
        raise InvalidRequest(
            "logprobs cannot be given with a thinking budget, because the tokens that end the thinking are not "
            "sampled: send one of the two",
            param="logprobs",
        )
