"""Reads the tools of a response. To the model every tool is a function; the answer has each call in its tool's kind.

Tools that a service would run by itself, such as web_search, are left out and listed as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count
from penstock.server.chat.structured import rules_grammar
from penstock.server.chat.tools import MAX_TOOLS, ToolUse, choose_tools, for_template
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import NoEffect, ignore_unsupported, leave_out, read_object
from penstock.server.http.openapi import read_as
from penstock.text.grammar.structural_tag import as_lark

FUNCTIONS = "functions"  # the namespace of tools that are called without one
LOCAL_SHELL: Literal["local_shell"] = "local_shell"

TOOL_NO_EFFECT: NoEffect = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
TEXT_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
SHELL_INPUT = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


class ResponsesFunction(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class InputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """Describes a tool whose input is text."""

    name: str
    description: str | None = None
    format: InputFormat | None = None


class LocalShell(msgspec.Struct, tag_field="type", tag="local_shell", forbid_unknown_fields=True):
    """Describes the shell that the client has."""


class NamespaceTool(msgspec.Struct, tag_field="type", tag="namespace", forbid_unknown_fields=True):
    """Holds tools whose calls name the namespace too."""

    name: str
    tools: list[Annotated[dict[str, Any], read_as(ResponsesFunction, CustomTool, no_effect=TOOL_NO_EFFECT)]]
    description: str | None = None


AnyTool = Annotated[
    dict[str, Any], read_as(ResponsesFunction, CustomTool, LocalShell, NamespaceTool, no_effect=TOOL_NO_EFFECT)
]


class CalledTool(NamedTuple):
    """Says how the answer names a tool, and of which kind its calls are."""

    name: str
    kind: Literal["function", "custom", "local_shell"] = "function"
    namespace: str = ""


class ResponseTools(NamedTuple):
    use: ToolUse
    called: dict[str, CalledTool]  # model's name of the tool -> tool

    def of_call(self, name: str) -> CalledTool:
        return self.called.get(name, CalledTool(name))


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace and namespace != FUNCTIONS else name


def read_response_tools(
    context: RequestContext,
    given: list[dict[str, Any]],
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
) -> ResponseTools:
    reader = _ToolReader(context)
    for index, tool in enumerate(given):
        reader.add(tool, f"tools[{index}]")
    check_count(reader.tools, MAX_TOOLS, "tools")
    use = choose_tools(reader.tools, _flat_choice(context, choice), parallel, strict=reader.strict)
    return ResponseTools(use._replace(inputs=reader.inputs), reader.called)


class _ToolReader:
    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self.tools: list[dict[str, Any]] = []  # as templates take them
        self.called: dict[str, CalledTool] = {}
        self.inputs: dict[str, str] = {}  # Lark grammars of custom tools
        self.strict = False

    def add(self, given: dict[str, Any], where: str, namespace: str = "") -> None:
        match given.get("type"):
            case "function":
                function = self._read(given, ResponsesFunction, where)
                self.strict |= bool(function.strict)
                self._append(
                    CalledTool(function.name, "function", namespace), function.description, function.parameters
                )
            case "custom":
                tool = self._read(given, CustomTool, where)
                described = "\n\n".join(filter(None, (tool.description, self._input_rule(tool, where, namespace))))
                self._append(CalledTool(tool.name, "custom", namespace), described, TEXT_INPUT)
            case "local_shell":
                self._read(given, LocalShell, where)
                self._append(CalledTool(LOCAL_SHELL, LOCAL_SHELL), "Runs a command in a shell.", SHELL_INPUT)
            case "namespace" if not namespace:
                group = self._read(given, NamespaceTool, where)
                for index, tool in enumerate(group.tools):
                    self.add(tool, f"{where}.tools[{index}]", group.name)
            case kind:
                leave_out(self._context, where, kind)

    def _read(self, given: dict[str, Any], kind: type[Any], where: str) -> Any:
        return read_object(self._context, {**given}, kind, TOOL_NO_EFFECT, where)

    def _input_rule(self, tool: CustomTool, where: str, namespace: str) -> str:
        """Returns a sentence about the input. It mentions the grammar that the answer has to match."""
        if tool.format is None or tool.format.type == "text":
            return "The input is plain text."
        syntax, definition = tool.format.syntax, tool.format.definition
        self.inputs[flat_name(tool.name, namespace)] = _lark(syntax, definition, f"{where}.format")
        return f"The input must match this {syntax} grammar:\n{definition}"

    def _append(self, tool: CalledTool, description: str | None, parameters: dict[str, Any] | None) -> None:
        name = flat_name(tool.name, tool.namespace)
        self.called[name] = tool if tool.namespace != FUNCTIONS else tool._replace(namespace="")
        self.tools.append(for_template(name, description, parameters))


def _lark(syntax: str | None, definition: str | None, where: str) -> str:
    if syntax not in ("lark", "regex"):
        raise InvalidRequest(f"{where}.syntax is 'lark' or 'regex'; got {syntax!r}", param=f"{where}.syntax")
    if not definition:
        raise InvalidRequest(f"the field '{where}.definition' is missing: send a grammar", param=f"{where}.definition")
    grammar = rules_grammar(syntax, definition, f"{where}.definition").text
    return grammar if syntax == "lark" else as_lark(grammar)


def _flat_choice(context: RequestContext, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Returns a choice of functions only: a tool that is left out cannot be chosen."""
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "allowed_tools", "tools": list(listed)}:
            return choice | {"tools": [named for each in listed if (named := _flat_choice(context, each))]}
        case {"type": "function" | "custom", "name": str(name)}:
            return {"type": "function", "name": flat_name(name, choice.get("namespace"))}
        case {"type": "local_shell"}:
            return {"type": "function", "name": LOCAL_SHELL}
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            ignore_unsupported(context, "tool_choice", choice)
            return None
    return choice
