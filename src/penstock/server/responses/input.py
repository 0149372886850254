"""A conversation's items: as clients send them, and as a chat template takes them.

What a model thought, said and called in one go are items of their own; to a template they are one message.
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
from penstock.server.chat.tools import told_reasoning
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
from penstock.text.tools import CallArguments

Rendered = dict[str, Any]  # a message as templates take it

KINDS: dict[str, tuple[type[Item], str]] = {  # by type: how ids of its own begin
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


def read_items(given: str | Sequence[dict[str, Any]] | None) -> list[Item]:
    """Items without an id get one; a text alone is what a user says."""
    if isinstance(given, str):
        return [MessageItem(new_id("msg"), "user", [InputText(given)])]
    check_count(given or (), MAX_MESSAGES, "input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given or ())]


def _item(given: dict[str, Any], where: str) -> Item:
    type = given.get("type") or "message"
    if not isinstance(type, str) or type not in KINDS:
        raise InvalidRequest(
            f"{where}.type: {type!r} is not supported; it may be {', '.join(KINDS)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    kind, prefix = KINDS[type]
    item = {name: value for name, value in given.items() if value is not None}
    item |= {"type": type, "id": item.get("id") or new_id(prefix)}
    if kind is MessageItem:
        item["content"] = _parts(item.get("content"), item.get("role"), f"{where}.content")
    if kind is FunctionOutputItem:
        item.pop("name", None)  # of the function: the call says it
        _check_parts(item.get("output"), ("input_text",), f"{where}.output")
    return read_object(item, kind, NO_EFFECT, where)


def _parts(content: object, role: object, where: str) -> object:
    if isinstance(content, str):
        return [{"type": "output_text" if role == "assistant" else "input_text", "text": content}]
    _check_parts(content, ("input_text", "output_text"), where)
    return content


def _check_parts(parts: object, types: tuple[str, ...], where: str) -> None:
    """Says which part a model of text cannot take."""
    listed = parts if isinstance(parts, list) else []
    check_count(listed, MAX_PARTS, where)
    for index, part in enumerate(listed):
        if isinstance(part, dict) and part.get("type") not in types:
            raise unsupported(f"{where}[{index}].type", part.get("type"))


# -- reasoning that clients carry ----------------------------------------------------------------------------------


def seal(text: str) -> str:
    """Reasoning for clients that hand back only what is `encrypted_content`. It stands beside the same text in the
    open: there is nothing to hide from whom it was told."""
    return base64.b64encode(text.encode()).decode()


def _unseal(sealed: str) -> str:
    try:
        return base64.b64decode(sealed, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidRequest(
            "the encrypted_content of a reasoning item is none of this server's: leave it out", param="input"
        ) from error


def _thought(item: ReasoningItem) -> str:
    if item.content is None and item.encrypted_content is not None:
        return _unseal(item.encrypted_content)
    return "\n".join(part.text for part in item.content or item.summary)


# -- rendering ----------------------------------------------------------------------------------------------------


def messages_of(instructions: str | None, items: Iterable[Item]) -> list[Rendered]:
    """System messages at the beginning become one: many templates take no more."""
    renderer = _Renderer()
    if instructions:
        renderer.add(MessageItem("", "system", [InputText(instructions)]))
    for item in items:
        renderer.add(item)
    renderer.end_turn()
    if not renderer.messages:
        raise InvalidRequest("input is empty: at least one item is needed", param="input")
    return renderer.messages


class _Renderer:
    def __init__(self) -> None:
        self.messages: list[Rendered] = []
        self._turn: list[Item] = []  # of the assistant: thoughts, then words, then calls
        self._names: dict[str, str] = {}  # of functions that were called, by the id of the call

    def add(self, item: Item) -> None:
        rank = _rank(item)
        if self._turn and (rank is None or not _follows(rank, _rank(self._turn[-1]))):
            self.end_turn()
        match item:
            case FunctionOutputItem():
                self.messages.append(self._result(item))
            case MessageItem() if rank is None:
                self._hear("user" if item.role == "user" else "system", _joined(item.content))
            case _:
                self._turn.append(item)

    def end_turn(self) -> None:
        if self._turn:
            self.messages.append(_said(self._turn))
            self._names |= {item.call_id: item.name for item in self._turn if isinstance(item, FunctionCallItem)}
        self._turn = []

    def _hear(self, role: str, text: str) -> None:
        if role == "system" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _result(self, item: FunctionOutputItem) -> Rendered:
        if item.call_id not in self._names:
            raise InvalidRequest(
                f"a function_call_output answers {item.call_id!r}, and no function_call before it has this call_id",
                param="input",
            )
        output = item.output if isinstance(item.output, str) else _joined(item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "name": self._names[item.call_id], "content": output}


def _rank(item: Item) -> int | None:
    """Where an item stands in an assistant's turn; none for what others say."""
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


def _said(turn: Sequence[Item]) -> Rendered:
    thoughts = [_thought(item) for item in turn if isinstance(item, ReasoningItem)]
    words = [_joined(item.content) for item in turn if isinstance(item, MessageItem)]
    calls = [_called(item) for item in turn if isinstance(item, FunctionCallItem)]
    said: Rendered = {"role": "assistant", "content": words[0] if words else None}
    if thoughts:
        said |= told_reasoning("\n".join(thoughts), said["content"])
    return said | {"tool_calls": calls} if calls else said


def _called(item: FunctionCallItem) -> dict[str, Any]:
    arguments = call_input(item.arguments)
    if arguments is None:
        raise InvalidRequest(
            f"the arguments of the function_call {item.call_id!r} must be a JSON object; got {item.arguments!r:.100}",
            param="input",
            code="invalid_json",
        )
    function = {"name": item.name, "arguments": CallArguments(arguments)}
    return {"id": item.call_id, "type": "function", "function": function}


def _joined(parts: Sequence[InputText | OutputText]) -> str:
    return "\n".join(part.text for part in parts)
