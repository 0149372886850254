"""What a request for a response asks for.

A field is read and honoured, or accepted because its value asks for nothing, or refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count
from penstock.server.bodies import ANY_VALUE, NoEffect, read_body, read_object, unsupported
from penstock.server.chat.structured import NamedSchema, ResponseFormat
from penstock.server.chat.tools import MAX_TOOLS, ToolUse, chosen, for_template
from penstock.server.openai.fields import SamplingFields
from penstock.server.openapi import read_as
from penstock.server.request_context import notes
from penstock.server.responses.items import ReasoningSettings, ResponsesFunction, TextFormat, TextSettings

MAX_METADATA = (16, 64, 512)  # pairs, characters of a key, characters of a value
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    SEALED,
    "code_interpreter_call.outputs",  # from here on: of tools that there are none of
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

ASK_NO_EFFECT: NoEffect = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": ANY_VALUE,  # of built-in tools, of which there are none
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}, {"mode": "explicit"}),
    "prompt_cache_retention": ANY_VALUE,
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "truncation": ("disabled",),
}
TOOL_NO_EFFECT: NoEffect = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
TEXT_NO_EFFECT: NoEffect = {"verbosity": ("medium",)}
REASONING_NO_EFFECT: NoEffect = {  # what is thought is told in full: there is nothing that could sum it up
    "context": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}


class ResponsesConversation(SamplingFields, kw_only=True):
    """What a prompt is made of. How the answer is sampled may be said as well."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Annotated[dict[str, Any], read_as(ResponsesFunction, no_effect=TOOL_NO_EFFECT)]] | None = None
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
    penstock: bool | None = None  # whether the response is to explain itself

    def __post_init__(self) -> None:
        notes().explain |= bool(self.penstock)

    @property
    def stores(self) -> bool:
        return self.store is not False

    def includes(self, name: str) -> bool:
        return name in (self.include or ())


class ResponseSettings(NamedTuple):
    functions: list[ResponsesFunction]
    use: ToolUse
    text: TextSettings
    reasoning: ReasoningSettings


async def read_ask(http: HttpRequest) -> ResponsesBody:
    body = await read_body(http, ResponsesBody, ASK_NO_EFFECT)
    for name, value in (("model", body.model), ("input", body.input)):
        if value is None:
            raise InvalidRequest(f"the field {name!r} is missing", param=name, code="missing_required_parameter")
    if body.background and not body.stores:
        raise InvalidRequest("background needs store: what is not stored cannot be asked for later", param="store")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.top_logprobs and not body.includes(LOGPROBS):
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include", param="top_logprobs")
    check_include(body.include or [])
    _check_metadata(body.metadata or {})
    return body


def check_include(names: list[str]) -> None:
    for name in names:
        if name not in INCLUDABLE:
            raise unsupported("include", name)


def _check_metadata(given: dict[str, str]) -> None:
    pairs, key_size, value_size = MAX_METADATA
    if len(given) > pairs:
        raise InvalidRequest(f"metadata takes at most {pairs} pairs; got {len(given)}", param="metadata")
    for key, value in given.items():
        if len(key) > key_size or len(value) > value_size:
            raise InvalidRequest(
                f"metadata takes keys of at most {key_size} characters and values of {value_size}; "
                f"got {len(key)} and {len(value)}",
                param="metadata",
            )


def read_settings(body: ResponsesConversation) -> ResponseSettings:
    """Makes the format of the text the request's response_format, which is what it is called in chats."""
    if body.response_format is not None:
        raise InvalidRequest("response_format is called text.format here", param="response_format")
    text = read_object(body.text or {}, TextSettings, TEXT_NO_EFFECT, "text")
    text.format = text.format or TextFormat("text")
    body.response_format = _response_format(text.format)
    reasoning = read_object(body.reasoning or {}, ReasoningSettings, REASONING_NO_EFFECT, "reasoning")
    functions, use = _read_tools(body)
    return ResponseSettings(functions, use, text, reasoning)


def _response_format(format: TextFormat) -> ResponseFormat | None:
    if format.type == "json_schema":
        if format.schema is None:
            param = "text.format.schema"
            raise InvalidRequest(f"the field {param!r} is missing", param=param, code="missing_required_parameter")
        return ResponseFormat("json_schema", NamedSchema(schema=format.schema))
    return ResponseFormat("json_object") if format.type == "json_object" else None


def _read_tools(body: ResponsesConversation) -> tuple[list[ResponsesFunction], ToolUse]:
    given = body.tools or []
    check_count(given, MAX_TOOLS, "tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    tools = [for_template(each.name, each.description, each.parameters) for each in functions]
    strict = any(each.strict for each in functions)
    return functions, chosen(tools, body.tool_choice, body.parallel_tool_calls, strict=strict)


def _function(given: dict[str, Any], where: str) -> ResponsesFunction:
    if given.get("type") != "function":
        raise unsupported(f"{where}.type", given.get("type"))
    return read_object(given, ResponsesFunction, TOOL_NO_EFFECT, where)


# -- in the address ------------------------------------------------------------------------------------------------


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


def read_query(http: HttpRequest, kind: type[Q]) -> Q:
    given: dict[str, Any] = {}
    for key, value in http.query_params.multi_items():
        if key in ("include", "include[]"):
            given.setdefault("include", []).append(value)
        else:
            given[key] = value
    query = read_object(given, kind, {}, strict=False)
    check_include(query.include)
    return query
