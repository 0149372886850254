"""Reads the bodies that Anthropic's clients send, and renders their messages as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, check_count
from penstock.server.chat.structured import json_grammar
from penstock.server.chat.template_fields import switch_thinking
from penstock.server.chat.tools import template_call, template_reasoning
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.anthropic.blocks import (
    BLOCK_NO_EFFECT,
    AnthropicText,
    AnthropicThinking,
    AnthropicToolResult,
    AnthropicToolUse,
    AnyBlock,
    Block,
    BlockReader,
)
from penstock.server.dialects.anthropic.tools import TOOL_NO_EFFECT, AnthropicTool, AnthropicToolChoice, ClientTool
from penstock.server.generation.speculation_fields import SpeculationWish
from penstock.server.http.bodies import ANY_VALUE, NoEffect, ignore_unsupported, read_object
from penstock.server.http.openapi import read_as
from penstock.server.models.served_model import ServedModel
from penstock.types import Grammar

NO_EFFECT: NoEffect = {
    "cache_control": ANY_VALUE,  # every prefix is cached anyway
    "container": (),
    "context_management": ({"edits": []},),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "metadata": ANY_VALUE,
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": ANY_VALUE,
    "workspace_id": ANY_VALUE,
}


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: str  # enabled, disabled or adaptive
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None  # tokens after which thinking ends
    display: Literal["summarized"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesConversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    messages: list[Annotated[dict[str, Any], read_as(AnthropicMessage)]]
    system: str | list[Annotated[dict[str, Any], read_as(AnthropicText, no_effect=BLOCK_NO_EFFECT)]] | None = None
    tools: list[Annotated[dict[str, Any], read_as(AnthropicTool, ClientTool, no_effect=TOOL_NO_EFFECT)]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format


class MessagesBody(MessagesConversation):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    loop_guard: bool | None = None  # false: at temperature 0 an answer may repeat itself without end
    penstock: bool | None = None  # asks for a report of what happened to the answer
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for the answer


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


THINKING = ("enabled", "disabled", "adaptive")
Rendered = dict[str, Any]  # a message as chat templates take it


def read_messages(context: RequestContext, body: MessagesConversation) -> list[Rendered]:
    if not body.messages:
        raise InvalidRequest("messages is empty: send at least one", param="messages")
    return _Renderer(context).messages(body)


def read_grammar(body: MessagesConversation) -> Grammar | None:
    if body.output_config is not None and body.output_config.format is not None:
        return json_grammar(body.output_config.format.schema, "output_config.format.schema")
    return json_grammar(body.output_format.schema, "output_format.schema") if body.output_format else None


def template_fields(served: ServedModel, context: RequestContext, body: MessagesConversation) -> dict[str, Any]:
    """Returns the template's fields other than messages and tools. Without `thinking` in the body the model does not
    think, if that can be turned off."""
    text, given = served.text, body.thinking
    if given is not None and given.type not in THINKING:
        ignore_unsupported(context, "thinking", given)
        given = None
    if given is not None:
        fields = switch_thinking(context, text, given.type != "disabled", "thinking", given)
    else:
        fields = {"enable_thinking": False} if text.takes("enable_thinking") else {}
    effort = body.output_config.effort if body.output_config else None
    if effort is None:
        return fields
    if text.takes("reasoning_effort"):
        return fields | {"reasoning_effort": effort}
    ignore_unsupported(context, "output_config.effort", effort)
    return fields


class _Renderer:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._blocks = BlockReader(context).read
        self._tools: dict[str, str] = {}  # names of tools that were called, by the id of the call

    def messages(self, body: MessagesConversation) -> list[Rendered]:
        check_count(body.messages, MAX_MESSAGES, "messages")
        rendered = []
        if body.system:
            rendered.append({"role": "system", "content": _joined(self._blocks(body.system, "system", "system"))})
        for index, given in enumerate(body.messages):
            rendered += self._message(given, f"messages[{index}]")
        return rendered

    def _message(self, given: dict[str, Any], where: str) -> Iterator[Rendered]:
        message = read_object(self._context, given, AnthropicMessage, {}, where)
        blocks = self._blocks(message.content, message.role, f"{where}.content")
        if message.role == "assistant":
            yield self._assistant(blocks)
        elif any(isinstance(block, AnthropicToolResult) for block in blocks):
            yield from self._results(blocks, where)
        else:
            yield {"role": message.role, "content": _joined(blocks)}

    def _assistant(self, blocks: Sequence[Block]) -> Rendered:
        rendered: Rendered = {"role": "assistant", "content": _joined(blocks)}
        reasoning = [block.thinking for block in blocks if isinstance(block, AnthropicThinking)]
        calls = [block for block in blocks if isinstance(block, AnthropicToolUse)]
        self._tools |= {call.id: call.name for call in calls}
        if reasoning:
            rendered |= template_reasoning("\n".join(reasoning), rendered["content"])
        if calls:
            rendered["tool_calls"] = [template_call(call.id, call.name, call.input) for call in calls]
        return rendered

    def _results(self, blocks: Sequence[Block], where: str) -> Iterator[Rendered]:
        """Yields each tool result as a message of its own, and then the user's text."""
        for index, block in enumerate(blocks):
            if isinstance(block, AnthropicToolResult):
                yield self._result(block, f"{where}.content[{index}]")
        if text := _joined(blocks):
            yield {"role": "user", "content": text}

    def _result(self, result: AnthropicToolResult, where: str) -> Rendered:
        if result.tool_use_id not in self._tools:
            raise InvalidRequest(
                f"{where}.tool_use_id: no tool_use block before it has the id {result.tool_use_id!r}",
                param=f"{where}.tool_use_id",
            )
        text = _joined(self._blocks(result.content or "", "tool", f"{where}.content"))
        return {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "name": self._tools[result.tool_use_id],
            "content": f"Error: {text}" if result.is_error else text,  # templates cannot express an error otherwise
        }


def _joined(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, AnthropicText))
