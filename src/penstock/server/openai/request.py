"""From what was asked to the engine's requests: how much of a prompt is taken, and where it stands among others."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidRequest
from penstock.server.openai.fields import GenerationFields
from penstock.server.request_context import notes
from penstock.server.served_model import ServedModel
from penstock.types import Request, SamplingParams

# How soon a request is computed among those that wait; clients that want another order send `priority`.
TIERS = {"auto": 0, "default": 0, "scale": 0, "flex": 1, "priority": -1, "fast": -1}
ALL_THAT_FITS = -1


def request_of(
    served: ServedModel,
    body: GenerationFields,
    prompt: Sequence[int],
    sampling: SamplingParams,
    param: str,
    default: int | None = None,
) -> Request:
    request = served.request(prompt, sampling, param, default)
    priority = TIERS[body.service_tier or "auto"] if body.priority is None else body.priority
    return request._replace(salt=body.cache_salt or "", priority=priority)


def shown_special(served: ServedModel, body: GenerationFields) -> frozenset[int]:
    """The special tokens that are told as text although they are part of no marker."""
    return frozenset() if body.skip_special_tokens is not False else served.text.tokenizer.special_ids


def taken(served: ServedModel, body: GenerationFields, prompt: list[int], most: int | None) -> list[int]:
    """The end of a prompt that may be cut, where it is longer than was asked for; it is told how much that left out.
    `most` tokens are to have room after it."""
    if body.truncate_prompt_tokens is None:
        return prompt
    room = served.limits.max_len - (1 if most is None else most)
    kept = room if body.truncate_prompt_tokens == ALL_THAT_FITS else body.truncate_prompt_tokens
    if not 0 < kept <= room:
        told = f"truncate_prompt_tokens is -1 or from 1 to {room}, as the context has room for; got {kept}"
        raise InvalidRequest(told, param="truncate_prompt_tokens")
    notes().truncated += max(len(prompt) - kept, 0)
    return prompt[-kept:]
