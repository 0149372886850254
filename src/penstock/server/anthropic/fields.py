"""What Anthropic's clients send, as a chat template takes it.

A field is read and honoured, or accepted because its value asks for nothing, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, MAX_PARTS, check_count
from penstock.server.bodies import ANY_VALUE, NoEffect, read_object, unsupported
from penstock.server.chat.chat_turn import thinking
from penstock.server.chat.structured import json_grammar
from penstock.server.chat.tools import MAX_TOOLS, ToolUse, for_template, known, told_reasoning
from penstock.server.openapi import read_as
from penstock.server.request_context import notes
from penstock.server.served_model import ServedModel
from penstock.text.tools import CallArguments
from penstock.types import Grammar

NO_EFFECT: NoEffect = {
    "cache_control": ANY_VALUE,  # every prefix is cached, asked for or not
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
BLOCK_NO_EFFECT: NoEffect = {
    "cache_control": ANY_VALUE,
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}
TOOL_NO_EFFECT: NoEffect = {
    "allowed_callers": (["direct"],),
    "cache_control": ANY_VALUE,
    "defer_loading": (False,),
    "eager_input_streaming": ANY_VALUE,
    "input_examples": ([],),
}


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None  # after so many, thinking is ended
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
    tools: list[Annotated[dict[str, Any], read_as(AnthropicTool, no_effect=TOOL_NO_EFFECT)]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesBody(MessagesConversation):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    penstock: bool | None = None  # whether the answer is to explain itself

    def __post_init__(self) -> None:
        notes().explain |= bool(self.penstock)


class AnthropicMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class AnthropicText(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class AnthropicThinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class AnthropicToolUse(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicToolResult(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[dict[str, Any], read_as(AnthropicText, no_effect=BLOCK_NO_EFFECT)]] | None = None
    is_error: bool | None = None


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


AnyBlock = Annotated[
    dict[str, Any],
    read_as(AnthropicText, AnthropicThinking, AnthropicToolUse, AnthropicToolResult, no_effect=BLOCK_NO_EFFECT),
]
Block = AnthropicText | AnthropicThinking | AnthropicToolUse | AnthropicToolResult
Rendered = dict[str, Any]  # a message as templates take it

BLOCKS: dict[str, dict[str, type[Block]]] = {  # of each role
    "system": {"text": AnthropicText},
    "user": {"text": AnthropicText, "tool_result": AnthropicToolResult},
    "assistant": {"text": AnthropicText, "thinking": AnthropicThinking, "tool_use": AnthropicToolUse},
}


def read_messages(body: MessagesConversation) -> list[Rendered]:
    """The messages for the model's chat template."""
    if not body.messages:
        raise InvalidRequest("messages is empty: at least one is needed", param="messages")
    messages = _Renderer().messages(body)
    if messages[-1]["role"] == "assistant":
        raise InvalidRequest("the last message must be the user's: an answer that was begun is not gone on with")
    return messages


def read_use(body: MessagesConversation) -> ToolUse:
    choice = body.tool_choice or AnthropicToolChoice("auto")
    check_count(body.tools or (), MAX_TOOLS, "tools")
    given = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    tools = [for_template(tool.name, tool.description, tool.input_schema) for tool in given]
    names = tuple(tool["function"]["name"] for tool in tools)
    use = ToolUse(
        [] if choice.type == "none" else tools,
        parallel=not choice.disable_parallel_tool_use,
        strict=any(tool.strict for tool in given),
    )
    if choice.type == "any":
        return use._replace(forced=known(names, names))
    return use._replace(forced=known(names, (choice.name or "",))) if choice.type == "tool" else use


def read_grammar(body: MessagesConversation) -> Grammar | None:
    format = body.output_config.format if body.output_config else None
    return json_grammar(format.schema, "output_config.format.schema") if format else None


def template_fields(served: ServedModel, body: MessagesConversation) -> dict[str, Any]:
    """What is asked of the template beside messages and tools: refused where it has no word for it. Without a word
    about thinking there is none, if the model can do without."""
    given = body.thinking
    fields = thinking(served, given is not None and given.type != "disabled")
    if fields is None and given is not None:
        raise unsupported("thinking", given)
    fields = fields or {}
    effort = body.output_config.effort if body.output_config else None
    if effort is not None and not served.text.takes("reasoning_effort"):
        raise unsupported("output_config.effort", effort)
    return fields if effort is None else fields | {"reasoning_effort": effort}


class _Renderer:
    def __init__(self) -> None:
        self._tools: dict[str, str] = {}  # names of tools that were used, by the id of the use

    def messages(self, body: MessagesConversation) -> list[Rendered]:
        check_count(body.messages, MAX_MESSAGES, "messages")
        rendered = []
        if body.system:
            rendered.append({"role": "system", "content": _joined(_blocks(body.system, "system", "system"))})
        for index, given in enumerate(body.messages):
            rendered += self._message(given, f"messages[{index}]")
        return rendered

    def _message(self, given: dict[str, Any], where: str) -> Iterator[Rendered]:
        message = read_object(given, AnthropicMessage, {}, where)
        blocks = _blocks(message.content, message.role, f"{where}.content")
        if message.role == "assistant":
            yield self._said(blocks)
        elif any(isinstance(block, AnthropicToolResult) for block in blocks):
            yield from self._results(blocks, where)
        else:
            yield {"role": message.role, "content": _joined(blocks)}

    def _said(self, blocks: Sequence[Block]) -> Rendered:
        said: Rendered = {"role": "assistant", "content": _joined(blocks)}
        thoughts = [block.thinking for block in blocks if isinstance(block, AnthropicThinking)]
        calls = [block for block in blocks if isinstance(block, AnthropicToolUse)]
        self._tools |= {call.id: call.name for call in calls}
        if thoughts:
            said |= told_reasoning("\n".join(thoughts), said["content"])
        if calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": CallArguments(call.input)},
                }
                for call in calls
            ]
        return said

    def _results(self, blocks: Sequence[Block], where: str) -> Iterator[Rendered]:
        """Each result is a message of its own; what the user says beside them comes after them."""
        for index, block in enumerate(blocks):
            if isinstance(block, AnthropicToolResult):
                yield self._result(block, f"{where}.content[{index}]")
        if text := _joined(blocks):
            yield {"role": "user", "content": text}

    def _result(self, result: AnthropicToolResult, where: str) -> Rendered:
        if result.tool_use_id not in self._tools:
            told = f"{where}.tool_use_id: no tool_use block before it has the id {result.tool_use_id!r}"
            raise InvalidRequest(told, param=f"{where}.tool_use_id")
        text = _joined(_blocks(result.content or "", "system", f"{where}.content"))
        return {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "name": self._tools[result.tool_use_id],
            "content": f"Error: {text}" if result.is_error else text,  # templates have no other word for it
        }


def _blocks(content: str | list[dict[str, Any]], role: str, where: str) -> list[Block]:
    if isinstance(content, str):
        return [AnthropicText("text", content)]
    check_count(content, MAX_PARTS, where)
    return [_block(block, BLOCKS[role], f"{where}[{index}]") for index, block in enumerate(content)]


def _block(given: dict[str, Any], kinds: dict[str, type[Block]], where: str) -> Block:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidRequest(
            f"{where}.type: {kind!r} is not supported here; it may be {', '.join(kinds)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    return read_object(given, kinds[kind], BLOCK_NO_EFFECT, where)


def _joined(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, AnthropicText))


def _tool(given: dict[str, Any], where: str) -> AnthropicTool:
    if given.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", given["type"])
    return read_object(given, AnthropicTool, TOOL_NO_EFFECT, where)
