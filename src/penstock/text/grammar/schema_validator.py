"""Validates JSON values against a schema in schema_normal.py's normal form.

jsonschema does the work, but llguidance matches the regular expressions, because Python could take forever on a
client's pattern.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher

Schema = dict[str, Any] | bool


def is_valid(value: Any, schema: Schema, root: Schema) -> bool:
    """Returns True if a value matches a schema that uses the definitions of `root`."""
    return first_problem(value, _within(schema, root)) is None


def first_problem(value: Any, schema: Schema) -> str | None:
    """Returns the path of the first keyword that a value fails; None if it is valid."""
    for error in _validator(schema).iter_errors(value):
        return ".".join(str(each) for each in error.absolute_schema_path)
    return None


def matches(pattern: str, text: str) -> bool:
    """Returns True if a pattern is found in a text, or if the pattern cannot be used."""
    matcher = _search(pattern)
    if matcher is None:
        return True
    matcher, tokens = matcher.deep_copy(), list(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


_NEGATED_SET = re.compile(r"(?<!\\)((?:\\\\)*)(\[\^(?:[^\]\\]|\\.)+\])", re.DOTALL)


@lru_cache(maxsize=1024)
def mended(pattern: str) -> str:
    """Extends sets that exclude a quotation mark or a backslash to exclude control characters too. Otherwise the
    library would allow both in escaped form, as JSON strings must.
    """
    return _NEGATED_SET.sub(lambda found: found[1] + _without_controls(found[2]), pattern)


def _without_controls(negated: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept = all(re.fullmatch(negated, character) for character in '"\\')
    except re.error:
        return negated
    return negated if kept else f"[^\\x00-\\x1f{negated[2:]}"


@lru_cache(maxsize=1024)
def usable(pattern: str) -> bool:
    return _search(pattern) is not None


@lru_cache(maxsize=256)
def _search(pattern: str) -> LLMatcher | None:
    """Returns a matcher of JSON strings that contain the pattern; None if the library does not support it."""
    from llguidance import LLMatcher, LLTokenizer

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": mended(pattern)})
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    return None if matcher.is_error() else matcher


def _within(schema: Schema, root: Schema) -> Schema:
    if isinstance(schema, bool) or isinstance(root, bool) or "$defs" not in root:
        return schema
    return {**schema, "$defs": root["$defs"]}


def _validator(schema: Schema) -> Any:
    return _validator_class()(schema)


@lru_cache(maxsize=1)
def _validator_class() -> Any:
    from jsonschema import Draft202012Validator, validators
    from jsonschema.exceptions import ValidationError

    def pattern(_: Any, wanted: str, value: Any, __: Any) -> Iterator[Any]:
        if isinstance(value, str) and not matches(wanted, value):
            yield ValidationError(f"does not match {wanted!r}")

    def pattern_properties(validator: Any, patterns: dict[str, Any], value: Any, _: Any) -> Iterator[Any]:
        for key, each in value.items() if isinstance(value, dict) else ():
            for wanted, schema in patterns.items():
                if matches(wanted, key):
                    yield from validator.descend(each, schema, path=key, schema_path=wanted)

    def additional_properties(validator: Any, schema: Any, value: Any, parent: dict[str, Any]) -> Iterator[Any]:
        listed, patterns = parent.get("properties", {}), parent.get("patternProperties", {})
        for key, each in value.items() if isinstance(value, dict) else ():
            if key not in listed and not any(matches(wanted, key) for wanted in patterns):
                yield from validator.descend(each, schema, path=key)

    ours = {"pattern": pattern, "patternProperties": pattern_properties, "additionalProperties": additional_properties}
    return validators.extend(Draft202012Validator, ours)
