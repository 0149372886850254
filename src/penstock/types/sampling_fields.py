"""Converts the fields of `SamplingParams` to the types that engines read, from any form that users give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import index
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest
from penstock.types.grammar import Grammar, StructuredOutputsParams, Thinking
from penstock.types.samplers import DryPenalty, SamplerChain

LIMIT = 2**31  # of token ids


class FieldType(NamedTuple):
    """Describes the values of a field, and how they are read."""

    takes: str
    read: Callable[[Any], Any]  # raises one of UNFIT for what cannot be read
    plain: tuple[type, ...] = ()  # types of values that need no reading
    fields: Mapping[str, FieldType] = {}  # fields of the value itself, if any


UNFIT = TypeError, ValueError, AttributeError, OverflowError


def read_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with their values as engines read them; raises InvalidRequest for a value that cannot be read."""
    return _read(given, _FIELDS)


def _read(given: Mapping[str, Any], types: Mapping[str, FieldType], within: str = "") -> dict[str, Any]:
    fields = dict(given)
    for name, value in given.items():
        if name not in types or type(value) in types[name].plain:
            continue
        takes, read, _, parts = types[name]
        try:
            fields[name] = read(value)
        except UNFIT:
            raise InvalidRequest(f"{within}{name} takes {takes}; got {value!r:.100}", param=within + name) from None
        if parts:
            fields[name] = value._replace(**_read(value._asdict(), parts, f"{within}{name}."))
    return fields


def _integer(value: Any) -> int:
    return int(index(value))


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if value not in (0, 1):  # NumPy's are equal to these, too
        raise ValueError
    return bool(value)


def _text(value: Any) -> str:
    str.encode(value)  # one that is no UTF-8 cannot be sent to an engine, nor can one of a subclass, such as NumPy's
    return str.__str__(value)


def _texts(value: Any) -> tuple[str, ...]:
    return (_text(value),) if isinstance(value, str) else tuple(map(_text, value or ()))


def _tokens(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(_token, value))


def _token(value: Any) -> int:
    if not -LIMIT <= (token := _integer(value)) < LIMIT:
        raise ValueError
    return token


def _biases(value: Any) -> dict[int, float]:
    return {} if value is None else {_token(token): _number(bias) for token, bias in value.items()}


def _json(value: Any) -> str:
    return _text(value if isinstance(value, str) else json.dumps(value))


def _one_of(kind: type, /, **fields: FieldType) -> FieldType:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise TypeError
        return value

    return FieldType(f"a {kind.__name__} or None", read, (type(None),), fields)


def _or_none(field: FieldType) -> FieldType:
    return field._replace(takes=f"{field.takes} or None", plain=(*field.plain, type(None)))


_INTEGER = FieldType("a whole number", _integer, (int,))
_INTEGER_OR_NONE = _or_none(_INTEGER)
_NUMBER = FieldType("a number", _number, (float, int))
_SWITCH = FieldType("True or False", _switch, (bool,))
_TEXT = FieldType("a text", _text)
_TEXTS = FieldType("a text or a list of texts", _texts)
_TOKEN = FieldType("a token id", _token)
_TOKENS = FieldType("a list of token ids", _tokens)
_JSON = FieldType("JSON as a text or a dictionary", _json)
_THINKING = _one_of(Thinking, closes=_TOKENS, opens=_TOKEN, budget=_INTEGER_OR_NONE)
_GRAMMAR = _one_of(
    Grammar,
    **dict.fromkeys(("kind", "text", "param"), _TEXT),
    **dict.fromkeys(("triggers", "trigger_patterns"), _TEXTS),
    thinking=_THINKING,
    trigger_tokens=_TOKENS,
    strict=_SWITCH,
)
_STRUCTURED_OUTPUTS = _one_of(
    StructuredOutputsParams,
    **dict.fromkeys(("json", "structural_tag"), _or_none(_JSON)),
    **dict.fromkeys(("regex", "grammar"), _or_none(_TEXT)),
    choice=_or_none(_TEXTS),
    json_object=_or_none(_SWITCH),
)
_DRY = _one_of(
    DryPenalty,
    **dict.fromkeys(("multiplier", "base"), _NUMBER),
    **dict.fromkeys(("allowed_length", "window"), _INTEGER),
    breakers=_TEXTS,
)
_CHAIN = _one_of(
    SamplerChain,
    **dict.fromkeys(("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"), _NUMBER),
    **dict.fromkeys(("dynatemp_range", "dynatemp_exponent", "mirostat_tau", "mirostat_eta"), _NUMBER),
    **dict.fromkeys(("mirostat", "min_keep"), _INTEGER),
    order=_TEXTS,
    mersenne=_SWITCH,
)
_FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "min_tokens", "penalty_window", "n", "output_kind"), _INTEGER),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), _INTEGER_OR_NONE),
    **dict.fromkeys(("best_of", "truncate_prompt_tokens"), _INTEGER_OR_NONE),
    **dict.fromkeys(("ignore_eos", "loop_guard", "include_stop_str_in_output"), _SWITCH),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), _SWITCH),
    **dict.fromkeys(("stop", "bad_words"), _TEXTS),
    "stop_token_ids": _TOKENS,
    "allowed_token_ids": _or_none(_TOKENS),
    "logit_bias": FieldType("a dictionary of token ids and numbers", _biases),
    **dict.fromkeys(("structured_outputs", "guided_decoding"), _STRUCTURED_OUTPUTS),
    "grammar": _GRAMMAR,
    "dry": _DRY,
    "chain": _CHAIN,
}
