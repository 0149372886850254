"""Reads the bodies that Ollama's clients send.

Some fields and options are accepted without effect, whatever their value: options about threads, memory and placement,
which the engine decides by itself, and `num_keep`, `truncate` and `shift`, which are about cutting a prompt. No prompt
is ever cut here: one that does not fit is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, check_count, check_stops
from penstock.server.bodies import ANY_VALUE, ContentValues, NoEffect, ignore_unsupported, read_object
from penstock.server.chat.structured import ANY_OBJECT, json_grammar
from penstock.server.chat.template_fields import switch_thinking, think_with_effort
from penstock.server.chat.tools import FunctionTool, template_call, template_reasoning
from penstock.server.models.entry import FOR_EVER
from penstock.server.openapi import read_as
from penstock.server.request_context import RequestContext
from penstock.server.samplers import sampler_settings
from penstock.server.served_model import ServedModel
from penstock.server.speculation_fields import DraftLimit, SpeculationWish, limit_drafts
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
MESSAGE_NO_EFFECT: NoEffect = {"images": ContentValues([[]])}
OPTION_NO_EFFECT: NoEffect = {
    "embedding_only": (False,),
    "f16_kv": ANY_VALUE,
    "logits_all": ANY_VALUE,
    "low_vram": ANY_VALUE,
    "main_gpu": ANY_VALUE,
    "num_batch": ANY_VALUE,
    "num_gpu": ANY_VALUE,
    "num_keep": ANY_VALUE,
    "num_thread": ANY_VALUE,
    "numa": ANY_VALUE,
    "penalize_newline": (True,),
    "tfs_z": (1,),
    "use_mlock": ANY_VALUE,
    "use_mmap": ANY_VALUE,
    "vocab_only": (False,),
}


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True):
    num_ctx: int | None = None
    num_predict: int | None = None  # 0 and below: until the model stops
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None  # tokens that penalties look at; -1: all
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    loop_guard: bool | None = None  # false: at temperature 0 an answer may repeat itself without end
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    draft_num_predict: DraftLimit | None = None  # Ollama's name of speculation


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


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Annotated[dict[str, Any], read_as(OllamaPastCall)]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaPastFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaPastCall(msgspec.Struct, forbid_unknown_fields=True):
    function: Annotated[dict[str, Any], read_as(OllamaPastFunction)]
    id: str | None = None
    type: Literal["function"] = "function"


def check(context: RequestContext, body: OllamaFields) -> None:
    """Checks what all requests share, and notes what the context must know."""
    context.explain |= bool(body.penstock)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    note_keep_alive(context, body.keep_alive)


def note_keep_alive(context: RequestContext, keep_alive: float | str | None) -> None:
    """Notes how long the model stays loaded after this request. A key without --admin has no say in that: others use
    the model too."""
    if keep_alive is None:
        return
    given = seconds(keep_alive)
    if context.payer is not None and not context.payer.admin:
        if not context.lenient:
            raise context.payer.forbidden("admin", "set keep_alive: leave it out, or use a key made with --admin")
        return context.ignore("keep_alive")
    context.keep_alive = FOR_EVER if given < 0 else given


def unloads(body: OllamaFields) -> bool:
    return body.keep_alive is not None and seconds(body.keep_alive) == 0


def template_fields(served: ServedModel, context: RequestContext, body: OllamaFields) -> dict[str, Any]:
    """Returns the template's fields beside messages and tools."""
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


def check_options(context: RequestContext, given: dict[str, Any]) -> OllamaOptions:
    """Returns the options of a request or of a Modelfile; raises for wrong ones."""
    options = read_object(context, given, OllamaOptions, OPTION_NO_EFFECT, "options")
    check_stops(_stops(options), "options.stop")
    SamplingParams(**_sampling_of(options))
    return options


def _sampling_of(options: OllamaOptions) -> dict[str, Any]:
    """Returns what the options say about sampling."""
    named = {name: getattr(options, name) for name in _SAMPLING}
    return {name: value for name, value in named.items() if value is not None} | sampler_settings(options)


def _stops(options: OllamaOptions) -> tuple[str, ...]:
    return (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())


def read_options(served: ServedModel, context: RequestContext, body: OllamaFields) -> tuple[SamplingParams, int | None]:
    """Returns how to sample, and the limit on the answer's tokens; None: what the context has room for."""
    options = check_options(context, body.options or {})
    _limit_context(served, context, options)
    limit_drafts(served, context, body.speculation, ("options.draft_num_predict", options.draft_num_predict))
    settings = _sampling_of(options)
    if settings.keys() & PENALTIES:
        settings.setdefault("penalty_window", PENALTY_WINDOW)
    scores = (body.top_logprobs or 0) if body.logprobs else None
    limit = options.num_predict if options.num_predict and options.num_predict > 0 else None
    return served.text.sampling(stop=_stops(options), logprobs=scores, grammar=_grammar(body), **settings), limit


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
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "loop_guard")


def _limit_context(served: ServedModel, context: RequestContext, options: OllamaOptions) -> None:
    """Cuts num_ctx to what the server was started with, and lists it as ignored."""
    max_len = served.limits.max_len
    if options.num_ctx is not None and options.num_ctx > max_len:
        ignore_unsupported(context, "options.num_ctx", options.num_ctx)
        options.num_ctx = max_len


# -- messages -----------------------------------------------------------------------------------------------------


def read_messages(context: RequestContext, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as chat templates take them."""
    check_count(given, MAX_MESSAGES, "messages")
    return [_message(context, message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(context: RequestContext, given: dict[str, Any], where: str) -> dict[str, Any]:
    message = read_object(context, given, OllamaMessage, MESSAGE_NO_EFFECT, where)
    calls = [
        _call(context, call, f"{where}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
    ]
    named = {
        "tool_calls": calls or None,
        "name": message.tool_name,
        "tool_call_id": message.tool_call_id,
    }
    rendered: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    rendered |= {name: value for name, value in named.items() if value is not None}
    return rendered | template_reasoning(message.thinking, message.content) if message.thinking else rendered


def _call(context: RequestContext, given: dict[str, Any], where: str) -> dict[str, Any]:
    call = read_object(context, given, OllamaPastCall, {}, where)
    function = read_object(context, call.function, OllamaPastFunction, {}, f"{where}.function")
    return template_call(call.id, function.name, function.arguments)
