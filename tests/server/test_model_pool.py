"""Several models on one server: which is loaded, which waits, which makes room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock import store
from penstock.cli.app import run_command
from penstock.errors import EngineUnavailable, MalformedFile, ModelError, ModelNotFound
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.context.request_context import RequestContext
from penstock.server.context.service import Service
from penstock.server.models.directory import Alias, client_aliases
from penstock.server.models.entry import FOR_EVER, ModelState
from penstock.server.models.ledger import Budget, Loaded, Refuse, Unload, Wait, excess, make_room
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.source import ModelSource
from tests.server import conftest, toys

GB = 10**9


def source(name: str, size: int = 1, open: Callable[[], Any] = toys.open_parrot) -> ModelSource:
    return ModelSource(name, lambda: InProcessClient(open, name), toys.ToyText, None, None, lambda: size)  # type: ignore[arg-type]


# -- the ledger -----------------------------------------------------------------------------------------------------


def test_models_that_fit_beside_the_others_unload_nothing() -> None:
    assert make_room("c", 2 * GB, [Loaded("a", 3 * GB, 1.0)], Budget(5 * GB, 0)) == Unload(())


def test_those_not_used_for_the_longest_time_leave_first_and_no_more_than_needed() -> None:
    loaded = [Loaded("a", 2, 3.0), Loaded("b", 2, 1.0), Loaded("c", 2, 2.0)]
    assert make_room("d", 2, loaded, Budget(6, 0)) == Unload(("b",))
    assert make_room("d", 4, loaded, Budget(6, 0)) == Unload(("b", "c"))
    assert make_room("d", 1, loaded, Budget(100, 3)) == Unload(("b",))


def test_busy_models_are_waited_for_and_pinned_ones_never_leave() -> None:
    busy, pinned = Loaded("a", 4, 1.0, busy=True), Loaded("b", 4, 1.0, pinned=True)
    assert make_room("c", 4, [busy, pinned], Budget(8, 0)) == Wait(("a",))
    refused = make_room("c", 5, [busy, pinned], Budget(8, 0))
    assert isinstance(refused, Refuse)
    assert "b" in refused.reason


def test_a_model_larger_than_the_budget_is_refused_with_both_sizes() -> None:
    refused = make_room("big", 9 * GB, [], Budget(8 * GB, 0))
    assert isinstance(refused, Refuse)
    assert "9.00 GB" in refused.reason
    assert "8.00 GB" in refused.reason


def test_models_that_have_grown_beyond_the_budget_make_idle_ones_leave() -> None:
    idle, grown = Loaded("a", 2, 1.0), Loaded("b", 5, 3.0)
    assert excess([idle, grown], Budget(7, 0)) == ()
    assert excess([idle, grown], Budget(6, 0)) == ("a",)
    assert excess([idle._replace(busy=True), Loaded("c", 2, 2.0), grown], Budget(6, 0)) == ("c",)
    assert excess([idle._replace(pinned=True), grown], Budget(6, 0)) == ()
    assert excess([grown], Budget(1, 0)) == ()  # unloading the last one would help nobody


# -- the pool -------------------------------------------------------------------------------------------------------


def run(pool: ModelPool, scenario: Callable[[ModelPool], Any]) -> None:
    async def main() -> None:
        await pool.start()
        try:
            async with asyncio.timeout(conftest.WAIT):
                await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(main())


def states(pool: ModelPool) -> dict[str, str]:
    return {entry.name: str(entry.state) for entry in pool.models.entries}


def test_a_model_is_loaded_when_it_is_first_used_and_makes_room_when_another_is() -> None:
    async def scenario(pool: ModelPool) -> None:
        assert states(pool) == {"a": "stored", "b": "stored"}
        first = RequestContext()
        assert (await pool.use("a", first)).name == "a"
        assert states(pool) == {"a": "awake", "b": "stored"}
        first.end()
        second = RequestContext()
        assert (await pool.use("b", second)).name == "b"
        assert states(pool) == {"a": "stored", "b": "awake"}
        assert second.service.loading_seconds > 0
        second.end()

    run(ModelPool([source("a"), source("b")], PoolSettings(Budget(100, 1))), scenario)


def test_what_cannot_be_loaded_makes_no_other_leave() -> None:
    def broken() -> None:
        raise MalformedFile("the file is cut off")

    async def scenario(pool: ModelPool) -> None:
        first, second = RequestContext(), RequestContext()
        await pool.use("a", first)
        first.end()
        with pytest.raises(MalformedFile, match="cut off"):
            await pool.use("b", second)
        second.end()
        assert states(pool) == {"a": "awake", "b": "stored"}
        assert pool.models.get("b").error == "the file is cut off"

    sources = [source("a"), replace(source("b"), check=broken)]
    run(ModelPool(sources, PoolSettings(Budget(100, 1))), scenario)


def test_a_model_in_use_is_waited_for_and_others_are_not_disturbed() -> None:
    async def scenario(pool: ModelPool) -> None:
        using, waiting, other = RequestContext(), RequestContext(), RequestContext()
        await pool.use("a", using)
        wanted = asyncio.create_task(pool.use("big", waiting))
        await asyncio.sleep(0.05)
        assert not wanted.done()
        assert (await pool.use("small", other)).name == "small"
        using.end()
        other.end()
        assert (await wanted).name == "big"
        assert states(pool) == {"a": "stored", "big": "awake", "small": "stored"}
        waiting.end()

    run(ModelPool([source("a", 5), source("big", 10), source("small", 5)], PoolSettings(Budget(10, 0))), scenario)


def test_requests_that_wait_for_one_load_share_it_and_one_that_leaves_harms_no_other() -> None:
    opened = []

    def open() -> Any:
        opened.append(1)
        return toys.open_parrot()

    async def scenario(pool: ModelPool) -> None:
        contexts = [RequestContext() for _ in range(4)]
        tasks = [asyncio.create_task(pool.use("a", context)) for context in contexts]
        await asyncio.sleep(0)
        tasks[0].cancel()
        served = await asyncio.gather(*tasks[1:])
        assert len({id(each) for each in served}) == 1
        assert len(opened) == 1
        for context in contexts:
            context.end()
        assert pool.models.get("a").users == 0

    run(ModelPool([source("a", 1, open), source("b")]), scenario)


def test_an_idle_model_is_unloaded_when_its_time_is_over_or_at_once_or_never() -> None:
    async def after(pool: ModelPool, seconds: float | None) -> None:
        context = RequestContext(service=Service(keep_alive=seconds))
        await pool.use("a", context)
        context.end()

    async def until(pool: ModelPool, state: ModelState) -> None:
        while pool.models.get("a").state is not state:
            await asyncio.sleep(0.01)

    async def scenario(pool: ModelPool) -> None:
        await after(pool, 0)
        await until(pool, ModelState.STORED)
        await after(pool, None)  # as the pool says: 0.2 seconds
        assert pool.models.get("a").state is ModelState.AWAKE
        await until(pool, ModelState.STORED)
        await after(pool, FOR_EVER)
        await asyncio.sleep(0.5)
        assert pool.models.get("a").state is ModelState.AWAKE
        assert pool.models.get("a").pinned
        assert await pool.unload("a")
        assert not await pool.unload("a")

    run(ModelPool([source("a"), source("b")], PoolSettings(keep_alive=0.2)), scenario)


def test_a_pinned_model_leaves_room_for_no_other() -> None:
    async def scenario(pool: ModelPool) -> None:
        context = RequestContext(service=Service(keep_alive=FOR_EVER))
        await pool.use("a", context)
        context.end()
        with pytest.raises(EngineUnavailable, match=r"stay loaded for ever.*a"):
            await pool.use("b", RequestContext())

    run(ModelPool([source("a", 6), source("b", 6)], PoolSettings(Budget(10, 0))), scenario)


def test_a_model_that_cannot_be_loaded_says_why_and_gives_its_memory_back() -> None:
    def broken() -> Any:
        raise ModelError("this file is torn")

    async def scenario(pool: ModelPool) -> None:
        context = RequestContext()
        with pytest.raises(ModelError, match="torn"):
            await pool.use("bad", context)
        context.end()
        assert (pool.models.get("bad").error, pool.models.get("bad").bytes) == ("this file is torn", 0)
        good = RequestContext()
        assert (await pool.use("good", good)).name == "good"
        good.end()

    run(ModelPool([source("good", 9), source("bad", 9, broken)], PoolSettings(Budget(10, 0))), scenario)


def test_an_unknown_name_is_refused_with_those_that_are_near() -> None:
    models = [source("smollm2"), source("gemma"), source("llama3.2:3b")]
    pool = ModelPool(models, PoolSettings(aliases=(Alias("gpt-*", "gemma"),)))
    assert pool.models.get("gpt-4o").name == "gemma"
    assert pool.models.get("gemma:latest").name == "gemma"
    assert pool.models.get("llama3.2").name == pool.models.get("llama3.2:latest").name == "llama3.2:3b"
    with pytest.raises(ModelNotFound, match="smollm2"):
        pool.models.get("smolm2")


def grown(client: Any, bytes: int) -> None:
    """Pretends that a model has adapters in memory."""
    client.stats = client.stats._replace(adapter_bytes=bytes)


def test_adapters_in_memory_count_and_idle_models_make_room_for_them() -> None:
    async def scenario(pool: ModelPool) -> None:
        for name in ("a", "b"):
            context = RequestContext()
            served = await pool.use(name, context)
            context.end()
        assert states(pool) == {"a": "awake", "b": "awake", "c": "stored"}
        context = RequestContext()
        await pool.use("b", context)
        grown(served.client, 3)
        assert pool.models.get("b").bytes == 4 + 3
        context.end()
        while pool.models.get("a").state is not ModelState.STORED:
            await asyncio.sleep(0.01)
        assert pool.models.get("b").state is ModelState.AWAKE
        context = RequestContext()
        pinned = RequestContext(service=Service(keep_alive=FOR_EVER))
        await pool.use("b", pinned)
        pinned.end()
        with pytest.raises(EngineUnavailable, match=r"c needs 0.00 GB.*b"):
            await pool.use("c", context)
        context.end()

    run(ModelPool([source("a", 4), source("b", 4), source("c", 4)], PoolSettings(Budget(10, 0))), scenario)


def test_an_adapter_gets_room_if_another_model_is_idle_and_else_an_error() -> None:
    async def scenario(pool: ModelPool) -> None:
        first, second = RequestContext(), RequestContext()
        await pool.use("a", first)
        await pool.use("b", second)
        with pytest.raises(EngineUnavailable, match="no other model is idle"):
            await pool.make_room_for_adapter(pool.models.get("b"), 3)
        await pool.make_room_for_adapter(pool.models.get("b"), 2)
        first.end()
        await pool.make_room_for_adapter(pool.models.get("b"), 3)
        assert states(pool) == {"a": "stored", "b": "awake"}
        with pytest.raises(EngineUnavailable, match="all models together may take"):
            await pool.make_room_for_adapter(pool.models.get("b"), 7)
        second.end()

    run(ModelPool([source("a", 4), source("b", 4)], PoolSettings(Budget(10, 0))), scenario)


def test_a_model_that_is_loaded_while_another_answers_yields_to_it() -> None:
    started: list[bool] = []

    class Starting(InProcessClient):
        async def start(self, *, yielding: bool = False) -> Any:
            started.append(yielding)
            return await super().start()

    def watched(name: str) -> ModelSource:
        return ModelSource(name, lambda: Starting(toys.open_parrot, name), toys.ToyText)  # type: ignore[arg-type]

    async def scenario(pool: ModelPool) -> None:
        using, other, last = RequestContext(), RequestContext(), RequestContext()
        await pool.use("a", using)
        await pool.use("b", other)
        using.end()
        other.end()
        await pool.use("c", last)
        last.end()
        assert started == [False, True, False]

    run(ModelPool([watched("a"), watched("b"), watched("c")]), scenario)


def test_models_that_come_and_go_are_found_and_a_loaded_one_stays_until_it_is_unloaded() -> None:
    first, second, third = source("a"), source("b"), source("c")
    changes: list[list[ModelSource]] = []

    async def scenario(pool: ModelPool) -> None:
        context = RequestContext()
        served = await pool.use("b", context)
        changes.append([first, second, third])
        other = RequestContext()
        assert (await pool.use("c", other)).name == "c"
        other.end()
        changes.append([third])
        assert [name for name, _ in pool.models.listed()] == ["b", "c"]
        assert pool.models.default.name == "b"
        assert pool.models.get("b").served is not None
        assert pool.models.get("b").served.client is served.client
        assert pool.models.get("gpt-4o").name == "b"
        assert pool.models.get("b").served.stands_for_it("gpt-4o")
        context.end()
        assert await pool.unload("b")
        assert states(pool) == {"c": "awake"}
        with pytest.raises(ModelNotFound):
            pool.models.get("a")
        assert pool.models.get("gpt-4o").name == "c"
        changes.append([])
        assert await pool.unload("c")
        pool.models.refresh()
        with pytest.raises(ModelNotFound, match="no model left"):
            await pool.use(None, RequestContext())

    pool = ModelPool(
        [first, second],
        PoolSettings(aliases=client_aliases()),
        discover=lambda: changes.pop() if changes else None,
    )
    run(pool, scenario)


# -- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo() -> Iterator[Any]:
    """Serves three parrots, of which two may be loaded at once."""
    aliases = (Alias("gpt-*", "polly"), Alias("polly-small", "polly"))
    pool = ModelPool([source("polly"), source("jack"), source("coco")], PoolSettings(Budget(100, 2), aliases=aliases))
    with TemporaryDirectory() as folder:
        app = create_app(pool, Setup(space=Space(Path(folder) / "data")))
        for server in conftest._serving(None, app):
            server.client = pool
            yield server


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "[hi]"}]},
    "/v1/completions": {"prompt": "[hi]"},
    "/v1/responses": {"input": "[hi]"},
    "/v1/messages": {"messages": [{"role": "user", "content": "[hi]"}], "max_tokens": 9},
    "/v1/embeddings": {"input": "hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "[hi]"}], "stream": False},
    "/api/generate": {"prompt": "[hi]", "stream": False},
    "/api/embed": {"input": "hi"},
    "/completion": {"prompt": "[hi]"},
    "/generate": {"text": "[hi]"},
    "/tokenize": {"prompt": "hi"},
    "/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", ASKED)
def test_the_model_field_chooses_the_model_in_every_dialect(zoo: Any, path: str) -> None:
    for name in ("jack", "coco"):
        answer = zoo.post(path, model=name, **ASKED[path])
        assert answer.status_code == 200 or b"classif" in answer.content, answer.text
        assert zoo.client.models.get(name).state is ModelState.AWAKE


def test_models_and_their_states_are_told(zoo: Any) -> None:
    zoo.post("/v1/completions", model="polly", prompt="[hi]")
    listed = [model["id"] for model in zoo.get("/v1/models").json()["data"]]
    assert listed == ["polly", "jack", "coco", "polly-small"]
    told = zoo.get("/health").json()
    assert {model["name"] for model in told["models"]} == {"polly", "jack", "coco"}
    awake = {model["name"] for model in told["models"] if model["state"] == "awake"}
    assert "polly" in awake
    assert len(awake) == 2
    assert {model["name"] for model in zoo.get("/api/ps").json()["models"]} == {f"{name}:latest" for name in awake}
    assert {"polly:latest", "jack:latest", "coco:latest"} <= {
        model["name"] for model in zoo.get("/api/tags").json()["models"]
    }


def test_an_empty_prompt_loads_and_a_keep_alive_of_nothing_unloads(zoo: Any) -> None:
    assert zoo.post("/api/generate", model="jack", stream=False).json()["done_reason"] == "load"
    assert zoo.client.models.get("jack").state is ModelState.AWAKE
    told = zoo.post("/api/generate", model="jack", keep_alive=0, stream=False).json()
    assert told["done_reason"] == "unload"
    zoo.until(lambda: zoo.client.models.get("jack").state is ModelState.STORED)
    assert zoo.post("/v1/completions", model="jack", prompt="[hi]").json()["choices"][0]["text"] == "hi"


def test_a_request_that_waited_for_its_model_says_so(zoo: Any) -> None:
    zoo.post("/api/generate", model="coco", keep_alive=0, stream=False)
    zoo.until(lambda: zoo.client.models.get("coco").state is ModelState.STORED)
    told = zoo.http.post(
        "/v1/completions", json={"model": "coco", "prompt": "[hi]"}, headers={"x-penstock-explain": "1"}
    ).json()
    assert told["penstock"]["loading_seconds"] > 0


def test_a_name_that_nobody_has_is_a_404_and_loads_nothing(zoo: Any) -> None:
    before = states(zoo.client)
    assert zoo.post("/v1/chat/completions", model="pollly", **ASKED["/v1/chat/completions"]).status_code == 404
    assert states(zoo.client) == before


def test_a_stream_keeps_its_model_loaded_to_its_end(zoo: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "[*la]"}], "max_tokens": 300, "stream": True}
    with zoo.http.stream("POST", "/v1/chat/completions", json={"model": "polly", **chat}) as stream:
        lines = stream.iter_lines()
        next(lines)
        for name in ("jack", "coco", "jack", "coco"):
            assert zoo.post("/v1/completions", model=name, prompt="[hi]").status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]


# -- other engines' routes ------------------------------------------------------------------------------------------


def test_clients_of_llama_cpps_router_load_and_unload(zoo: Any) -> None:
    def status() -> dict[str, str]:
        return {model["id"]: model["status"]["value"] for model in zoo.get("/models").json()["data"]}

    assert zoo.post("/models/load", model="jack").json() == {"success": True}
    assert status()["jack"] == "loaded"
    assert zoo.post("/models/unload", model="jack").json() == {"success": True}
    assert status()["jack"] == "unloaded"
    assert zoo.post("/models/load", model="nobody").status_code == 404


def test_clients_of_vllm_put_a_model_to_sleep_and_a_request_wakes_it(zoo: Any) -> None:
    zoo.post("/models/load", model="jack")
    assert zoo.http.post("/sleep?level=1&model=jack").status_code == 200
    assert zoo.get("/is_sleeping?model=jack").json() == {"is_sleeping": True}
    assert zoo.http.post("/wake_up?model=jack&tags=weights").status_code == 200
    assert zoo.get("/is_sleeping?model=jack").json() == {"is_sleeping": False}
    zoo.http.post("/sleep?model=jack")
    assert zoo.post("/v1/completions", model="jack", prompt="[hi]").json()["choices"][0]["text"] == "hi"
    assert zoo.get("/is_sleeping?model=jack").json() == {"is_sleeping": False}


def test_clients_of_llama_swap_see_what_runs_and_unload_it(zoo: Any) -> None:
    zoo.post("/models/load", model="polly")
    assert {"model": "polly", "state": "ready"} in zoo.get("/running").json()["running"]
    assert zoo.http.post("/api/models/unload/polly").text == "OK"
    assert "polly" not in {model["model"] for model in zoo.get("/running").json()["running"]}
    zoo.post("/models/load", model="polly")
    assert zoo.get("/unload").text == "OK"
    assert zoo.get("/running").json() == {"running": []}


def test_commands_show_and_change_what_a_server_has_loaded(zoo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("load", ["coco", "--url", zoo.url]) == 0
    assert run_command("ps", ["--json", "--url", zoo.url]) == 0
    told = {model["name"]: model["state"] for model in json.loads(capsys.readouterr().out)}
    assert told["coco"] == "awake"
    assert run_command("stop", ["coco", "--url", zoo.url]) == 0
    assert run_command("ps", ["--url", zoo.url]) == 0
    assert "stored" in capsys.readouterr().out
    assert run_command("stop", ["nobody", "--url", zoo.url]) == 1
    assert "does not exist here" in capsys.readouterr().err
    assert run_command("ps", ["--url", "http://127.0.0.1:9"]) == 1
    assert "penstock serve" in capsys.readouterr().err


# -- derived models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_a_derived_model_begins_every_chat_in_every_dialect(
    zoo: Any, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    store.save_derived(store.DerivedModel(name="pirate", base="jack", system="[arr]"))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "who?"}], "max_tokens": 9, "stream": False}
    if path == "/v1/responses":
        asked = {"input": "who?"}
    answer = zoo.post(path, model="pirate", **asked)
    assert answer.status_code == 200, answer.text
    assert "arr" in answer.text
    assert answer.json()["model"] == "pirate"
    own = {"role": "system", "content": "[no]"}
    if path == "/v1/chat/completions":
        chat = zoo.post(path, model="pirate", messages=[own, *asked["messages"]]).json()
        assert chat["choices"][0]["message"]["content"] == "no"
