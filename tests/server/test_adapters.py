"""A model's name may be an adapter's; adapters survive the death of an engine process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config import configure
from penstock.errors import AdapterError, AdapterNotFound
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.request_stream import EventReader
from penstock.ipc.spawn import ProcessClient
from penstock.types import AdapterInfo, AdapterUse, Request, SamplingParams, Tokens
from penstock.types.messages import ListAdapters, RegisterAdapter, UnregisterAdapter
from tests.server.toys import open_parrot

MODELS = Path(__file__).parents[1] / "models"
GOLDEN, ADAPTER = MODELS / "goldens" / "tied", MODELS / "adapters" / "tied"


class Recorder(InProcessClient):
    """Keeps the requests that are submitted. It calls adapters registered that the engine does not have."""

    def __init__(self, open: Any) -> None:
        super().__init__(open)
        self.requests: list[Request] = []

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        self.requests.append(request)
        return super().run(request._replace(adapters=()), read)


@pytest.fixture(scope="module")
def recorder(serve: Callable[[Any, Any, str], AbstractContextManager[Any]], toy_text: Any) -> Any:
    client = Recorder(open_parrot)
    with serve(client, toy_text, "toy") as server:
        client._settings.adapters = {name: AdapterInfo(name, "", 1.0, 4) for name in ("pirate", "toy:shout")}
        yield server, client


SAID = {"messages": [{"role": "user", "content": "[yes]"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "[yes]"},
    "/v1/embeddings": {"input": "[yes]"},
    "/v1/messages": SAID | {"max_tokens": 4},
    "/v1/responses": {"input": "[yes]"},
    "/api/chat": SAID | {"stream": False},
    "/api/generate": {"prompt": "[yes]", "stream": False},
    "/api/embed": {"input": "[yes]"},
    "/completion": {"prompt": "[yes]"},
    "/pooling": {"input": "[yes]"},
    "/v2/models/MODEL/generate": {"text_input": "[yes]"},
}


@pytest.mark.parametrize(
    ("model", "uses"),
    [
        ("toy", ()),
        ("pirate", (AdapterUse("pirate"),)),
        ("toy:pirate", (AdapterUse("pirate"),)),
        ("toy:shout", (AdapterUse("toy:shout"),)),
        ("gpt-4o", ()),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_a_model_named_like_an_adapter_is_computed_with_it(
    recorder: Any, path: str, model: str, uses: tuple[AdapterUse, ...]
):
    server, client = recorder
    answer = server.post(path.replace("MODEL", model), model=model, **BODIES[path])
    assert answer.status_code == 200, answer.text
    assert client.requests[-1].adapters == uses
    told = answer.json().get("model_name" if "MODEL" in path else "model")
    assert told in (None, model if uses else "toy")


def test_the_explanation_says_how_long_an_adapter_was_waited_for(recorder: Any):
    server, _ = recorder
    headers = {"x-penstock-explain": "1"}
    for model, told in (("pirate", True), ("toy", False)):
        answer = server.http.post("/v1/completions", json={"model": model, "prompt": "[yes]"}, headers=headers)
        seconds = answer.json()["penstock"]["choices"][0]["seconds"]
        assert ("adapter" in seconds) == told


def test_an_unknown_adapter_is_an_unknown_model(recorder: Any):
    server, _ = recorder
    answer = server.post("/v1/completions", model="toy:five", prompt="[yes]")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# ---- an engine process ----


@asynccontextmanager
async def engine_process(**options: Any) -> AsyncGenerator[ProcessClient, None]:
    settings = {"device": "cpu", "threads": 1, "max_rows": 2, "kv_memory": 1 << 22} | options
    client = ProcessClient(configure(GOLDEN, settings))
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def answer(client: ProcessClient, *uses: AdapterUse) -> list[int]:
    request = Request(client.next_id(), (5, 9, 3, 7), SamplingParams(temperature=0), 12, adapters=uses)
    events = [event async for step in client.submit(request) for event in step]
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def test_adapters_of_an_engine_process_survive_its_death():
    async def check() -> None:
        async with engine_process(adapter=[f"first={ADAPTER}"]) as client:
            plain, first = await answer(client), await answer(client, AdapterUse("first"))
            assert plain != first
            (info,) = (await client.ask(RegisterAdapter("second", str(ADAPTER), 0.5))).adapters
            assert (info.name, info.rank, info.scale) == ("second", 4, 0.5)
            second = await answer(client, AdapterUse("second"))
            assert await answer(client, AdapterUse("second", 2.0)) == first
            assert list(client.adapters) == ["first", "second"]
            await client.ask(RegisterAdapter("first", str(ADAPTER), -1.0, replace=True))
            first, before = await answer(client, AdapterUse("first")), first
            assert first != before
            await client.ask(RegisterAdapter("third", str(ADAPTER)))
            await client.ask(UnregisterAdapter("third"))
            hello = client.hello
            assert hello
            os.kill(hello.pid, signal.SIGKILL)
            while client.hello is None or client.hello.pid == hello.pid:
                await asyncio.sleep(0.02)
            assert await answer(client, AdapterUse("first")) == first
            assert await answer(client, AdapterUse("second")) == second
            assert [one.name for one in (await client.ask(ListAdapters())).adapters] == ["first", "second"]

    asyncio.run(check())


def test_errors_about_adapters_cross_the_process():
    async def check() -> None:
        async with engine_process() as client:
            with pytest.raises(AdapterError, match="trained on another base"):
                await client.ask(RegisterAdapter("other", str(MODELS / "adapters" / "qwen2")))
            with pytest.raises(AdapterNotFound, match="no adapter is registered as 'other'; registered: none"):
                await client.ask(UnregisterAdapter("other"))
            assert not client.adapters

    asyncio.run(check())


def test_an_engine_does_not_start_with_an_adapter_that_does_not_fit():
    async def check() -> None:
        async with engine_process(adapter=[f"bad={MODELS / 'adapters' / 'gpt2'}"]):
            pass

    with pytest.raises(AdapterError, match="which this model does not have"):
        asyncio.run(check())
