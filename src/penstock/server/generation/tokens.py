"""Serves POST /tokenize, /detokenize and /apply-template, with the fields of both vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.template_fields import read_template_kwargs
from penstock.server.chat.tools import FunctionTool, read_tools
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.chat_prompt import PromptFields, render_chat
from penstock.server.generation.messages import MESSAGE_NO_EFFECT, ChatMessage, read_messages
from penstock.server.http.bodies import NoEffect, read_body
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import json_response
from penstock.server.models.served_model import ServedModel, off_loop


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Takes exactly one of `prompt` (vLLM), `content` (llama.cpp) or `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Annotated[dict[str, Any], read_as(ChatMessage, no_effect=MESSAGE_NO_EFFECT)]] | None = None
    add_special_tokens: bool = True  # prompts: the model's BOS, if it wants one
    add_special: bool = False  # contents: the same
    parse_special: bool = True
    add_generation_prompt: bool | None = None  # messages; default: true, unless the last one is continued
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Annotated[dict[str, Any], read_as(FunctionTool)]] | None = None
    return_token_strs: bool = False
    with_pieces: bool = False


class Detokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class ApplyTemplate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    messages: list[Annotated[dict[str, Any], read_as(ChatMessage, no_effect=MESSAGE_NO_EFFECT)]]
    tools: list[Annotated[dict[str, Any], read_as(FunctionTool)]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


NO_EFFECT: NoEffect = {}
TOKENIZE = Operation(Tokenize, NO_EFFECT)
DETOKENIZE = Operation(Detokenize, NO_EFFECT)
APPLY_TEMPLATE = Operation(ApplyTemplate, NO_EFFECT)


async def tokenize(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, Tokenize, NO_EFFECT)
    served.check_model(body.model, context)
    text = only_one({"prompt": body.prompt, "content": body.content, "messages": body.messages})
    tokenizer = served.text.tokenizer
    if body.messages is not None:
        ids = await _chat_tokens(served, context, body, read_messages(context, body.messages))
    else:
        bos = body.add_special if body.content is not None else body.add_special_tokens
        ids = await off_loop(len(text), lambda: tokenizer.encode(text, special=body.parse_special, bos=bos))
        ids += tokenizer.closing if bos and served.encoder else ()
    pieces = [tokenizer.token_text(id) for id in ids] if body.return_token_strs or body.with_pieces else None
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.limits.max_len, "tokens": ids}
    if pieces is not None and body.return_token_strs:
        answer["token_strs"] = pieces
    if pieces is not None and body.with_pieces:
        answer["tokens"] = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)]
    return json_response(answer)


async def _chat_tokens(
    served: ServedModel, context: RequestContext, body: Tokenize, messages: list[dict[str, Any]]
) -> list[int]:
    given = PromptFields(
        template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
    )
    kwargs = read_template_kwargs(context, served.text, body.chat_template_kwargs)
    tools = read_tools(context, body.tools).tools or None
    return (await render_chat(served, context, messages, given, kwargs | {"tools": tools})).tokens


async def detokenize(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, Detokenize, NO_EFFECT)
    served.check_model(body.model, context)
    served.check_ids(body.tokens, "tokens")
    text = await off_loop(len(body.tokens), lambda: served.text.tokenizer.decode(body.tokens, special=True))
    return json_response({"prompt": text, "content": text})


async def apply_template(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, ApplyTemplate, NO_EFFECT)
    served.check_model(body.model, context)
    tools = read_tools(context, body.tools).tools
    kwargs = {"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs}
    messages = read_messages(context, body.messages)
    size = sum(len(message["content"] or "") for message in messages)
    text = served.text
    prompt = await off_loop(
        size, lambda: text.render_chat(messages, tools=tools or None, **kwargs), text.chat_template.process
    )
    return json_response({"prompt": prompt})


async def count_chat_tokens(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Answers llama.cpp's /chat/completions/input_tokens."""
    body = await read_body(http, context, ApplyTemplate, NO_EFFECT)
    tools = read_tools(context, body.tools).tools
    messages = read_messages(context, body.messages)
    size = sum(len(message["content"] or "") for message in messages)
    text = served.text
    ids = await off_loop(size, lambda: text.encode_chat(messages, tools=tools or None), text.chat_template.process)
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


def only_one(given: dict[str, Any]) -> Any:
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        got = " and ".join(named) if named else "none of them"
        raise InvalidRequest(f"send exactly one of {', '.join(given)}; got {got}")
    return given[named[0]]
