"""Reads the fields that ask for structured output, in every dialect, and returns the grammar they mean."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.types import Grammar

MAX_SCHEMA = 2**20  # characters
MAX_RULES = 2**15  # characters of a regular expression or a Lark grammar: every one may be a rule
MAX_CHOICES = 4096
ANY_OBJECT = {"type": "object"}

Schema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: Schema | None = None  # none: any object
    strict: bool | None = None  # without effect: answers always follow the schema


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Exactly one field may be set."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Structured(msgspec.Struct, kw_only=True):
    """Declares the fields of a request that ask for structured output: OpenAI's, and vLLM's older and newer ones."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def grammar_of(fields: Structured) -> Grammar | None:
    """Returns what answers must match, whichever field asks for it; raises if two do."""
    named = fields.structured_outputs or StructuredOutputs()
    ways: list[tuple[str, Grammar | None]] = [
        ("response_format", _response_format(fields.response_format)),
        *_ways("structured_outputs.", named.json, named.regex, named.choice, named.grammar),
        ("structured_outputs.json_object", json_grammar(ANY_OBJECT) if named.json_object else None),
        *_ways("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar),
    ]
    given = [(name, grammar) for name, grammar in ways if grammar is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidRequest(f"{names} cannot be combined: send one of them", param=given[1][0])
    return given[0][1] if given else None


def json_grammar(schema: Schema | str, param: str = "json_schema") -> Grammar:
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if schema is False:
        raise InvalidRequest(f"{param} is false, which no answer can match: send a schema", param=param)
    text = json.dumps({} if schema is True else schema)
    _check_size(param, len(text), MAX_SCHEMA)
    return Grammar("json", text)


def _rules(kind: str, text: str, param: str) -> Grammar:
    _check_size(param, len(text), MAX_RULES)
    return Grammar(kind, text)


def choice_grammar(choices: list[str], param: str) -> Grammar:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{param} takes 1 to {MAX_CHOICES} texts; got {len(choices)}", param=param)
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices if choice)
    if not texts:
        raise InvalidRequest(f"{param} has only empty texts: send one with characters", param=param)
    _check_size(param, len(texts), MAX_SCHEMA)
    return Grammar("lark", f"start: CHOICE{'?' if '' in choices else ''}\nCHOICE: {texts}")


def _response_format(fields: ResponseFormat | None) -> Grammar | None:
    if fields is None or fields.type == "text":
        return None
    if fields.type == "json_object":
        return json_grammar(ANY_OBJECT)
    if fields.json_schema is None:
        raise InvalidRequest(
            "the field 'response_format.json_schema' is missing",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    schema = fields.json_schema.schema
    return json_grammar(ANY_OBJECT if schema is None else schema)


def _ways(
    prefix: str, schema: Schema | str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[tuple[str, Grammar | None]]:
    return [
        (f"{prefix}json", None if schema is None else json_grammar(schema, f"{prefix}json")),
        (f"{prefix}regex", None if regex is None else _rules("regex", regex, f"{prefix}regex")),
        (f"{prefix}choice", None if choice is None else choice_grammar(choice, f"{prefix}choice")),
        (f"{prefix}grammar", None if lark is None else _rules("lark", lark, f"{prefix}grammar")),
    ]


def _parsed(schema: str, param: str) -> Schema:
    given = read_json(schema, param, param)
    if not isinstance(given, dict | bool):
        raise InvalidRequest(
            f"{param} must be a JSON schema, which is an object, true or false; got {schema[:100]!r}", param=param
        )
    return given


def _check_size(param: str, size: int, most: int) -> None:
    if size > most:
        raise InvalidRequest(f"{param} has {size} characters; the limit is {most}: shorten it", param=param)
