"""Reads the fields of llama.cpp's completions, and returns the settings that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.llamacpp.prompts import Prompts
from penstock.server.generation.adapter_fields import NumberedAdapters
from penstock.server.generation.fields import N_MAX, SamplingFields, drawn_as_llamacpp, sampling
from penstock.server.generation.fields import NO_EFFECT as OPENAI_NO_EFFECT
from penstock.server.generation.sampler_fields import sampler_order
from penstock.server.generation.speculation_fields import DraftLimit, SpeculationWish, limit_drafts
from penstock.server.http.bodies import ANY_VALUE, NoEffect
from penstock.server.models.served_model import ServedModel
from penstock.types import SAMPLERS, DryPenalty, SamplerChain, SamplingParams

MAX_LOGPROBS = 20  # the engine's limit
RANDOM_SEED = 2**32 - 1  # as which llama.cpp writes -1
PENALTIES = ("penalties", "dry")  # samplers that are applied before all others
LOOKED_UP = "ngram-simple"  # as llama.cpp calls drafts that are looked up in the text so far

NO_EFFECT: NoEffect = OPENAI_NO_EFFECT | {
    "model": ANY_VALUE,  # llama.cpp serves one model, under any name
    "adaptive_decay": ANY_VALUE,  # without a target it does nothing
    "adaptive_target": (-1, -1.0),
    "backend_sampling": ANY_VALUE,
    "grammar_type": ANY_VALUE,
    "id_slot": ANY_VALUE,  # a request finds the cached prefixes of all others
    "n_cache_reuse": ANY_VALUE,
    "n_discard": ANY_VALUE,  # the context is never shifted, so nothing is discarded
    "n_indent": (0,),
    "n_keep": ANY_VALUE,
    "preserved_tokens": ANY_VALUE,
    "return_progress": (False,),
    "sse_ping_interval": ANY_VALUE,
    "t_max_prompt_ms": ANY_VALUE,  # llama.cpp does not read it either
}

Count = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=128)]


class NativeFields(SamplingFields, kw_only=True):
    """Declares what /completion and /infill share."""

    n_predict: Count | None = None
    max_tokens: Count | None = None  # another name of n_predict
    n_cmpl: Choices | None = None
    n: Choices | None = None  # another name of n_cmpl
    stream: bool | None = None
    n_probs: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    post_sampling_probs: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    response_fields: list[str] | None = None
    lora: NumberedAdapters | None = None  # left out: the scales of POST /lora-adapters
    penstock: bool | None = None  # asks for a report of what happened to the answer
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for an answer
    speculative_n_max: DraftLimit | None = msgspec.field(default=None, name=N_MAX)  # llama.cpp's name of it

    @property
    def choices(self) -> int:
        return self.n_cmpl or self.n or 1


class CompletionFields(NativeFields):
    prompt: Prompts


def sampling_of(
    served: ServedModel, context: RequestContext, body: NativeFields, ends: Sequence[int] = ()
) -> list[SamplingParams]:
    """Returns sampling for each choice; `ends` are tokens that end an answer in addition to the model's own."""
    context.notes.explain |= bool(body.penstock)
    limit_drafts(served, context, body.speculation, (N_MAX, body.speculative_n_max))
    if body.cache_prompt is False:
        context.service.share_nothing()
    if body.samplers is not None:
        body.samplers = _known_samplers(context, body.samplers)
    if isinstance(body.stop, list):
        body.stop = [each for each in body.stop if each]
    if body.n_probs is not None and body.n_probs > MAX_LOGPROBS:
        context.notes.ignore("n_probs")
    if body.seed is not None and body.seed < 0:
        body.seed = None  # llama.cpp's -1: a random one
    body.stop_token_ids = [*(body.stop_token_ids or ()), *ends]
    wanted = body.max_tokens if body.n_predict is None else body.n_predict
    shown = min(body.n_probs or 0, MAX_LOGPROBS)
    logprobs = (MAX_LOGPROBS if body.post_sampling_probs else shown) if shown else None
    limit = None if wanted is None or wanted < 0 else wanted
    params = sampling(served, body, max_tokens=limit, logprobs=logprobs)
    return params if body.seed is None else drawn_as_llamacpp(params)


def _known_samplers(context: RequestContext, given: list[str] | str) -> list[str]:
    """Returns the order of samplers without those that we do not have, because of which the field is listed."""
    order = sampler_order(given)
    known = [each for each in order if each in SAMPLERS or each in PENALTIES]
    if len(known) < len(order):
        context.notes.ignore("samplers")
    return known


# -- answering ----------------------------------------------------------------------------------------------------


class TokenBias(msgspec.Struct):
    token: int
    bias: float | None  # null: minus infinity


class GenerationSettings(msgspec.Struct, kw_only=True, rename={"speculative_types": "speculative.types"}):
    """Lists the settings of an answer, as `generation_settings` and /props show them."""

    seed: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    typical_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    stop: Sequence[str]
    max_tokens: int
    n_predict: int
    n_keep: int = 0
    n_discard: int = 0
    ignore_eos: bool
    stream: bool = False
    logit_bias: list[TokenBias]
    n_probs: int = 0
    min_keep: int
    grammar: str
    grammar_lazy: bool
    grammar_triggers: Sequence[str]
    preserved_tokens: list[int] = []
    chat_format: str = "Content-only"
    reasoning_format: str = "none"
    reasoning_in_content: bool = False
    generation_prompt: str = ""
    samplers: list[str]
    speculative_types: str
    timings_per_token: bool = False
    post_sampling_probs: bool = False
    backend_sampling: bool = False
    lora: list[int] = []


_CHAIN_FIELDS = [name for name in SamplerChain._fields if name in GenerationSettings.__struct_fields__]


def settings_of(served: ServedModel, params: SamplingParams, speculation: int | None = None) -> GenerationSettings:
    """Returns `generation_settings` for this sampling, with at most `speculation` drafted tokens per step."""
    chain, dry = params.chain or SamplerChain(), params.dry or DryPenalty(0.0)
    limit = -1 if params.max_tokens is None else params.max_tokens
    banned = sorted(served.text.tokenizer.eos_ids) if params.ignore_eos else []
    biases = [TokenBias(id, None if bias == float("-inf") else bias) for id, bias in params.logit_bias.items()]
    grammar = params.grammar
    return GenerationSettings(
        seed=RANDOM_SEED if params.seed is None else params.seed & 0xFFFFFFFF,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repeat_last_n=params.penalty_window,
        repeat_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        dry_multiplier=dry.multiplier,
        dry_base=dry.base,
        dry_allowed_length=dry.allowed_length,
        dry_penalty_last_n=dry.window,
        dry_sequence_breakers=dry.breakers,
        stop=params.stop,
        max_tokens=limit,
        n_predict=limit,
        ignore_eos=params.ignore_eos,
        logit_bias=biases + [TokenBias(id, None) for id in banned],
        grammar="" if grammar is None else grammar.text,
        grammar_lazy=grammar is not None and grammar.lazy,
        grammar_triggers=() if grammar is None else grammar.triggers,
        speculative_types="none" if speculation == 0 or not served.draft_tokens else LOOKED_UP,
        samplers=[*PENALTIES, *("typ_p" if name == "typical_p" else name for name in chain.order)],
        **{name: getattr(chain, name) for name in _CHAIN_FIELDS},
    )
