"""Reads the fields of llama.cpp's completions, and returns the settings that they mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count, check_stops
from penstock.server.bodies import ANY_VALUE, NoEffect
from penstock.server.chat.structured import json_grammar
from penstock.server.llamacpp.prompts import Prompts
from penstock.server.request_context import RequestContext, new_request_id
from penstock.server.served_model import ServedModel
from penstock.text import new_seed
from penstock.types import DryPenalty, Grammar, SamplerChain, SamplingParams

MAX_LOGPROBS = 20  # as many as the engine returns
MAX_BIASES = 65536
RANDOM_SEED = 2**32 - 1  # as which llama.cpp writes -1

NO_EFFECT: NoEffect = {
    "model": ANY_VALUE,  # llama.cpp serves one model, under whatever name
    "id_slot": ANY_VALUE,  # any row finds the cached blocks of every other
    "n_cache_reuse": ANY_VALUE,
    "sse_ping_interval": ANY_VALUE,
    "backend_sampling": ANY_VALUE,
    "adaptive_decay": ANY_VALUE,  # without a target it does nothing
    "n_keep": ANY_VALUE,  # the context is never shifted, so nothing is discarded
    "n_discard": ANY_VALUE,
    "preserved_tokens": ANY_VALUE,
    "grammar_type": ANY_VALUE,
    "t_max_prompt_ms": ANY_VALUE,  # llama.cpp reads it nowhere either
    "lora": ([],),
    "n_indent": (0,),
    "return_progress": (False,),
    "adaptive_target": (-1, -1.0),
}

Count = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Bias = float | bool  # false bans the token
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class SamplerFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Declares the fields that say how tokens are sampled. Every field may be null, which is the same as leaving it
    out."""

    seed: Seed | None = None
    temperature: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    typical_p: float | None = None
    repeat_last_n: Count | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: NonNegative | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_keep: NonNegative | None = None
    samplers: list[str] | str | None = None  # names, or a character for each


class NativeFields(SamplerFields, kw_only=True):
    """Declares what /completion and /infill share."""

    n_predict: Count | None = None
    max_tokens: Count | None = None  # another name of n_predict
    n_cmpl: Annotated[int, Meta(ge=1, le=128)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None  # another name of n_cmpl
    stream: bool | None = None
    stop: list[str] | str | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | list[tuple[int | str, Bias]] | None = None
    n_probs: NonNegative | None = None
    post_sampling_probs: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    response_fields: list[str] | None = None
    json_schema: dict[str, Any] | bool | None = None

    @property
    def limit(self) -> int:
        """Returns the most tokens of an answer; -1: as many as the context has room for."""
        wanted = self.max_tokens if self.n_predict is None else self.n_predict
        return -1 if wanted is None else wanted

    @property
    def choices(self) -> int:
        return self.n_cmpl or self.n or 1


class CompletionFields(NativeFields):
    prompt: Prompts


class TokenBias(msgspec.Struct):
    token: int
    bias: float | None  # null: minus infinity


class GenerationSettings(msgspec.Struct, kw_only=True, rename={"speculative_types": "speculative.types"}):
    """Lists the settings of an answer, as `generation_settings` and /props show them. The values here are those of
    requests that do not name them: llama.cpp's."""

    seed: int = RANDOM_SEED
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    stop: list[str] = []
    max_tokens: int = -1
    n_predict: int = -1
    n_keep: int = 0
    n_discard: int = 0
    ignore_eos: bool = False
    stream: bool = False
    logit_bias: list[TokenBias] = []
    n_probs: int = 0
    min_keep: int = 0
    grammar: str = ""
    grammar_lazy: bool = False
    grammar_triggers: list[str] = []
    preserved_tokens: list[int] = []
    chat_format: str = "Content-only"
    reasoning_format: str = "none"
    reasoning_in_content: bool = False
    generation_prompt: str = ""
    samplers: Sequence[str] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )
    speculative_types: str = "none"
    timings_per_token: bool = False
    post_sampling_probs: bool = False
    backend_sampling: bool = False
    lora: list[int] = []


_SAMPLERS = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature", "top-k": "top_k", "top-p": "top_p"}
_CHARACTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
_DIRECT = [name for name in SamplerFields.__struct_fields__ if name not in ("seed", "samplers")]


def settings_of(context: RequestContext, served: ServedModel, body: NativeFields) -> GenerationSettings:
    """Returns the settings of an answer: what the request names, and llama.cpp's defaults for the rest."""
    given = {name: value for name in _DIRECT if (value := getattr(body, name)) is not None}
    settings = GenerationSettings(**given)
    settings.seed = RANDOM_SEED if body.seed is None or body.seed < 0 else body.seed
    settings.max_tokens = settings.n_predict = body.limit
    settings.stop = [body.stop] if isinstance(body.stop, str) else [each for each in body.stop or () if each]
    settings.samplers = _sampler_names(context, body.samplers) if body.samplers is not None else settings.samplers
    settings.ignore_eos, settings.stream = bool(body.ignore_eos), bool(body.stream)
    settings.n_probs, settings.post_sampling_probs = body.n_probs or 0, bool(body.post_sampling_probs)
    settings.timings_per_token = bool(body.timings_per_token)
    settings.logit_bias = [TokenBias(*each) for each in _biases(served, body.logit_bias)]
    if settings.ignore_eos:
        settings.logit_bias += [TokenBias(id, None) for id in sorted(served.text.tokenizer.eos_ids)]
    return settings


def _sampler_names(context: RequestContext, given: list[str] | str) -> list[str]:
    """Returns the samplers in their order. Those that we do not have are left out, and the field is listed."""
    names = [_CHARACTERS.get(each, each) for each in given] if isinstance(given, str) else given
    known = [_SAMPLERS.get(each, each) for each in names]
    if not set(known) <= set(_CHARACTERS.values()):
        context.ignore("samplers")
    return list(dict.fromkeys(each for each in known if each in _CHARACTERS.values()))


def _biases(
    served: ServedModel, given: dict[str, Bias] | list[tuple[int | str, Bias]] | None
) -> Iterator[tuple[int, float | None]]:
    """Yields token ids with what is added to their logits. A text stands for each of its tokens."""
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    check_count(pairs, MAX_BIASES, "logit_bias")
    for name, bias in pairs:
        if bias is True:
            raise InvalidRequest("logit_bias takes numbers, and false to ban a token; got true", param="logit_bias")
        id = int(name) if isinstance(name, int) or name.isdecimal() else None
        ids = served.text.tokenizer.encode(str(name)) if id is None else [id]
        served.check_ids(ids, "logit_bias")
        for each in ids:
            yield each, None if bias is False else float(bias)


# -- sampling -----------------------------------------------------------------------------------------------------


def sampling_of(
    context: RequestContext, body: NativeFields, settings: GenerationSettings, room: int, ends: Sequence[int] = ()
) -> list[SamplingParams]:
    """Returns sampling for each choice; `room` is how many tokens the context has left for an answer, and `ends` are
    tokens that end it beside the model's own."""
    if settings.n_probs > MAX_LOGPROBS:
        context.ignore("n_probs")
    if body.cache_prompt is False:
        context.salt = new_request_id()  # no other request has the salt, so no block is shared
    penalizes = "penalties" in settings.samplers and settings.repeat_last_n != 0
    seed = new_seed() if settings.seed == RANDOM_SEED else settings.seed
    cuts = {name: getattr(settings, name) if name in settings.samplers else off for name, off in _CUTS.items()}
    common: dict[str, Any] = {
        "temperature": _within(settings.temperature, 0.0, 100.0) if "temperature" in settings.samplers else 1.0,
        "top_k": max(int(cuts["top_k"]), 0),
        "top_p": _within(cuts["top_p"], 0.0, 1.0),
        "min_p": _within(cuts["min_p"], 0.0, 1.0),
        "repetition_penalty": settings.repeat_penalty if penalizes else 1.0,
        "presence_penalty": settings.presence_penalty if penalizes else 0.0,
        "frequency_penalty": settings.frequency_penalty if penalizes else 0.0,
        "penalty_window": settings.repeat_last_n,
        "dry": _dry(settings),
        "chain": _chain(settings),
        "logit_bias": {
            each.token: -100.0 if each.bias is None else _within(each.bias, -100.0, 100.0)
            for each in settings.logit_bias
        },
        "stop": check_stops(tuple(settings.stop), "stop"),
        "stop_token_ids": tuple(ends),
        "max_tokens": room if settings.n_predict < 0 else min(settings.n_predict, room),
        "ignore_eos": settings.ignore_eos,
        "logprobs": min(settings.n_probs, MAX_LOGPROBS) or None,
        "grammar": grammar_of(body),
    }
    if settings.post_sampling_probs and settings.n_probs:
        common["logprobs"] = MAX_LOGPROBS
    return [SamplingParams(seed=seed + choice, **common) for choice in range(body.choices)]


_CUTS: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _dry(settings: GenerationSettings) -> DryPenalty | None:
    if settings.dry_multiplier <= 0 or settings.dry_penalty_last_n == 0 or "dry" not in settings.samplers:
        return None
    breakers = tuple(settings.dry_sequence_breakers)
    base = settings.dry_base if settings.dry_base >= 1 else 1.75
    return DryPenalty(settings.dry_multiplier, base, settings.dry_allowed_length, settings.dry_penalty_last_n, breakers)


_CHAIN_NAMES = {"typ_p": "typical_p"}
_CHAIN_FIELDS = [name for name in SamplerChain._fields if name in GenerationSettings.__struct_fields__]


def _chain(settings: GenerationSettings) -> SamplerChain | None:
    """Returns the chain of samplers; None if the usual cuts say the same. The fields of samplers that are not in the
    order do not count."""
    order = tuple(_CHAIN_NAMES.get(each, each) for each in settings.samplers if each not in ("penalties", "dry"))
    chain = SamplerChain(order=order, **{name: getattr(settings, name) for name in _CHAIN_FIELDS})
    plain = SamplerChain(order=chain.order)
    usual = [name for name in plain.order if name in _USUAL]
    same = chain._replace(xtc_threshold=0.1, dynatemp_exponent=1.0, mirostat_tau=5.0, mirostat_eta=0.1) == plain
    return None if same and usual == [name for name in _USUAL if name in usual] else chain


_USUAL = ("top_k", "top_p", "min_p", "temperature")  # in the order in which they are applied without a chain


def grammar_of(body: NativeFields) -> Grammar | None:
    return None if body.json_schema is None else json_grammar(body.json_schema)
