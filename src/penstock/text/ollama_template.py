"""Renders the subset of Ollama's Go templates that describes one turn of a chat.

Supported are {{ .System }}, {{ .Prompt }} and {{ .Response }}, with {{ if }}, {{ else }} and {{ end }}. A chat is
rendered turn by turn, and the last turn ends where the response would begin.

A Jinja template is a program. A template of this kind costs no more than its output, so requests may bring one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates import MAX_CHARACTERS
from penstock.text.chat import ChatTemplate
from penstock.text.tools import MessageDict

MAX_SOURCE = 2**16  # characters
MAX_ACTIONS = 64

FIELDS = {"system": "System", "user": "Prompt", "assistant": "Response"}  # role -> field, in the order of a turn

TurnFields = dict[str, str]  # field -> text


class OllamaTemplate(ChatTemplate):
    """Renders chats with a template in Ollama's notation."""

    def __init__(self, source: str) -> None:
        self._renderer = TurnRenderer(source)
        super().__init__({"default": source}, {})

    def _template(self, _: str) -> TurnRenderer:
        return self._renderer


class Placeholder(NamedTuple):
    """Stands for a field of the turn, such as {{ .Prompt }}."""

    field: str


class Conditional(NamedTuple):
    """Represents an {{ if }} with its branches."""

    operator: str  # and: all fields have text; or: one of them; not: the first has none
    fields: Sequence[str]
    then: list[TemplateNode]
    other: list[TemplateNode]

    def branch(self, turn: TurnFields) -> list[TemplateNode]:
        present = [bool(turn.get(field)) for field in self.fields]
        holds = not present[0] if self.operator == "not" else any(present) if self.operator == "or" else all(present)
        return self.then if holds else self.other


TemplateNode = str | Placeholder | Conditional


class TurnRenderer:
    """Renders the turns of a chat with a parsed template."""

    def __init__(self, source: str) -> None:
        self._nodes = parse(source)
        self._fields = set(fields_of(self._nodes))
        if "Prompt" not in self._fields:
            raise _invalid("it has no place for the user's message: {{ .Prompt }}")
        if "Response" not in self._fields:
            self._nodes.append(Placeholder("Response"))

    def render(self, given: Mapping[str, Any]) -> str:
        turns = list(split_turns(given["messages"]))
        if "System" not in self._fields and any("System" in turn for turn in turns):
            raise InvalidRequest(
                "the model's template does not support a system message: leave it out", param="messages"
            )
        open_ended = given["add_generation_prompt"]
        if open_ended and (not turns or "Response" in turns[-1]):
            turns.append({})
        pieces: list[str] = []
        for turn in turns:
            write(self._nodes, turn, pieces, open_ended=open_ended and turn is turns[-1])
        if sum(map(len, pieces)) > MAX_CHARACTERS:
            raise ContextTooLong(f"the rendered chat is longer than {MAX_CHARACTERS} characters", param="messages")
        return "".join(pieces)


# ---- parsing ----


def parse(source: str) -> list[TemplateNode]:
    nodes: list[TemplateNode] = []  # the innermost block's
    enclosing: list[tuple[list[TemplateNode], Conditional]] = []  # innermost last
    for action, text in split_actions(source):
        match action.split():
            case ["end"] if enclosing:
                nodes = enclosing.pop()[0]
            case ["else", *condition] if enclosing and nodes is enclosing[-1][1].then:
                outer, conditional = enclosing.pop()
                nodes = conditional.other
                if condition:
                    nodes.append(conditional := parse_condition(condition))
                    nodes = conditional.then
                enclosing.append((outer, conditional))
            case ["if", *_] as condition:
                nodes.append(conditional := parse_condition(condition))
                enclosing.append((nodes, conditional))
                nodes = conditional.then
            case [word]:
                nodes.append(Placeholder(parse_field(word)))
            case [*words] if words:
                raise _invalid(f"{{{{ {action[:80]} }}}} is not supported")
        nodes += [text] if text else []
    if enclosing:
        raise _invalid("an {{ if }} has no {{ end }}")
    return nodes


def split_actions(source: str) -> Iterator[tuple[str, str]]:
    """Yields each action with the text after it. Leading text, and text after a comment, have an empty action."""
    if len(source) > MAX_SOURCE:
        raise _invalid(f"it has {len(source)} characters; the limit is {MAX_SOURCE}")
    text, *pieces = source.split("{{")
    if len(pieces) > MAX_ACTIONS:
        raise _invalid(f"it has {len(pieces)} actions; the limit is {MAX_ACTIONS}")
    action = ""
    for piece in pieces:
        following, closed, rest = piece.partition("}}")
        if not closed:
            raise _invalid("a {{ has no }}")
        yield action, text.rstrip() if following[:2] in ("- ", "-\n") else text
        text = rest.lstrip() if following[-2:] in (" -", "\n-") else rest
        action = following.strip("- \n")
        action = "" if action.startswith("/*") else action
    yield action, text


def parse_condition(condition: Sequence[str]) -> Conditional:
    match condition:
        case ["if", "and" | "or" as operator, first, *others]:
            return Conditional(operator, [parse_field(each) for each in (first, *others)], [], [])
        case ["if", "not", one]:
            return Conditional("not", [parse_field(one)], [], [])
        case ["if", one]:
            return Conditional("and", [parse_field(one)], [], [])
    raise _invalid(f"{{{{ {' '.join(condition)[:80]} }}}} is not supported")


def parse_field(word: str) -> str:
    field = word.removeprefix(".")
    if field == word or field not in FIELDS.values():
        raise _invalid(f"{{{{ {word[:80]} }}}} is not supported")
    return field


def fields_of(nodes: list[TemplateNode]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, Placeholder):
            yield node.field
        elif isinstance(node, Conditional):
            yield from fields_of(node.then)
            yield from fields_of(node.other)


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"template: {problem}; use .System, .Prompt and .Response, with if, else and end", param="template"
    )


# ---- rendering ----


def write(nodes: list[TemplateNode], turn: TurnFields, pieces: list[str], *, open_ended: bool) -> bool:
    """Renders a turn into `pieces`. An open-ended turn stops at its response and returns True."""
    for node in nodes:
        if isinstance(node, str):
            pieces.append(node)
        elif isinstance(node, Placeholder):
            pieces.append(turn.get(node.field, ""))
            if open_ended and node.field == "Response":
                return True
        elif write(node.branch(turn), turn, pieces, open_ended=open_ended):
            return True
    return False


def split_turns(messages: Sequence[MessageDict]) -> Iterator[TurnFields]:
    """Groups messages into turns: at most a system message, a prompt and a response, in this order."""
    texts: dict[str, list[str]] = {}
    order = list(FIELDS.values())
    for message in messages:
        field = FIELDS[message["role"]]
        if any(later in texts for later in order[order.index(field) + 1 :]):
            yield _join_texts(texts)
            texts = {}
        texts.setdefault(field, []).append(message["content"])
    if texts:
        yield _join_texts(texts)


def _join_texts(texts: Mapping[str, Sequence[str]]) -> TurnFields:
    return {field: "\n\n".join(several) for field, several in texts.items()}
