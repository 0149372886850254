"""Encodes the prompts of a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.server.models.served_model import ServedModel, off_loop


class EncodedPrompt(NamedTuple):
    ids: Sequence[int]
    text: str | None  # as it was sent; None if token ids were


def separate(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """Returns the prompts of a field, which is one text, several, one list of token ids, or several."""
    if isinstance(given, str):
        return [given]
    ids = [each for each in given if isinstance(each, int)]
    if ids and len(ids) == len(given):
        return [ids]
    texts = [each for each in given if isinstance(each, str)]
    lists = [each for each in given if isinstance(each, list)]
    if len(given) not in (len(texts), len(lists)) or not given:
        raise InvalidRequest(
            f"{param} must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            param=param,
        )
    return [*texts, *lists]


async def encode_prompts(
    served: ServedModel, prompts: Sequence[str | list[int]], *, whole: bool = False, bos: bool = True
) -> list[EncodedPrompt]:
    """Returns the prompts' token ids, after the model's BOS unless `bos` is False. `whole` prompts are not continued:
    they get the model's closing tokens."""
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    encode = served.text.encode_whole if whole else served.text.encode_prompt
    if not bos:
        encode = partial(served.text.tokenizer.encode, special=True)
    return await off_loop(
        size, lambda: [EncodedPrompt(encode(p), p) if isinstance(p, str) else EncodedPrompt(p, None) for p in prompts]
    )
