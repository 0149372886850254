"""Reads the bodies that Ollama's clients send.

Some fields and options are accepted without effect, with any value: options about threads, memory and placement, which
the engine decides by itself, and `num_keep`, `truncate` and `shift`, which are about cutting a prompt. No prompt is
ever cut here: one that does not fit is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.chat.structured import ANY_OBJECT, json_grammar
from penstock.server.chat.template_fields import switch_thinking, think_with_effort
from penstock.server.chat.tools import FunctionTool
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.modelfile import (
    MESSAGE_NO_EFFECT,
    OPTION_NO_EFFECT,
    OllamaMessage,
    OllamaOptions,
    check_options,
    sampling_of,
    stops_of,
)
from penstock.server.generation.speculation_fields import SpeculationWish, limit_drafts
from penstock.server.http.bodies import ANY_VALUE, ContentValues, NoEffect, ignore_unsupported, read_object
from penstock.server.http.openapi import read_as
from penstock.server.models.entry import FOR_EVER
from penstock.server.models.served_model import ServedModel
from penstock.types import Grammar, SamplingParams

PENALTY_WINDOW = 64  # tokens, by default: Ollama's

NO_EFFECT: NoEffect = {
    "shift": ANY_VALUE,
    "truncate": ANY_VALUE,
}
GENERATE_NO_EFFECT: NoEffect = NO_EFFECT | {
    "context": ContentValues([[]]),  # an earlier conversation, as tokens
    "height": (0,),
    "images": ContentValues([[]]),
    "steps": (0,),
    "width": (0,),
}


class OllamaFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    stream: bool | None = None  # left out: true
    options: Annotated[dict[str, Any], read_as(OllamaOptions, no_effect=OPTION_NO_EFFECT)] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: dict[str, Any] | Literal["", "json"] | None = None
    penstock: bool | None = None  # asks for a report of what happened to the answer
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for the answer


class OllamaChatBody(OllamaFields):
    messages: list[Annotated[dict[str, Any], read_as(OllamaMessage, no_effect=MESSAGE_NO_EFFECT)]] | None = None
    tools: list[Annotated[dict[str, Any], read_as(FunctionTool)]] | None = None


class OllamaGenerateBody(OllamaFields):
    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    suffix: str | None = None
    raw: bool | None = None


def check(context: RequestContext, body: OllamaFields) -> None:
    """Checks what all requests share, and notes what the context must know."""
    context.notes.explain |= bool(body.penstock)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    note_keep_alive(context, body.keep_alive)


def note_keep_alive(context: RequestContext, keep_alive: float | str | None) -> None:
    """Notes how long the model stays loaded after this request. A key without --admin cannot change that: others use
    the model too."""
    if keep_alive is None:
        return
    given = seconds(keep_alive)
    if context.caller.payer is not None and not context.caller.payer.admin:
        if not context.lenient:
            raise context.caller.payer.forbidden(
                "admin", "set keep_alive: leave it out, or use a key made with --admin"
            )
        return context.notes.ignore("keep_alive")
    context.service.keep_alive = FOR_EVER if given < 0 else given


def unloads(body: OllamaFields) -> bool:
    return body.keep_alive is not None and seconds(body.keep_alive) == 0


def template_fields(served: ServedModel, context: RequestContext, body: OllamaFields) -> dict[str, Any]:
    if body.think is None or isinstance(body.think, str):
        return think_with_effort(context, served.text, body.think, "think")
    return switch_thinking(context, served.text, body.think, "think", body.think)


UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_STEP = rf"(\d+(?:\.\d+)?)({'|'.join(UNITS)})"


def seconds(duration: float | str) -> float:
    """Returns the seconds of a number, or of a Go duration such as "1h30m". Below zero means forever."""
    if not isinstance(duration, str):
        return duration
    if re.fullmatch(r"-?\d+(\.\d+)?", duration):
        return float(duration)
    if not re.fullmatch(rf"-?(?:{_STEP})+", duration):
        raise InvalidRequest(
            f"keep_alive: {duration!r} is not a duration: send one such as 300, 5m or -1", param="keep_alive"
        )
    total = sum(float(count) * UNITS[unit] for count, unit in re.findall(_STEP, duration))
    return -total if duration.startswith("-") else total


# -- options ------------------------------------------------------------------------------------------------------


def read_options(served: ServedModel, context: RequestContext, body: OllamaFields) -> tuple[SamplingParams, int | None]:
    """Returns how to sample, and the limit on the answer's tokens; None: what the context has room for."""
    options = check_options(context, body.options or {})
    _limit_context(served, context, options)
    limit_drafts(served, context, body.speculation, ("options.draft_num_predict", options.draft_num_predict))
    settings = sampling_of(options)
    if settings.keys() & PENALTIES:
        settings.setdefault("penalty_window", PENALTY_WINDOW)
    scores = (body.top_logprobs or 0) if body.logprobs else None
    limit = options.num_predict if options.num_predict and options.num_predict > 0 else None
    return served.text.sampling(stop=stops_of(options), logprobs=scores, grammar=_grammar(body), **settings), limit


def context_length(served: ServedModel, context: RequestContext, given: dict[str, Any] | None) -> int:
    """Returns how many tokens an input may have. Options about sampling have no effect on an embedding."""
    options = read_object(context, given or {}, OllamaOptions, OPTION_NO_EFFECT, "options")
    _limit_context(served, context, options)
    return options.num_ctx if options.num_ctx and options.num_ctx > 0 else served.limits.max_len


def _grammar(body: OllamaFields) -> Grammar | None:
    if body.format is None or body.format == "":
        return None
    return json_grammar(ANY_OBJECT if body.format == "json" else body.format, "format")


PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


def _limit_context(served: ServedModel, context: RequestContext, options: OllamaOptions) -> None:
    """Cuts num_ctx to what the server was started with, and lists it as ignored."""
    max_len = served.limits.max_len
    if options.num_ctx is not None and options.num_ctx > max_len:
        ignore_unsupported(context, "options.num_ctx", options.num_ctx)
        options.num_ctx = max_len


# -- messages -----------------------------------------------------------------------------------------------------
