"""The responses that are kept: in memory, and no more than so many and so much of them.

What was not used for longest goes first. A conversation is one response after the other; going on with it uses all of
them. A response that is being worked on stays.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.errors import InvalidRequest, NotFound
from penstock.server.responses.background import BackgroundResponse
from penstock.server.responses.items import Item, ResponseObject
from penstock.server.sse import encode

MOST = 1024
MOST_BYTES = 64 * 2**20  # as JSON


@dataclass(eq=False)
class StoredResponse:
    response: ResponseObject
    input: list[Item]
    job: BackgroundResponse | None = None  # of those made in the background

    @property
    def busy(self) -> bool:
        return self.job is not None and not self.job.done

    @property
    def size(self) -> int:
        told = self.job.told if self.job is not None else []
        return len(encode(self.response)) + len(encode(self.input)) + sum(map(len, told))


class ResponseStore:
    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = (
            OrderedDict()
        )  # with its size; the latest used is last
        self._bytes = 0

    def put(self, kept: StoredResponse) -> None:
        """Anew, or as it has become."""
        self._drop(kept.response.id)
        self._kept[kept.response.id] = kept, kept.size
        self._bytes += self._kept[kept.response.id][1]
        self._make_room(kept)

    def get(self, id: str) -> StoredResponse:
        if id not in self._kept:
            raise NotFound(
                f"there is no response {id!r} here: it was not stored, or deleted, or gave way to later ones"
            )
        self._kept.move_to_end(id)
        return self._kept[id][0]

    def remove(self, id: str) -> None:
        self.get(id)
        self._drop(id)

    def conversation(self, id: str | None) -> list[Item]:
        """All that was said up to and with the response."""
        turns: list[StoredResponse] = []
        while id is not None:
            turns.append(self._ended(id))
            id = turns[-1].response.previous_response_id
        for turn in reversed(turns):
            self._kept.move_to_end(turn.response.id)
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.response.output)]

    def _ended(self, id: str) -> StoredResponse:
        try:
            kept = self.get(id)
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        if kept.response.status not in ("completed", "incomplete"):
            told = f"previous_response_id: the response {id!r} is {kept.response.status} and cannot be gone on with"
            raise InvalidRequest(told, param="previous_response_id")
        return kept

    def _make_room(self, newest: StoredResponse) -> None:
        for id, (kept, _) in list(self._kept.items()):
            if len(self._kept) <= self._most and self._bytes <= self._most_bytes:
                return
            if kept is not newest and not kept.busy:
                self._drop(id)

    def _drop(self, id: str) -> None:
        if id in self._kept:
            self._bytes -= self._kept.pop(id)[1]
