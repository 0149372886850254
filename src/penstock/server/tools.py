"""Tools as OpenAI's clients send them, and calls as they send them back."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.openai import Neutral, read_object, unsupported
from penstock.text import Text
from penstock.text.families import Format
from penstock.text.parse import AnswerParser, schemas_of
from penstock.text.tools import CallArguments
from penstock.types import SamplingParams

MAX_TOOLS = 128
FUNCTION_NEUTRAL: Neutral = {"strict": (False,)}  # held to a schema only where a grammar is


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: dict[str, Any]


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Call(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: dict[str, Any]
    type: Literal["function"] = "function"


class Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolUse(NamedTuple):
    """The tools an answer may call, as a template takes them; none where it may call none."""

    tools: list[dict[str, Any]]
    parallel: bool = True

    @property
    def calling(self) -> bool:
        return bool(self.tools)

    def parser(self, format: Format, opened: bool) -> AnswerParser | None:
        """For one answer; none where it is content alone."""
        if format.plain(self.calling):
            return None
        return AnswerParser(format, schemas_of(self.tools), opened=opened, parallel=self.parallel)


def read_tools(given: list[dict[str, Any]] | None, choice: object, parallel: bool | None) -> ToolUse:
    if len(given or ()) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS}; got {len(given or ())}", param="tools")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given or ())]
    _check_choice(choice)
    return ToolUse([] if choice == "none" else tools, parallel is not False)


def _check_choice(choice: object) -> None:
    if choice in (None, "none", "auto"):
        return
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")):
        raise InvalidRequest(
            "tool_choice can be none or auto: answers are not held to a grammar here, so no call can be forced",
            param="tool_choice",
            code="unsupported_parameter",
        )
    raise unsupported("tool_choice", choice)


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    tool = read_object(given, Tool, {}, where)
    function = read_object(tool.function, Function, FUNCTION_NEUTRAL, f"{where}.function")
    return {"type": "function", "function": for_template(function.name, function.description, function.parameters)}


def for_template(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """With a description and parameters in any case: templates count on them."""
    given = {"type": "object", "properties": {}} | (parameters or {})
    return {"name": name, "description": description or "", "parameters": given}


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
    try:
        return CallArguments(msgspec.json.decode(text or "{}", type=dict[str, Any]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"{where} must be a JSON object: {error}", param=where, code="invalid_json") from error


def stopping(text: Text, use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """Ends an answer where its family ends a call, too."""
    stops = text.special_in(*text.format.family.stops) if use.calling else frozenset()
    return dataclasses.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *stops)) if stops else sampling
