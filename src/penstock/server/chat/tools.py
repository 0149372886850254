"""Reads tools and the calls of earlier turns, as OpenAI's clients send them, and constrains answers to tools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidGrammar, InvalidRequest
from penstock.server.access.bounds import check_count, read_json
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import leave_out, read_object, unsupported
from penstock.server.http.openapi import read_as
from penstock.templates import CallArguments
from penstock.text import Text
from penstock.text.grammar.call_grammar import NO_INPUTS, call_grammar
from penstock.text.grammar.json_schema import check_enforced, rewrite
from penstock.text.parse import AnswerParser, schemas_of
from penstock.text.tool_formats import AnswerFormat
from penstock.types import Grammar, SamplingParams

MAX_TOOLS = 128
MAX_REPORTED = 64  # keywords of a schema


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """Describes a tool, in the shape that OpenAI's chat and Ollama share."""

    type: Literal["function"]
    function: Annotated[dict[str, Any], read_as(FunctionDefinition)]


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class PastCall(msgspec.Struct, forbid_unknown_fields=True):
    """Is a tool call of an earlier turn, as the client sends it back."""

    id: str
    function: Annotated[dict[str, Any], read_as(PastCallFunction)]
    type: Literal["function"] = "function"


class PastCallFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolUse(NamedTuple):
    """Lists the tools that an answer may call, in the shape that chat templates take; none if it may call none."""

    tools: list[dict[str, Any]]
    parallel: bool = True
    forced: tuple[str, ...] = ()  # names of tools, one of which must be called
    strict: bool = False  # calls must match the tools' schemas, as forced ones always must
    inputs: Mapping[str, str] = NO_INPUTS  # Lark grammars of the tools whose one argument is a text, by name

    @property
    def calling(self) -> bool:
        return bool(self.tools)

    def parser(self, format: AnswerFormat, opened: bool) -> AnswerParser | None:
        """Returns a parser for one answer; None if the answer is plain content."""
        if format.plain(self.calling):
            return None
        return AnswerParser(
            format, schemas_of(self.tools), opened=opened, parallel=self.parallel, forced=bool(self.forced)
        )


def read_tools(
    context: RequestContext,
    given: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None = None,
    parallel: bool | None = None,
) -> ToolUse:
    if not given and choice is None:
        return ToolUse([], parallel is not False)
    check_count(given or (), MAX_TOOLS, "tools")
    read = (_function(context, tool, f"tools[{index}]") for index, tool in enumerate(given or ()))
    functions = [function for function in read if function is not None]
    tools = [for_template(each.name, each.description, each.parameters) for each in functions]
    return choose_tools(tools, choice, parallel, strict=any(each.strict for each in functions))


def choose_tools(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, parallel: bool | None, *, strict: bool
) -> ToolUse:
    """Returns which of the tools an answer may and must call. A choice is spelled as in chats or, with less nesting, as
    in responses."""
    names = tuple(tool["function"]["name"] for tool in tools)
    use = ToolUse(tools, parallel is not False, strict=strict)
    match choice:
        case None | "auto":
            return use
        case "none":
            return use._replace(tools=[])
        case "required":
            return use._replace(forced=known(names, names))
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return use._replace(forced=known(names, (name,)), parallel=False)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)},
        } | {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            allowed = known(names, tuple(_named(each) for each in listed))
            kept = [tool for tool in tools if tool["function"]["name"] in allowed]
            return use._replace(tools=kept, forced=allowed if mode == "required" else ())
    raise unsupported("tool_choice", choice)


def _named(listed: object) -> str:
    match listed:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise unsupported("tool_choice.allowed_tools.tools", listed)


def known(names: tuple[str, ...], chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `chosen`; raises if it is empty or names a tool that is not among `names`."""
    for name in chosen:
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {name!r}, which is not in tools: add it, or choose another", param="tool_choice"
            )
    if not chosen:
        raise InvalidRequest(
            "tool_choice requires a call, but tools is empty: send tools, or leave tool_choice out", param="tool_choice"
        )
    return chosen


def _function(context: RequestContext, given: dict[str, Any], where: str) -> FunctionDefinition | None:
    """Returns a tool that is a function; None for one of another kind, which is left out and listed as ignored."""
    if given.get("type", "function") != "function":
        leave_out(context, where, given["type"])
        return None
    tool = read_object(context, given, FunctionTool, {}, where)
    return read_object(context, tool.function, FunctionDefinition, {}, f"{where}.function")


def for_template(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a tool as templates take it: always with a description and parameters, which templates rely on."""
    given = {"type": "object", "properties": {}} | (parameters or {})
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": given}}


def left_out_text(kind: str) -> str:
    return f"[The tool returned a part of type {kind[:40]}, which this text model cannot read. It was left out.]"


def template_reasoning(reasoning: str, content: str | None) -> dict[str, str]:
    """Returns an assistant's reasoning under the names that templates read it by."""
    fields = {"reasoning_content": reasoning, "reasoning": reasoning}
    return fields if content else fields | {"thinking": reasoning}  # templates that read this take it or the content


def template_call(id: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns a call of an earlier turn as templates take it: its arguments are an object."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": CallArguments(arguments)}}


def read_calls(context: RequestContext, given: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    return [_call(context, call, f"{where}[{index}]") for index, call in enumerate(given)]


def _call(context: RequestContext, given: dict[str, Any], where: str) -> dict[str, Any]:
    call = read_object(context, given, PastCall, {}, where)
    called = read_object(context, call.function, PastCallFunction, {}, f"{where}.function")
    return template_call(call.id, called.name, _arguments(called.arguments, f"{where}.function.arguments"))


def _arguments(text: str, where: str) -> dict[str, Any]:
    given = read_json(text or "{}", where, where)
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be a JSON object; got {text[:100]!r}", param=where, code="invalid_json")
    return given


# -- constraining an answer to tools ------------------------------------------------------------------------------


def constrain_to_tools(context: RequestContext, text: Text, use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """Returns sampling with the grammar of calls (if a call is forced, calls are strict or the answer has a schema),
    and with the tokens that end a call in the model's tool format."""
    grammar = _tools_grammar(context, text, use, sampling.grammar)
    stops = text.special_in(*text.format.tool_format.stops)
    return dataclasses.replace(sampling, grammar=grammar, stop_token_ids=(*sampling.stop_token_ids, *stops))


def _tools_grammar(context: RequestContext, text: Text, use: ToolUse, format: Grammar | None) -> Grammar | None:
    """Returns the grammar of calls, of calls or a formatted answer, or of calls after any text."""
    if use.forced:
        return _calls(context, text, use)
    if format is None:
        return _calls(context, text, use, free=True) if use.strict or use.inputs else None
    if format.kind != "json":
        raise InvalidRequest(
            f"tools cannot be combined with a {format.kind} grammar: send one of them, or a JSON schema", param="tools"
        )
    content = _enforced(context, msgspec.json.decode(format.text), format.param, format.strict)
    return _calls(context, text, use, content=content)


def _calls(context: RequestContext, text: Text, use: ToolUse, **others: Any) -> Grammar:
    given = schemas_of(use.tools)
    schemas = {
        name: _enforced(context, dict(given[name]), "tools[].parameters", use.strict) for name in use.forced or given
    }
    markers = text.special_in(text.format.markers(calling=True))
    special = {text.tokenizer.token_text(id): id for id in markers}
    others |= {"parallel": use.parallel, "inputs": use.inputs}
    try:
        rules = call_grammar(text.format.tool_format, schemas, special, **others)
    except InvalidGrammar as error:
        raise InvalidGrammar(str(error), param="tools") from error
    return Grammar("lark", rules, param="tools")


def _enforced(context: RequestContext, schema: dict[str, Any], where: str, strict: bool) -> dict[str, Any]:
    """Returns a schema with closed objects, in keywords that a grammar enforces. What the grammar does not enforce is
    refused if the schema or the server is strict, and listed as ignored otherwise."""
    try:
        rewritten = rewrite(msgspec.json.encode(schema).decode(), verified=False)
        if strict or not context.lenient:
            check_enforced(rewritten)
    except InvalidGrammar as error:
        raise InvalidGrammar(str(error), param=where) from error
    for path in rewritten.unenforced[:MAX_REPORTED]:
        context.notes.ignore(f"{where}.{path}")
    return rewritten.schema if isinstance(rewritten.schema, dict) else {}
