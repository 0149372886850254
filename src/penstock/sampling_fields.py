"""Reads the fields of `SamplingParams` as the types that engines read, whatever users give: no other may reach them."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest
from penstock.grammar_types import Grammar, StructuredOutputsParams
from penstock.sampler_types import DryPenalty, SamplerChain

LIMIT = 2**31  # of token ids


class FieldType(NamedTuple):
    """Says what a field takes, and how that is read."""

    takes: str
    read: Callable[[Any], Any]  # raises TypeError, ValueError or AttributeError for what cannot be read
    plain: tuple[type, ...] = ()  # types of values that need no reading


def read_fields(params: Any) -> dict[str, Any]:
    """Returns the fields of sampling parameters that have to be changed; raises InvalidRequest for one that cannot be
    read."""
    changed: dict[str, Any] = {}
    for name, (takes, read, plain) in _FIELDS.items():
        value = getattr(params, name)
        if type(value) in plain:
            continue
        try:
            changed[name] = read(value)
        except (TypeError, ValueError, AttributeError):
            raise InvalidRequest(f"{name} takes {takes}; got {value!r:.100}", param=name) from None
    return changed


def _refuse(value: Any) -> Any:
    raise TypeError


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


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    for text in texts:
        str.encode(text)  # one that is no UTF-8 cannot be sent to an engine
    return texts


def _integers(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(_token, value))


def _token(value: Any) -> int:
    if not -LIMIT <= (token := _integer(value)) < LIMIT:
        raise ValueError
    return token


def _biases(value: Any) -> dict[int, float]:
    return {} if value is None else {_integer(token): _number(bias) for token, bias in value.items()}


def _one_of(kind: type) -> FieldType:
    return FieldType(f"a {kind.__name__} or None", _refuse, (kind, type(None)))


_INTEGER = FieldType("a whole number", _integer, (int,))
_INTEGER_OR_NONE = FieldType("a whole number or None", _integer, (int, type(None)))
_NUMBER = FieldType("a number", _number, (float, int))
_SWITCH = FieldType("True or False", _switch, (bool,))
_TEXTS = FieldType("a text or a list of texts", _texts)
_FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "min_tokens", "penalty_window", "n", "output_kind"), _INTEGER),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), _INTEGER_OR_NONE),
    **dict.fromkeys(("best_of", "truncate_prompt_tokens"), _INTEGER_OR_NONE),
    **dict.fromkeys(("ignore_eos", "loop_guard", "include_stop_str_in_output"), _SWITCH),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), _SWITCH),
    **dict.fromkeys(("stop", "bad_words"), _TEXTS),
    "stop_token_ids": FieldType("a list of token ids", _integers),
    "allowed_token_ids": FieldType("a list of token ids or None", _integers, (type(None),)),
    "logit_bias": FieldType("a dictionary of token ids and numbers", _biases),
    **dict.fromkeys(("structured_outputs", "guided_decoding"), _one_of(StructuredOutputsParams)),
    "grammar": _one_of(Grammar),
    "dry": _one_of(DryPenalty),
    "chain": _one_of(SamplerChain),
}
