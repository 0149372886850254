"""Creates the context of each HTTP request: who sent it, who pays for it, and what its answer has to report.

The outermost middleware creates it. Authentication and tracing fill in their part. Endpoints get it as an argument and
pass it down.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import Forbidden, InvalidRequest, ModelNotFound, PenstockError
from penstock.ipc.placement import RequestPlacement
from penstock.server.access.accounts import Account
from penstock.server.access.in_flight import Admission
from penstock.service_levels import NO_TARGETS, STANDARD_TERMS, ServiceTerms, Targets
from penstock.store import DerivedModel
from penstock.types import AdapterUse, Claim, Request

if TYPE_CHECKING:
    from penstock.server.streams.kept import KeptStreams
    from penstock.server.telemetry.tracing import RequestSpan

SHAPES = "penstock.errors"  # names, in a request's scope, the function that finds the shape of its errors
EXPLAIN = "x-penstock-explain"
RESUME = "x-penstock-resume"  # asks that a stream goes on when its client loses the connection
STREAM = b"x-penstock-stream"  # names the stream, in answers whose clients may come back
IGNORED = b"x-penstock-ignored"  # lists the ignored fields of a request
MODEL = b"x-penstock-model"  # names the served model, in answers to requests that call it by another name
ROUTE = b"x-penstock-route"  # says who answers a request, where several could
PARENT_HEADERS = ("traceparent", "tracestate")
MAX_HEADER = 1024  # characters of a list of ignored fields
CREDENTIALS = ("authorization", "x-api-key")
MAX_IGNORED = 256  # fields
MAX_NAME = 128  # characters of one
NO = ("", "0", "false", "no")
KNOWN = ("key ", "tenant ")  # owners that a key or a trusted proxy names begin so
UNNAMED = "unnamed tenant"  # owns what comes through a trusted proxy without a name
DEADLINE, TTFT, ITL = "x-request-deadline-ms", "x-request-ttft-target-ms", "x-request-itl-target-ms"
LONGEST = 86_400_000  # milliseconds of a deadline or target
MAX_TENANT = 256  # characters of a tenant's name that count


MAX_PART = 32 * 2**10  # bytes of a body that are sent at once: the rest waits until the client reads
WRITE = "penstock.write"  # names `write` among the extensions of an HTTP server
Write = Callable[[bytes], bool]  # writes a part of a body that has begun; False: not now, the client does not read


async def _no_connection(_: Message) -> None:
    raise RuntimeError("this context belongs to no connection, so nothing can be sent")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


@dataclass(slots=True)
class Outcome:
    """Adds up what became of a request, for the log."""

    prompts: dict[int, int] = field(default_factory=dict)  # tokens of each prompt, by its hash: choices share theirs
    charged: set[int] = field(default_factory=set)  # hashes of the prompts that the payer is charged for
    recorded: bool = False  # the usage file has counted the request
    reused: dict[str, int] = field(default_factory=dict)  # prompt tokens by the tier that their KV came from
    cached: int = 0  # prompt tokens whose KV was reused
    generated: int = 0  # tokens
    queued: float = 0.0  # seconds until the engine began with the answer that waited longest
    first: float = 0.0  # perf_counter's time of the first token; 0: there was none
    preemptions: int = 0
    loop: int = 0  # tokens of the phrase that an answer repeated, if the loop guard ended it
    finish_reason: str = ""  # of the answer that ended last
    error: str = ""  # code of the error that was the answer
    reason: str = ""  # what the error said

    def fail(self, error: PenstockError) -> None:
        """Takes note of the error that was the answer."""
        self.error, self.reason = error.code, error.message


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """Holds what is known about one HTTP request beside its body. `send` is the HTTP server's own. The chunks of a
    stream go through it and skip the middlewares, which only change an answer's headers: each middleware would cost a
    stream a microsecond per token. Where the HTTP server has it, `write` does so without a coroutine."""

    id: str = field(default_factory=new_request_id)
    send: Send = _no_connection
    write: Write | None = None  # None: the HTTP server has only `send`
    owner: str = ""  # an explanation mentions recent prompts of the same owner only
    page: str = ""  # describes the foreign web page that the request comes from, if it does
    anonymous: bool = False  # it has no key, where others need one: nothing but a probe's answer is for it
    payer: Account | None = None  # the API key's account that is charged
    admission: Admission | None = None  # its places among the requests in flight; None: it needs none
    span: RequestSpan | None = None  # the request's span, if traces are exported
    lenient: bool = True  # unknown fields and unsupported settings are ignored and listed; False: refused
    explain: bool = False  # the answer reports what happened to it
    background: bool = False  # its answers may wait behind those of every foreground request
    priority: int = 0  # lower runs sooner
    terms: ServiceTerms = STANDARD_TERMS
    arrived: float = field(default_factory=monotonic)
    deadline: float | None = None  # seconds from its arrival
    targets: Targets = NO_TARGETS  # that the request itself states
    salt: str = ""  # prompts share cached blocks only under the same salt
    unshared: bool = False  # its blocks are nobody else's
    adapters: tuple[AdapterUse, ...] = ()  # that the request is computed with
    prediction: tuple[int, ...] = ()  # how the client expects the answer to go on
    speculation: int | None = None  # the most tokens that a step may draft for it; 0: none; None: as the server says
    ignored: set[str] = field(default_factory=set)  # names of ignored fields
    stood_in: str = ""  # the served model's name, if the request calls it by another
    placements: list[tuple[int, RequestPlacement]] = field(default_factory=list)  # if several engines could answer
    fallback: str = ""  # says which model answers in place of the one that was asked for, and why
    parents: dict[str, str] = field(default_factory=dict)  # headers by which the client names the trace it belongs to
    streaming: bool = True  # what is sent as it comes cannot be tried again
    truncated: int = 0  # tokens that were cut from the prompt, as the request asked
    outcome: Outcome = field(default_factory=Outcome)
    body: bytes | None = None  # of the request, once it is read
    json: dict[str, Any] | None = None  # the body's fields, once they are decoded and until an endpoint reads them
    keep_alive: float | None = None  # seconds that the model stays loaded after this request; None: as the server says
    model: str = ""  # that the request uses
    unknown_model: Callable[[str], ModelNotFound] = ModelNotFound  # makes the error for a name that no model has
    loading_seconds: float = 0.0  # that the request waited for its model to be loaded
    streams: KeptStreams | None = None  # where its stream is kept; None: it ends when its client leaves
    stream_id: str = ""  # under which it is kept; empty: a new one
    _endings: list[Callable[[], None]] = field(default_factory=list)

    def on_end(self, call: Callable[[], None]) -> None:
        """Has something called when the request has ended."""
        self._endings.append(call)

    def end(self) -> None:
        """Calls what was to be called at the end."""
        while self._endings:
            self._endings.pop()()

    def check_allowed(self, model: str) -> None:
        """Raises if the request's key may not use the model."""
        if self.payer is not None and not self.payer.may_use(model):
            raise self.payer.forbidden("model", f"use {model!r}, only {', '.join(self.payer.models)}")

    @property
    def owner_name(self) -> str | None:
        """Returns who owns what this request stores, and whose things alone it finds: the API key or, without one, the
        tenant that a trusted proxy names; those that it does not name are one. None: the server has neither keys nor
        such a proxy, and everything is everyone's."""
        if self.payer is not None:
            return self.payer.name
        return (self.tenant or UNNAMED) if self.terms.tenant_header else None

    def may_see(self, derived: DerivedModel | None) -> bool:
        """Returns whether a derived model exists for this request: it does for the owner that made it, and for keys
        whose list of models names it. One that has no owner is everyone's."""
        if derived is None or self.owner_name is None or derived.key in ("", self.owner_name):
            return True
        return self.payer is not None and derived.name in self.payer.models

    def charge_to(self, account: Account) -> None:
        """Makes the account pay for this request and own it."""
        self.payer = account
        self.owner = owner_of_key(account.name)

    @property
    def tenant(self) -> str:
        """Returns whose share of the engine the request uses. All who are not known by a key or by a trusted proxy's
        header are one tenant."""
        return self.owner if self.owner.startswith(KNOWN) else ""

    def read_headers(self, headers: Headers) -> None:
        """Takes over the deadline and the targets that the headers state."""
        self.state_times(*((name, _whole_number(name, headers.get(name))) for name in (DEADLINE, TTFT, ITL)))

    def state_times(self, *times: tuple[str, int | None]) -> None:
        """Takes over the deadline and the targets for the first token and for those after it, which are given in this
        order, in milliseconds and with their names; None: it stays as it is."""
        for name, time in times:
            if time is not None and not 1 <= time <= LONGEST:
                raise InvalidRequest(f"{name} is in milliseconds, from 1 to {LONGEST}; got {time}", param=name)
        deadline, ttft, itl = (None if time is None else time / 1000 for _, time in times)
        self.deadline = self.deadline if deadline is None else deadline
        self.targets = Targets(ttft, itl).over(self.targets)

    def ask_priority(self, asked: int, param: str) -> None:
        """Takes over the priority that a request asks for, as far as its owner may use it: a lower number becomes the
        lowest that the owner has, and is listed as ignored or refused. Tenants without a key have the bound of a key
        without rights."""
        lowest = 0 if self.payer is None else self.payer.priority
        if self.owner_name is not None and asked < lowest:
            if not self.lenient:
                what = f"ask for {param} below {lowest}"
                raise self.payer.forbidden("priority", what) if self.payer else Forbidden(f"tenants may not {what}")
            self.ignore(param)
            asked = lowest
        self.priority = asked

    def claim(self) -> Claim:
        """Returns what the request may claim of the engine. Time that has passed since its arrival is taken off, of
        which loading the model counts for a deadline only. In the background there are no targets but those that the
        request itself states."""
        keys = NO_TARGETS if self.payer is None else self.payer.targets
        ttft, itl = self.targets if self.background else self.targets.over(keys).over(self.terms.targets)
        waited = monotonic() - self.arrived
        return Claim(
            self.tenant,
            1.0 if self.payer is None else self.payer.weight,
            None if self.deadline is None else max(self.deadline - waited, 0.0),
            None if ttft is None else max(ttft - waited + self.loading_seconds, 0.0),
            itl,
        )

    def cache_salt(self) -> str:
        """Returns the salt under which the request shares cached prompts. Tenants share none with one another, unless
        the server's terms say so."""
        apart = (self.tenant or "\0" in self.salt) and not self.terms.share_prefixes
        return f"{self.tenant}\0{self.salt}" if apart else self.salt

    def share_nothing(self) -> None:
        """Makes the request's cached blocks its own: no other request has this salt."""
        self.salt, self.unshared = new_request_id(), True

    @property
    def durable(self) -> bool:
        """Returns whether the KV of its prompt may be kept on disk. With a salt of the client's it may if the server's
        terms say so."""
        return not self.unshared and (self.terms.durable_salts or not self.salt)

    def answer(self) -> AbstractContextManager[Callable[[], None]]:
        """Holds a place for one answer, and yields what is to be called when the answer is computed; raises Overloaded
        if there is no place."""
        return nullcontext(lambda: None) if self.admission is None else self.admission.answer()

    def ignore(self, name: str) -> None:
        """Lists a field as ignored: once, in however many messages or tools it occurs."""
        self.ignored.add(re.sub(r"\[\d+\]", "[]", name[:MAX_NAME]))
        if len(self.ignored) > MAX_IGNORED:
            raise InvalidRequest(
                f"the request has more than {MAX_IGNORED} unknown fields; {name[:MAX_NAME]!r} is one: remove them",
                param=name,
            )

    def ignore_kind(self, where: str, kind: str) -> None:
        """Lists an entry of a list as ignored, by its kind in place of its index: tools[web_search]."""
        self.ignore(f"{where[: where.rindex('[')]}[{kind[:MAX_NAME]}]")

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers of this request's answer. Anthropic's clients expect the id as request-id."""
        headers = [(b"x-request-id", self.id.encode()), (b"request-id", self.id.encode())]
        if self.ignored:
            headers.append((IGNORED, _header_text(", ".join(sorted(self.ignored)))))
        if self.stood_in:
            headers.append((MODEL, _header_text(self.stood_in)))
        if self.placements or self.fallback:
            headers.append((ROUTE, _header_text(self.route)))
        return headers

    @property
    def route(self) -> str:
        """Returns in words which engines compute its answers, and why those; empty: there is only one."""
        latest = {id: placement.why for id, placement in self.placements}
        engines = " | ".join(dict.fromkeys(latest.values()))
        return "; ".join(part for part in (self.fallback, engines) if part)

    @property
    def resumed_on(self) -> list[str]:
        """Returns the engines that went on with its answers, in their order."""
        return [placement.replica for _, placement in self.placements if placement.resumed]

    def place(self, id: int, placement: RequestPlacement) -> None:
        """Takes note of where one of its answers is sent; `id` is that of the engine's request."""
        self.placements.append((id, placement))
        if self.span is not None:
            self.span.place(id, placement)

    def fall_back(self, model: str, to: str, why: str) -> None:
        """Takes note that another model answers in place of the one that the request asks for. What was noted of the
        attempt is forgotten: the answer is not that model's."""
        self.fallback, self.stood_in = f"{to} in place of {model} ({why})", to
        self.outcome = Outcome()
        self.placements.clear()
        if self.span is not None:
            self.span.fall_back(model, to, why)

    def end_fallbacks(self, model: str) -> None:
        """Takes note that no other model has answered: the answer is an error of the one that was asked for."""
        self.fallback, self.stood_in, self.model = "", "", model
        self.placements.clear()

    def trace_headers(self) -> dict[str, str]:
        """Returns the headers that name the parent of what another server does for this request."""
        return self.parents if self.span is None else self.span.headers()

    def apply_to(self, request: Request) -> Request:
        """Returns the engine's request with what this context says about it."""
        return request._replace(
            owner=self.owner,
            explain=self.explain,
            salt=self.cache_salt(),
            priority=self.priority,
            background=self.background,
            adapters=self.adapters,
            prediction=self.prediction,
            speculation=self.speculation,
            claim=self.claim(),
            durable=self.durable,
        )


def owner_of_key(name: str) -> str:
    return f"key {name}"


def context_of(scope: Scope) -> RequestContext:
    """Returns the context that the outermost middleware, or the batch runner, created for a request."""
    context = scope["state"]["context"]
    assert isinstance(context, RequestContext)
    return context


class ContextMiddleware:
    """Creates each HTTP request's context, and adds the context's headers to the answer. It is the outermost
    middleware: `send` is the HTTP server's own here."""

    def __init__(
        self,
        app: ASGIApp,
        streams: KeptStreams,
        error_shape: Callable[[Scope], Any],
        *,
        lenient: bool,
        terms: ServiceTerms,
    ) -> None:
        """Takes what finds the shape of a request's errors."""
        self._app = app
        self._error_shape = error_shape
        self._streams = streams
        self._lenient = lenient
        self._terms = terms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        http = HttpRequest(scope)
        explain, resume = (http.headers.get(name, "").lower() not in NO for name in (EXPLAIN, RESUME))
        owner = _owner(http, self._terms.tenant_header)
        context = RequestContext(send=send, owner=owner, lenient=self._lenient, explain=explain, terms=self._terms)
        context.write = scope.get("extensions", {}).get(WRITE, {}).get("call")
        context.parents = {name: http.headers[name] for name in PARENT_HEADERS if name in http.headers}
        context.streams = self._streams if resume and self._streams.limits.seconds else None
        scope.setdefault("state", {})["context"] = context
        scope[SHAPES] = self._error_shape

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *context.headers()]
            rest = memoryview(message.get("body", b""))
            while len(rest) > MAX_PART:
                await send({"type": "http.response.body", "body": rest[:MAX_PART], "more_body": True})
                rest = rest[MAX_PART:]
                message["body"] = rest
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            context.end()
            context.send, context.write = _no_connection, None  # both lead back to the scope, and so to this context


def _header_text(text: str) -> bytes:
    """Returns text that may be in a header: what is no printable ASCII character becomes a question mark."""
    kept = text if len(text) <= MAX_HEADER else f"{text[:MAX_HEADER]}..."
    return re.sub(r"[^ -~]", "?", kept).encode()


def _whole_number(name: str, text: str | None) -> int | None:
    """Returns the number in a header, if there is one."""
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,12}", text.strip(), re.ASCII):
        raise InvalidRequest(f"{name} is a whole number of milliseconds; got {text[:MAX_NAME]!r}", param=name)
    return int(text)


def _owner(http: HttpRequest, tenant_header: str) -> str:
    """Returns who sent a request as far as that is known without keys: the tenant that a trusted proxy names in a
    header, or the address and the credentials, hashed."""
    if tenant_header and (tenant := http.headers.get(tenant_header)):
        return f"tenant {tenant[:MAX_TENANT]}"
    host = http.client.host if http.client else secrets.token_hex(8)
    given = [host, *(http.headers.get(name, "") for name in CREDENTIALS)]
    return blake2b("\n".join(given).encode(), digest_size=8).hexdigest()
