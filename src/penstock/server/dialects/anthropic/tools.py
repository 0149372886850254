"""Reads Anthropic's tools. Its client tools, whose schemas the model's maker knows, become functions with a schema;
its server tools, which only Anthropic can run, are left out and listed as ignored."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from penstock.server.access.bounds import check_count
from penstock.server.chat.tools import MAX_TOOLS, ToolUse, for_template, known
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ANY_VALUE, NoEffect, leave_out, read_object

TOOL_NO_EFFECT: NoEffect = {
    "allowed_callers": (["direct"],),
    "cache_control": ANY_VALUE,
    "defer_loading": (False,),
    "eager_input_streaming": ANY_VALUE,
    "input_examples": ([],),
    "max_characters": ANY_VALUE,  # the client applies it
}


class AnthropicTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ClientTool(msgspec.Struct, forbid_unknown_fields=True):
    """Is a tool of Anthropic's that the client runs. Its type has a date: bash_20250124."""

    type: str
    name: str
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


TEXT = {"type": "string"}
CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {  # keyed by the type without its date: description and schema
    "bash": (
        "Runs a command in a bash session that keeps its state. `restart` begins a new session instead.",
        {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "Views, creates and edits files. `view` takes view_range, `create` file_text, `str_replace` old_str (which "
        "must occur once) and new_str, `insert` insert_line and insert_text.",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                "path": TEXT,
                "view_range": {"type": "array", "items": {"type": "integer"}},
                "file_text": TEXT,
                "old_str": TEXT,
                "new_str": TEXT,
                "insert_line": {"type": "integer"},
                "insert_text": TEXT,
            },
            "required": ["command", "path"],
        },
    ),
}


def read_use(context: RequestContext, given: list[dict[str, Any]], choice: AnthropicToolChoice | None) -> ToolUse:
    choice = choice or AnthropicToolChoice("auto")
    check_count(given, MAX_TOOLS, "tools")
    read = [_tool(context, tool, f"tools[{index}]") for index, tool in enumerate(given)]
    kept = [tool for tool in read if tool is not None]
    tools = [for_template(tool.name, tool.description, tool.input_schema) for tool in kept]
    names = tuple(tool.name for tool in kept)
    use = ToolUse(
        [] if choice.type == "none" else tools,
        parallel=not choice.disable_parallel_tool_use,
        strict=any(tool.strict for tool in kept),
    )
    if choice.type == "any":
        return use._replace(forced=known(names, names))
    if choice.type == "tool":
        return use._replace(forced=known(names, (choice.name or "",)), parallel=False)
    return use


def _tool(context: RequestContext, given: dict[str, Any], where: str) -> AnthropicTool | None:
    kind = given.get("type")
    if kind in (None, "custom"):
        return read_object(context, given, AnthropicTool, TOOL_NO_EFFECT, where)
    family = re.sub(r"_\d{8}$", "", str(kind))
    if family not in CLIENT_TOOLS:
        leave_out(context, where, kind)
        return None
    tool = read_object(context, given, ClientTool, TOOL_NO_EFFECT, where)
    description, schema = CLIENT_TOOLS[family]
    return AnthropicTool(tool.name, schema, description, strict=tool.strict)
