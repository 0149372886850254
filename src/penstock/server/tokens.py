"""Serves POST /tokenize, /detokenize and /apply-template, with the fields of both vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.bodies import NoEffect, read_body
from penstock.server.chat.tools import FunctionTool, read_tools
from penstock.server.openai.chat import MESSAGE_NO_EFFECT, ChatMessage, read_messages
from penstock.server.openapi import Operation, read_as
from penstock.server.request_context import RequestContext
from penstock.server.served_model import ServedModel, off_loop
from penstock.server.sse import json_response


class Tokenize(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Takes exactly one of `prompt` (vLLM), `content` (llama.cpp) or `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Annotated[dict[str, Any], read_as(ChatMessage, no_effect=MESSAGE_NO_EFFECT)]] | None = None
    add_special_tokens: bool = True  # to a prompt: the model's BOS, if it wants one
    add_special: bool = False  # to a content
    parse_special: bool = True
    add_generation_prompt: bool = True
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
    if body.messages is not None:
        text = served.text.render_chat(
            read_messages(context, body.messages), add_generation_prompt=body.add_generation_prompt
        )
    bos = body.add_special if body.content is not None else body.add_special_tokens
    tokenizer = served.text.tokenizer
    ids = await off_loop(len(text), lambda: tokenizer.encode(text, special=body.parse_special, bos=bos))
    if bos and served.encoder:
        ids += tokenizer.closing
    pieces = [tokenizer.token_text(id) for id in ids] if body.return_token_strs or body.with_pieces else None
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.limits.max_len, "tokens": ids}
    if pieces is not None and body.return_token_strs:
        answer["token_strs"] = pieces
    if pieces is not None and body.with_pieces:
        answer["tokens"] = [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)]
    return json_response(answer)


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
    return json_response({"prompt": served.text.render_chat(messages, tools=tools or None, **kwargs)})


async def count_chat_tokens(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    """Answers llama.cpp's /chat/completions/input_tokens."""
    body = await read_body(http, context, ApplyTemplate, NO_EFFECT)
    tools = read_tools(context, body.tools).tools
    messages = read_messages(context, body.messages)
    size = sum(len(message["content"] or "") for message in messages)
    ids = await off_loop(size, lambda: served.text.encode_chat(messages, tools=tools or None))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


def only_one(given: dict[str, Any]) -> Any:
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        got = " and ".join(named) if named else "none of them"
        raise InvalidRequest(f"send exactly one of {', '.join(given)}; got {got}")
    return given[named[0]]
