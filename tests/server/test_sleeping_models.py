"""Models whose engines stay while they sleep: what the ledger and the routes say, and who wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.errors import OutOfMemory
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.context.request_context import RequestContext
from penstock.server.models.ledger import Budget
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.source import ModelSource
from tests.server import conftest, toys
from tests.server.test_model_pool import run, states

HOST_BYTES = 70


class CountingSleeper:
    """Counts what is done, and raises what it is told to."""

    def __init__(self) -> None:
        self.slept = self.woken = 0
        self.host_is_full = self.device_is_full = False

    def sleep(self) -> int:
        if self.host_is_full:
            raise OutOfMemory("the host is full")
        self.slept += 1
        return HOST_BYTES

    def wake(self) -> None:
        if self.device_is_full:
            raise OutOfMemory("the device is full")
        self.woken += 1


def source(name: str, sleeper: CountingSleeper, size: int = 5, pace: float = 0.0) -> ModelSource:
    limits = toys.LIMITS._replace(memory=size)

    def open() -> Engine:
        return assemble(toys.Parrot(limits, pace), limits, sleeper=sleeper)  # type: ignore[arg-type]

    return ModelSource(name, lambda: InProcessClient(open, name), toys.ToyText, None, None, lambda: size)  # type: ignore[arg-type]


async def using(pool: ModelPool, name: str) -> Any:
    context = RequestContext()
    served = await pool.use(name, context)
    context.end()
    return served


def test_a_sleeping_model_takes_nothing_of_the_budget_and_wakes_when_there_is_room() -> None:
    a, b = CountingSleeper(), CountingSleeper()

    async def scenario(pool: ModelPool) -> None:
        served = await using(pool, "a")
        await pool.sleep("a")
        entry = pool.models.get("a")
        assert (states(pool)["a"], entry.bytes, entry.host_bytes, a.slept) == ("asleep", 0, HOST_BYTES, 1)
        await using(pool, "b")
        assert states(pool) == {"a": "asleep", "b": "awake"}, "there was room for b"
        assert await using(pool, "a") is served, "its engine stayed"
        assert states(pool) == {"a": "awake", "b": "stored"}, "b made room for what a takes awake"
        assert (entry.bytes, entry.host_bytes, a.woken) == (5, HOST_BYTES, 1)
        await pool.sleep("a")
        assert await pool.unload("a")
        assert (states(pool)["a"], entry.host_bytes) == ("stored", 0)

    run(ModelPool([source("a", a), source("b", b)], PoolSettings(Budget(9, 0))), scenario)


def test_level_2_and_a_host_without_memory_end_the_engine() -> None:
    sleeper = CountingSleeper()

    async def scenario(pool: ModelPool) -> None:
        first = await using(pool, "a")
        await pool.sleep("a", keep_weights=False)
        assert (states(pool)["a"], pool.models.get("a").served, sleeper.slept) == ("asleep", None, 0)
        sleeper.host_is_full = True
        second = await using(pool, "a")
        await pool.sleep("a")
        assert (states(pool)["a"], pool.models.get("a").served) == ("asleep", None)
        assert len({id(first), id(second), id(await using(pool, "a"))}) == 3
        sleeper.host_is_full = False
        await pool.sleep("a")
        await pool.sleep("a", keep_weights=False)
        assert (states(pool)["a"], pool.models.get("a").served, pool.models.get("a").host_bytes) == ("asleep", None, 0)

    run(ModelPool([source("a", sleeper), source("b", sleeper)]), scenario)


def test_a_device_without_memory_refuses_the_request_and_the_next_one_wakes_the_model() -> None:
    sleeper = CountingSleeper()

    async def scenario(pool: ModelPool) -> None:
        served = await using(pool, "a")
        await pool.sleep("a")
        sleeper.device_is_full = True
        with pytest.raises(OutOfMemory, match="the device is full"):
            await pool.load("a")
        assert (states(pool)["a"], pool.models.get("a").bytes, pool.models.get("a").error) == (
            "asleep",
            0,
            "the device is full",
        )
        sleeper.device_is_full = False
        assert await using(pool, "a") is served
        assert pool.models.get("a").error == ""

    run(ModelPool([source("a", sleeper), source("b", sleeper)]), scenario)


def test_a_sleeping_model_whose_engine_died_is_loaded_again() -> None:
    sleeper = CountingSleeper()

    async def scenario(pool: ModelPool) -> None:
        served = await using(pool, "a")
        await pool.sleep("a")
        await served.client.close()
        assert served.client.hello is None
        again = await using(pool, "a")
        assert again is not served
        assert again.client.hello is not None

    run(ModelPool([source("a", sleeper), source("b", sleeper)]), scenario)


def test_requests_that_come_while_a_model_falls_asleep_wake_it() -> None:
    sleeper = CountingSleeper()

    async def scenario(pool: ModelPool) -> None:
        held = RequestContext()
        await pool.use("a", held)
        sleeping = asyncio.create_task(pool.sleep("a"))
        await asyncio.sleep(0.05)
        assert not sleeping.done(), "it waits for the request"
        held.end()
        while states(pool)["a"] == "awake":
            await asyncio.sleep(0)
        others = [asyncio.create_task(using(pool, "a")) for _ in range(3)]
        await asyncio.gather(sleeping, *others)
        assert states(pool)["a"] == "awake"
        assert (sleeper.slept, sleeper.woken) == (1, 1)

    run(ModelPool([source("a", sleeper), source("b", sleeper)]), scenario)


@pytest.fixture
def served() -> Iterator[Any]:
    """Serves a model that answers slowly and can sleep."""
    sleeper = CountingSleeper()
    pool = ModelPool([source("polly", sleeper, 5, 0.01)])
    with TemporaryDirectory() as folder:
        app = create_app(pool, Setup(space=Space(Path(folder) / "data")))
        for server in conftest._serving(None, app):
            server.client, server.sleeper = pool, sleeper
            yield server


def test_routes_put_a_model_to_sleep_after_its_answers_and_say_what_it_takes(served: Any) -> None:
    def model() -> dict[str, Any]:
        return served.get("/health").json()["models"][0]

    asked: dict[str, Any] = {"model": "polly", "prompt": "[0123456789]", "max_tokens": 9}
    pid = model()["pid"]
    with served.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert served.http.post("/sleep?level=1").status_code == 200
        assert "data: [DONE]" in list(lines), "the answer under way came to its end"
    assert model()["state"] == "asleep"
    assert (model()["bytes"], model()["host_bytes"], model()["pid"]) == (0, HOST_BYTES, pid)
    assert served.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.get("/api/ps").json() == {"models": []}
    assert served.get("/running").json() == {"running": []}
    assert served.post("/v1/completions", **asked).json()["choices"][0]["text"] == "012345678"
    assert (model()["state"], model()["bytes"]) == ("awake", 5)
    assert served.get("/is_sleeping").json() == {"is_sleeping": False}
    assert (served.sleeper.slept, served.sleeper.woken) == (1, 1)
