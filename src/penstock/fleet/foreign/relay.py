"""Sends a request to one engine after another until one answers, and passes the answer on.

Before its first byte a failed request is tried on the next engine. A stream that breaks off later is continued by
another engine of the same model, if that can be done; otherwise it ends with an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec

from penstock.errors import EngineUnavailable, InvalidRequest, ModelNotFound, PenstockError, RateLimited
from penstock.fleet.foreign.engine import EngineHealth, ForeignEngine
from penstock.fleet.foreign.http import EngineAnswer, EngineLost, GiveUp
from penstock.fleet.foreign.kinds import TRAITS, Continuing, EngineKind
from penstock.fleet.foreign.placement import EnginePlacement, Job, Placed
from penstock.fleet.foreign.sse_stream import (
    Continuation,
    EventStream,
    Said,
    SoFar,
    TokenUse,
    error_in,
    finish_in,
    usage_in,
)
from penstock.ipc.placement import RELAYED, RequestPlacement
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import FinishedRequest, Metrics
from penstock.types import Request, SamplingParams

log = logging.getLogger(__name__)

SILENCE_SECONDS = 600.0  # after which an engine that says nothing is given up
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REFUSED = "refused"
Renaming = tuple[bytes, bytes]  # model name in answers: the engine's, ours
ELSEWHERE = {404, 408, 409, 425, 429, 500, 502, 503, 504, 529}  # another engine may answer what this one refuses


class EngineRefused(Exception):
    """Carries an engine's refusal: the error for other dialects, and the engine's own body."""

    def __init__(self, error: PenstockError, status: int, body: bytes) -> None:
        super().__init__(error.message)
        self.error, self.status, self.body = error, status, body


@dataclass(slots=True)
class _Attempt:
    """Is a request on one engine, whose answer has begun."""

    placed: Placed
    answer: EngineAnswer
    chunks: AsyncGenerator[bytes, None]


class RelayAccount:
    """Measures one request and charges its tokens, once, when it has ended."""

    def __init__(self, metrics: Metrics, context: RequestContext, job: Job) -> None:
        self.reason = "abort"
        self.use: TokenUse | None = None
        self.events = 0  # events: an estimate of tokens without usage
        self._metrics, self._context, self._job = metrics, context, job
        self._began = perf_counter()
        self._first = 0.0

    def begin(self) -> None:
        self._first = perf_counter()
        self._metrics.distributions.first_token.observe(self._first - self._began)

    def end(self, estimate: int) -> None:
        """Charges the request. `estimate` replaces unknown prompt tokens. A refused request is free."""
        if self.reason == REFUSED:
            return
        prompt, generated, cached = self.use or TokenUse(estimate if self._first else 0, self.events)
        if (payer := self._context.caller.payer) is not None:
            payer.charge("prompt", prompt)
            payer.charge("generated", generated)
        limit = self._job.body.get("max_tokens")
        standing = Request(0, (0,) * prompt, SamplingParams(), limit if isinstance(limit, int) else 0)
        now = perf_counter()
        finished = FinishedRequest(
            standing,
            self.reason,
            self._began,
            self._first,
            now if self._first else 0.0,
            now,
            generated,
            cached or 0,
            charged=prompt,
        )
        self._metrics.end(self._context, finished)


class Relay:
    """Relays requests to the engines of a placement."""

    def __init__(self, placement: EnginePlacement, metrics: Metrics) -> None:
        self.placement = placement
        self.metrics = metrics
        self.outcomes: Counter[str] = Counter()  # fallback, resumed, broken

    async def whole(self, job: Job, context: RequestContext) -> bytes:
        """Returns an engine's whole answer. One that breaks off is asked of the next engine."""
        account, tried = RelayAccount(self.metrics, context, job), set[ForeignEngine]()
        attempt = None
        try:
            while True:
                attempt = await self.open(job, context, tried)
                self.placement.begun(attempt.placed)
                try:
                    body = b"".join([chunk async for chunk in attempt.chunks])
                    break
                except EngineLost as error:
                    self.lose(job, attempt.placed, error)
            account.begin()
            account.use, account.reason = usage_in(body), finish_in(body) or "stop"
            return _renamed(body, renaming(attempt.placed.engine, job))
        except Exception as error:
            account.reason = REFUSED if isinstance(error, EngineRefused) else "error"
            raise
        finally:
            self.settle(job, attempt, account)

    async def open(self, job: Job, context: RequestContext, tried: set[ForeignEngine]) -> _Attempt:
        """Returns the first answer that begins, of engines that were not tried yet. Raises what the last one refused
        with, or EngineUnavailable."""
        refusal: Exception | None = None
        while candidates := self._candidates(job, tried):
            placed = await self.placement.place(job, candidates)
            tried.add(placed.engine)
            context.place(RELAYED, RequestPlacement(placed.engine.name, placed.why, resumed=job.said is not None))
            try:
                attempt = await self._send(job, context, placed)
                self.outcomes["fallback"] += refusal is not None
                return attempt
            except EngineLost as error:
                self.lose(job, placed, error)
                refusal = EngineUnavailable(f"the engine {placed.engine.name} failed: {error}")
            except EngineRefused as error:
                self.placement.release(job, placed, computed=False)
                placed.engine.outcomes["refused"] += 1
                if error.status not in ELSEWHERE:
                    raise
                refusal = error
            except BaseException:
                self.placement.release(job, placed, computed=False)
                raise
        raise refusal or self._unavailable(job)

    def lose(self, job: Job, placed: Placed, error: EngineLost) -> None:
        placed.engine.outcomes["lost"] += 1
        placed.engine.lost(str(error))
        self.placement.release(job, placed, computed=False)

    async def count(self, job: Job, text: str) -> int:
        """Returns the tokens of a text, from an engine with the job's model; 0 if none counts them. An event may have
        several."""
        for engine in self.placement.candidates(job.model):
            body: dict[str, Any] = {"content": text}  # llama.cpp's name of it
            if engine.traits.tokenizes:
                body = {"model": engine.models[job.model].id, "prompt": text, "add_special_tokens": False}
            elif engine.kind is not EngineKind.LLAMACPP:
                continue
            with suppress(EngineLost, KeyError, TypeError):
                return len((await engine.call("/tokenize", body))["tokens"])
        return 0

    def settle(self, job: Job, attempt: _Attempt | None, account: RelayAccount) -> None:
        estimate = 0
        if attempt is not None:
            placed, use = attempt.placed, account.use
            attempt.answer.close()
            estimate = placed.tokens
            share = use.cached / use.prompt if use is not None and use.cached is not None and use.prompt else None
            failed = account.reason == "error"
            placed.engine.outcomes["ok"] += not failed
            self.placement.release(job, placed, share, computed=not failed)
        account.end(estimate)

    def _candidates(self, job: Job, tried: set[ForeignEngine]) -> list[ForeignEngine]:
        unable = set() if job.said is None else {each for each in self.placement.engines if not _continues(each, job)}
        return self.placement.candidates(job.model, tried | unable)

    def _unavailable(self, job: Job) -> PenstockError:
        if job.said is not None:
            return EngineUnavailable("no other engine can continue the answer")
        having = [each for each in self.placement.engines if job.model in each.models]
        waits = [each.spared_seconds for each in having if each.health is EngineHealth.READY]
        if waits and min(waits) > 0:
            return RateLimited(
                f"every engine that has {job.model!r} is busy: retry in {min(waits):.3g} seconds",
                retry_after=min(waits),
            )
        told = "; ".join(f"{each.name} is {each.health}: {each.reason}" for each in having if each.reason)
        return EngineUnavailable(f"no engine answers for {job.model!r} now: {told or 'all were tried'}")

    async def _send(self, job: Job, context: RequestContext, placed: Placed) -> _Attempt:
        engine = placed.engine
        body = msgspec.json.encode(body_for(engine, job))
        told = {"x-request-id": context.id} | context.trace_headers()
        headers = "".join(f"{name}: {value}\r\n" for name, value in told.items())

        def sent(give_up: GiveUp) -> None:
            placed.give_up = give_up

        answer = await engine.http.request("POST", job.path, body, SILENCE_SECONDS, headers, sent)
        if answer.status == 200:
            return _Attempt(placed, answer, answer.chunks(SILENCE_SECONDS))
        given = await answer.read(SILENCE_SECONDS)
        if answer.status in (429, 503):
            engine.spare(_retry_after(answer))
        raise EngineRefused(_error_for(engine, answer, given), answer.status, given)


class RelayedStream:
    """Relays one stream, on one engine after another if it must."""

    def __init__(self, relay: Relay, job: Job, context: RequestContext, wants_usage: bool) -> None:
        self.resumed_on: list[str] = []
        self._relay, self._job, self._context = relay, job, context
        self._wants_usage = wants_usage
        self._account = RelayAccount(relay.metrics, context, job)
        self._reading = EventStream(wants_usage, keep=_resumable(job))
        self._tried: set[ForeignEngine] = set()
        self._attempt: _Attempt | None = None
        self._fit: Continuation | None = None
        self._head: dict[str, Any] = {}
        self._said = job.said or Said("", 0)
        self._whole = b""  # the first events
        self._renaming: Renaming | None = None
        self._reading_begun = False

    @property
    def use(self) -> TokenUse | None:
        return self._account.use

    async def open(self) -> None:
        """Waits until an engine has begun to answer. Raises what keeps all from it."""
        try:
            self._whole = await self._first()
        except BaseException as error:
            reason = "error" if isinstance(error, Exception) else "abort"
            self._settle(REFUSED if isinstance(error, EngineRefused) else reason)
            raise
        self._account.begin()
        self._context.on_end(self._abandon)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields whole events as bytes, without the final [DONE]. The stream must be open."""
        self._reading_begun = True
        reason = "abort"
        try:
            async with aclosing(self._all()) as all_events:
                async for whole in all_events:
                    yield whole
            reason = self._reading.finish or "stop"
        except Exception:
            reason = "error"
            raise
        finally:
            self._settle(reason)

    def _abandon(self) -> None:
        if not self._reading_begun:
            self._settle("abort")

    def _settle(self, reason: str) -> None:
        self._account.reason = reason
        self._account.events += self._reading.events
        self._relay.settle(self._job, self._attempt, self._account)

    async def _all(self) -> AsyncGenerator[bytes, None]:
        whole = self._whole
        while True:
            try:
                if whole:
                    yield whole
                async for data in self._chunks():
                    if whole := self._take(data):
                        yield whole
                self._reading.end()
                break
            except EngineLost as error:
                whole = await self._resume(error)
        self._account.use = self._summed()
        if self._wants_usage and self._head and self._account.use is not None:
            yield _usage_event(self._head, self._account.use)

    def _chunks(self) -> AsyncGenerator[bytes, None]:
        assert self._attempt is not None
        return self._attempt.chunks

    def _take(self, data: bytes) -> bytes:
        whole = _renamed(self._reading.push(data), self._renaming)
        return whole if self._fit is None or not whole else self._fit.fit(whole)

    async def _first(self) -> bytes:
        """Returns the first events that an engine sends. If it fails before them, the next one is asked."""
        while True:
            attempt = self._attempt = await self._relay.open(self._job, self._context, self._tried)
            self._renaming = renaming(attempt.placed.engine, self._job)
            self._reading = EventStream(self._wants_usage and not self._head, keep=_resumable(self._job))
            if self._job.said is not None:
                engine = attempt.placed.engine
                if self._head:
                    self.resumed_on.append(engine.name)
                repeated = self._job.said.text if engine.traits.echoes and self._job.path == CHAT else ""
                self._fit = Continuation(self._head, repeated, self.resumed_on)
            try:
                async for data in attempt.chunks:
                    self._relay.placement.begun(attempt.placed)
                    if whole := self._take(data):
                        return whole
                self._reading.end()
                return b""
            except EngineLost as error:
                self._relay.lose(self._job, attempt.placed, error)

    async def _resume(self, error: EngineLost) -> bytes:
        """Continues a broken answer on another engine; raises EngineUnavailable if that is impossible."""
        assert self._attempt is not None
        relay, reading, broken = self._relay, self._reading, self._attempt.placed.engine.name
        relay.lose(self._job, self._attempt.placed, error)
        so_far = reading.so_far()
        self._head = self._head or reading.head() or {"id": "resumed"}
        text = self._said.text + so_far.text
        said = Said(text, await relay.count(self._job, text) or self._said.tokens + so_far.tokens)
        spoken = f"{len(said.text)} characters" if reading.kept else f"{reading.events} events"
        told = f"the engine {broken} broke off after {spoken} ({error})"
        self._account.events += reading.events
        reading.events = 0
        try:
            if obstacle := _obstacle(self._job, reading, so_far, said):
                raise EngineUnavailable(obstacle)
            self._said, self._job = said, self._job._replace(said=said)
            whole = await self._first()
        except (PenstockError, EngineRefused) as none:
            relay.outcomes["broken"] += 1
            raise EngineUnavailable(f"{told}, and {none}: send the request again") from None
        relay.outcomes["resumed"] += 1
        log.warning("%s; %s continues it", told, self.resumed_on[-1])
        return whole

    def _summed(self) -> TokenUse | None:
        """Returns the usage of all engines together: what one said before is in the prompt of the next."""
        use, said = self._reading.use, self._said.tokens
        return use and TokenUse(max(use.prompt - said, 0), use.generated + said, use.cached)


# -- requests ------------------------------------------------------------------------------------------------------


def body_for(engine: ForeignEngine, job: Job) -> dict[str, Any]:
    body = {**(_accepted(engine.kind, job.body) if job.translated else job.body), "model": engine.models[job.model].id}
    if body.get("stream") and job.path in (CHAT, COMPLETIONS):
        options = body.get("stream_options")
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return body if job.said is None else body | _continued(engine, job, job.said)


def _accepted(kind: EngineKind, body: Mapping[str, Any]) -> dict[str, Any]:
    unknown = {"top_k", "min_p", "repetition_penalty"} if kind is EngineKind.OPENAI else set()
    unknown |= set() if TRAITS[kind].template_fields else {"chat_template_kwargs"}
    names = {"repetition_penalty": "repeat_penalty"} if kind is EngineKind.LLAMACPP else {}
    return {names.get(name, name): value for name, value in body.items() if name not in unknown}


def renaming(engine: ForeignEngine, job: Job) -> Renaming | None:
    """Returns the engine's name for a model and ours, as they are written in answers; None if they are the same."""
    id = engine.models[job.model].id
    return None if id == job.model else (msgspec.json.encode(id), msgspec.json.encode(job.model))


def _renamed(data: bytes, renaming: Renaming | None) -> bytes:
    return data if renaming is None else data.replace(*renaming)


def _continued(engine: ForeignEngine, job: Job, said: Said) -> dict[str, Any]:
    limits = ("max_tokens", "max_completion_tokens")
    changed: dict[str, Any] = {
        name: max(limit - said.tokens, 1) for name in limits if isinstance(limit := job.body.get(name), int)
    }
    if job.path == COMPLETIONS:
        return changed | {"prompt": f"{job.body['prompt']}{said.text}"}
    changed["messages"] = [*job.body["messages"], {"role": "assistant", "content": said.text}]
    if engine.traits.continuing is Continuing.FLAGGED:
        changed |= {"continue_final_message": True, "add_generation_prompt": False}
    return changed


def _continues(engine: ForeignEngine, job: Job) -> bool:
    return job.path == COMPLETIONS or engine.traits.continuing is not Continuing.NEVER


def _resumable(job: Job) -> bool:
    body = job.body
    several = (body.get("n") or 1) != 1 or (body.get("best_of") or 1) != 1
    if several or body.get("echo") or body.get("response_format") or body.get("structured_outputs"):
        return False
    if job.path == COMPLETIONS:
        return isinstance(body.get("prompt"), str)
    return isinstance(body.get("messages"), list) and job.path == CHAT


def _obstacle(job: Job, reading: EventStream, so_far: SoFar, said: Said) -> str:
    """Returns why an answer cannot be continued; empty: it can."""
    if not _resumable(job):
        return "an answer with several choices or in a given format cannot be continued"
    if not reading.kept:
        return "it is too long to be continued"
    if so_far.calls:
        return "a tool call cannot be continued"
    if so_far.reasoning and not said.text:
        return "reasoning cannot be continued"
    return ""


def _usage_event(head: dict[str, Any], use: TokenUse) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": use.prompt, "completion_tokens": use.generated}
    usage["total_tokens"] = use.prompt + use.generated
    if use.cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": use.cached}
    return b"data: " + msgspec.json.encode({**head, "choices": [], "usage": usage}) + b"\n\n"


# -- refusals ------------------------------------------------------------------------------------------------------


def _retry_after(answer: EngineAnswer) -> float | None:
    """Returns the seconds that a refusal asks to wait; None if it does not say."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return max(float(answer.headers[name]) * unit, 0.0)
    return None


def _error_for(engine: ForeignEngine, answer: EngineAnswer, body: bytes) -> PenstockError:
    message = error_in(body) or body[:200].decode("utf-8", "replace") or "it gave no reason"
    told = f"the engine {engine.name} answers {answer.status}: {message}"
    match answer.status:
        case 401 | 403:
            return EngineUnavailable(f"{told}. The gateway's key for it is wrong: see key-env of --engine")
        case 404:
            return ModelNotFound(told)
        case 429:
            return RateLimited(told, retry_after=_retry_after(answer) or 1.0)
        case status if 400 <= status < 500:
            return InvalidRequest(message)
    return EngineUnavailable(told)
