"""Stores responses. A conversation is a chain of responses; continuing it uses all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

from penstock.errors import InvalidRequest, NotFound
from penstock.server.dialects.responses.background import BackgroundResponse
from penstock.server.dialects.responses.items import Item, ResponseError, ResponseObject
from penstock.server.http.sse import encode
from penstock.server.storage.lasting_answers import AnswerRecord, LastingAnswers
from penstock.server.storage.owned_store import MAX_BYTES, MAX_KEPT, OwnedStore

UNENDED = ("queued", "in_progress")
CUT_OFF = "the server was killed while it generated this response: send the request again"


@dataclass(eq=False)
class StoredResponse:
    response: ResponseObject
    input: list[Item]
    job: BackgroundResponse | None = None  # if it is generated in the background
    tenant: str | None = None  # whose it is: see RequestContext.owner_name

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def running(self) -> bool:
        return self.job is not None and not self.job.done

    @property
    def size(self) -> int:
        events = 0 if self.job is None else self.job.buffer.bytes
        return len(encode(self.response)) + len(encode(self.input)) + events

    def record(self) -> AnswerRecord:
        """Returns the record for the disk, which lacks the events."""
        return AnswerRecord(self.id, self.tenant, encode((self.response, self.input)))

    @classmethod
    def of(cls, record: AnswerRecord) -> Self:
        """Returns the response in a record. One that had not ended has failed: its server was killed."""
        response, input = _decoder.decode(record.body)
        if response.status in UNENDED:
            response.status, response.error = "failed", ResponseError("server_error", CUT_OFF)
        return cls(response, input, tenant=record.tenant)


_decoder = msgspec.json.Decoder(tuple[ResponseObject, list[Item]])


class ResponseStore(OwnedStore[StoredResponse]):
    def __init__(
        self,
        max_responses: int = MAX_KEPT,
        max_bytes: int = MAX_BYTES,
        lasting: LastingAnswers[StoredResponse] | None = None,
    ) -> None:
        super().__init__("response", max_responses, max_bytes, lasting)

    def conversation(self, id: str | None, tenant: str | None) -> list[Item]:
        turns: list[StoredResponse] = []
        while id is not None:
            turns.append(self._ended(id, tenant))
            id = turns[-1].response.previous_response_id
        for turn in reversed(turns):
            self.get(turn.id, tenant)
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
