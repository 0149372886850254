"""Stores responses in memory, with limits on their number and size.

The least recently used response is dropped first. A conversation is a chain of responses; continuing it uses all of
them. A response that is still being generated is not dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.errors import InvalidRequest, NotFound
from penstock.server.responses.background import BackgroundResponse
from penstock.server.responses.items import Item, ResponseObject
from penstock.server.sse import encode

MAX_RESPONSES = 1024
MAX_BYTES = 64 * 2**20  # as JSON


@dataclass(eq=False)
class StoredResponse:
    response: ResponseObject
    input: list[Item]
    job: BackgroundResponse | None = None  # if it is generated in the background
    tenant: str | None = None  # whose it is: see RequestContext.owner_name

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.done

    @property
    def size(self) -> int:
        events = 0 if self.job is None else self.job.buffer.bytes
        return len(encode(self.response)) + len(encode(self.input)) + events


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = (
            OrderedDict()
        )  # with its size; the most recently used is last
        self._bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Stores a response, or its current state if it is stored already."""
        self._drop(stored.response.id)
        self._stored[stored.response.id] = stored, stored.size
        self._bytes += self._stored[stored.response.id][1]
        self._make_room(stored)

    def get(self, id: str, tenant: str | None) -> StoredResponse:
        """Returns a tenant's response; raises NotFound if there is none, or if it is another's."""
        if id not in self._stored or self._stored[id][0].tenant != tenant:
            raise NotFound(
                f"there is no response {id!r} here: it was not stored, was deleted, or was dropped for newer ones"
            )
        self._stored.move_to_end(id)
        return self._stored[id][0]

    def remove(self, id: str, tenant: str | None) -> None:
        self.get(id, tenant)
        self._drop(id)

    def conversation(self, id: str | None, tenant: str | None) -> list[Item]:
        """Returns all items of the conversation up to and including the response."""
        turns: list[StoredResponse] = []
        while id is not None:
            turns.append(self._ended(id, tenant))
            id = turns[-1].response.previous_response_id
        for turn in reversed(turns):
            self._stored.move_to_end(turn.response.id)
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.response.output)]

    def _ended(self, id: str, tenant: str | None) -> StoredResponse:
        try:
            stored = self.get(id, tenant)
        except NotFound as error:
            raise InvalidRequest(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from error
        if stored.response.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"previous_response_id: the response {id!r} is {stored.response.status} and cannot be continued",
                param="previous_response_id",
            )
        return stored

    def _make_room(self, newest: StoredResponse) -> None:
        for id, (stored, _) in list(self._stored.items()):
            if len(self._stored) <= self._max_responses and self._bytes <= self._max_bytes:
                return
            if stored is not newest and not stored.running:
                self._drop(id)

    def _drop(self, id: str) -> None:
        if id in self._stored:
            self._bytes -= self._stored.pop(id)[1]
