"""Rewrites JSON schemas into the keywords that llguidance enforces, and lists those that it cannot enforce.

Most keywords have an equivalent: `oneOf` of mutually exclusive options is `anyOf`, `not` and `if` are negated, and
`enum` keeps only the values that the rest of the schema allows. The grammar omits keywords without an equivalent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from penstock.errors import InvalidGrammar
from penstock.text.grammar.closed_schema import ALONE, CLOSED_ONE_OF, close_objects
from penstock.text.grammar.schema_disjoint import are_disjoint
from penstock.text.grammar.schema_negation import NotExpressible, all_of, any_of, negate
from penstock.text.grammar.schema_normal import NormalSchema, Schema, children, normalize
from penstock.text.grammar.schema_objects import with_counts, with_names
from penstock.text.grammar.schema_validator import is_valid, mended, usable

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
THOROUGH, PLAIN, LOOSE = 2, 1, 0  # efforts
UNSATISFIABLE = "Unsatisfiable schema"  # prefix of the library's error
IN_PART = "while processing"  # the error's next words if it concerns a definition, which may be unused
CONTAINS_WITHIN = 6  # candidate positions of the contained item; more items may follow
MAX_PARTS = 4000  # schemas in a rewritten one

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_KEPT = ("type", "minLength", "maxLength", *_NUMBERS, "minItems", "maxItems", "required", "$ref")


class RewrittenSchema(NamedTuple):
    """Holds a schema for the library, and one to validate answers against."""

    schema: Schema
    unenforced: tuple[str, ...]  # paths of keywords that the grammar does not enforce
    unchecked: tuple[str, ...]  # those that validation does not check either
    normal: Schema


@lru_cache(maxsize=128)
def rewrite(text: str, verified: bool = True) -> RewrittenSchema:
    """Rewrites a JSON schema; raises InvalidGrammar for an invalid or unsatisfiable one. Tries the most thorough
    rewriting that the library accepts, with closed objects if possible. Unless `verified`, the library is not asked,
    because it needs a large stack.
    """
    try:
        normal = normalize(json.loads(text))
        closed, opened = close_objects(normal.schema), normal.schema
        problem = ""
        for effort, form in ((THOROUGH, closed), (THOROUGH, opened), (PLAIN, closed), (PLAIN, opened), (LOOSE, opened)):
            rewritten = _Rewriting(normal, form, effort).whole()
            problem = library_problem(rewritten.schema) if verified else ""
            if not problem:
                return rewritten
            if effort == PLAIN and form is opened and problem.startswith(UNSATISFIABLE) and IN_PART not in problem:
                raise InvalidGrammar(f"the JSON schema cannot be used: no value matches it. {problem}")
    except RecursionError as error:
        raise InvalidGrammar("the JSON schema cannot be used: it is nested too deep") from error
    except (ArithmeticError, ValueError) as error:  # numbers too large for a check or the library
        raise InvalidGrammar(f"the JSON schema cannot be used: {error}") from error
    raise InvalidGrammar(f"the JSON schema cannot be used: {problem}")


def guaranteed(text: str) -> dict[str, Any]:
    """Rewrites a JSON schema; raises InvalidGrammar if its grammar would not enforce all of it."""
    rewritten = rewrite(text)
    check_enforced(rewritten)
    return rewritten.schema if isinstance(rewritten.schema, dict) else {}


def check_enforced(rewritten: RewrittenSchema) -> None:
    """Raises InvalidGrammar if a keyword is not enforced."""
    for path in rewritten.unenforced:
        place, _, keyword = path.rpartition(".")
        where = f" at {place}" if place else ""
        raise InvalidGrammar(
            f"the JSON schema cannot be guaranteed: {keyword}{where} has no equivalent in a grammar; leave it out"
        )


def library_problem(schema: Schema) -> str:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps({} if schema is True else schema))
    return " ".join(LLMatcher.validate_grammar(grammar).split())[:400]


class _Rewriting:
    """Rewrites one schema, closed or not. Negations and checks use the original. THOROUGH looks for equivalents, which
    enlarge a schema. LOOSE also drops parts that the library may be unable to intersect.
    """

    def __init__(self, normal: NormalSchema, form: Schema, effort: int) -> None:
        self.unenforced = list(normal.unresolved)
        self.unchecked = list(normal.unresolved)
        self._root = normal.schema
        self._form = form
        self._places = normal.places
        self._thorough = effort == THOROUGH
        self._loose = effort == LOOSE
        self._parts = 0
        self._definitions = _definitions(normal.schema)
        self._form_definitions = _definitions(form)

    def whole(self) -> RewrittenSchema:
        schema = self.of(self._form, "")
        definitions = self._used_by(schema)
        if schema is False:
            raise InvalidGrammar("the JSON schema cannot be used: no value matches it")
        if isinstance(self._root, dict) and isinstance(schema, dict):
            spacing = {"x-guidance": self._root["x-guidance"]} if "x-guidance" in self._root else {}
            schema = {**schema, **({"$defs": definitions} if definitions else {}), **spacing}
        unenforced, unchecked = (tuple(dict.fromkeys(paths)) for paths in (self.unenforced, self.unchecked))
        return RewrittenSchema(schema, unenforced, unchecked, self._root)

    def _used_by(self, schema: Schema) -> dict[str, Schema]:
        used: dict[str, Schema] = {}
        pending = [schema]
        while pending:
            for name in _references(pending.pop()):
                if name not in used:
                    used[name] = self.of(self._form_definitions[name], self._places[name.removesuffix(ALONE)])
                    pending.append(used[name])
        return used

    def of(self, schema: Schema, path: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise InvalidGrammar(f"the JSON schema cannot be used: its grammar has more than {MAX_PARTS} parts")
        if "enum" in schema or "const" in schema:
            return self._values(schema)
        plain: dict[str, Any] = {name: schema[name] for name in _KEPT if name in schema}
        if self._loose and "$ref" in plain and len(schema) > 1:
            del plain["$ref"]
            self._leave_out(path, "$ref")
        parts: list[Schema] = []
        self._copy_texts(schema, plain, path)
        self._copy_nested(schema, plain, path)
        for name, rewriting in self._rewritings().items():
            if name in schema:
                parts.append(self._tried(rewriting, schema, name, path))
        for name in ("uniqueItems", "unevaluatedProperties", "unevaluatedItems", "minContains", "maxContains"):
            if name in schema and self._matters(schema, name):
                self._leave_out(path, name)
        try:
            parts.append(with_counts(schema, plain))
        except NotExpressible:
            self._leave_out(path, *(name for name in ("minProperties", "maxProperties") if name in schema))
        return _merged(plain, parts)

    # ---- keywords that are kept ----

    def _copy_texts(self, schema: dict[str, Any], plain: dict[str, Any], path: str) -> None:
        if "pattern" in schema:
            if usable(schema["pattern"]) and not self._loose:
                plain["pattern"] = mended(schema["pattern"])
            else:
                self._leave_out(path, "pattern", checked=usable(schema["pattern"]))
        if "format" in schema:
            if schema["format"] in FORMATS:
                plain["format"] = schema["format"]
            else:
                self._leave_out(path, "format", checked=False)

    def _copy_nested(self, schema: dict[str, Any], plain: dict[str, Any], path: str) -> None:
        for name in ("properties", "prefixItems", "anyOf", "allOf"):
            if isinstance(nested := schema.get(name), dict):
                plain[name] = {key: self.of(each, f"{path}.{name}.{key}") for key, each in nested.items()}
            elif name == "allOf" and nested is not None and self._loose:
                self._leave_out(path, name)
            elif isinstance(nested, list):
                plain[name] = [self.of(each, f"{path}.{name}.{at}") for at, each in enumerate(nested)]
        for name in ("items", "additionalProperties"):
            if name in schema:
                plain[name] = self.of(schema[name], f"{path}.{name}")
        if "patternProperties" in schema:
            self._copy_patterns(schema, plain, path)
        if schema.get("unevaluatedProperties") is False and not _in_place(schema):
            plain.setdefault("additionalProperties", False)

    def _copy_patterns(self, schema: dict[str, Any], plain: dict[str, Any], path: str) -> None:
        patterns = schema["patternProperties"]
        if all(map(usable, patterns)) and (self._thorough or (len(patterns) == 1 and not self._loose)):
            plain["patternProperties"] = {
                mended(pattern): self.of(each, f"{path}.patternProperties.{pattern}")
                for pattern, each in patterns.items()
            }
            return
        self._leave_out(path, "patternProperties", checked=all(map(usable, patterns)))
        if plain.pop("additionalProperties", True) is not True:
            self._leave_out(path, "additionalProperties")

    def _values(self, schema: dict[str, Any]) -> Schema:
        values = schema.get("enum", [schema.get("const")])
        rest = {name: value for name, value in schema.items() if name not in ("$defs", "x-guidance")}
        if rest.keys() - {"enum"}:
            values = [value for value in values if is_valid(value, rest, self._root)]
        kinds = {"type": schema["type"]} if "type" in schema else {}
        return {**kinds, "enum": values} if values else False

    # ---- keywords with an equivalent ----

    def _rewritings(self) -> dict[str, Callable[[dict[str, Any]], Schema]]:
        return {
            "not": lambda schema: negate(schema["not"], self._definitions),
            "if": self._condition,
            "oneOf": self._one_of,
            "contains": _contains,
            "dependentRequired": _dependent_required,
            "dependentSchemas": _dependent_schemas,
            "propertyNames": with_names,
        }

    def _tried(
        self, rewriting: Callable[[dict[str, Any]], Schema], schema: dict[str, Any], name: str, path: str
    ) -> Schema:
        try:
            if not self._thorough:
                raise NotExpressible
            return self.of(rewriting(schema), f"{path}.{name}")
        except NotExpressible:
            self._leave_out(path, name)
        if name == "oneOf":
            return self.of({"anyOf": schema.get(CLOSED_ONE_OF, schema["oneOf"])}, f"{path}.{name}")
        return True

    def _condition(self, schema: dict[str, Any]) -> Schema:
        unmet = negate(schema["if"], self._definitions)
        met = all_of([schema["if"], schema.get("then", True)])
        return any_of([met, all_of([unmet, schema.get("else", True)])])

    def _one_of(self, schema: dict[str, Any]) -> Schema:
        options = schema["oneOf"]
        closed = schema.get(CLOSED_ONE_OF, options)
        if are_disjoint(options, self._definitions):
            return {"anyOf": closed}
        refused = [negate(option, self._definitions) for option in options]
        others = [[each for at, each in enumerate(refused) if at != own] for own in range(len(options))]
        return any_of([all_of([option, *rest]) for option, rest in zip(closed, others, strict=True)])

    # ---- keywords without an equivalent ----

    def _matters(self, schema: dict[str, Any], name: str) -> bool:
        match name:
            case "uniqueItems":
                return bool(schema.get("maxItems", 2) > 1)
            case "minContains":
                return "contains" in schema and schema[name] > 1
            case "maxContains":
                return "contains" in schema
            case "unevaluatedProperties":
                return schema[name] is not True and not (schema[name] is False and not _in_place(schema))
        return schema[name] is not True

    def _leave_out(self, path: str, *names: str, checked: bool = True) -> None:
        paths = [f"{path}.{name}".removeprefix(".") for name in names]
        self.unenforced += paths
        self.unchecked += [] if checked else paths


def _definitions(schema: Schema) -> dict[str, Schema]:
    return schema.get("$defs", {}) if isinstance(schema, dict) else {}


def _references(schema: Schema) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].removeprefix("#/$defs/")
        for _, each in children(schema):
            yield from _references(each)


def _in_place(schema: dict[str, Any]) -> bool:
    return any(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "not"))


def _merged(plain: dict[str, Any], others: list[Schema]) -> Schema:
    kept = [other for other in others if other is not True and other != {}]
    if any(other is False for other in kept):
        return False
    if not plain and len(kept) == 1:
        return kept[0]
    return {**plain, "allOf": [*plain.get("allOf", ()), *kept]} if kept else plain


def _contains(schema: dict[str, Any]) -> Schema:
    if schema.get("minContains", 1) == 0:
        return True
    if "prefixItems" in schema:
        raise NotExpressible
    most = min(CONTAINS_WITHIN, schema.get("maxItems", CONTAINS_WITHIN))
    places = [{"prefixItems": [True] * at + [schema["contains"]], "minItems": at + 1} for at in range(most)]
    return any_of([{"type": [kind for kind in _OTHERS if kind != "array"]}, *({"type": "array"} | p for p in places)])


_OTHERS = ("null", "boolean", "number", "string", "object", "array")


def _dependent_required(schema: dict[str, Any]) -> Schema:
    return all_of([_depends(key, {"required": names}) for key, names in schema["dependentRequired"].items()])


def _dependent_schemas(schema: dict[str, Any]) -> Schema:
    return all_of([_depends(key, each) for key, each in schema["dependentSchemas"].items()])


def _depends(key: str, schema: Schema) -> Schema:
    absent: Schema = {"properties": {key: False}}
    return any_of([absent, all_of([{"type": "object", "required": [key]}, schema])])
