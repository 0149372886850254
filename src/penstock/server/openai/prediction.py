"""Reads OpenAI's predicted outputs: text that a client expects in the answer, which is drafted where it fits."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.server.access.bounds import MAX_PARTS, check_count
from penstock.server.openai.content import ChatTextPart
from penstock.server.request_context import RequestContext
from penstock.server.served_model import ServedModel, off_loop


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[ChatTextPart]


async def draft_prediction(served: ServedModel, context: RequestContext, given: Prediction | None) -> None:
    """Has a request's prediction drafted, in the tokens of an answer: without BOS, and special tokens are plain text.
    It is listed as ignored where nothing is drafted."""
    if given is None:
        return
    if not served.draft_tokens or context.speculation == 0:
        context.ignore("prediction")
        return
    if isinstance(given.content, list):
        check_count(given.content, MAX_PARTS, "prediction.content")
    text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    tokens = await off_loop(len(text), lambda: served.text.tokenizer.encode(text))
    context.prediction = tuple(tokens[: served.limits.max_len])
