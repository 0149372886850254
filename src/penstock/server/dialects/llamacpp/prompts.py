"""Reads prompts in the forms that llama.cpp takes: text, token ids, both mixed, objects, and lists of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count
from penstock.server.http.bodies import unsupported
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text import Text

MAX_PROMPTS = 1024


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    prompt_string: str
    multimodal_data: list[str] | str | None = None


Prompt = str | PromptObject | list[str | int]
Prompts = str | PromptObject | list[str | int | PromptObject | list[str | int]]


async def encode_prompts(served: ServedModel, given: Prompts, param: str, *, whole: bool = False) -> list[list[int]]:
    """Returns the token ids of each prompt. `whole` prompts are not continued: they get the model's closing tokens."""
    prompts = separate(given, param)
    check_count(prompts, MAX_PROMPTS, param)
    size = sum(_size(prompt) for prompt in prompts)
    encoded = await off_loop(size, lambda: [_encode(served.text, prompt, param) for prompt in prompts])
    for ids in encoded:
        served.check_ids(ids, param)
    return [[*ids, *served.text.tokenizer.closing] for ids in encoded] if whole else encoded


def separate(given: Prompts, param: str) -> list[Prompt]:
    """Returns the prompts. A list that has a token id among its elements is one prompt."""
    if not isinstance(given, list):
        return [given]
    mixed = [each for each in given if isinstance(each, str | int)]
    if any(isinstance(each, int) for each in given):
        if len(mixed) < len(given):
            raise InvalidRequest(f"{param}: a list with token ids has only ids and texts beside them", param=param)
        return [mixed]
    if not given:
        raise InvalidRequest(f"{param} is an empty list: send at least one prompt", param=param)
    return [each for each in given if not isinstance(each, int)]


def _size(prompt: Prompt) -> int:
    if isinstance(prompt, PromptObject):
        return len(prompt.prompt_string)
    return len(prompt) if isinstance(prompt, str) else sum(len(each) for each in prompt if isinstance(each, str))


def _encode(text: Text, prompt: Prompt, param: str) -> list[int]:
    if isinstance(prompt, PromptObject):
        if prompt.multimodal_data:
            raise unsupported(f"{param}.multimodal_data", prompt.multimodal_data)
        prompt = prompt.prompt_string
    return text.encode_prompt(prompt) if isinstance(prompt, str) else _encode_mixed(text, prompt)


def _encode_mixed(text: Text, parts: Sequence[Any]) -> list[int]:
    """Returns the ids of texts and ids in their order. A text at the beginning gets the model's BOS."""
    ids: list[int] = []
    for at, part in enumerate(parts):
        if isinstance(part, str):
            ids += text.encode_prompt(part) if at == 0 else text.tokenizer.encode(part, special=True)
        else:
            ids.append(part)
    return ids
