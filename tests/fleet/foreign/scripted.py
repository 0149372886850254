"""Engines of other kinds, as far as a gateway sees them: scripted ones, and a gateway in front of them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.fleet.foreign.engine import parse_engine
from penstock.fleet.foreign.gateway import ForeignGateway
from penstock.server import Setup, Space, create_app
from penstock.server.app import bind
from penstock.server.models.directory import Alias
from penstock.server.models.fallbacks import parse_fallbacks
from penstock.server.models.pool import ModelPool, PoolSettings
from tests.server.conftest import WAIT, Server, _serving

PROBES: dict[str, dict[str, Any]] = {  # what each kind answers on the paths by which it is known
    "vllm": {"/version": {"version": "0.17.0"}},
    "llamacpp": {"/props": {"default_generation_settings": {}}},
    "ollama": {"/api/version": {"version": "0.12.0"}},
    "openai": {},
}


class Broken(Exception):
    """Ends an answer in the middle, as the death of its engine does."""


class ScriptedEngine:
    """Answers chats with `words`, one event each. `break_at` breaks off before that word; `refusal` refuses. `model`
    may be several, with commas between them."""

    def __init__(
        self, kind: str = "openai", model: str = "m", words: tuple[str, ...] = ("one ", "two ", "three")
    ) -> None:
        self.kind, self.model, self.words = kind, model, words
        self.break_at: int | None = None
        self.refusal: tuple[int, dict[str, str], Any] | None = None
        self.cached: int | None = None
        self.tool: dict[str, str] | None = None
        self.pause = 0.0
        self.held = False  # answers wait until they are let go
        self.probed = 0
        self.bodies: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def app(self) -> Starlette:
        probes = PROBES[self.kind]
        routes = [Route(path, lambda _, told=told: JSONResponse(told)) for path, told in probes.items()]
        listed = {"data": [{"id": model, "owned_by": self.kind} for model in self.model.split(",")]}
        return Starlette(
            routes=[
                *routes,
                Route("/health", self.health),
                Route("/v1/models", lambda _: JSONResponse(listed)),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.chat, methods=["POST"]),
                Route("/v1/embeddings", self.embed, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    async def health(self, _: Request) -> Response:
        self.probed += 1
        return JSONResponse({})

    async def tokenize(self, http: Request) -> Response:
        self.tokenized.append(await http.json())
        asked = self.tokenized[-1]
        text = asked.get("prompt") or "".join(message["content"] for message in asked["messages"])
        return JSONResponse({"tokens": list(text.encode())})

    async def embed(self, http: Request) -> Response:
        self.bodies.append(await http.json())
        data = [{"index": 0, "embedding": [0.5, -1.0], "object": "embedding"}]
        return JSONResponse({"object": "list", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}})

    async def chat(self, http: Request) -> Response:
        body = await http.json()
        self.bodies.append(body)
        self.headers.append(dict(http.headers))
        while self.held:
            await asyncio.sleep(0.005)
        if self.refusal is not None:
            status, headers, told = self.refusal
            return JSONResponse(told, status, headers)
        if body.get("stream"):
            return StreamingResponse(self.events(body), media_type="text/event-stream")
        if self.break_at is not None:
            raise Broken
        message = {"role": "assistant", "content": "".join(self.words)}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "text": message["content"]}
        return JSONResponse(self.head("chat.completion") | {"choices": [choice], "usage": self.usage()})

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": f"id-{self.url[-5:]}", "object": kind, "created": 1, "model": self.model}

    def usage(self) -> dict[str, Any]:
        details = {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return {"prompt_tokens": 40, "completion_tokens": len(self.words), "total_tokens": 43} | details

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        chat = "messages" in body
        if chat:
            yield self.event({"delta": {"role": "assistant", "content": ""}})
        if self.tool is not None:
            for delta in self.tool_deltas():
                yield self.event({"delta": {"tool_calls": [delta]}})
        for at, word in enumerate(self.words):
            if at == self.break_at:
                raise Broken
            await asyncio.sleep(self.pause)
            yield self.event({"delta": {"content": word}} if chat else {"text": word})
        yield self.event({"delta": {}} if chat else {"text": ""}, "tool_calls" if self.tool else "stop")
        if (body.get("stream_options") or {}).get("include_usage"):
            told = self.head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}
            yield f"data: {json.dumps(told)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    def tool_deltas(self) -> list[dict[str, Any]]:
        assert self.tool is not None
        name, arguments = self.tool["name"], self.tool["arguments"]
        half = len(arguments) // 2
        return [
            {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}},
            {"index": 0, "function": {"arguments": arguments[:half]}},
            {"index": 0, "function": {"arguments": arguments[half:]}},
        ]

    def event(self, choice: dict[str, Any], finish: str | None = None) -> bytes:
        told = self.head("chat.completion.chunk") | {"choices": [{"index": 0, "finish_reason": finish, **choice}]}
        return f"data: {json.dumps(told, separators=(',', ':'))}\n\n".encode()


@contextmanager
def engine(**settings: Any) -> Iterator[ScriptedEngine]:
    """Runs a scripted engine on a port of its own. `stop` ends it."""
    scripted = ScriptedEngine(**settings)
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(scripted.app(), log_config=None, timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    scripted.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    _until(lambda: server.started)

    def stop() -> None:
        server.should_exit = server.force_exit = True
        thread.join(WAIT)

    scripted.stop = stop  # type: ignore[attr-defined]
    try:
        yield scripted
    finally:
        stop()


@contextmanager
def gateway(
    *options: str, aliases: tuple[str, ...] = (), fallbacks: tuple[str, ...] = (), **setup: Any
) -> Iterator[Server]:
    """Runs a gateway in front of engines, which options describe as --engine does, and --fallback fallbacks."""
    foreign = ForeignGateway([parse_engine(option) for option in options], [Alias(each, "") for each in aliases])
    with TemporaryDirectory() as folder:
        pool = ModelPool([], PoolSettings(fallbacks=parse_fallbacks(fallbacks)), foreign=foreign)
        app = create_app(pool, Setup("gateway", Space(Path(folder) / "data"), **setup))
        yield from _serving(foreign, app)


def states(server: Server) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.get("/health").json()["engines"]}


def moved(server: Server, how: str) -> float:
    return metric(server, f'penstock_foreign_moved_total{{how="{how}"}}')


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name)))


def chat(server: Server, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "count"}]
    return server.post("/v1/chat/completions", **{"model": "m", "messages": messages} | fields)


def _until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not met():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
