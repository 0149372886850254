"""Templates in Ollama's notation, as far as they tell of one turn: {{ .System }}, {{ .Prompt }}, {{ .Response }}, and
{{ if }}, {{ else }}, {{ end }} around them. A chat is its turns one after the other, and the last ends where the
response would begin.

A Jinja template is a program; this one costs no more than what it writes, so that a request may bring it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import MAX_CHARACTERS
from penstock.text.tools import Message

MAX_SOURCE = 2**16  # characters
MAX_ACTIONS = 64

PARTS = {"system": "System", "user": "Prompt", "assistant": "Response"}  # by role, in the order of a turn

Turn = dict[str, str]  # by part


class TurnTemplate(ChatTemplate):
    def __init__(self, source: str) -> None:
        self._turns = Turns(source)
        super().__init__({"default": source}, {})

    def _template(self, _: str) -> Turns:
        return self._turns


class Field(NamedTuple):
    part: str


class Choice(NamedTuple):
    """`then` where the parts are there, else `other`."""

    how: str  # all of them (and), one of them (or), not the first (not)
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
        self._nodes = read(source)
        self._parts = set(parts_of(self._nodes))
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


# -- reading ------------------------------------------------------------------------------------------------------


def read(source: str) -> list[Node]:
    place: list[Node] = []
    around: list[tuple[list[Node], Choice]] = []  # what stands around the place, innermost last
    for action, text in cut(source):
        match action.split():
            case ["end"] if around:
                place = around.pop()[0]
            case ["else", *condition] if around and place is around[-1][1].then:
                outside, choice = around.pop()
                place = choice.other
                if condition:
                    place.append(choice := choice_of(condition))
                    place = choice.then
                around.append((outside, choice))
            case ["if", *_] as condition:
                place.append(choice := choice_of(condition))
                around.append((place, choice))
                place = choice.then
            case [word]:
                place.append(Field(part_of(word)))
            case [*words] if words:
                raise _wrong(f"{{{{ {action[:80]} }}}} is not understood here")
        place += [text] if text else []
    if around:
        raise _wrong("an {{ if }} has no {{ end }}")
    return place


def cut(source: str) -> Iterator[tuple[str, str]]:
    """Actions, each with the text after it; the text before the first comes with an empty one, and so do comments."""
    if len(source) > MAX_SOURCE:
        raise _wrong(f"it has {len(source)} characters; at most {MAX_SOURCE} are taken")
    text, *pieces = source.split("{{")
    if len(pieces) > MAX_ACTIONS:
        raise _wrong(f"it has {len(pieces)} actions; at most {MAX_ACTIONS} are taken")
    action = ""
    for piece in pieces:
        following, closed, rest = piece.partition("}}")
        if not closed:
            raise _wrong("a {{ has no }}")
        yield action, text.rstrip() if following[:2] in ("- ", "-\n") else text
        text = rest.lstrip() if following[-2:] in (" -", "\n-") else rest
        action = following.strip("- \n")
        action = "" if action.startswith("/*") else action
    yield action, text


def choice_of(condition: Sequence[str]) -> Choice:
    match condition:
        case ["if", "and" | "or" as how, first, *others]:
            return Choice(how, [part_of(each) for each in (first, *others)], [], [])
        case ["if", "not", one]:
            return Choice("not", [part_of(one)], [], [])
        case ["if", one]:
            return Choice("and", [part_of(one)], [], [])
    raise _wrong(f"{{{{ {' '.join(condition)[:80]} }}}} is not understood here")


def part_of(word: str) -> str:
    part = word.removeprefix(".")
    if part == word or part not in PARTS.values():
        raise _wrong(f"{{{{ {word[:80]} }}}} is not understood here")
    return part


def parts_of(nodes: list[Node]) -> Iterator[str]:
    """Those that are written."""
    for node in nodes:
        if isinstance(node, Field):
            yield node.part
        elif isinstance(node, Choice):
            yield from parts_of(node.then)
            yield from parts_of(node.other)


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"template: {what}; templates are of .System, .Prompt and .Response, with if, else and end", param="template"
    )


# -- writing ------------------------------------------------------------------------------------------------------


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
    said: dict[str, list[str]] = {}
    order = list(PARTS.values())
    for message in messages:
        part = PARTS[message["role"]]
        if any(later in said for later in order[order.index(part) + 1 :]):
            yield _joined(said)
            said = {}
        said.setdefault(part, []).append(message["content"])
    if said:
        yield _joined(said)


def _joined(said: Mapping[str, Sequence[str]]) -> Turn:
    return {part: "\n\n".join(texts) for part, texts in said.items()}
