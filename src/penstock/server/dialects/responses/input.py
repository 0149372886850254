"""Reads the items of a conversation, and renders them as chat templates take them.

An assistant's reasoning, text and calls of one turn are separate items; to a template they are one message.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, MAX_PARTS, check_count
from penstock.server.chat.chat_turn import call_input
from penstock.server.chat.tools import left_out_text, template_call, template_reasoning
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.responses.items import (
    CallItem,
    CallOutput,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    LocalShellItem,
    LocalShellOutputItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    new_id,
)
from penstock.server.dialects.responses.tools import LOCAL_SHELL, flat_name
from penstock.server.http.bodies import ANY_VALUE, NoEffect, leave_out, read_object, unsupported

Rendered = dict[str, Any]  # a message as chat templates take it

KINDS: dict[str, tuple[type[Item], str]] = {  # type -> struct, prefix of new ids
    "message": (MessageItem, "msg"),
    "reasoning": (ReasoningItem, "rs"),
    "function_call": (FunctionCallItem, "fc"),
    "function_call_output": (FunctionOutputItem, "fco"),
    "custom_tool_call": (CustomCallItem, "ctc"),
    "custom_tool_call_output": (CustomOutputItem, "ctco"),
    "local_shell_call": (LocalShellItem, "lsh"),
    "local_shell_call_output": (LocalShellOutputItem, "lsho"),
}
ADDITIONAL_TOOLS = "additional_tools"  # an item that brings tools along
NEEDED = ("item_reference", "compaction", "compaction_summary")  # items without which a conversation is another one
NO_EFFECT: NoEffect = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "created_by": ANY_VALUE,
    "phase": ANY_VALUE,
}


# -- reading ------------------------------------------------------------------------------------------------------


def tools_in(given: str | Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools that items of the input bring along."""
    items = () if given is None or isinstance(given, str) else given
    listed = [item.get("tools") for item in items if item.get("type") == ADDITIONAL_TOOLS]
    return [tool for tools in listed if isinstance(tools, list) for tool in tools if isinstance(tool, dict)]


def read_items(context: RequestContext, given: str | Sequence[dict[str, Any]] | None) -> list[Item]:
    """Returns the input's items. Those without an id get one. A string is a user's message. Items about tools that a
    service ran by itself are left out and listed as ignored."""
    if isinstance(given, str):
        return [MessageItem(new_id("msg"), "user", [InputText(given)])]
    check_count(given or (), MAX_MESSAGES, "input")
    items = (_item(context, item, f"input[{index}]") for index, item in enumerate(given or ()))
    return [item for item in items if item is not None]


def _item(context: RequestContext, given: dict[str, Any], where: str) -> Item | None:
    type = given.get("type") or "message"
    if type == ADDITIONAL_TOOLS:
        return None
    if not isinstance(type, str) or type not in KINDS:
        _leave_out(context, type, where)
        return None
    kind, prefix = KINDS[type]
    item = {name: value for name, value in given.items() if value is not None}
    item |= {"type": type, "id": item.get("id") or new_id(prefix)}
    if kind is ReasoningItem:
        _check_sealed(context, item, where)
    if kind is MessageItem:
        item["content"] = _parts(item.get("content"), item.get("role"), f"{where}.content")
    if issubclass(kind, CallOutput):
        item.pop("name", None)  # the tool's: the call has it
        item["output"] = _output(context, item.get("output"), f"{where}.output")
        item.setdefault("call_id", item["id"])  # a shell's output has only this id
    return read_object(context, item, kind, NO_EFFECT, where)


def _leave_out(context: RequestContext, type: object, where: str) -> None:
    if context.lenient and isinstance(type, str) and type not in NEEDED:
        context.notes.ignore_kind(where, type)
        return
    raise InvalidRequest(
        f"{where}.type: {str(type)[:100]!r} is not supported; use {', '.join(KINDS)}",
        param=f"{where}.type",
        code="unsupported_parameter",
    )


def _parts(content: object, role: object, where: str) -> object:
    if isinstance(content, str):
        return [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    listed = content if isinstance(content, list) else []
    check_count(listed, MAX_PARTS, where)
    for index, part in enumerate(listed):
        if isinstance(part, dict) and part.get("type") not in ("input_text", "output_text", "refusal"):
            raise unsupported(f"{where}[{index}].type", part.get("type"))
    return [_refusal(part) for part in content] if isinstance(content, list) else content


def _refusal(part: object) -> object:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "output_text", "text": part.get("refusal")}
    return part


def _output(context: RequestContext, output: object, where: str) -> object:
    """Returns a tool's output. An image or a file in it is replaced by a note."""
    if not isinstance(output, list):
        return output
    check_count(output, MAX_PARTS, where)
    return [_output_part(context, part, f"{where}[{index}]") for index, part in enumerate(output)]


def _output_part(context: RequestContext, part: object, where: str) -> object:
    if not isinstance(part, dict) or part.get("type") == "input_text":
        return part
    kind = part.get("type")
    leave_out(context, where, kind)
    return {"type": "input_text", "text": left_out_text(str(kind))}


# -- reasoning that clients send back-------------------------------------------------------------------------------


def seal(text: str) -> str:
    """Returns reasoning for clients that send back only `encrypted_content`. It is not secret: the same text is next
    to it."""
    return base64.b64encode(text.encode()).decode()


def _unseal(sealed: str) -> str | None:
    """Returns reasoning that was sealed here; None if another server did that."""
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except ValueError:
        return None


def _check_sealed(context: RequestContext, item: dict[str, Any], where: str) -> None:
    """Leaves out reasoning that another server has sealed, and lists it as ignored; raises if the server is strict."""
    sealed = item.get("encrypted_content")
    if item.get("content") is None and isinstance(sealed, str) and _unseal(sealed) is None:
        if not context.lenient:
            raise InvalidRequest(
                f"{where}.encrypted_content was not made by this server: leave it out",
                param=f"{where}.encrypted_content",
            )
        context.notes.ignore(f"{where}.encrypted_content")
        del item["encrypted_content"]


def _reasoning(item: ReasoningItem) -> str:
    if item.content is None and item.encrypted_content is not None:
        return _unseal(item.encrypted_content) or ""
    return "\n".join(part.text for part in item.content or item.summary)


# -- rendering ----------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[Rendered]:
    """Returns items as messages. System messages at the beginning become one: many templates take only one."""
    renderer = _Renderer()
    if instructions:
        renderer.add(MessageItem("", "system", [InputText(instructions)]))
    for item in items:
        renderer.add(item)
    renderer.end_turn()
    if not renderer.messages:
        raise InvalidRequest("input is empty: send at least one item", param="input")
    return renderer.messages


class _Renderer:
    def __init__(self) -> None:
        self.messages: list[Rendered] = []
        self._turn: list[Item] = []  # items of the assistant: reasoning, then text, then calls
        self._names: dict[str, str] = {}  # names of functions that were called, by the id of the call

    def add(self, item: Item) -> None:
        rank = _rank(item)
        if self._turn and (rank is None or not _follows(rank, _rank(self._turn[-1]))):
            self.end_turn()
        match item:
            case CallOutput():
                self.messages.append(self._result(item))
            case MessageItem() if rank is None:
                self._append("user" if item.role == "user" else "system", _joined(item.content))
            case _:
                self._turn.append(item)

    def end_turn(self) -> None:
        if self._turn:
            self.messages.append(_assistant(self._turn))
            self._names |= {item.call_id: _name(item) for item in self._turn if isinstance(item, CallItem)}
        self._turn = []

    def _append(self, role: str, text: str) -> None:
        if role == "system" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _result(self, item: CallOutput) -> Rendered:
        if item.call_id not in self._names:
            raise InvalidRequest(
                f"the output of a tool has the call_id {item.call_id!r}, which no call before it has", param="input"
            )
        output = item.output if isinstance(item.output, str) else _joined(item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "name": self._names[item.call_id], "content": output}


def _rank(item: Item) -> int | None:
    """Returns an item's place in an assistant's turn; None for the items of others."""
    match item:
        case ReasoningItem():
            return 0
        case MessageItem(role="assistant"):
            return 1
        case FunctionCallItem() | CustomCallItem() | LocalShellItem():
            return 2
    return None


def _follows(rank: int, last: int | None) -> bool:
    return last is not None and rank >= last and not rank == last == 1


def _assistant(turn: Sequence[Item]) -> Rendered:
    reasoning = [_reasoning(item) for item in turn if isinstance(item, ReasoningItem)]
    texts = [_joined(item.content) for item in turn if isinstance(item, MessageItem)]
    calls = [_call(item) for item in turn if isinstance(item, CallItem)]
    rendered: Rendered = {"role": "assistant", "content": texts[0] if texts else None}
    if reasoning:
        rendered |= template_reasoning("\n".join(reasoning), rendered["content"])
    return rendered | {"tool_calls": calls} if calls else rendered


def _name(item: CallItem) -> str:
    return LOCAL_SHELL if isinstance(item, LocalShellItem) else flat_name(item.name, item.namespace or None)


def _call(item: CallItem) -> dict[str, Any]:
    return template_call(item.call_id, _name(item), _arguments(item))


def _arguments(item: CallItem) -> dict[str, Any]:
    match item:
        case CustomCallItem():
            return {"input": item.input}
        case LocalShellItem():
            given = {name: getattr(item.action, name) for name in ("command", "working_directory", "timeout_ms")}
            return {name: value for name, value in given.items() if value is not None}
    arguments = call_input(item.arguments)
    if arguments is None:
        raise InvalidRequest(
            f"the arguments of the function_call {item.call_id!r} must be a JSON object; got {item.arguments!r:.100}",
            param="input",
            code="invalid_json",
        )
    return arguments


def _joined(parts: Sequence[InputText | OutputText]) -> str:
    return "\n".join(part.text for part in parts)
