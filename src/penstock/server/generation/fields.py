"""Contains what OpenAI's chat and completions share: the fields of a request, and the fields of every answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, field
from starlette.requests import Request as HttpRequest

from penstock import __version__
from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count, check_stops
from penstock.server.chat.structured import Structured, grammar_of
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.adapter_fields import NamedAdapters, NumberedAdapters
from penstock.server.generation.prediction import PredictionTally
from penstock.server.generation.sampler_fields import LogitBias, logit_biases, sampler_settings
from penstock.server.generation.speculation_fields import DraftLimit, SpeculationWish, limit_drafts
from penstock.server.http.bodies import ANY_VALUE, NoEffect, ignore_unsupported, read_body
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta, new_seed, seed_of_choice
from penstock.types import Request, SamplerChain, SamplingParams

FINGERPRINT = f"b0-penstock-{__version__}"  # clients of llama.cpp expect b and a build number
ALL_THAT_FITS = -1  # a value of truncate_prompt_tokens
NO_LIMIT = -1  # a value of max_tokens and n_predict
N_MAX = "speculative.n_max"

ANSWERED_TIERS = {"flex": "flex", "priority": "priority", "fast": "priority"}  # others are answered as "default"
TIER_PRIORITIES = {"auto": 0, "default": 0, "scale": 0, "flex": 1, "priority": -1, "fast": -1}  # lower runs sooner

NO_EFFECT: NoEffect = {
    "metadata": ANY_VALUE,
    "prompt_cache_key": ANY_VALUE,  # every prefix is cached anyway, for as long as there is room
    "prompt_cache_options": ANY_VALUE,
    "prompt_cache_retention": ANY_VALUE,
    "safety_identifier": ANY_VALUE,
    "store": (False,),
    "user": ANY_VALUE,
    # llama.cpp's
    "id_slot": ANY_VALUE,  # a request finds the cached prefixes of all others
    "speculative.n_min": (0,),
    "speculative.p_min": (),
    # vLLM's
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": ANY_VALUE,  # only slow tokenizers of another library put spaces there
    "vllm_xargs": ({},),
}

F = TypeVar("F", bound="GenerationFields")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(Structured, forbid_unknown_fields=True, kw_only=True):
    """Declares the fields that say how tokens are sampled. Every field may be null, which is the same as leaving it
    out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    loop_guard: bool | None = None  # false: at temperature 0 an answer may repeat itself without end
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    repeat_penalty: float | None = None  # llama.cpp's name of repetition_penalty
    repeat_last_n: int | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    min_keep: int | None = None
    samplers: str | list[str] | None = None

    @property
    def choices(self) -> int:
        return 1


class GenerationFields(SamplingFields, kw_only=True):
    model: str | None = None  # left out: the served model
    max_tokens: int | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # llama.cpp's max_tokens; -1: no limit
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None  # left out: true
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens of logprobs are spelled token_id:N
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None  # part of the answer's id
    use_beam_search: bool | None = None
    length_penalty: float | None = None  # beam search only
    add_special_tokens: bool | None = None  # false: no BOS is added to the prompt
    truncate_prompt_tokens: int | None = None  # -1: to what the context has room for
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    cache_prompt: bool | None = None  # llama.cpp's; false: no block is shared with other requests
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower is sooner
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    deadline_ms: int | None = None  # from the request's arrival: what cannot have begun by then is refused
    ttft_target_ms: int | None = None  # time to the first token
    itl_target_ms: int | None = None  # time between two tokens
    adapters: NamedAdapters | None = None  # LoRA, added to the adapters of the model's name
    lora: NumberedAdapters | None = None  # llama.cpp's way to name them
    penstock: bool | None = None  # asks for a report of what happened to the answer
    speculation: SpeculationWish | None = None  # the most tokens that a step drafts for an answer
    speculative_n_max: DraftLimit | None = field(default=None, name=N_MAX)  # llama.cpp's name of it

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def unlimited(self) -> bool:
        """True if only the context limits an answer, as llama.cpp's clients may ask."""
        return self.n_predict == NO_LIMIT

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


async def read_fields(
    served: ServedModel, http: HttpRequest, context: RequestContext, kind: type[F], no_effect: NoEffect
) -> F:
    """Returns the request's body, and copies the fields about the whole request into the context."""
    fields = await read_body(http, context, kind, no_effect)
    if fields.stream_options is not None and not fields.stream:
        if not context.lenient:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        context.notes.ignore("stream_options")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        ignore_unsupported(context, "stream_options.include_obfuscation", True)
    _unify_limits(fields)
    limit_drafts(served, context, fields.speculation, (N_MAX, fields.speculative_n_max))
    context.notes.explain |= bool(fields.penstock)
    context.service.salt = fields.cache_salt or ""
    if fields.cache_prompt is False and not context.service.salt:
        context.service.share_nothing()
    _take_priority(fields, context)
    times = [(name, getattr(fields, name)) for name in ("deadline_ms", "ttft_target_ms", "itl_target_ms")]
    if any(time is not None for _, time in times):
        context.service.state_times(*times)
    return fields


def _take_priority(fields: GenerationFields, context: RequestContext) -> None:
    """Takes over the priority. A tier that the request's key may not use is answered as the default one."""
    if fields.priority is not None:
        return context.ask_priority(fields.priority, "priority")
    asked = TIER_PRIORITIES[fields.service_tier or "auto"]
    context.ask_priority(asked, "service_tier")
    if context.service.priority != asked:
        fields.service_tier = "default"


def _unify_limits(fields: GenerationFields) -> None:
    """Makes max_tokens the limit, and n_predict the note that there is none, whichever of them the request has."""
    if NO_LIMIT in (fields.max_tokens, fields.n_predict):
        fields.max_tokens, fields.n_predict = None, NO_LIMIT
    elif fields.max_tokens is None:
        fields.max_tokens = fields.n_predict


def check_prompt_logprobs(fields: GenerationFields) -> None:
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed: leave stream out", param="prompt_logprobs")


def shown_special(served: ServedModel, fields: GenerationFields) -> frozenset[int]:
    """Returns the special tokens that are returned as text although no marker contains them."""
    return frozenset() if fields.skip_special_tokens is not False else served.text.tokenizer.special_ids


def truncate(
    served: ServedModel, context: RequestContext, fields: GenerationFields, prompt: list[int], max_tokens: int | None
) -> list[int]:
    """Cuts a prompt to its last truncate_prompt_tokens, and counts the tokens cut. The context must
    have room for `max_tokens` after it."""
    if fields.truncate_prompt_tokens is None:
        return prompt
    room = served.limits.max_len - (1 if max_tokens is None else max_tokens)
    length = room if fields.truncate_prompt_tokens == ALL_THAT_FITS else fields.truncate_prompt_tokens
    if not 0 < length <= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1, or from 1 to {room}, for which the context has room; got {length}",
            param="truncate_prompt_tokens",
        )
    context.notes.truncated += max(len(prompt) - length, 0)
    return prompt[-length:]


# -- sampling -----------------------------------------------------------------------------------------------------

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "loop_guard",
    "include_stop_str_in_output",
)
MAX_BAD_WORDS = 1024


def sampling(served: ServedModel, fields: SamplingFields, **given: Any) -> list[SamplingParams]:
    """Returns sampling for each of a prompt's choices; each choice has its own seed. `given` are the settings that each
    endpoint spells in its own way."""
    served.check_ids(fields.stop_token_ids or (), "stop_token_ids")
    served.check_ids(fields.allowed_token_ids or (), "allowed_token_ids")
    check_count(fields.bad_words or (), MAX_BAD_WORDS, "bad_words")
    named = {name: getattr(fields, name) for name in _SAMPLING}
    settings = {name: value for name, value in (named | given).items() if value is not None} | sampler_settings(fields)
    settings["logit_bias"] = logit_biases(served, fields.logit_bias) if fields.logit_bias else {}
    settings["bad_words"] = tuple(fields.bad_words or ())
    settings["allowed_token_ids"] = None if fields.allowed_token_ids is None else tuple(fields.allowed_token_ids)
    settings["top_k"] = 0 if fields.top_k == -1 else fields.top_k  # some clients send -1 for "off"
    settings["stop"] = check_stops((fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()), "stop")
    settings["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    settings["grammar"] = grammar_of(fields)
    usual = served.text.sampling_defaults.get("seed")
    seed = fields.seed if fields.seed is not None else new_seed() if usual is None else usual
    params = [served.text.sampling(seed=seed_of_choice(seed, choice), **settings) for choice in range(fields.choices)]
    return params if usual is None else drawn_as_llamacpp(params)


def drawn_as_llamacpp(params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Returns sampling whose seed gives the text that it gives in llama.cpp. The host draws, which takes longer than on
    a GPU: so does a server with a seed of its own, and llama.cpp's routes if the request has one."""
    return [replace(each, chain=(each.chain or SamplerChain())._replace(mersenne=True)) for each in params]


# -- answering ----------------------------------------------------------------------------------------------------


class CompletionHead(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    service_tier: str | UnsetType = UNSET  # only if the request names one


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int
    accepted_prediction_tokens: int | UnsetType = UNSET  # predicted tokens in the answer and not in it
    rejected_prediction_tokens: int | UnsetType = UNSET


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TokenTally:
    """Counts the tokens of an answer: each prompt once, however many choices it has."""

    def __init__(self, requests: Sequence[Request], n: int) -> None:
        self._requests = requests
        self.n = n
        self._generated = 0
        self._cached = [0] * len(requests)
        self._predictions = [PredictionTally(each.prediction) if each.prediction else None for each in requests]

    def add(self, choice: int, delta: Delta) -> None:
        self._generated += len(delta.tokens)
        if delta.cached > self._cached[choice]:
            self._cached[choice] = delta.cached
        if (prediction := self._predictions[choice]) is not None:
            prediction.add(delta.tokens)

    def usage(self) -> CompletionUsage:
        """Returns the usage. A prompt's cached tokens are those reused from earlier requests: the choice that reused
        least counts, because choices also reuse the prompt from each other."""
        firsts = range(0, len(self._requests), self.n)
        prompt = sum(len(self._requests[first].prompt) for first in firsts)
        cached = sum(min(self._cached[first : first + self.n]) for first in firsts)
        return CompletionUsage(prompt, self._generated, prompt + self._generated, PromptTokensDetails(cached))

    def details(self, reasoning: int) -> CompletionTokensDetails | UnsetType:
        """Returns the kinds of the generated tokens, of which `reasoning` were reasoning; UNSET if they are all
        plain."""
        predicted = [each for each in self._predictions if each is not None]
        if not predicted:
            return CompletionTokensDetails(reasoning) if reasoning else UNSET
        accepted, rejected = sum(each.accepted for each in predicted), sum(each.rejected for each in predicted)
        return CompletionTokensDetails(reasoning, accepted, rejected)


def new_head(kind: str, model: str, tier: str | None = None, id: str | None = None) -> dict[str, Any]:
    """Returns the fields that an answer and all its chunks begin with. `id` is the request's own, if it has one."""
    answered = {} if tier is None else {"service_tier": ANSWERED_TIERS.get(tier, "default")}
    return {"id": f"{kind}-{id or secrets.token_hex(12)}", "created": int(time.time()), "model": model, **answered}


def fitting(served: ServedModel, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
    """Returns sampling that ends where the context is full. Without any room, making the request fails."""
    room = max(served.limits.max_len - len(prompt), 1)
    return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))
