"""Templates in Ollama's notation, as far as they tell of one turn: {{ .System }}, {{ .Prompt }}, {{ .Response }}, and
{{ if }}, {{ else }}, {{ end }} around them. A chat is its turns one after the other, and the last ends where the
response would begin.

A Jinja template is a program; this one costs no more than what it writes, so that a request may bring it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import MAX_CHARACTERS
from penstock.text.tools import Message

MAX_SOURCE = 2**16  # characters
MAX_ACTIONS = 64

PARTS = {"system": "System", "user": "Prompt", "assistant": "Response"}  # by role, in the order of a turn

_ACTION = re.compile(r"\{\{(?:-(?=\s))?(.*?)(?:(?<=\s)-)?\}\}", re.DOTALL)
_TRIMMED = re.compile(r"\s*(\{\{-\s)|(\s-\}\})\s*")
_CONDITION = re.compile(rf"(?:(and|or|not)\s+)?((?:\.(?:{'|'.join(PARTS.values())})\b\s*)+)")

Turn = dict[str, str]  # by part


class TurnTemplate(ChatTemplate):
    def __init__(self, source: str) -> None:
        super().__init__({"default": source}, {})
        self._turns = Turns(source)

    def _template(self, _: str) -> Turns:
        return self._turns


class Field(NamedTuple):
    part: str


class Choice(NamedTuple):
    """`then` where the parts are there, else `other`."""

    how: str  # all of them (and), one of them (or), the one not (not)
    parts: Sequence[str]
    then: list[Node]
    other: list[Node]

    def taken(self, turn: Turn) -> list[Node]:
        there = [bool(turn.get(part)) for part in self.parts]
        holds = not there[0] if self.how == "not" else any(there) if self.how == "or" else all(there)
        return self.then if holds else self.other


Node = str | Field | Choice


class Turns:
    """A template, read."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise _wrong(f"it has {len(source)} characters; at most {MAX_SOURCE} are taken")
        pieces = _ACTION.split(_TRIMMED.sub(r"\1\2", source))  # text, action, text, action, ... text
        if len(pieces) // 2 > MAX_ACTIONS:
            raise _wrong(f"it has {len(pieces) // 2} actions; at most {MAX_ACTIONS} are taken")
        self._parts: set[str] = set()
        self._nodes = self._read(pieces)
        if "Prompt" not in self._parts:
            raise _wrong("what a user says has no place in it: {{ .Prompt }}")
        if "Response" not in self._parts:
            self._nodes.append(Field("Response"))

    def render(self, given: Mapping[str, Any]) -> str:
        turns = list(split(given["messages"]))
        if "System" not in self._parts and any("System" in turn for turn in turns):
            raise InvalidRequest("the model's template has no place for a system message", param="messages")
        begun = given["add_generation_prompt"]
        if begun and (not turns or "Response" in turns[-1]):
            turns.append({})
        pieces: list[str] = []
        for turn in turns:
            write(self._nodes, turn, pieces, begun=begun and turn is turns[-1])
        if sum(map(len, pieces)) > MAX_CHARACTERS:
            raise ContextTooLong(f"the rendered chat is longer than {MAX_CHARACTERS} characters", param="messages")
        return "".join(pieces)

    def _read(self, pieces: list[str]) -> list[Node]:
        place: list[Node] = []
        around: list[tuple[list[Node], Choice]] = []  # what stands around the place, innermost last
        for text, action in zip(pieces[::2], [*pieces[1::2], None], strict=True):
            place += [text] if text else []
            words = "" if action is None or action.strip().startswith("/*") else action.strip()
            if words == "end" and around:
                place = around.pop()[0]
            elif words.startswith("else") and around and place is around[-1][1].then:
                outside, choice = around.pop()
                place = choice.other
                if words != "else":
                    place.append(choice := self._choice(words.removeprefix("else").strip()))
                    place = choice.then
                around.append((outside, choice))
            elif words.startswith("if "):
                place.append(choice := self._choice(words))
                around.append((place, choice))
                place = choice.then
            elif words:
                place.append(self._field(words))
        if around:
            raise _wrong("an {{ if }} has no {{ end }}")
        return place

    def _field(self, words: str) -> Field:
        if words.removeprefix(".") not in PARTS.values() or not words.startswith("."):
            raise _wrong(f"{{{{ {words[:80]} }}}} is not understood here")
        self._parts.add(words[1:])
        return Field(words[1:])

    def _choice(self, words: str) -> Choice:
        found = _CONDITION.fullmatch(words.removeprefix("if ").strip())
        if found is None or (found[1] == "not") > (found[2].count(".") == 1):
            raise _wrong(f"{{{{ {words[:80]} }}}} is not understood here")
        return Choice(found[1] or "and", found[2].replace(".", "").split(), [], [])


def write(nodes: list[Node], turn: Turn, pieces: list[str], *, begun: bool) -> bool:
    """Adds a turn's text; of one that has `begun`, up to its response: then it returns True."""
    for node in nodes:
        if isinstance(node, str):
            pieces.append(node)
        elif isinstance(node, Field):
            pieces.append(turn.get(node.part, ""))
            if begun and node.part == "Response":
                return True
        elif write(node.taken(turn), turn, pieces, begun=begun):
            return True
    return False


def split(messages: Sequence[Message]) -> Iterator[Turn]:
    """The turns of a chat: each has a system message, a prompt and a response at most, in this order."""
    turn: Turn = {}
    for message in messages:
        part, content = PARTS[message["role"]], message["content"]
        later = list(PARTS.values())[list(PARTS).index(message["role"]) + 1 :]
        if any(each in turn for each in later):
            yield turn
            turn = {}
        turn[part] = f"{turn[part]}\n\n{content}" if part in turn else content
    if turn:
        yield turn


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"template: {what}; templates are of .System, .Prompt and .Response, with if, else and end", param="template"
    )
