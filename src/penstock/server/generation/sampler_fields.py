"""Turns llama.cpp's sampler fields, which clients of several dialects send, into sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count
from penstock.server.models.served_model import ServedModel
from penstock.types import BANNED, DryPenalty, SamplerChain

LogitBias = dict[str, float | bool] | list[tuple[int | str, float | bool]]  # token id or text -> bias; false: a ban

MAX_BREAKERS = 64
MAX_BIASES = 65536
CHAIN_FIELDS = (
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "min_keep",
)
DRY_FIELDS = {
    "multiplier": "dry_multiplier",
    "base": "dry_base",
    "allowed_length": "dry_allowed_length",
    "window": "dry_penalty_last_n",
    "breakers": "dry_sequence_breakers",
}
SAMPLER_FIELDS = (*CHAIN_FIELDS, *DRY_FIELDS.values(), "repeat_penalty", "repeat_last_n", "samplers")
LETTERS = {
    "d": "dry",
    "e": "penalties",
    "k": "top_k",
    "m": "min_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "t": "temperature",
    "x": "xtc",
    "y": "typical_p",
}
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typical_p", "typ_p": "typical_p", "typical": "typical_p"}
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


def sampler_settings(fields: object) -> dict[str, Any]:
    """Returns the settings of SamplingParams for a body's SAMPLER_FIELDS: `chain` (only if the usual three cuts cannot
    do it), `dry`, `repetition_penalty` and `penalty_window`. Unset fields are left out. The result overrides settings
    of the same name: an order without penalties turns these off."""
    named = ((name, getattr(fields, name, None)) for name in SAMPLER_FIELDS)
    given = {name: value for name, value in named if value is not None}
    if not given:
        return {}
    order = sampler_order(given["samplers"]) if "samplers" in given else None
    settings: dict[str, Any] = {}
    if "repeat_penalty" in given:
        settings["repetition_penalty"] = _repeat_penalty(fields, given["repeat_penalty"])
    if "repeat_last_n" in given:
        settings["penalty_window"] = _window(given["repeat_last_n"])
    if order is not None and "penalties" not in order:
        settings |= NO_PENALTIES
    if (dry := _dry(given)) is not None and (order is None or "dry" in order):
        settings["dry"] = dry
    if (chain := _chain(given, order)) is not None:
        settings["chain"] = chain
    return settings


def _window(tokens: int) -> int:
    if tokens < -1:
        raise InvalidRequest(f"repeat_last_n is -1, 0 or a number of tokens; got {tokens}", param="repeat_last_n")
    return tokens


def _repeat_penalty(fields: object, penalty: float) -> float:
    other = getattr(fields, "repetition_penalty", None)
    if not 0.01 <= penalty <= 100:
        raise InvalidRequest(f"repeat_penalty must be between 0.01 and 100; got {penalty}", param="repeat_penalty")
    if other not in (None, penalty):
        raise InvalidRequest(
            f"repeat_penalty is {penalty} and repetition_penalty is {other}, which mean the same: send one of them",
            param="repeat_penalty",
        )
    return penalty


def _chain(given: Mapping[str, Any], order: tuple[str, ...] | None) -> SamplerChain | None:
    """Returns the chain; None if it would change nothing that the usual cuts do."""
    usual = SamplerChain()
    settings = {name: given[name] for name in CHAIN_FIELDS if name in given}
    settings |= {"top_n_sigma": max(settings["top_n_sigma"], -1.0)} if "top_n_sigma" in settings else {}
    chain = usual._replace(**settings)
    if order is not None:
        return chain._replace(order=tuple(name for name in order if name not in ("dry", "penalties")))
    acts = (
        chain.top_n_sigma > 0,
        chain.typical_p != usual.typical_p,
        chain.xtc_probability != usual.xtc_probability,
        chain.dynatemp_range != usual.dynatemp_range,
        chain.mirostat != usual.mirostat,
        chain.min_keep > 1,  # every cut leaves one in any case
    )
    return chain if any(acts) else None


def _dry(given: Mapping[str, Any]) -> DryPenalty | None:
    settings = {setting: given[name] for setting, name in DRY_FIELDS.items() if name in given}
    if not settings.get("multiplier"):
        return None
    if "breakers" in settings:
        check_count(settings["breakers"], MAX_BREAKERS, "dry_sequence_breakers")
        settings["breakers"] = tuple(settings["breakers"])
    return DryPenalty(**settings)


def sampler_order(samplers: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of samplers given as a list, as names with semicolons between, or as llama.cpp's letters."""
    names = _spelled(samplers) if isinstance(samplers, str) else [_name(name) for name in samplers]
    check_count(names, 2 * len(LETTERS), "samplers")
    return tuple(names)


def _spelled(samplers: str) -> list[str]:
    if ";" in samplers or _name(samplers) in LETTERS.values():
        return [_name(name) for name in samplers.split(";") if name]
    return [LETTERS.get(letter, letter) for letter in samplers]


def _name(name: str) -> str:
    plain = name.strip().lower().replace("-", "_")
    return ALIASES.get(plain, plain)


# -- logit biases -------------------------------------------------------------------------------------------------


def logit_biases(served: ServedModel, given: LogitBias | None) -> dict[int, float]:
    """Returns the bias of each token. A text stands for each of its tokens; false bans."""
    pairs: Sequence[tuple[int | str, float | bool]] = list(given.items()) if isinstance(given, dict) else given or ()
    check_count(pairs, MAX_BIASES, "logit_bias")
    biases = {id: _bias(bias) for token, bias in pairs for id in _ids(served, token)}
    served.check_ids(biases, "logit_bias")
    return biases


def _ids(served: ServedModel, token: int | str) -> Iterator[int]:
    if isinstance(token, str) and not token.removeprefix("-").isdecimal():
        yield from served.text.tokenizer.encode(token)
    else:
        yield int(token)


def _bias(bias: float | bool) -> float:
    if bias is True:
        raise InvalidRequest("logit_bias: a bias is a number, or false for a ban; got true", param="logit_bias")
    return BANNED if bias is False else bias
