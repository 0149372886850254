"""What OpenAI's generating endpoints share: the fields of a request, and what every answer holds."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest

from penstock import __version__
from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_stops
from penstock.server.bodies import ANY_VALUE, NoEffect, read_body, unsupported
from penstock.server.chat.structured import Structured, grammar_of
from penstock.server.request_context import notes
from penstock.server.served_model import ServedModel
from penstock.text import Delta
from penstock.types import Request, SamplingParams

FINGERPRINT = f"penstock-{__version__}"
NO_CHANCE = -9999.0  # stands for minus infinity, which JSON has no word for

TOLD_TIERS = {"flex": "flex", "priority": "priority", "fast": "priority"}

NO_EFFECT: NoEffect = {
    "metadata": ANY_VALUE,
    "prompt_cache_key": ANY_VALUE,  # every prefix is cached, asked for or not, for as long as there is room
    "prompt_cache_options": ANY_VALUE,
    "prompt_cache_retention": ANY_VALUE,
    "safety_identifier": ANY_VALUE,
    "store": (False,),
    "user": ANY_VALUE,
}

F = TypeVar("F", bound="GenerationFields")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(Structured, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen. Every field may be null, which is the same as leaving it out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None

    @property
    def choices(self) -> int:
        return 1


class GenerationFields(SamplingFields, kw_only=True):
    model: str
    max_tokens: int | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None  # left out: true
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None  # -1: to what the context has room for
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower is sooner
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    penstock: bool | None = None  # whether the answer is to explain itself

    def __post_init__(self) -> None:
        notes().explain |= bool(self.penstock)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


async def read_fields(http: HttpRequest, kind: type[F], no_effect: NoEffect) -> F:
    fields = await read_body(http, kind, no_effect)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", True)
    return fields


# -- sampling -----------------------------------------------------------------------------------------------------

_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
)


def sampling(served: ServedModel, fields: SamplingFields, **given: Any) -> list[SamplingParams]:
    """One for each of a prompt's choices: with a seed, each choice has its own. `given` are the settings that each
    endpoint spells in its own way."""
    served.check_ids(fields.logit_bias or (), "logit_bias")
    served.check_ids(fields.stop_token_ids or (), "stop_token_ids")
    named = {name: getattr(fields, name) for name in _SAMPLING}
    settings = {name: value for name, value in (named | given).items() if value is not None}
    settings["top_k"] = 0 if fields.top_k in (None, -1) else fields.top_k  # -1 is how some clients say "off"
    settings["stop"] = check_stops((fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()), "stop")
    settings["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    settings["grammar"] = grammar_of(fields)
    seed = settings.pop("seed", None)
    return [
        SamplingParams(seed=None if seed is None else seed + choice, **settings) for choice in range(fields.choices)
    ]


# -- answering ----------------------------------------------------------------------------------------------------


class CompletionHead(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    service_tier: str | UnsetType = UNSET  # told to those who ask for one


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


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

    def take(self, choice: int, delta: Delta) -> None:
        self._generated += len(delta.tokens)
        self._cached[choice] = max(self._cached[choice], delta.cached)

    def usage(self) -> CompletionUsage:
        """A prompt's cached tokens are those reused from before; its choices reuse it from each other, too."""
        firsts = range(0, len(self._requests), self.n)
        prompt = sum(len(self._requests[first].prompt) for first in firsts)
        cached = sum(min(self._cached[first : first + self.n]) for first in firsts)
        return CompletionUsage(prompt, self._generated, prompt + self._generated, PromptTokensDetails(cached))


def new_head(kind: str, model: str, tier: str | None = None) -> dict[str, Any]:
    told = {} if tier is None else {"service_tier": TOLD_TIERS.get(tier, "default")}
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model, **told}


def told_logprob(logprob: float) -> float:
    return max(logprob, NO_CHANCE)
