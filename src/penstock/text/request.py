"""Makes the engine's request from a prompt's token ids. A prompt that does not fit is refused here, with the
numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.token_sequences import bad_word_tokens, breaker_tokens
from penstock.text.tokenizer import Tokenizer
from penstock.types import Limits, Request, SamplingParams


def check_answers(limits: Limits) -> None:
    """Raises if the model generates no text: an encoder, or a decoder without an output head."""
    if not limits.generates and limits.labels and not limits.encoder:
        raise InvalidRequest(
            "this model classifies texts and generates none: send texts to /classify, /score or /rerank", param="model"
        )
    if not limits.generates:
        kind = "an encoder" if limits.encoder else "a decoder without an output head"
        raise InvalidRequest(
            f"this model is {kind}, which returns embeddings and no text: send texts to /v1/embeddings or "
            "/api/embed, or to LLM.embed",
            param="model",
        )


def new_seed() -> int:
    """Returns a random 63-bit seed, the size that OpenAI's clients may send."""
    return secrets.randbits(63)


def seed_of_choice(seed: int, choice: int) -> int:
    """Returns the seed of a choice: consecutive numbers, wrapping to 0 after the largest."""
    derived = seed + choice
    return derived if derived < 2**64 else derived - 2**64


def make_request(
    id: int,
    prompt: Sequence[int],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    context: int,
    *,
    param: str = "prompt",
    default: int | None = None,
) -> Request:
    """Makes a request. `context` limits the tokens of prompt and answer; `param` is the prompt's field for errors.
    Without max_tokens the answer has `default` tokens, or fills the context.

    A request without a seed gets one here instead of in the engine, so another engine can continue the answer.
    """
    room = context - len(prompt)
    wanted = sampling.max_tokens
    if not prompt:
        raise InvalidRequest(f"{param} is empty: it must have at least one token", param=param)
    if room < (1 if wanted is None else min(wanted, 1)):
        raise ContextTooLong(
            f"{param} has {len(prompt)} tokens; the context holds {context}, answer included: shorten it",
            param=param,
            prompt_tokens=len(prompt),
            context=context,
        )
    if wanted is not None and wanted > room:
        raise ContextTooLong(
            f"max_tokens is {wanted} and {param} has {len(prompt)} tokens, together {len(prompt) + wanted}; "
            f"the context holds {context}: lower max_tokens to at most {room}",
            param="max_tokens",
            prompt_tokens=len(prompt),
            context=context,
        )
    if sampling.seed is None:
        sampling = replace(sampling, seed=new_seed())
    ends = () if sampling.ignore_eos else tokenizer.eos_ids
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=min(room, default or room) if wanted is None else wanted,
        stop_ids=frozenset((*ends, *sampling.stop_token_ids)),
        bad_words=bad_word_tokens(tokenizer, sampling.bad_words),
        dry_breakers=breaker_tokens(tokenizer, sampling.dry.breakers) if sampling.dry else (),
    )
