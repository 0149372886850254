"""Rewritten schemas accept what the originals accept and nothing else, or say which keyword they do not enforce."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidGrammar
from penstock.text.grammar.json_schema import rewrite
from penstock.text.grammar.schema_negation import NotExpressible, negate
from penstock.text.grammar.schema_normal import normalize
from penstock.text.grammar.schema_validator import first_problem, matches
from tests.examples import examples

LEAF = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TREE: dict[str, Any] = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}

CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schema, valid and invalid values
    "true": (True, [1, {"a": []}], []),
    "pointer": ({"$ref": "#/x/1", "x": [0, {"type": "null"}]}, [None], [0]),
    "escaped pointer": ({"$ref": "#/$defs/a~1b%25c", "$defs": {"a/b%c": {"const": 1}}}, [1], [2]),
    "root": ({"type": "array", "items": {"$ref": "#"}}, [[[], []]], [[1]]),
    "id": ({"$id": "http://a/b", "$defs": {"x": {"$id": "c", "const": 1}}, "$ref": "http://a/c"}, [1], [2]),
    "relative": ({"$id": "http://a/b/", "$ref": "c#/d", "$defs": {"x": {"$id": "c", "d": {"const": 1}}}}, [1], [2]),
    "anchor": ({"$ref": "#there", "$defs": {"x": {"$anchor": "there", "const": 1}}}, [1], [2]),
    "beside a reference": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, [3], [2, "x"]),
    "beside it in draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#/x", "minimum": 3}}}
        | {"x": {"type": "integer"}, "required": ["a"]},
        [{"a": 1}],
        [{"a": "x"}],
    ),
    "recursion": (TREE, [[], [[], [[]]]], [[1], 1]),
    "items of draft 7": (
        {"items": [{"const": 1}, {"const": 2}], "additionalItems": False},
        [[1, 2], [1]],
        [[2], [1, 2, 3]],
    ),
    "exclusive of draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    "inclusive of draft 4": ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, [3], [2]),
    "enum": ({"enum": [1, 2, 3, "x", None], "minimum": 2, "not": {"type": "null"}}, [2, 3, "x"], [1, None]),
    "const": ({"const": {"a": 1}, "required": ["a"]}, [{"a": 1}], [{"a": 2}, {}]),
    "not type": ({"not": {"type": ["object", "array"]}}, [1, "x", None], [{}, []]),
    "not enum": (
        {"type": ["string", "integer"], "not": {"enum": ["a", "ab", 3]}},
        ["", "b", "abc", 2, 4],
        ["a", "ab", 3],
    ),
    "not required": ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 1}]),
    "not a range": ({"type": "number", "not": {"minimum": 2, "maximum": 5}}, [1, 1.9, 5.5], [2, 3, 5]),
    "not a length": ({"type": "string", "not": {"minLength": 2}}, ["", "a"], ["ab"]),
    "not not": ({"not": {"not": {"type": "string"}}}, ["a"], [1]),
    "not a property": ({"type": "object", "not": {"properties": {"a": {"const": 1}}}}, [{"a": 2}], [{"a": 1}, {}]),
    "not items": ({"type": "array", "not": {"items": {"type": "number"}}}, [["x"], [1, "x"]], [[], [1]]),
    "if": (
        {"type": "object", "if": {"properties": {"k": {"const": "n"}}, "required": ["k"]}}
        | {"then": {"required": ["n"]}, "else": {"required": ["o"]}, "properties": {"k": {"enum": ["n", "m"]}}},
        [{"k": "n", "n": 1}, {"k": "m", "o": 1}, {"o": 1}],
        [{"k": "n"}, {"k": "m"}, {}],
    ),
    "if alone": ({"if": {"type": "string"}, "else": {"const": 1}}, ["x", 1], [2]),
    "one of types": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None]),
    "one of kinds": (
        {"oneOf": [{"properties": {"k": {"const": kind}, kind: {}}, "required": ["k", kind]} for kind in "xy"]}
        | {"type": "object"},
        [{"k": "x", "x": 1}],
        [{"k": "x", "y": 1}, {"k": "z"}],
    ),
    "one of required": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]} | AB,
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "one of overlapping": ({"type": "integer", "oneOf": [{"minimum": 2}, {"maximum": 4}]}, [1, 5], [2, 3, 4]),
    "all of": ({"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, "x"]),
    "dependencies": (
        {"type": "object", "dependencies": {"a": ["b"]}} | AB,
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "dependent schemas": (
        {"type": "object", "dependentSchemas": {"a": {"required": ["c"]}}},
        [{}, {"c": 1}, {"a": 1, "c": 1}],
        [{"a": 1}],
    ),
    "names by pattern": ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{}, {"ab": 1}], [{"b": 1}]),
    "names by enum": ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1}], [{"c": 1}]),
    "names by length": ({"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
    "no names": ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    "patterns": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
        [{"ab": 1}, {}],
        [{"ab": "x"}, {"b": 1}],
    ),
    "at least one": (
        {"type": "object", "minProperties": 1, "additionalProperties": True} | AB,
        [{"a": 1}, {"b": 1}, {"c": 1}],
        [{}],
    ),
    "at most one": (
        {"type": "object", "maxProperties": 1, "additionalProperties": False} | AB,
        [{}, {"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}],
    ),
    "as many as listed": (
        {"maxProperties": 2, "additionalProperties": False, "type": "object"} | AB,
        [{"a": 1, "b": 1}],
        [1],
    ),
    "contains": ({"type": "array", "contains": {"const": 7}}, [[7], [1, 7], [1, 2, 7, "x"]], [[], [1]]),
    "contains none": ({"type": "array", "contains": {"const": 7}, "minContains": 0}, [[], [1]], [1]),
    "unique alone": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False} | AB, [{"a": 1}], [{"c": 1}]),
    "unknown keywords": ({"type": "integer", "nullable": True, "x-order": 3, "discriminator": {}}, [1], [None]),
    "quotes": ({"type": "string", "pattern": '^[^"\\\\]+$'}, ["ab"], ['a"b', "a\\b"]),
    "draft 3": ({"type": "object", "properties": {"a": {"required": True}}}, [{}, {"a": 1}], [1]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return llguidance.LLTokenizer("byte")


def accepts(tokenizer: Any, schema: Any, value: Any) -> bool:
    text = json.dumps({} if schema is True else schema)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(json.dumps(value, ensure_ascii=False).encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES.values(), ids=CASES.keys())
def test_an_equivalent_is_enforced(tokenizer: Any, schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    rewritten = rewrite(json.dumps(schema))
    assert rewritten.unenforced == ()
    assert [value for value in valid if not accepts(tokenizer, rewritten.schema, value)] == []
    assert [value for value in invalid if accepts(tokenizer, rewritten.schema, value)] == []
    assert [value for value in valid if first_problem(value, rewritten.normal)] == []
    assert [value for value in invalid if not first_problem(value, rewritten.normal)] == []
    again = rewrite(json.dumps(rewritten.schema))
    assert again.unenforced == ()


CHECKED = {  # schema, the keyword that no grammar enforces, and a value that fails it
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems", [1, 1]),
    "nested": ({"properties": {"a": {"items": {"not": {"pattern": "x"}}}}}, "properties.a.items.not", {"a": ["x"]}),
    "multiples": ({"type": "integer", "not": {"multipleOf": 3}}, "not", 9),
    "one of": ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "oneOf", "ab"),
    "overlap": ({"patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 3}}}, "patternProperties", {"ab": 1}),
    "at least three": ({"type": "object", "minProperties": 3} | AB, "minProperties", {"a": 1}),
    "in a definition": (
        {"$ref": "#/definitions/a", "definitions": {"a": {"uniqueItems": True}}},
        "definitions.a.uniqueItems",
        [1, 1],
    ),
    "unevaluated": (
        {"anyOf": [{"properties": {"a": {"const": 1}}}, AB | {"required": ["b"]}], "unevaluatedProperties": False},
        "unevaluatedProperties",
        {"a": 1, "b": "x"},
    ),
    "twice": ({"contains": {"const": 1}, "minContains": 2}, "minContains", [1]),
    "if": ({"if": {"pattern": "a"}, "then": {"maxLength": 1}}, "if", "ab"),
}


@pytest.mark.parametrize(("schema", "keyword", "failing"), CHECKED.values(), ids=CHECKED.keys())
def test_what_has_no_equivalent_is_named_and_checked(tokenizer: Any, schema: Any, keyword: str, failing: Any) -> None:
    rewritten = rewrite(json.dumps(schema))
    assert keyword in rewritten.unenforced
    assert rewritten.unchecked == ()
    assert accepts(tokenizer, rewritten.schema, failing)
    assert first_problem(failing, rewritten.normal)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "format": "poem"}, "format"),
        ({"items": {"pattern": "(?=a)b"}}, "items.pattern"),
        ({"$ref": "http://elsewhere/schema"}, "$ref"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ],
)
def test_what_cannot_be_checked_is_named(schema: Any, keyword: str) -> None:
    rewritten = rewrite(json.dumps(schema))
    assert rewritten.unenforced == rewritten.unchecked == (keyword,)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "poem"}, "type has 'poem'"),
        ({"properties": {"a": {"$ref": "#/missing"}}}, "properties.a.\\$ref is '#/missing', which is not in it"),
        ({"properties": {"a": 3}}, "properties.a must be an object"),
        ({"enum": [1, 2], "minimum": 3}, "no value matches"),
        ({"not": {}}, "no value matches"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=problem):
        rewrite(json.dumps(schema))


def test_deep_schemas_are_refused() -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(400):
        deep = {"items": deep}
    with pytest.raises(InvalidGrammar, match="nested"):
        rewrite(json.dumps(deep))


def test_a_pattern_never_takes_long() -> None:
    assert not matches("^(a+)+$", "a" * 60 + "b")


# -- negation, against a validator --------------------------------------------------------------------------------

VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2.5, 7, "", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
KEYWORDS = {
    "type": st.sampled_from(["null", "boolean", "number", "string", "array", "object"]),
    "enum": st.lists(st.sampled_from([None, True, 1, 7, "", "a", "ab"]), min_size=1, max_size=3, unique_by=repr),
    "minimum": st.integers(0, 3),
    "exclusiveMaximum": st.integers(0, 8),
    "minLength": st.integers(0, 2),
    "maxItems": st.integers(0, 2),
    "minProperties": st.integers(0, 2),
    "required": st.lists(st.sampled_from("ab"), max_size=2, unique=True),
}
PLAIN = st.fixed_dictionaries({}, optional=KEYWORDS)
SCHEMAS = st.recursive(
    PLAIN | st.booleans(),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={name: st.lists(inner, min_size=1, max_size=2) for name in ("allOf", "anyOf", "oneOf")}
        | dict.fromkeys(("not", "if", "then", "else", "items", "contains"), inner)
        | {"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)},
    ),
    max_leaves=5,
)


@settings(max_examples=examples(150))
@given(SCHEMAS, VALUES)
def test_a_negation_refuses_what_the_schema_accepts(schema: Any, value: Any) -> None:
    try:
        refused = negate(schema, {})
    except NotExpressible:
        return
    accepted = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert jsonschema.Draft202012Validator(refused).is_valid(value) != accepted


@settings(max_examples=examples(60))
@given(SCHEMAS, VALUES)
def test_a_grammar_accepts_nothing_that_the_schema_refuses(tokenizer: Any, schema: Any, value: Any) -> None:
    try:
        rewritten = rewrite(json.dumps(schema))
    except InvalidGrammar:
        return
    if not rewritten.unenforced and accepts(tokenizer, rewritten.schema, value):
        jsonschema.Draft202012Validator(schema).validate(value)


# -- closing ------------------------------------------------------------------------------------------------------

A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
NESTED = {"properties": {"o": A | {"type": "object"}}}
CLOSED: dict[str, tuple[Any, list[Any], list[Any]]] = {  # schema, values that may be generated, and invented ones
    "listed": (AB, [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}, {"a": 1, "c": 1}]),
    "none listed": ({"type": "object"}, [{}, {"c": {"d": 1}}], [1]),
    "an empty list": ({"type": "object", "properties": {}}, [{}], [{"c": 1}]),
    "required alone": (AB | {"required": ["c"]}, [{"c": 1}], [{"c": 1, "d": 1}]),
    "open": (AB | {"additionalProperties": True}, [{"c": 1}], [{"a": "x"}]),
    "open for numbers": (AB | {"additionalProperties": {"type": "number"}}, [{"c": 1}], [{"c": "x"}]),
    "open for patterns": (AB | {"patternProperties": {"^x": {}}}, [{"xy": 1, "c": 1}], []),
    "open by being unevaluated": (AB | {"unevaluatedProperties": True}, [{"c": 1}], []),
    "too few listed": (AB | {"minProperties": 3}, [{"a": 1, "b": 1, "c": 1}], []),
    "items": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"b": 1}]]),
    "nested": ({"properties": {"o": AB}}, [{"o": {"a": 1}}], [{"o": {"c": 1}}, {"p": 1}]),
    "nested in an open one": (NESTED | {"additionalProperties": True}, [{"o": {"a": 1}, "p": 1}], [{"o": {"c": 1}}]),
    "any of": ({"type": "object", "anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
    "any of and others": (A | {"anyOf": [B, {}]}, [{"a": 1, "b": 1}], [{"c": 1}]),
    "any of what is required": (
        AB | {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]},
        [{"c": 1}],
        [{"a": 1, "d": 1}],
    ),
    "one of": (
        {"oneOf": [A | {"required": ["a"]}, B | {"required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
    ),
    "all of": ({"allOf": [A, B]}, [{"a": 1}, {"a": 1, "b": 1}], [{"a": 1, "c": 1}]),
    "all of one": ({"allOf": [A]}, [{"a": 1}], [{"b": 1}]),
    "all of, one of them open": ({"allOf": [A, B | {"additionalProperties": True}]}, [{"a": 1, "c": 1}], []),
    "a reference": ({"$ref": "#/$defs/x", "$defs": {"x": A}}, [{"a": 1}], [{"b": 1}]),
    "a reference and others": (
        {"properties": {"p": {"$ref": "#/$defs/x"} | B, "q": {"$ref": "#/$defs/x"}}, "$defs": {"x": A}},
        [{"p": {"a": 1, "b": 1}, "q": {"a": 1}}],
        [{"q": {"b": 1}}, {"p": {"c": 1}}],
    ),
    "a base and its objects": (
        {"allOf": [{"$ref": "#/$defs/base"}, B], "$defs": {"base": NESTED}},
        [{"o": {"a": 1}, "b": 1}],
        [{"o": {"b": 1}}, {"c": 1}],
    ),
    "one property of two schemas": (
        {"allOf": [NESTED, {"properties": {"o": B}}]},
        [{"o": {"a": 1, "b": 1}}],
        [{"p": 1}],
    ),
    "items of two schemas": ({"items": A, "allOf": [{"items": B}]}, [[{"b": 1, "a": 1}]], []),
    "contained": (
        {"type": "array", "items": AB, "contains": A | {"required": ["a"]}},
        [[{"a": 1, "b": 1}]],
        [[{"c": 1}]],
    ),
    "if": (
        {"properties": {"k": {"enum": ["x", "y"]}}, "required": ["k"]}
        | {"if": {"properties": {"k": {"const": "x"}}}, "then": A, "else": B},
        [{"k": "x", "a": 1}, {"k": "y", "b": 1}],
        [{"k": "x", "c": 1}],
    ),
    "not": (AB | {"type": "object", "not": {"required": ["a"]}}, [{"b": 1}], [{"a": 1}, {"c": 1}]),
    "not a reference": (
        {"type": "object", "properties": {"o": {"not": {"$ref": "#/$defs/x"}}}}
        | {"$defs": {"x": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}},
        [{"o": {"a": 1}}],
        [{"o": {"a": "x", "c": 1}}],
    ),
    "dependent": (A | {"dependentSchemas": {"a": B}, "type": "object"}, [{"a": 1, "b": 1}], [{"c": 1}]),
    "values": ({"enum": [{"a": 1}, {"c": 1}]} | AB, [{"a": 1}, {"c": 1}], [{"b": 1}]),
    "recursive": (
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}, "v": {}}}}},
        [{"n": {"n": {"v": 1}}}],
        [{"n": {"n": {"w": 1}}}],
    ),
    "old draft": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "items": {"$ref": "#/definitions/x"},
            "definitions": {"x": A},
        },
        [[{"a": 1}]],
        [[{"b": 1}]],
    ),
    "only invented ones are valid": (
        {
            "type": "object",
            "oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}],
        },
        [{"a": "x", "b": 1}],
        [{"a": "x"}],
    ),
}


@pytest.mark.parametrize(("schema", "listed", "invented"), CLOSED.values(), ids=CLOSED.keys())
def test_objects_have_no_properties_but_listed_ones(
    tokenizer: Any, schema: Any, listed: list[Any], invented: list[Any]
) -> None:
    rewritten = rewrite(json.dumps(schema))
    assert [value for value in listed if not accepts(tokenizer, rewritten.schema, value)] == []
    assert [value for value in invented if accepts(tokenizer, rewritten.schema, value)] == []
    assert [value for value in listed if not jsonschema.Draft202012Validator(schema).is_valid(value)] == []


def test_a_schema_that_combines_without_end_is_refused() -> None:
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": A}
    assert rewrite(json.dumps({"$ref": "#/$defs/d0", "$defs": definitions}), verified=False)
    wide: Any = {f"p{i}": {"$ref": "#/$defs/big"} | {"properties": {f"x{i}": {}}} for i in range(400)}
    big: Any = {"properties": {f"q{i}": {} for i in range(400)}}
    with pytest.raises(InvalidGrammar, match="parts; simplify it"):
        rewrite(json.dumps({"properties": wide, "$defs": {"big": big}}), verified=False)


def test_one_form_of_a_plain_schema_is_itself() -> None:
    assert normalize(LEAF).schema == LEAF
