"""Describes the structure that an answer must have."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest


class Thinking(NamedTuple):
    """Gives the token ids that open and close a model's thinking, and how many tokens that may take."""

    closes: tuple[int, ...]
    opens: int = -1  # -1: the prompt has opened the thinking; else the answer may begin with this token
    budget: int | None = None  # tokens, after which the thinking is closed


class Grammar(NamedTuple):
    """Describes what an answer must match. Thinking, where the model may think, comes before it and is free. A grammar
    with triggers is lazy: the answer is free text until one of them was generated, and matches from there on."""

    kind: str  # json, rewritten_json, regex, lark, gbnf, ebnf, structural_tag, or free for any text at all
    text: str
    thinking: Thinking | None = None
    triggers: tuple[str, ...] = ()  # texts, each of which begins what must match
    trigger_patterns: tuple[str, ...] = ()  # regular expressions: what must match begins with their first group
    trigger_tokens: tuple[int, ...] = ()
    strict: bool = False  # a keyword of a schema that cannot be guaranteed is an error
    param: str = ""  # the request's field that it came in, which errors and reports name

    @classmethod
    def of_rules(cls, text: str, param: str = "") -> Grammar:
        """Returns a grammar in GBNF or Lark, recognized by its notation."""
        return cls("gbnf" if re.search(r"(?m)^\s*[\w-]+\s*::=", text) else "lark", text, param=param)

    @classmethod
    def of_choices(cls, choices: Sequence[str], param: str = "") -> Grammar:
        """Returns a grammar that one of the texts matches; raises if none of them has a character."""
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices if choice)
        if not texts:
            where = param or "choice"
            raise InvalidRequest(f"{where} has only empty texts: send one with characters", param=where)
        return cls("lark", f"start: CHOICE{'?' if '' in choices else ''}\nCHOICE: {texts}", param=param)

    @property
    def lazy(self) -> bool:
        return bool(self.triggers or self.trigger_patterns or self.trigger_tokens)


class StructuredOutputsParams(NamedTuple):
    """Asks for structured output, with vLLM's names. Exactly one field may be set."""

    json: str | dict[str, Any] | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # in Lark's syntax, or GBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    def to_grammar(self) -> Grammar:
        """Returns the grammar that this asks for."""
        given = [name for name, value in zip(self._fields, self, strict=True) if value is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs takes exactly one of {', '.join(self._fields)}; got {', '.join(given) or 'none'}",
                param="structured_outputs",
            )
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return Grammar.of_rules(self.grammar)
        if self.choice is not None:
            return Grammar.of_choices(self.choice)
        if self.structural_tag is not None:
            return Grammar("structural_tag", _as_json(self.structural_tag))
        return Grammar("json", _as_json({"type": "object"} if self.json is None else self.json))


def _as_json(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)
