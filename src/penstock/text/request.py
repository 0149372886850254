"""From a prompt's token ids to the engine's request: what cannot fit is refused here, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.tokenizer import Tokenizer
from penstock.types import Limits, Request, SamplingParams


def check_answers(limits: Limits) -> None:
    """Refuses to ask a model for text that has none to give."""
    if limits.encoder:
        raise InvalidRequest(
            "this model is an encoder, which makes embeddings and no text: send texts to /v1/embeddings or /api/embed, "
            "or to LLM.embed",
            param="model",
        )


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
    """`context` is how many tokens prompt and answer may have together; `param` is the field the prompt came in.
    Without a max_tokens the answer has `default` tokens, or what the context has room for."""
    room = context - len(prompt)
    wanted = sampling.max_tokens
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if room < (1 if wanted is None else min(wanted, 1)):
        raise ContextTooLong(
            f"{param} has {len(prompt)} tokens and the model's context holds {context}, answer included: shorten it",
            param=param,
        )
    if wanted is not None and wanted > room:
        raise ContextTooLong(
            f"max_tokens is {wanted} and {param} has {len(prompt)} tokens, together {len(prompt) + wanted}; "
            f"the model's context holds {context}: ask for at most {room} tokens",
            param="max_tokens",
        )
    ends = () if sampling.ignore_eos else tokenizer.eos_ids
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=min(room, default or room) if wanted is None else wanted,
        stop_ids=frozenset((*ends, *sampling.stop_token_ids)),
    )
