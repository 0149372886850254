"""Reports what happened to an answer in its `penstock` object, in every dialect, for clients that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.context.request_context import RequestContext
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta
from penstock.types import FIRST_VERSION, Nearest, Report, Request, WeightSpan


class CacheMiss(msgspec.Struct):
    """Says why no more of a prompt was reused."""

    reason: str
    message: str
    position: int | UnsetType = UNSET  # the first token that could not be reused
    expected: str | UnsetType = UNSET  # the text at that position in the recent prompt or its answer
    got: str | UnsetType = UNSET
    after: str | UnsetType = UNSET  # the text before it, which both share


class CacheUse(msgspec.Struct):
    """Says how much of a prompt was reused, and from where: the device's cache, host memory or disk."""

    prompt_tokens: int
    reused_tokens: int
    reused_from: dict[str, int]  # tokens by tier
    miss: CacheMiss | None = None


class StageSeconds(msgspec.Struct):
    """Gives durations by the engine's clock."""

    queue: float
    prefill: float
    decode: float
    grammar: float | UnsetType = UNSET  # the wait for its grammar, before the queue
    adapter: float | UnsetType = UNSET  # the wait for its adapters, before that
    pause: float | UnsetType = UNSET  # the wait for a pause to end
    kv: float | UnsetType = UNSET  # the wait for KV of its prompt to be read from disk
    gateway: float | UnsetType = UNSET  # the wait at a fleet's gateway until a replica had room, before all others


class FinishCause(msgspec.Struct):
    reason: str
    by: str  # end_of_text, stop_token, stop_string, repeated_call, repetition, max_tokens, context or abort
    token: int | UnsetType = UNSET
    text: str | UnsetType = UNSET


class SourceDrafts(msgspec.Struct):
    """Counts the tokens that one source drafted for a choice."""

    source: str
    drafted_tokens: int
    accepted_tokens: int


class WeightUse(msgspec.Struct):
    """Says which weights computed a choice's tokens from one on."""

    index: int  # the choice's
    weight_version: str
    first_token: int  # its place in the answer; below 0 for logprobs of the prompt's last tokens
    mixed: bool  # these weights saw KV that older ones had computed


class ChoiceExplanation(msgspec.Struct):
    """Explains one choice."""

    index: int
    finish: FinishCause
    cache: CacheUse | UnsetType = UNSET  # this and what follows is unknown if the engine was lost meanwhile
    seconds: StageSeconds | UnsetType = UNSET
    preemptions: int | UnsetType = UNSET
    recomputed_tokens: int | UnsetType = UNSET
    forced_tokens: int | UnsetType = UNSET  # tokens that a grammar left no choice about
    drafts: list[SourceDrafts] | UnsetType = UNSET  # only if something was drafted


class EndedLoop(msgspec.Struct):
    """Says that the loop guard ended a choice."""

    index: int  # the choice's
    phrase_tokens: int  # length of the repeated phrase
    message: str = (
        "at temperature 0 the answer repeated itself without end, so it was ended: set a temperature or a "
        "repetition_penalty, or loop_guard to false"
    )


class AnswerReport(msgspec.Struct):
    """Is the `penstock` object of an answer."""

    ignored_fields: list[str]
    truncated_tokens: int  # cut from the prompt, as the request asked
    choices: list[ChoiceExplanation] | UnsetType = UNSET
    loading_seconds: float | UnsetType = UNSET  # waited for its model
    weight_version: str | UnsetType = UNSET  # the weights at its end, once any were updated
    weights: list[WeightUse] | UnsetType = UNSET  # if several computed it, or some on KV of others
    resumed_on: list[str] | UnsetType = UNSET  # other engines that continued it, each where the one before broke off
    route: list[str] | UnsetType = UNSET  # where it was sent, one after the other, if several engines could answer
    loops: list[EndedLoop] | UnsetType = UNSET  # choices that repeated themselves without end


def report_of(context: RequestContext) -> AnswerReport | UnsetType:
    """Returns the report of an answer of which only its way is explained; UNSET if there is nothing to tell."""
    if not context.notes.ignored and not (context.notes.explain and context.notes.placements):
        return UNSET
    return AnswerReport(sorted(context.notes.ignored), context.notes.truncated, route=_route(context))


def _route(context: RequestContext) -> list[str] | UnsetType:
    told = [placement.why for _, placement in context.notes.placements] if context.notes.explain else []
    return told or UNSET


class RelayReport:
    """Reports on an answer that another engine computes: ignored fields, and the engines that continued it."""

    def __init__(self, context: RequestContext, resumed_on: Sequence[str]) -> None:
        self._context = context
        self._resumed_on = resumed_on

    def end(self, choice: int, delta: Delta) -> None:
        """Does nothing: the engine does not tell what happened to the answer."""

    def report(self, _: Iterable[int] | None = None) -> AnswerReport | UnsetType:
        """Returns the report; UNSET if there is nothing to tell."""
        if not self._resumed_on:
            return report_of(self._context)
        ignored, route = sorted(self._context.notes.ignored), _route(self._context)
        return AnswerReport(ignored, 0, resumed_on=list(self._resumed_on), route=route)


class Explanation:
    """Collects the report of an answer. It costs nothing before the end, and nothing at all if no report is wanted."""

    def __init__(self, served: ServedModel, context: RequestContext, requests: Sequence[Request]) -> None:
        self._text = served.text
        self._limits = served.limits
        self._context = context
        self._requests = requests
        self._choices: dict[int, ChoiceExplanation] = {}
        self._weights: dict[int, tuple[WeightSpan, ...]] = {}  # choice -> spans
        self._loops: dict[int, int] = {}  # tokens of the phrases that choices repeated, by choice
        self._running = len(requests)

    def end(self, choice: int, delta: Delta) -> None:
        self._running -= 1
        if delta.report is not None:
            self._weights[choice] = delta.report.weights
        if phrase := delta.loop:
            self._loops[choice] = phrase
        if self._context.notes.explain:
            self._choices[choice] = self._choice(choice, delta)

    def report(self, order: Iterable[int] | None = None) -> AnswerReport | UnsetType:
        """Returns the report once every choice has ended, unless there is nothing that it must contain. `order` names
        the choices to report, if not all of them or not in their order."""
        context, chosen = self._context, sorted(self._weights) if order is None else list(order)
        version, weights = _weights_of([self._weights.get(choice, ()) for choice in chosen])
        told = context.notes.explain or context.notes.ignored or context.notes.truncated or version or self._loops
        if self._running or not told:
            return UNSET
        choices = self._ordered(order) if context.notes.explain else UNSET
        loading = (
            round(context.service.loading_seconds, 6)
            if context.notes.explain and context.service.loading_seconds
            else UNSET
        )
        resumed_on, route = context.notes.resumed_on if context.notes.explain else [], _route(context)
        loops = [EndedLoop(at, self._loops[choice]) for at, choice in enumerate(chosen) if choice in self._loops]
        return AnswerReport(
            ignored_fields=sorted(context.notes.ignored),
            truncated_tokens=context.notes.truncated,
            choices=choices,
            loading_seconds=loading,
            weight_version=version or UNSET,
            weights=weights or UNSET,
            resumed_on=resumed_on or UNSET,
            route=route,
            loops=loops or UNSET,
        )

    def _ordered(self, order: Iterable[int] | None) -> list[ChoiceExplanation]:
        chosen = sorted(self._choices) if order is None else order
        return [msgspec.structs.replace(self._choices[choice], index=index) for index, choice in enumerate(chosen)]

    def _choice(self, index: int, delta: Delta) -> ChoiceExplanation:
        request, report = self._requests[index], delta.report
        choice = ChoiceExplanation(index, self._finish(request, delta))
        if report is not None:
            missed = self._miss(request, report)
            choice.cache = CacheUse(len(request.prompt), report.cached, dict(report.reused), missed)
            choice.seconds = StageSeconds(*(round(each, 6) for each in (report.queued, report.prefill, report.decode)))
            choice.preemptions, choice.recomputed_tokens = report.preemptions, report.recomputed
            if request.sampling.grammar is not None:
                choice.seconds.grammar, choice.forced_tokens = round(report.compiling, 6), report.forced
            if report.drafts:
                choice.drafts = [SourceDrafts(each.source, each.drafted, each.accepted) for each in report.drafts]
            for reason in ("pause", "kv", "gateway"):
                if reason in dict(report.waited):
                    setattr(choice.seconds, reason, round(dict(report.waited)[reason], 6))
            if request.adapters:
                choice.seconds.adapter = round(dict(report.waited).get("adapter", 0.0), 6)
        return choice

    def _finish(self, request: Request, delta: Delta) -> FinishCause:
        assert delta.finish is not None
        if delta.stop is not None:
            return FinishCause("stop", "stop_string", text=delta.stop)
        if delta.loop:
            return FinishCause("length", "repetition")
        if delta.finish == "length":
            full = len(request.prompt) + request.max_tokens >= self._limits.max_len
            return FinishCause("length", "context" if full else "max_tokens")
        if delta.finish == "abort":
            return FinishCause("abort", "abort")
        if not delta.silent:
            return FinishCause("stop", "repeated_call")
        token, tokenizer = delta.tokens[-1], self._text.tokenizer
        by = "end_of_text" if token in tokenizer.eos_ids else "stop_token"
        return FinishCause("stop", by, token, tokenizer.token_text(token))

    # -- the cache ------------------------------------------------------------------------------------------------

    def _miss(self, request: Request, report: Report) -> CacheMiss | None:
        """Returns None if everything was reused that can be: whole blocks, and never the last token, whose logits are
        needed."""
        size, near = self._limits.block_size, report.nearest
        if report.cached >= (len(request.prompt) - 1) // size * size:
            return None
        if request.sampling.prompt_logprobs is not None:
            return CacheMiss(
                "scored", "the request asked for logprobs of the prompt's tokens, which only computing them gives"
            )
        if near is None:
            return CacheMiss("new", "no recent prompt of yours begins like this one")
        if report.cached < min(near.shared, len(request.prompt) - 1) // size * size:
            message = f"{near.shared} tokens of a recent prompt were the same, but their blocks have been evicted"
            return CacheMiss("evicted", message, report.cached)
        return self._divergence(near) if near.had and report.cached < near.held // size * size else None

    def _divergence(self, near: Nearest) -> CacheMiss:
        before, had, got = (self._spell(tokens) for tokens in (near.before, near.had, near.got))
        reason = self._reason(near, had, got)
        message = f"{_MESSAGES[reason]} at token {near.shared}"
        return CacheMiss(reason, message, near.shared, had, got, before)

    def _reason(self, near: Nearest, had: str, got: str) -> str:
        markers = self._text.format.reasoning
        if markers and markers[0] in had and markers[0] not in got:
            return "reasoning_dropped"
        return "prompt_changed" if near.shared < near.prompt else "answer_changed"

    def _spell(self, tokens: Sequence[int]) -> str:
        return self._text.tokenizer.decode(tokens, special=True, continuing=True)


def _weights_of(choices: Sequence[tuple[WeightSpan, ...]]) -> tuple[str, list[WeightUse]]:
    """Returns the version of the latest weights and, if an answer had several or saw KV of others, who computed what.
    Both are empty for weights that were never updated."""
    versions = [spans[-1].version for spans in choices if spans]
    uses = [WeightUse(at, *span) for at, spans in enumerate(choices) for span in spans]
    if set(versions) <= {FIRST_VERSION} and len(uses) <= len(choices):
        return "", []
    told = len(uses) > len(choices) or any(use.mixed for use in uses) or len(set(versions)) > 1
    return versions[-1], uses if told else []


_MESSAGES = {
    "reasoning_dropped": "the chat template dropped the reasoning of an earlier turn: the prompt differs",
    "prompt_changed": "the prompt differs from a recent one",
    "answer_changed": "the client sent an earlier answer back in another form than it was generated: it differs",
}
