"""Tools as OpenAI's clients send them, and calls as they send them back."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count, read_json
from penstock.server.bodies import read_object, unsupported
from penstock.server.openapi import read_as
from penstock.text import Text
from penstock.text.call_grammar import call_grammar
from penstock.text.parse import AnswerParser, schemas_of
from penstock.text.tool_formats import AnswerFormat
from penstock.text.tools import CallArguments
from penstock.types import Grammar, SamplingParams

MAX_TOOLS = 128


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Annotated[dict[str, Any], read_as(Function)]


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: Annotated[dict[str, Any], read_as(Called)]
    type: Literal["function"] = "function"


class Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolUse(NamedTuple):
    """The tools an answer may call, as a template takes them; none where it may call none."""

    tools: list[dict[str, Any]]
    parallel: bool = True
    forced: tuple[str, ...] = ()  # one of these must be called
    strict: bool = False  # calls are held to the tools' schemas, as forced ones always are

    @property
    def calling(self) -> bool:
        return bool(self.tools)

    def parser(self, format: AnswerFormat, opened: bool) -> AnswerParser | None:
        """For one answer; none where it is content alone."""
        if format.plain(self.calling):
            return None
        return AnswerParser(format, schemas_of(self.tools), opened=opened, parallel=self.parallel)


def read_tools(
    given: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> ToolUse:
    check_count(given or (), MAX_TOOLS, "tools")
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(given or ())]
    tools = [for_template(each.name, each.description, each.parameters) for each in functions]
    return chosen(tools, choice, parallel, strict=any(each.strict for each in functions))


def chosen(
    tools: list[dict[str, Any]], choice: str | dict[str, Any] | None, parallel: bool | None, *, strict: bool
) -> ToolUse:
    """What of the tools an answer may and must call. A choice is spelled as in chats or, with less nesting, as in
    responses."""
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
            return use._replace(forced=known(names, (name,)))
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
    """The chosen, of which there must be some and all among the names."""
    for name in chosen:
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
    if not chosen:
        raise InvalidRequest("tool_choice asks for a call, and there are no tools", param="tool_choice")
    return chosen


def _function(given: dict[str, Any], where: str) -> Function:
    tool = read_object(given, Tool, {}, where)
    return read_object(tool.function, Function, {}, f"{where}.function")


def for_template(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool, with a description and parameters in any case: templates count on them."""
    given = {"type": "object", "properties": {}} | (parameters or {})
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": given}}


def told_reasoning(reasoning: str, content: str | None) -> dict[str, str]:
    """What an assistant thought, by the names that templates have for it."""
    told = {"reasoning_content": reasoning, "reasoning": reasoning}
    return told if content else told | {"thinking": reasoning}  # a template that calls it so takes one of the two


def read_calls(given: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """An assistant's calls as a template takes them: arguments are an object."""
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(given)]


def _call(given: dict[str, Any], where: str) -> dict[str, Any]:
    call = read_object(given, Call, {}, where)
    called = read_object(call.function, Called, {}, f"{where}.function")
    arguments = _arguments(called.arguments, f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


def _arguments(text: str, where: str) -> CallArguments:
    given = read_json(text or "{}", where, where)
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be a JSON object", param=where, code="invalid_json")
    return CallArguments(given)


# -- holding an answer to it ---------------------------------------------------------------------------------------


def held(text: Text, use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """With the grammar of calls where one is forced, they are strict or a schema stands beside them, and an end where
    the family ends a call."""
    grammar = _held_calls(text, use, sampling.grammar) if use.calling else sampling.grammar
    stops = text.special_in(*text.format.tool_format.stops) if use.calling else frozenset()
    return dataclasses.replace(sampling, grammar=grammar, stop_token_ids=(*sampling.stop_token_ids, *stops))


def _held_calls(text: Text, use: ToolUse, format: Grammar | None) -> Grammar | None:
    """Calls alone, calls or an answer in its format, or strict calls after any text."""
    if use.forced:
        return _calls(text, use)
    if format is None:
        return _calls(text, use, free=True) if use.strict else None
    if format.kind != "json":
        raise InvalidRequest(f"tools and a {format.kind} grammar cannot be honoured together", param="tools")
    return _calls(text, use, content=msgspec.json.decode(format.text))


def _calls(text: Text, use: ToolUse, **beside: Any) -> Grammar:
    schemas = {name: schema for name, schema in schemas_of(use.tools).items() if name in use.forced or not use.forced}
    markers = text.special_in(text.format.markers(calling=True))
    special = {text.tokenizer.token_text(id): id for id in markers}
    rules = call_grammar(text.format.tool_format, schemas, special, parallel=use.parallel, **beside)
    return Grammar("lark", rules)
