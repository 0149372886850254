"""The `penstock` object: what happened to an answer, in every dialect, for those who ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.request_context import notes
from penstock.server.served_model import ServedModel
from penstock.text import Delta
from penstock.types import Nearest, Report, Request


class CacheMiss(msgspec.Struct):
    """Why not more of a prompt was reused."""

    reason: str
    message: str
    position: int | UnsetType = UNSET  # the first token that could not be reused
    expected: str | UnsetType = UNSET  # what stood there in the recent prompt or its answer
    got: str | UnsetType = UNSET
    after: str | UnsetType = UNSET  # what stands before it in both


class CacheUse(msgspec.Struct):
    prompt_tokens: int
    reused_tokens: int
    miss: CacheMiss | None = None


class StageSeconds(msgspec.Struct):
    """By the engine's clock."""

    queue: float
    prefill: float
    decode: float
    grammar: float | UnsetType = UNSET  # waited for, before the queue


class FinishCause(msgspec.Struct):
    reason: str
    by: str  # end_of_text, stop_token, stop_string, max_tokens or context
    token: int | UnsetType = UNSET
    text: str | UnsetType = UNSET


class ChoiceExplanation(msgspec.Struct):
    """Of one choice."""

    index: int
    finish: FinishCause
    cache: CacheUse | UnsetType = UNSET  # this and what follows is not known of an engine that was lost meanwhile
    seconds: StageSeconds | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET
    forced_tokens: int | UnsetType = UNSET  # that a grammar left no choice about


class AnswerReport(msgspec.Struct):
    ignored_fields: list[str]
    truncated_tokens: int  # of the prompt; never without being asked
    choices: list[ChoiceExplanation] | UnsetType = UNSET
    kept: str | UnsetType = UNSET  # that a model which was to be unloaded stays


class Explanation:
    """Costs an answer nothing before its end, and nothing at all where it is not asked for."""

    def __init__(self, served: ServedModel, requests: Sequence[Request]) -> None:
        self._text = served.text
        self._limits = served.limits
        self._requests = requests
        self._notes = notes()
        self._told: dict[int, ChoiceExplanation] = {}
        self._running = len(requests)

    def end(self, choice: int, delta: Delta) -> None:
        """Takes a choice's last delta."""
        self._running -= 1
        if self._notes.explain:
            self._told[choice] = self._choice(choice, delta)

    def told(self, order: Iterable[int] | None = None) -> AnswerReport | UnsetType:
        """Once every choice has ended; nothing where there is nothing to tell that was not asked for. `order` names
        the choices that are told, where not all are or not in their order."""
        noted = self._notes
        if self._running or not (noted.explain or noted.lenient or noted.ignored or noted.truncated):
            return UNSET
        return AnswerReport(sorted(noted.ignored), noted.truncated, self._choices(order) if noted.explain else UNSET)

    def _choices(self, order: Iterable[int] | None) -> list[ChoiceExplanation]:
        chosen = sorted(self._told) if order is None else order
        return [msgspec.structs.replace(self._told[choice], index=index) for index, choice in enumerate(chosen)]

    def _choice(self, index: int, delta: Delta) -> ChoiceExplanation:
        request, report = self._requests[index], delta.report
        told = ChoiceExplanation(index, self._finish(request, delta))
        if report is not None:
            told.cache = CacheUse(len(request.prompt), report.cached, self._miss(request, report))
            told.seconds = StageSeconds(*(round(each, 6) for each in (report.queued, report.prefill, report.decode)))
            told.preemptions, told.recomputed_tokens = report.preemptions, report.recomputed
            if request.sampling.grammar is not None:
                told.seconds.grammar, told.forced_tokens = round(report.compiling, 6), report.forced
        return told

    def _finish(self, request: Request, delta: Delta) -> FinishCause:
        assert delta.finish is not None
        if delta.stop is not None:
            return FinishCause("stop", "stop_string", text=delta.stop)
        if delta.finish == "length":
            full = len(request.prompt) + request.max_tokens >= self._limits.max_len
            return FinishCause("length", "context" if full else "max_tokens")
        token, tokenizer = delta.tokens[-1], self._text.tokenizer
        by = "end_of_text" if token in tokenizer.eos_ids else "stop_token"
        return FinishCause("stop", by, token, tokenizer.token_text(token))

    # -- the cache ------------------------------------------------------------------------------------------------

    def _miss(self, request: Request, report: Report) -> CacheMiss | None:
        """None where all was reused that could be: whole blocks, and never the last token, whose logits are wanted."""
        size, near = self._limits.block_size, report.nearest
        if report.cached >= (len(request.prompt) - 1) // size * size:
            return None
        if request.sampling.prompt_logprobs is not None:
            return CacheMiss("scored", "the prompt's own tokens were to be scored, and only computing them does that")
        if near is None:
            return CacheMiss("new", "no recent prompt of yours begins like this one")
        if report.cached < min(near.shared, len(request.prompt) - 1) // size * size:
            told = f"{near.shared} tokens of a recent prompt were the same, and their blocks were evicted since"
            return CacheMiss("evicted", told, report.cached)
        return self._parting(near) if near.had and report.cached < near.held // size * size else None

    def _parting(self, near: Nearest) -> CacheMiss:
        before, had, got = (self._spell(tokens) for tokens in (near.before, near.had, near.got))
        reason = self._reason(near, had, got)
        told = f"{_WORDS[reason]} at token {near.shared}"
        return CacheMiss(reason, told, near.shared, had, got, before)

    def _reason(self, near: Nearest, had: str, got: str) -> str:
        thought = self._text.format.reasoning
        if thought and thought[0] in had and thought[0] not in got:
            return "reasoning_dropped"
        return "prompt_changed" if near.shared < near.prompt else "answer_changed"

    def _spell(self, tokens: Sequence[int]) -> str:
        return self._text.tokenizer.decode(tokens, special=True, continuing=True)


_WORDS = {
    "reasoning_dropped": "the chat template left out what was thought in an earlier turn: it differs from that turn",
    "prompt_changed": "the prompt differs from a recent one",
    "answer_changed": "the earlier answer came back other than it was generated: it differs",
}
