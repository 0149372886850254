"""Reads options and messages in Ollama's form: requests have them, and so have derived models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.server.access.bounds import MAX_MESSAGES, check_count, check_stops
from penstock.server.chat.tools import template_call, template_reasoning
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.sampler_fields import sampler_settings
from penstock.server.generation.speculation_fields import DraftLimit
from penstock.server.http.bodies import ANY_VALUE, ContentValues, NoEffect, read_object
from penstock.server.http.openapi import read_as
from penstock.types import SamplingParams

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


def check_options(context: RequestContext, given: dict[str, Any]) -> OllamaOptions:
    options = read_object(context, given, OllamaOptions, OPTION_NO_EFFECT, "options")
    check_stops(stops_of(options), "options.stop")
    SamplingParams(**sampling_of(options))
    return options


def sampling_of(options: OllamaOptions) -> dict[str, Any]:
    named = {name: getattr(options, name) for name in _SAMPLING}
    return {name: value for name, value in named.items() if value is not None} | sampler_settings(options)


def stops_of(options: OllamaOptions) -> tuple[str, ...]:
    return (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "loop_guard")


def read_messages(context: RequestContext, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
