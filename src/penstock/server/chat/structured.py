"""Reads the fields that ask for structured output, in every dialect, and returns the grammar they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import read_json
from penstock.types import Grammar

MAX_SCHEMA = 2**20  # characters
MAX_RULES = 2**15  # characters of a regular expression or a grammar: every one may be a rule
MAX_CHOICES = 4096
MAX_TRIGGERS = 64
MAX_TRIGGER = 1024  # characters
ANY_OBJECT = {"type": "object"}
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Schema = dict[str, Any] | bool


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: Schema | None = None  # none: any object
    strict: bool | None = None  # keywords that cannot be guaranteed are refused


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Is OpenAI's field. `schema` with json_object is llama.cpp's older spelling; the other fields belong to
    structural tags as vLLM and SGLang send them."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """Is vLLM's field: exactly one constraint, and the white space of JSON."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class GrammarTrigger(msgspec.Struct, forbid_unknown_fields=True):
    """Is one of llama.cpp's triggers. Types are numbers there: 0 token, 1 word, 2 pattern, 3 pattern_full."""

    type: int | str
    value: str
    token: int | None = None


class Structured(msgspec.Struct, kw_only=True):
    """Declares the fields of a request that ask for structured output: OpenAI's, vLLM's older and newer ones, SGLang's
    and llama.cpp's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Schema | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    grammar: str | None = None
    grammar_lazy: bool | None = None
    grammar_triggers: list[GrammarTrigger] | None = None


def grammar_of(fields: Structured) -> Grammar | None:
    """Returns the grammar that a field asks for; raises if two fields do."""
    if all(getattr(fields, name) is None for name in Structured.__struct_fields__):
        return None
    given = [(name, grammar) for name, grammar in _ways(fields) if grammar is not None]
    if len(given) > 1:
        names = " and ".join(name for name, _ in given)
        raise InvalidRequest(f"{names} cannot be combined: send one of them", param=given[1][0])
    if not given:
        if fields.grammar_lazy:
            raise InvalidRequest("grammar_lazy needs a grammar: send one", param="grammar_lazy")
        return None
    return _lazy(given[0][1], fields)


def _ways(fields: Structured) -> list[tuple[str, Grammar | None]]:
    """Returns each field that can ask for structured output, and the grammar that it asks for."""
    named = fields.structured_outputs or StructuredOutputs()
    spaced = _spacing(named.whitespace_pattern, named.disable_any_whitespace)
    guided = _spacing(fields.guided_whitespace_pattern, None)
    return [
        ("response_format", _response_format(fields.response_format)),
        _schema("structured_outputs.json", named.json, spaced),
        _rules("structured_outputs.regex", "regex", named.regex),
        _choice("structured_outputs.choice", named.choice),
        _rules("structured_outputs.grammar", "", named.grammar),
        _schema("structured_outputs.json_object", ANY_OBJECT if named.json_object else None, spaced),
        _tags("structured_outputs.structural_tag", named.structural_tag),
        _schema("guided_json", fields.guided_json, guided),
        _rules("guided_regex", "regex", fields.guided_regex),
        _choice("guided_choice", fields.guided_choice),
        _rules("guided_grammar", "", fields.guided_grammar),
        _schema("json_schema", fields.json_schema),
        _rules("regex", "regex", fields.regex),
        _rules("ebnf", "ebnf", fields.ebnf),
        _tags("structural_tag", fields.structural_tag),
        _rules("grammar", "gbnf", fields.grammar),
    ]


def json_grammar(
    schema: Schema | str,
    param: str = "json_schema",
    *,
    strict: bool = False,
    spacing: dict[str, Any] | None = None,
) -> Grammar:
    """Returns the grammar of a JSON schema. A keyword of a `strict` one that cannot be guaranteed is an error.
    `spacing` are the library's options for white space."""
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if schema is False:
        raise InvalidRequest(f"{param} is false, which no answer can match: send a schema", param=param)
    given = {} if schema is True else schema
    text = json.dumps({**given, "x-guidance": spacing} if spacing else given)
    _check_size(param, len(text), MAX_SCHEMA)
    return Grammar("json", text, strict=strict, param=param)


def rules_grammar(kind: str, text: str, param: str) -> Grammar:
    """Returns a grammar of rules. Without a kind, the notation decides between Lark and GBNF."""
    _check_size(param, len(text), MAX_RULES)
    return Grammar(kind, text, param=param) if kind else Grammar.of_rules(text, param)


def choice_grammar(choices: list[str], param: str) -> Grammar:
    if not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{param} takes 1 to {MAX_CHOICES} texts; got {len(choices)}", param=param)
    grammar = Grammar.of_choices(choices, param)
    _check_size(param, len(grammar.text), MAX_SCHEMA)
    return grammar


def tags_grammar(tags: dict[str, Any] | str, param: str) -> Grammar:
    """Returns the grammar of a structural tag: free text in which marked parts match schemas."""
    given = read_json(tags, param, param) if isinstance(tags, str) else tags
    if not isinstance(given, dict):
        raise InvalidRequest(f"{param} must be an object; got {str(tags)[:100]!r}", param=param)
    text = json.dumps(given)
    _check_size(param, len(text), MAX_SCHEMA)
    return Grammar("structural_tag", text, param=param)


def lazy_grammar(grammar: Grammar, triggers: Sequence[GrammarTrigger], param: str = "grammar_triggers") -> Grammar:
    """Returns the grammar as it applies from the first of llama.cpp's triggers on."""
    if not 0 < len(triggers) <= MAX_TRIGGERS:
        raise InvalidRequest(f"{param} takes 1 to {MAX_TRIGGERS} triggers; got {len(triggers)}", param=param)
    texts, patterns, tokens = list[str](), list[str](), list[int]()
    for trigger in triggers:
        _check_size(param, len(trigger.value), MAX_TRIGGER)
        match trigger.type:
            case 0 | "token":
                tokens.append(_token(trigger, param))
            case 1 | "word":
                texts.append(trigger.value)
            case 2 | "pattern":
                patterns.append(trigger.value)
            case 3 | "pattern_full":
                patterns.append(f"^{trigger.value.removeprefix('^').removesuffix('$')}$")
            case other:
                raise InvalidRequest(
                    f"{param}: a type is token, word, pattern or pattern_full, or 0 to 3; got {other!r}", param=param
                )
    if "" in texts or "" in patterns:
        raise InvalidRequest(f"{param}: a trigger's value must not be empty", param=param)
    return grammar._replace(triggers=tuple(texts), trigger_patterns=tuple(patterns), trigger_tokens=tuple(tokens))


def _token(trigger: GrammarTrigger, param: str) -> int:
    if trigger.token is None or trigger.token < 0:
        raise InvalidRequest(f"{param}: a trigger of type token needs a token id in 'token'", param=param)
    return trigger.token


def _lazy(grammar: Grammar, fields: Structured) -> Grammar:
    if not fields.grammar_lazy:
        return grammar
    return lazy_grammar(grammar, fields.grammar_triggers or ())


def _response_format(fields: ResponseFormat | None) -> Grammar | None:
    if fields is None or fields.type == "text":
        return None
    if fields.type == "structural_tag":
        return tags_grammar(_tag_fields(fields), "response_format")
    if fields.type == "json_object":
        schema = ANY_OBJECT if fields.schema is None else fields.schema
        return json_grammar(schema, "response_format.schema")
    if fields.json_schema is None:
        if fields.schema is not None:
            return json_grammar(fields.schema, "response_format.schema")
        raise InvalidRequest(
            "the field 'response_format.json_schema' is missing",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    named = fields.json_schema
    schema = ANY_OBJECT if named.schema is None else named.schema
    return json_grammar(schema, "response_format.json_schema.schema", strict=bool(named.strict))


def _tag_fields(fields: ResponseFormat) -> dict[str, Any]:
    given = {"structures": fields.structures, "triggers": fields.triggers, "format": fields.format}
    return {"type": "structural_tag"} | {name: value for name, value in given.items() if value is not None}


def _schema(
    name: str, schema: Schema | str | None, spacing: dict[str, Any] | None = None
) -> tuple[str, Grammar | None]:
    return name, None if schema is None else json_grammar(schema, name, spacing=spacing)


def _rules(name: str, kind: str, text: str | None) -> tuple[str, Grammar | None]:
    return name, rules_grammar(kind, text, name) if text else None


def _choice(name: str, choices: list[str] | None) -> tuple[str, Grammar | None]:
    return name, None if choices is None else choice_grammar(choices, name)


def _tags(name: str, tags: dict[str, Any] | str | None) -> tuple[str, Grammar | None]:
    return name, None if tags is None else tags_grammar(tags, name)


def _spacing(pattern: str | None, compact: bool | None) -> dict[str, Any] | None:
    if pattern is not None:
        _check_size("whitespace_pattern", len(pattern), MAX_TRIGGER)
        return {"whitespace_pattern": pattern}
    return COMPACT if compact else None


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
