"""Serves the models of other engines: finds the engines that have a model, and answers in every dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from time import monotonic, perf_counter_ns
from typing import Any

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from penstock.errors import EngineUnavailable, InvalidRequest, NotSupported
from penstock.fleet.foreign import chat_body
from penstock.fleet.foreign.chat_body import Body
from penstock.fleet.foreign.engine import EngineHealth, EngineSpec, ForeignEngine
from penstock.fleet.foreign.http import EngineLost
from penstock.fleet.foreign.kinds import EngineKind
from penstock.fleet.foreign.placement import EnginePlacement, Job
from penstock.fleet.foreign.relay import CHAT, COMPLETIONS, EngineRefused, Relay, RelayedStream
from penstock.fleet.foreign.relayed_turn import RelayedTurn
from penstock.fleet.foreign.sse_stream import Said
from penstock.server.access.bounds import read_json
from penstock.server.chat.stream import while_connected
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.anthropic import messages as anthropic
from penstock.server.dialects.anthropic.fields import NO_EFFECT as ANTHROPIC_NO_EFFECT
from penstock.server.dialects.anthropic.fields import MessagesBody, MessagesConversation
from penstock.server.dialects.ollama import chat as ollama
from penstock.server.dialects.ollama.embed import OllamaEmbedBody, OllamaEmbeddings, OllamaOldEmbedBody
from penstock.server.dialects.ollama.fields import (
    GENERATE_NO_EFFECT,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
    check,
)
from penstock.server.dialects.ollama.fields import NO_EFFECT as OLLAMA_NO_EFFECT
from penstock.server.generation.explain import RelayReport
from penstock.server.http.bodies import body_of, read_body, unsupported
from penstock.server.http.errors import CLIENT_LEFT
from penstock.server.http.sse import OPENAI, StreamResponse, json_response, reply, sent
from penstock.server.models.directory import Alias
from penstock.server.models.foreign import ForeignModel
from penstock.server.telemetry.metrics import Metrics

TICK = 0.5  # seconds between two looks for requests that are not answered
START_SECONDS = 5.0  # longest wait for engines at the server's start
EMBEDDINGS = "/v1/embeddings"
RESPONSES = OPENAI._replace(frame=lambda error: b"event: error\ndata: " + error + b"\n\n")  # the rest is framed

ForeignEndpoint = Callable[["ForeignGateway", str, Request, RequestContext], Coroutine[Any, Any, Response]]


class ForeignGateway:
    """Is the server's ForeignModels. An alias without a model means the first of all."""

    def __init__(self, specs: Sequence[EngineSpec], aliases: Sequence[Alias] = ()) -> None:
        self._engines = [ForeignEngine(number, spec) for number, spec in enumerate(specs)]
        self._placement = EnginePlacement(self._engines)
        self._aliases = tuple(aliases)
        self._relay: Relay | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def use_metrics(self, metrics: Metrics) -> None:
        self._relay = Relay(self._placement, metrics)

    @property
    def relay(self) -> Relay:
        assert self._relay is not None, "use_metrics comes first"
        return self._relay

    async def start(self) -> None:
        """Asks all engines who they are, and begins to watch them. Those that do not answer are asked again."""
        looking = [asyncio.create_task(engine.look()) for engine in self._engines]
        await asyncio.wait(looking, timeout=START_SECONDS)
        for task in looking:
            task.cancel()
        self._tasks = [asyncio.create_task(engine.watch()) for engine in self._engines]
        self._tasks.append(asyncio.create_task(self._tick()))
        self._tasks += [asyncio.create_task(each.run()) for each in self._placement.subscribers.values()]

    async def _tick(self) -> None:
        """Counts the seconds that this process is awake: a stopped gateway blames no engine."""
        while True:
            began = monotonic()
            await asyncio.sleep(TICK)
            self._placement.tick(min(monotonic() - began, 2 * TICK))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for engine in self._engines:
            engine.close()

    # -- models ------------------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> str | None:
        """Returns the model that a name means: by its own name, by an alias of an engine, or by one of all."""
        if name is None:
            return self._first()
        for each in (name, name.removesuffix(":latest")):
            for engine in self._engines:
                if each in engine.models:
                    return each
        for engine in self._engines:
            for model in engine.models.values():
                if any(fnmatchcase(name, pattern) for pattern in model.aliases):
                    return model.name
        for pattern, meant in self._aliases:
            if fnmatchcase(name, pattern) and (not meant or any(meant in engine.models for engine in self._engines)):
                return meant or self._first()
        return None

    def _first(self) -> str | None:
        return next((name for engine in self._engines for name in engine.models), None)

    def models(self) -> list[ForeignModel]:
        having: dict[str, list[ForeignEngine]] = {}
        for engine in self._engines:
            for name in engine.models:
                having.setdefault(name, []).append(engine)
        return [
            ForeignModel(name, tuple(sorted({str(each.kind) for each in engines})), any(e.available for e in engines))
            for name, engines in having.items()
        ]

    def engines(self) -> list[dict[str, Any]]:
        return [engine.state() for engine in self._engines]

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("penstock_foreign_up", "1 while an engine answers", labels=["engine", "kind"])
        running = GaugeMetricFamily("penstock_foreign_requests", "Requests in flight, by engine", labels=["engine"])
        ended = CounterMetricFamily(
            "penstock_foreign_requests_ended", "Requests by engine and outcome", labels=["engine", "outcome"]
        )
        for engine in self._engines:
            up.add_metric([engine.name, str(engine.kind)], engine.health is EngineHealth.READY)
            running.add_metric([engine.name], engine.in_flight)
            for outcome in ("ok", "refused", "lost"):
                ended.add_metric([engine.name, outcome], engine.outcomes[outcome])
        yield from (up, running, ended)
        moved = CounterMetricFamily(
            "penstock_foreign_moved",
            "Requests that another engine took over before the first byte (fallback) or later (resumed), and streams "
            "that none could continue (broken)",
            labels=["how"],
        )
        for how in ("fallback", "resumed", "broken"):
            moved.add_metric([how], self.relay.outcomes[how])
        yield moved
        yield GaugeMetricFamily("penstock_foreign_blocks", "KV blocks that engines tell of", len(self._placement.index))

    # -- answering ---------------------------------------------------------------------------------------------------

    async def answer(self, model: str, http: Request, context: RequestContext) -> Response:
        """Answers a request for one of these models. It takes no place among the requests of the server's own engines:
        other engines limit themselves."""
        if context.admission is not None:
            context.admission.close()
        endpoint = ENDPOINTS.get(http.url.path)
        if endpoint is None:
            raise NotSupported(
                f"{http.url.path} is not there for {model!r}, which another engine computes: use one of "
                f"{', '.join(ENDPOINTS)}"
            )
        try:
            answer = await while_connected(http.receive, endpoint(self, model, http, context))
        except EngineRefused as refused:
            raise refused.error from None
        return CLIENT_LEFT if answer is None else answer

    async def open_stream(self, job: Job, context: RequestContext, wants_usage: bool = False) -> RelayedStream:
        stream = RelayedStream(self.relay, job, context, wants_usage)
        await stream.open()
        return stream

    async def count(self, model: str, body: Body) -> int:
        for engine in self._placement.candidates(model):
            try:
                if engine.traits.tokenizes:
                    found = await engine.call("/tokenize", {"model": engine.models[model].id, **body})
                elif engine.kind is EngineKind.LLAMACPP:
                    prompt = (await engine.call("/apply-template", body))["prompt"]
                    found = await engine.call("/tokenize", {"content": prompt, "add_special": True})
                else:
                    continue
                return len(found["tokens"])
            except (EngineLost, KeyError, TypeError):
                continue
        raise NotSupported(f"no engine that has {model!r} tells how many tokens a prompt has")


# -- OpenAI --------------------------------------------------------------------------------------------------------


async def _openai(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    """Relays OpenAI's dialect. Chunks pass as bytes."""
    body = _object(await body_of(http, context))
    streaming = context.streaming = bool(body.get("stream"))
    if not streaming:
        return await _whole(gateway, model, http, context, body)
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    try:
        stream = await gateway.open_stream(Job(model, http.url.path, body), context, wants_usage)
    except EngineRefused as refused:
        return _as_refused(refused, context)
    chunks = _with_end(stream.events())
    if context.streams is not None:
        return context.streams.keep(context, chunks, OPENAI)
    return StreamResponse(context, sent(chunks), OPENAI)


async def _responses(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    """Relays a response to an engine that has them. It is not stored here, so what refers to an earlier one, or is to
    be read later, is refused."""
    body = _object(await body_of(http, context))
    for name in ("previous_response_id", "background", "conversation"):
        if body.get(name):
            raise unsupported(name, body[name])
    if not body.get("stream"):
        return await _whole(gateway, model, http, context, body)
    try:
        stream = await gateway.open_stream(Job(model, http.url.path, body), context)
    except EngineRefused as refused:
        return _as_refused(refused, context)
    return StreamResponse(context, sent(stream.events()), RESPONSES)


async def _whole(gateway: ForeignGateway, model: str, http: Request, context: RequestContext, body: Body) -> Response:
    try:
        answer = await gateway.relay.whole(Job(model, http.url.path, body), context)
    except EngineRefused as refused:
        return _as_refused(refused, context)
    return Response(answer, media_type="application/json")


async def _embeddings(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    return await _whole(gateway, model, http, context, _object(await body_of(http, context)))


async def _with_end(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for whole in events:
            yield whole
    yield OPENAI.end


def _as_refused(refused: EngineRefused, context: RequestContext) -> Response:
    if refused.status not in (400, 413, 422):
        raise refused.error
    context.notes.outcome.fail(refused.error)
    return Response(refused.body, refused.status, media_type="application/json")


def _object(body: bytes) -> Body:
    given = read_json(body, "the body")
    if not isinstance(given, dict):
        raise InvalidRequest(f"the body must be a JSON object; got {type(given).__name__}", code="invalid_type")
    return given


# -- Anthropic -----------------------------------------------------------------------------------------------------


async def _messages(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, MessagesBody, ANTHROPIC_NO_EFFECT)
    job = Job(model, CHAT, chat_body.from_anthropic(context, body) | {"stream": True}, translated=True)
    last = job.body["messages"][-1]
    if last["role"] == "assistant":  # an answer that was begun is continued
        job = job._replace(body={**job.body, "messages": job.body["messages"][:-1]}, said=Said(last["content"], 0))
    stream = await gateway.open_stream(job, context)
    turn = RelayedTurn(stream)
    report = RelayReport(context, stream.resumed_on)
    writer = anthropic.MessageWriter(model, turn, report, "max_tokens")
    streaming = bool(body.stream)
    return await reply(http, context, writer, turn.deltas, streaming=streaming, framing=anthropic.ANTHROPIC)


async def _count_tokens(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, MessagesConversation, ANTHROPIC_NO_EFFECT)
    made = chat_body.from_anthropic(context, body)
    asked: Body = {name: made[name] for name in ("messages", "tools", "chat_template_kwargs") if name in made}
    return json_response({"input_tokens": await gateway.count(model, asked)})


# -- Ollama --------------------------------------------------------------------------------------------------------


async def _chat(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, OllamaChatBody, OLLAMA_NO_EFFECT)
    check(context, body)
    if not body.messages:
        return _nothing(model, ollama.chat_line)
    made = chat_body.from_ollama_chat(context, body)
    return await _ollama(gateway, Job(model, CHAT, made, translated=True), http, context, body, ollama.chat_line)


async def _generate(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, OllamaGenerateBody, GENERATE_NO_EFFECT)
    check(context, body)
    if not body.prompt:
        return _nothing(model, ollama.generate_line)
    made = chat_body.from_ollama_generate(context, body)
    job = Job(model, COMPLETIONS if body.raw else CHAT, made, translated=True)
    return await _ollama(gateway, job, http, context, body, ollama.generate_line)


async def _ollama(
    gateway: ForeignGateway,
    job: Job,
    http: Request,
    context: RequestContext,
    body: OllamaFields,
    line: Callable[..., ollama.OllamaLine],
) -> Response:
    stream = await gateway.open_stream(job._replace(body={**job.body, "stream": True}), context)
    turn = RelayedTurn(stream)
    writer = ollama.OllamaWriter(job.model, turn, RelayReport(context, stream.resumed_on), line)
    streaming = body.stream is not False
    return await reply(http, context, writer, turn.deltas, streaming=streaming, framing=ollama.OLLAMA)


def _nothing(model: str, line: Callable[..., ollama.OllamaLine]) -> Response:
    """Answers a request that would only load the model: the engine decides that by itself."""
    empty = ollama.OllamaAssistantMessage("")
    return json_response(line(empty, model=model, created_at=ollama.now(), done=True, done_reason="load"))


async def _embed(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    began = perf_counter_ns()
    body = await read_body(http, context, OllamaEmbedBody, {})
    asked: Body = {"input": body.input or []} | ({"dimensions": body.dimensions} if body.dimensions else {})
    vectors, tokens = await _vectors(gateway, model, context, asked)
    answer = OllamaEmbeddings(
        model=model, embeddings=vectors, total_duration=perf_counter_ns() - began, prompt_eval_count=tokens
    )
    return json_response(answer)


async def _embed_old(gateway: ForeignGateway, model: str, http: Request, context: RequestContext) -> Response:
    body = await read_body(http, context, OllamaOldEmbedBody, {})
    vectors, _ = await _vectors(gateway, model, context, {"input": body.prompt or ""})
    return json_response({"embedding": vectors[0] if vectors else []})


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _EmbeddingUsage = msgspec.field(default_factory=_EmbeddingUsage)


async def _vectors(
    gateway: ForeignGateway, model: str, context: RequestContext, asked: Body
) -> tuple[list[msgspec.Raw], int]:
    job = Job(model, EMBEDDINGS, {**asked, "encoding_format": "float"})
    try:
        found = msgspec.json.decode(await gateway.relay.whole(job, context), type=_Embeddings)
    except msgspec.MsgspecError as error:
        raise EngineUnavailable(f"an engine's embeddings cannot be read: {error}") from None
    return [each.embedding for each in sorted(found.data, key=lambda each: each.index)], found.usage.prompt_tokens


ENDPOINTS: dict[str, ForeignEndpoint] = {
    CHAT: _openai,
    COMPLETIONS: _openai,
    EMBEDDINGS: _embeddings,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _count_tokens,
    "/api/chat": _chat,
    "/api/generate": _generate,
    "/api/embed": _embed,
    "/api/embeddings": _embed_old,
}
