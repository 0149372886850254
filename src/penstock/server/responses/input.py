"""Reads the items of a conversation, and renders them as chat templates take them.

An assistant's reasoning, text and calls of one turn are separate items; to a template they are one message.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_MESSAGES, MAX_PARTS, check_count
from penstock.server.bodies import ANY_VALUE, NoEffect, read_object, unsupported
from penstock.server.chat.chat_turn import call_input
from penstock.server.chat.tools import template_call, template_reasoning
from penstock.server.request_context import RequestContext
from penstock.server.responses.items import (
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    new_id,
)

Rendered = dict[str, Any]  # a message as chat templates take it

KINDS: dict[str, tuple[type[Item], str]] = {  # by type: the struct, and the prefix of new ids
    "message": (MessageItem, "msg"),
    "reasoning": (ReasoningItem, "rs"),
    "function_call": (FunctionCallItem, "fc"),
    "function_call_output": (FunctionOutputItem, "fco"),
}
NO_EFFECT: NoEffect = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "created_by": ANY_VALUE,
    "namespace": (),
    "phase": ANY_VALUE,
}


# -- reading ------------------------------------------------------------------------------------------------------


def read_items(context: RequestContext, given: str | Sequence[dict[str, Any]] | None) -> list[Item]:
    """Returns the input's items. Those without an id get one. A string is a user's message."""
    if isinstance(given, str):
        return [MessageItem(new_id("msg"), "user", [InputText(given)])]
    check_count(given or (), MAX_MESSAGES, "input")
    return [_item(context, item, f"input[{index}]") for index, item in enumerate(given or ())]


def _item(context: RequestContext, given: dict[str, Any], where: str) -> Item:
    type = given.get("type") or "message"
    if not isinstance(type, str) or type not in KINDS:
        raise InvalidRequest(
            f"{where}.type: {type!r} is not supported; use {', '.join(KINDS)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    kind, prefix = KINDS[type]
    item = {name: value for name, value in given.items() if value is not None}
    item |= {"type": type, "id": item.get("id") or new_id(prefix)}
    if kind is MessageItem:
        item["content"] = _parts(item.get("content"), item.get("role"), f"{where}.content")
    if kind is FunctionOutputItem:
        item.pop("name", None)  # the function's: the call has it
        _check_parts(item.get("output"), ("input_text",), f"{where}.output")
    return read_object(context, item, kind, NO_EFFECT, where)


def _parts(content: object, role: object, where: str) -> object:
    if isinstance(content, str):
        return [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    _check_parts(content, ("input_text", "output_text"), where)
    return content


def _check_parts(parts: object, types: tuple[str, ...], where: str) -> None:
    """Raises for a part of another type, which a text model cannot take."""
    listed = parts if isinstance(parts, list) else []
    check_count(listed, MAX_PARTS, where)
    for index, part in enumerate(listed):
        if isinstance(part, dict) and part.get("type") not in types:
            raise unsupported(f"{where}[{index}].type", part.get("type"))


# -- reasoning that clients send back-------------------------------------------------------------------------------


def seal(text: str) -> str:
    """Returns reasoning for clients that send back only `encrypted_content`. It is not secret: the same text is next
    to it."""
    return base64.b64encode(text.encode()).decode()


def _unseal(sealed: str) -> str:
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(
            "the encrypted_content of a reasoning item was not made by this server: leave it out", param="input"
        ) from error


def _reasoning(item: ReasoningItem) -> str:
    if item.content is None and item.encrypted_content is not None:
        return _unseal(item.encrypted_content)
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
            case FunctionOutputItem():
                self.messages.append(self._result(item))
            case MessageItem() if rank is None:
                self._append("user" if item.role == "user" else "system", _joined(item.content))
            case _:
                self._turn.append(item)

    def end_turn(self) -> None:
        if self._turn:
            self.messages.append(_assistant(self._turn))
            self._names |= {item.call_id: item.name for item in self._turn if isinstance(item, FunctionCallItem)}
        self._turn = []

    def _append(self, role: str, text: str) -> None:
        if role == "system" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _result(self, item: FunctionOutputItem) -> Rendered:
        if item.call_id not in self._names:
            raise InvalidRequest(
                f"a function_call_output has the call_id {item.call_id!r}, which no function_call before it has",
                param="input",
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
        case FunctionCallItem():
            return 2
    return None


def _follows(rank: int, last: int | None) -> bool:
    return last is not None and rank >= last and not rank == last == 1


def _assistant(turn: Sequence[Item]) -> Rendered:
    reasoning = [_reasoning(item) for item in turn if isinstance(item, ReasoningItem)]
    texts = [_joined(item.content) for item in turn if isinstance(item, MessageItem)]
    calls = [_call(item) for item in turn if isinstance(item, FunctionCallItem)]
    rendered: Rendered = {"role": "assistant", "content": texts[0] if texts else None}
    if reasoning:
        rendered |= template_reasoning("\n".join(reasoning), rendered["content"])
    return rendered | {"tool_calls": calls} if calls else rendered


def _call(item: FunctionCallItem) -> dict[str, Any]:
    arguments = call_input(item.arguments)
    if arguments is None:
        raise InvalidRequest(
            f"the arguments of the function_call {item.call_id!r} must be a JSON object; got {item.arguments!r:.100}",
            param="input",
            code="invalid_json",
        )
    return template_call(item.call_id, item.name, arguments)


def _joined(parts: Sequence[InputText | OutputText]) -> str:
    return "\n".join(part.text for part in parts)
