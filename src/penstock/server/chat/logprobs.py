"""Returns log probabilities of tokens in the shape that OpenAI's chat and responses and Ollama's chat share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.text import Delta, Tokenizer
from penstock.types import TokenLogprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


class TokenAlternative(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenAlternative):
    top_logprobs: list[TokenAlternative]


def finite_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def token_entries(tokenizer: Tokenizer, delta: Delta, *, as_ids: bool = False) -> list[TokenEntry]:
    """Returns an entry for each of the delta's tokens that is part of the text, if logprobs were asked for. With
    `as_ids`, tokens are spelled by their ids."""
    return [_entry(tokenizer, each, as_ids) for each in delta.logprobs[: len(delta.logprobs) - delta.silent]]


def _entry(tokenizer: Tokenizer, scored: TokenLogprob, as_ids: bool) -> TokenEntry:
    top = [TokenAlternative(*_spelled(tokenizer, token, logprob, as_ids)) for token, logprob in scored.top]
    return TokenEntry(*_spelled(tokenizer, scored.token, scored.logprob, as_ids), top)


def _spelled(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> tuple[str, float, list[int]]:
    spelling = tokenizer.token_bytes(token)
    text = spelled_id(token) if as_ids else spelling.decode("utf-8", "replace")
    return text, finite_logprob(logprob), list(spelling)


def spelled_id(token: int) -> str:
    return f"token_id:{token}"


class PromptLogprob(msgspec.Struct):
    """Is vLLM's entry for a token of the prompt, or for an alternative to it."""

    logprob: float
    rank: int | None  # 1 is the likeliest; null: below the alternatives that were asked for
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # null for the first token, which nothing precedes


def prompt_entries(tokenizer: Tokenizer, scores: Sequence[TokenLogprob]) -> PromptLogprobs:
    """Returns the entries of scored prompt tokens: of each, the alternatives and the token itself."""
    return [_prompt_entry(tokenizer, scored) for scored in scores]


def _prompt_entry(tokenizer: Tokenizer, scored: TokenLogprob) -> dict[int, PromptLogprob]:
    found = {
        token: PromptLogprob(finite_logprob(logprob), rank, tokenizer.token_text(token))
        for rank, (token, logprob) in enumerate(scored.top, 1)
    }
    own = PromptLogprob(finite_logprob(scored.logprob), None, tokenizer.token_text(scored.token))
    return {scored.token: found.get(scored.token, own)} | found
