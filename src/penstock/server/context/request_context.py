"""Defines the context of one HTTP request: who asks, what service is due, and what the answer reports.

The outermost middleware creates it. Authentication and tracing fill in their part. Endpoints get it as an argument and
pass it down.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Scope, Send

from penstock.errors import Forbidden, ModelNotFound
from penstock.ipc.placement import RequestPlacement
from penstock.server.access.in_flight import Admission
from penstock.server.context.caller import Caller
from penstock.server.context.notes import AnswerNotes
from penstock.server.context.service import Service, new_request_id
from penstock.types import Request

if TYPE_CHECKING:
    from penstock.server.streams.kept import KeptStreams
    from penstock.server.telemetry.tracing import RequestSpan

SHAPES = "penstock.errors"  # names, in a request's scope, the function that finds the shape of its errors
STREAM = b"x-penstock-stream"  # names the stream, in answers whose clients may come back

Write = Callable[[bytes], bool]  # writes a part of a body that has begun; False: not now, the client does not read


async def no_connection(_: Message) -> None:
    raise RuntimeError("this context belongs to no connection, so nothing can be sent")


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """Holds the facts about one HTTP request. `send` is the HTTP server's own. The chunks of a stream
    go through it and skip the middlewares, which only change an answer's headers: each middleware would cost a stream a
    microsecond per token. Where the HTTP server has it, `write` does so without a coroutine."""

    caller: Caller = field(default_factory=Caller)
    service: Service = field(default_factory=Service)
    notes: AnswerNotes = field(default_factory=AnswerNotes)
    id: str = field(default_factory=new_request_id)
    lenient: bool = True  # unknown fields and unsupported settings are ignored and listed; False: refused
    send: Send = no_connection
    write: Write | None = None  # None: the HTTP server has only `send`
    body: bytes | None = None  # None: not read yet
    json: dict[str, Any] | None = None  # the body's fields, once they are decoded and until an endpoint reads them
    streaming: bool = True  # a streamed answer cannot be tried again
    streams: KeptStreams | None = None  # where its stream is kept; None: it ends when its client leaves
    stream_id: str = ""  # under which it is kept; empty: a new one
    admission: Admission | None = None  # its places among the requests in flight; None: it needs none
    span: RequestSpan | None = None  # the request's span, if traces are exported
    parents: dict[str, str] = field(default_factory=dict)  # headers by which the client names the trace it belongs to
    unknown_model: Callable[[str], ModelNotFound] = ModelNotFound  # makes the error for a name that no model has
    _endings: list[Callable[[], None]] = field(default_factory=list)

    def on_end(self, call: Callable[[], None]) -> None:
        self._endings.append(call)

    def end(self) -> None:
        while self._endings:
            self._endings.pop()()

    def ask_priority(self, asked: int, param: str) -> None:
        """Takes over the priority that a request asks for, as far as its owner may use it: a lower number becomes the
        lowest that the owner has, and is listed as ignored or refused. Tenants without a key have the bound of a key
        without rights."""
        lowest = 0 if self.caller.payer is None else self.caller.payer.priority
        if self.caller.owner_name is not None and asked < lowest:
            if not self.lenient:
                what = f"ask for {param} below {lowest}"
                raise (
                    self.caller.payer.forbidden("priority", what)
                    if self.caller.payer
                    else Forbidden(f"tenants may not {what}")
                )
            self.notes.ignore(param)
            asked = lowest
        self.service.priority = asked

    def answer(self) -> AbstractContextManager[Callable[[], None]]:
        """Holds a place for one answer, and yields a function to call when the answer is computed; raises Overloaded
        if there is no place."""
        return nullcontext(lambda: None) if self.admission is None else self.admission.answer()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of this request's answer. Anthropic's clients expect the id as request-id."""
        id = self.id.encode()
        return [(b"x-request-id", id), (b"request-id", id), *self.notes.headers()]

    def place(self, id: int, placement: RequestPlacement) -> None:
        """Notes where one of its answers is sent; `id` is the number of the engine's request."""
        self.notes.placements.append((id, placement))
        if self.span is not None:
            self.span.place(id, placement)

    def fall_back(self, model: str, to: str, why: str) -> None:
        self.notes.fall_back(model, to, why)
        if self.span is not None:
            self.span.fall_back(model, to, why)

    def trace_headers(self) -> dict[str, str]:
        """Returns the headers that name the parent of what another server does for this request."""
        return self.parents if self.span is None else self.span.headers()

    def apply_to(self, request: Request) -> Request:
        return self.service.apply_to(request, self.caller, explain=self.notes.explain)


def context_of(scope: Scope) -> RequestContext:
    """Returns the context that the outermost middleware, or the batch runner, created for a request."""
    context = scope["state"]["context"]
    assert isinstance(context, RequestContext)
    return context
