"""Reads the bodies and queries of OpenAI's responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.chat.structured import NamedSchema, ResponseFormat
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.responses.input import tools_in
from penstock.server.dialects.responses.items import ReasoningSettings, TextFormat, TextSettings
from penstock.server.dialects.responses.tools import AnyTool, ResponseTools, read_response_tools
from penstock.server.generation.fields import SamplingFields
from penstock.server.generation.speculation_fields import SpeculationWish
from penstock.server.http.bodies import (
    ANY_VALUE,
    ContentValues,
    NoEffect,
    ignore_unsupported,
    read_body,
    read_object,
)
from penstock.server.http.openapi import read_as

MAX_METADATA = (16, 64, 512)  # pairs, characters of a key, characters of a value
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    SEALED,
    "code_interpreter_call.outputs",  # from here on: results of built-in tools, of which there are none
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

BODY_NO_EFFECT: NoEffect = {
    "access_programs": (),
    "client_metadata": ANY_VALUE,
    "context_management": ([],),
    "conversation": ContentValues(),
    "image": (),
    "max_tool_calls": ANY_VALUE,  # limits built-in tools, of which there are none
    "moderation": (),
    "prompt": ContentValues(),
    "prompt_cache_options": ({}, {"mode": "implicit"}, {"mode": "explicit"}),
    "prompt_cache_retention": ANY_VALUE,
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "truncation": ("disabled",),
}
TEXT_NO_EFFECT: NoEffect = {}
REASONING_NO_EFFECT: NoEffect = {  # reasoning is always returned in full: nothing here could summarize it
    "context": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}


class ResponsesConversation(SamplingFields, kw_only=True):
    """Declares the fields that the prompt depends on. Sampling fields are accepted, too."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[AnyTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[dict[str, Any], read_as(ReasoningSettings, no_effect=REASONING_NO_EFFECT)] | None = None
    text: Annotated[dict[str, Any], read_as(TextSettings, no_effect=TEXT_NO_EFFECT)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] = False


class ResponsesBody(ResponsesConversation, kw_only=True):
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: str | None = None
    penstock: bool | None = None  # asks for a report of what happened to the answer
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for the answer

    @property
    def stores(self) -> bool:
        return self.store is not False

    def includes(self, name: str) -> bool:
        return name in (self.include or ())


class ResponseSettings(NamedTuple):
    given_tools: list[dict[str, Any]]
    tools: ResponseTools
    text: TextSettings
    reasoning: ReasoningSettings


async def read_response_body(http: HttpRequest, context: RequestContext) -> ResponsesBody:
    body = await read_body(http, context, ResponsesBody, BODY_NO_EFFECT)
    context.notes.explain |= bool(body.penstock)
    if body.input is None:
        raise InvalidRequest("the field 'input' is missing", param="input", code="missing_required_parameter")
    if body.background and not body.stores:
        raise InvalidRequest("background needs store: true, because the answer is retrieved later", param="store")
    if body.stream_options is not None and not body.stream:
        if not context.lenient:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        context.notes.ignore("stream_options")
    if body.top_logprobs and not body.includes(LOGPROBS):
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")
    check_include(context, body.include or [])
    _check_metadata(body.metadata or {})
    return body


def check_include(context: RequestContext, names: list[str]) -> None:
    for name in names:
        if name not in INCLUDABLE:
            ignore_unsupported(context, "include", name)


def _check_metadata(given: dict[str, str]) -> None:
    pairs, key_size, value_size = MAX_METADATA
    if len(given) > pairs:
        raise InvalidRequest(f"metadata may have {pairs} pairs; got {len(given)}: send fewer", param="metadata")
    for key, value in given.items():
        if len(key) > key_size or len(value) > value_size:
            raise InvalidRequest(
                f"metadata may have keys of {key_size} characters and values of {value_size}; "
                f"got {len(key)} and {len(value)}",
                param="metadata",
            )


def read_settings(context: RequestContext, body: ResponsesConversation) -> ResponseSettings:
    """Returns the body's nested settings. It also sets response_format, the name of text.format in chats, from which
    the grammar is made."""
    if body.response_format is not None:
        raise InvalidRequest("response_format is called text.format here: send that", param="response_format")
    text = read_object(context, body.text or {}, TextSettings, TEXT_NO_EFFECT, "text")
    text.format = text.format or TextFormat("text")
    body.response_format = _response_format(text.format)
    reasoning = read_object(context, body.reasoning or {}, ReasoningSettings, REASONING_NO_EFFECT, "reasoning")
    given = [*(body.tools or ()), *tools_in(body.input)]
    tools = read_response_tools(context, given, body.tool_choice, body.parallel_tool_calls)
    return ResponseSettings(given, tools, text, reasoning)


def _response_format(format: TextFormat) -> ResponseFormat | None:
    if format.type == "json_schema":
        if format.schema is None:
            param = "text.format.schema"
            raise InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")
        return ResponseFormat("json_schema", NamedSchema(schema=format.schema, strict=format.strict))
    return ResponseFormat("json_object") if format.type == "json_object" else None


# -- queries -----------------------------------------------------------------------------------------------------


class RetrieveQuery(msgspec.Struct, forbid_unknown_fields=True):
    include: list[str] = []
    include_obfuscation: Literal["false"] = "false"
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    stream: bool = False


class ItemsQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    include: list[str] = []
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


Q = TypeVar("Q", RetrieveQuery, ItemsQuery)


def read_query(context: RequestContext, http: HttpRequest, kind: type[Q]) -> Q:
    given: dict[str, Any] = {}
    for key, value in http.query_params.multi_items():
        if key in ("include", "include[]"):
            given.setdefault("include", []).append(value)
        else:
            given[key] = value
    query = read_object(context, given, kind, {}, strict=False)
    check_include(context, query.include)
    return query
