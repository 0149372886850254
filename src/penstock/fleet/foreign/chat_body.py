"""Writes what Anthropic's and Ollama's clients ask for as the body of a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.server.access.bounds import check_stops
from penstock.server.chat.tools import ToolUse, read_tools
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.anthropic import fields as anthropic
from penstock.server.dialects.anthropic.tools import read_use
from penstock.server.dialects.ollama import fields as ollama
from penstock.server.generation import modelfile
from penstock.server.http.bodies import unsupported

Body = dict[str, Any]

SAME_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
OTHER_OPTIONS = (
    "num_ctx",
    "repeat_last_n",
    "typical_p",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "draft_num_predict",
)


def from_anthropic(context: RequestContext, body: anthropic.MessagesConversation) -> Body:
    """Returns the body for a conversation in Anthropic's dialect."""
    made: Body = {"messages": _messages(anthropic.read_messages(context, body))}
    made |= _tools(read_use(context, body.tools or [], body.tool_choice))
    if isinstance(body, anthropic.MessagesBody):
        stops = check_stops(tuple(body.stop_sequences or ()), "stop_sequences")
        given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": list(stops) or None}
        made |= {name: value for name, value in given.items() if value is not None} | {"max_tokens": body.max_tokens}
    config = body.output_config
    format = (config.format if config is not None else None) or body.output_format
    if format is not None:
        made["response_format"] = _schema(format.schema)
    if body.thinking is not None:
        made["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if config is not None and config.effort is not None:
        made["reasoning_effort"] = config.effort
    return made


def from_ollama_chat(context: RequestContext, body: ollama.OllamaChatBody) -> Body:
    messages = _messages(modelfile.read_messages(context, body.messages or []))
    return {"messages": messages} | _tools(read_tools(context, body.tools)) | _ollama_settings(context, body)


def from_ollama_generate(context: RequestContext, body: ollama.OllamaGenerateBody) -> Body:
    """Returns the body for /api/generate: a chat of one message, or of a raw prompt a completion."""
    for name in ("suffix", "template"):
        if getattr(body, name):
            raise unsupported(name, getattr(body, name))
    settings = _ollama_settings(context, body)
    if body.raw:
        return {"prompt": body.prompt or ""} | settings
    messages = [{"role": "system", "content": body.system}] if body.system else []
    return {"messages": [*messages, {"role": "user", "content": body.prompt or ""}]} | settings


def _ollama_settings(context: RequestContext, body: ollama.OllamaFields) -> Body:
    options = modelfile.check_options(context, body.options or {})
    made: Body = {name: value for name in SAME_OPTIONS if (value := getattr(options, name)) is not None}
    if options.stop:
        made["stop"] = options.stop
    if options.num_predict is not None and options.num_predict > 0:
        made["max_tokens"] = options.num_predict
    if options.repeat_penalty is not None:
        made["repetition_penalty"] = options.repeat_penalty
    for name in OTHER_OPTIONS:
        if getattr(options, name) is not None:
            context.notes.ignore(f"options.{name}")
    for name in ("logprobs", "speculation"):
        if getattr(body, name):
            context.notes.ignore(name)
    if body.format:
        made["response_format"] = {"type": "json_object"} if body.format == "json" else _schema(body.format)
    if isinstance(body.think, str):
        made["reasoning_effort"] = body.think
    elif body.think is not None:
        made["chat_template_kwargs"] = {"enable_thinking": body.think}
    return made


def _schema(schema: Any) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _tools(use: ToolUse) -> Body:
    if not use.tools:
        return {}
    made: Body = {"tools": use.tools}
    if len(use.forced) == 1 and len(use.tools) > 1:
        made["tool_choice"] = {"type": "function", "function": {"name": use.forced[0]}}
    elif use.forced:
        made["tool_choice"] = "required"
    if not use.parallel:
        made["parallel_tool_calls"] = False
    return made


def _messages(rendered: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_message(message) for message in rendered]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    kept = ("role", "content", "tool_call_id", "reasoning_content")
    made = {name: message[name] for name in kept if name in message}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call, at) for at, call in enumerate(calls)]
        made["content"] = made.get("content") or None
    if made["role"] == "tool":
        made.setdefault("tool_call_id", _call_id(0))  # Ollama's clients send none
    return made


def _call(call: dict[str, Any], at: int) -> dict[str, Any]:
    function = call["function"]
    arguments = msgspec.json.encode(dict(function["arguments"])).decode()
    called = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or _call_id(at), "type": "function", "function": called}


def _call_id(at: int) -> str:
    return f"call_{at}"
