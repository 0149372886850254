"""Reads the bodies of SGLang's requests."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from penstock.server.context.request_context import RequestContext
from penstock.server.generation.fields import SamplingFields, sampling
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_object
from penstock.server.models.served_model import ServedModel
from penstock.types import SamplingParams

DEFAULT_TOKENS = 128  # SGLang's

SAMPLING_NO_EFFECT: NoEffect = {
    "custom_params": ({},),
    "spaces_between_special_tokens": ANY_VALUE,  # it concerns tokenizers of another library
    "stop_regex": ([], ""),
    "stream_interval": ANY_VALUE,
}


class SglangSampling(SamplingFields, kw_only=True):
    """Declares the fields of `sampling_params`, which has OpenAI's and vLLM's names for most."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    no_stop_trim: bool | None = None  # the stop string is part of the text
    skip_special_tokens: bool | None = None  # left out: true
    n: Annotated[int, Meta(ge=1, le=128)] | None = None

    @property
    def choices(self) -> int:
        return self.n or 1


class SglangLogprobs(NamedTuple):
    """Says which logprobs a request wants."""

    wanted: bool = False
    start: int = -1  # the first prompt token that has an entry; -1: none has
    top: int = 0  # alternatives for each token
    texts: bool = False  # entries have the tokens' texts


def read_sampling(
    served: ServedModel, context: RequestContext, given: dict[str, Any], where: str, logprobs: SglangLogprobs
) -> tuple[SglangSampling, list[SamplingParams]]:
    """Returns the fields of `sampling_params`, and the sampling of each of a prompt's answers."""
    fields = read_object(context, given, SglangSampling, SAMPLING_NO_EFFECT, where)
    if fields.sampling_seed is not None:
        fields.seed = fields.sampling_seed
    settings: dict[str, Any] = {"max_tokens": fields.max_new_tokens}
    if fields.min_new_tokens is not None:
        settings["min_tokens"] = fields.min_new_tokens
    if fields.no_stop_trim:
        settings["include_stop_str_in_output"] = True
    if logprobs.wanted:
        settings |= {"logprobs": logprobs.top, "prompt_logprobs": logprobs.top if logprobs.start >= 0 else None}
    return fields, sampling(served, fields, **settings)
