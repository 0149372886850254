"""Reads OpenAI's predicted outputs: text that a client expects in the answer, which is drafted where it fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.server.access.bounds import MAX_PARTS, check_count
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.content import ChatTextPart
from penstock.server.models.served_model import ServedModel, off_loop


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["content"]
    content: str | list[ChatTextPart]


async def draft_prediction(served: ServedModel, context: RequestContext, given: Prediction) -> None:
    """Drafts a request's prediction, in the tokens of an answer: without BOS, and with special tokens as plain text.
    The prediction is listed as ignored if the server does not draft."""
    if not served.draft_tokens or context.service.speculation == 0:
        context.notes.ignore("prediction")
        return
    if isinstance(given.content, list):
        check_count(given.content, MAX_PARTS, "prediction.content")
    text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    tokens = await off_loop(len(text), lambda: served.text.tokenizer.encode(text))
    context.service.prediction = tuple(tokens[: served.limits.max_len])


class PredictionTally:
    """Counts which tokens of a prediction appear in an answer, in their order, whether they were drafted or not. After
    the two diverge, counting resumes where the answer has the prediction's next token, or RUN tokens of a later
    place."""

    RUN = 3

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._next = 0  # the place in the prediction that the answer has reached
        self._unmatched: list[int] = []  # the answer's last tokens, since they diverge
        self._places: dict[tuple[int, ...], list[int]] = {}  # run of tokens -> places
        self.accepted = 0

    @property
    def rejected(self) -> int:
        return len(self._prediction) - self.accepted

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._next < len(self._prediction) and token == self._prediction[self._next]:
                self._reach(self._next, 1)
            else:
                self._unmatched = [*self._unmatched[1 - self.RUN :], token]
                self._find()

    def _find(self) -> None:
        """Goes on at the next place where the prediction has the unmatched tokens."""
        if not self._places:
            for at in range(len(self._prediction) - self.RUN + 1):
                self._places.setdefault(tuple(self._prediction[at : at + self.RUN]), []).append(at)
        places = self._places.get(tuple(self._unmatched), ())
        found = bisect_left(places, self._next)
        if found < len(places):
            self._reach(places[found], self.RUN)

    def _reach(self, at: int, count: int) -> None:
        self._next, self._unmatched = at + count, []
        self.accepted += count
