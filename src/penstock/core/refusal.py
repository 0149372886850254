"""Refuses at once what could never work: limits that contradict each other, and requests that could never finish."""

from __future__ import annotations

from penstock.core.sequence import Sequence
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest
from penstock.types import Limits, blocks_for


def refuse_unworkable(limits: Limits) -> None:
    """Raises ConfigError for limits under which some sequence could never be computed."""
    if limits.step_tokens < limits.max_rows:
        raise ConfigError(
            f"a step of {limits.step_tokens} tokens cannot serve {limits.max_rows} rows: "
            "raise step_tokens or lower max_rows"
        )
    if limits.encoder and limits.max_len > limits.step_tokens:
        raise ConfigError(
            f"a step of {limits.step_tokens} tokens cannot hold one sequence of {limits.max_len}: "
            "raise step_tokens or lower max_len"
        )
    chunk = limits.max_len if limits.encoder else 1
    if blocks_for(limits.max_len, limits.windows, limits.block_size, chunk) > limits.num_blocks:
        raise ConfigError(
            f"{limits.num_blocks} blocks cannot hold one sequence of {limits.max_len} tokens: "
            "give the KV cache more memory or lower max_len"
        )


def refuse_impossible(seq: Sequence, limits: Limits) -> None:
    """Raises InvalidRequest for a sequence that could never be finished within the limits."""
    if not seq.prompt_len:
        raise InvalidRequest("the prompt is empty: at least one token is needed")
    if seq.max_len > limits.max_len:
        answer = seq.max_len - seq.prompt_len
        raise ContextTooLong(
            f"the prompt has {seq.prompt_len} tokens and {answer} more may follow, together {seq.max_len}; "
            f"the context holds {limits.max_len}: shorten the prompt or lower max_tokens"
        )
    if min(seq.tokens) < 0 or max(seq.tokens) >= limits.vocab:
        raise InvalidRequest(f"prompt token ids must be from 0 to {limits.vocab - 1}")
