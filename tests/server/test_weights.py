"""Training loops over HTTP: pauses and weights that change, with vLLM's and SGLang's routes, while answers stream."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.backend.base import Batch
from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.models.ledger import Budget
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.source import ModelSource
from tests.engine.changed_weights import change_weights
from tests.server import conftest
from tests.server.test_adapter_routes import MODELS, SmallText

MODEL = MODELS / "goldens" / "qwen2"
OPTIONS = {"device": "cpu", "threads": 1, "max_rows": 4, "kv_memory": 1 << 20, "max_len": 64, "block_size": 8}
PROMPT = "once upon a time"
PACE = [0.01]  # seconds of a step
GREEDY = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}


def slow_engine(path: Path | str) -> Engine:
    """Opens an engine that takes its time, so that a test can come between two steps."""
    engine = open_engine(configure(path, OPTIONS, name="tiny"))
    launch = engine.backend.launch

    def wait_and_launch(batch: Batch) -> int:
        time.sleep(PACE[0])
        return launch(batch)

    engine.backend.launch = wait_and_launch  # type: ignore[method-assign]
    return engine


def serving(make: Any, settings: PoolSettings | None = None) -> Iterator[Any]:
    source = ModelSource("tiny", make, SmallText, MODEL)  # type: ignore[arg-type]
    pool = ModelPool([source], settings or PoolSettings())
    with TemporaryDirectory() as folder:
        app = create_app(pool, Setup(space=Space(Path(folder))))
        for server in conftest._serving(None, app):
            server.client = pool.models.default.served.client  # type: ignore[union-attr]
            yield server


@pytest.fixture
def server() -> Iterator[Any]:
    yield from serving(partial(InProcessClient, lambda: slow_engine(MODEL), "tiny"))


@pytest.fixture
def pace() -> Iterator[list[float]]:
    """Has steps take so long that answers last for seconds: a busy machine, too, comes between two of them."""
    PACE[0] = 0.1
    yield PACE
    PACE[0] = 0.01


@pytest.fixture
def process() -> Iterator[Any]:
    """Has its engine in a process of its own."""
    yield from serving(lambda: ProcessClient(configure(MODEL, OPTIONS, name="tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(change_weights(MODEL, tmp_path_factory.mktemp("weights") / "other"))


@pytest.fixture(scope="module")
def expected(other: str) -> str:
    """What a server of the other weights says."""
    for server in serving(partial(InProcessClient, lambda: slow_engine(other), "tiny")):
        return said(server)[0]
    raise AssertionError


def said(server: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Returns the text of an answer, and its `penstock` object."""
    answer = server.post("/v1/completions", **GREEDY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json().get("penstock", {})


def update(server: Any, **body: Any) -> Any:
    return server.http.post("/update_weights", json=body)


def cached(server: Any) -> int:
    return int(server.post("/v1/completions", **GREEDY).json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def ok(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- vLLM's routes --------------------------------------------------------------------------------------------------


def test_weights_change_while_the_server_runs(server: Any, other: str, expected: str) -> None:
    before, report = said(server)
    assert not report, "weights that were never updated are not mentioned"
    assert cached(server) == 8
    assert ok(server.get("/weight_info")) == {"weight_version": "default", "updates": 0, "path": None}
    told = ok(update(server, path=other, weight_version="step 7"))
    assert told == {"message": "Weights updated", "weight_version": "step 7", "updates": 1, "path": other}
    assert cached(server) == 0, "nothing of the old weights is reused"
    assert cached(server) == 8
    text, report = said(server)
    assert text == expected != before
    assert report["weight_version"] == "step 7"
    assert "weights" not in report
    assert ok(server.get("/weight_info"))["weight_version"] == "step 7"
    assert ok(update(server, update_info={"path": str(MODEL)}))["weight_version"] == "2"
    assert said(server)[0] == before


@pytest.mark.parametrize("recompute", [True, False])
def test_a_stream_goes_on_over_a_pause_and_an_update(
    server: Any, other: str, pace: list[float], recompute: bool
) -> None:
    asked = GREEDY | {"max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}}
    with server.http.stream("POST", "/v1/completions", json=asked) as stream, ThreadPoolExecutor() as pool:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: {"))
        chunks = [json.loads(next(lines))]
        assert ok(server.http.post("/pause")) == {"status": "paused"}
        assert ok(server.get("/is_paused")) == {"is_paused": True}
        steps = server.client.stats.steps
        late = pool.submit(said, server, penstock=True)
        server.until(lambda: server.client.stats.waiting == 1)
        ok(update(server, path=other, weight_version="new", recompute=recompute))
        assert server.client.stats.steps == steps
        pace[0] = 0.0
        assert ok(server.http.post("/resume")) == {"status": "resumed"}
        chunks += map(json.loads, lines)
        _, waited = late.result(60)
    assert ok(server.get("/is_paused")) == {"is_paused": False}
    (report,) = [chunk["penstock"] for chunk in chunks if "penstock" in chunk]
    first, second = report["weights"]
    assert (first["weight_version"], second["weight_version"], report["weight_version"]) == ("default", "new", "new")
    assert 0 == first["first_token"] < second["first_token"] < 40
    assert (first["mixed"], second["mixed"]) == (False, not recompute)
    assert waited["choices"][0]["seconds"]["pause"] > 0
    assert waited["weight_version"] == "new"


def test_a_pause_waits_for_what_runs(server: Any) -> None:
    with ThreadPoolExecutor() as pool:
        long = pool.submit(said, server, max_tokens=40)
        server.until(lambda: server.client.stats.running > 0)
        ok(server.http.post("/pause?mode=wait"))
        assert server.client.stats.running == 0
        assert len(long.result(60)[0]) == 40
        ok(server.http.post("/resume"))


@pytest.mark.parametrize("path", ["/pause?mode=abort", "/abort_requests"])
@pytest.mark.usefixtures("pace")
def test_an_abort_returns_what_was_generated(server: Any, path: str) -> None:
    asked = GREEDY | {"max_tokens": 40, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=asked) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        ok(server.http.post(path, json={}))
        finish = [json.loads(line)["choices"][0]["finish_reason"] for line in lines]
    assert finish[-1] == "abort"
    ok(server.http.post("/resume"))
    assert len(said(server)[0]) == 8


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(server: Any, tmp_path: Path) -> None:
    before = said(server)[0]
    for path in (str(tmp_path), str(MODELS / "goldens" / "llama3"), "/no/such/folder", "\0", "x" * 5000):
        answer = update(server, path=path)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid_weights"
    for body in ({}, {"path": str(MODEL), "update_info": {"path": str(MODEL)}}, {"path": 3}, {"path": ""}):
        assert update(server, **body).status_code == 400
    assert update(server, path=str(MODEL), model="unknown").status_code == 404
    assert server.http.post("/pause?mode=nonsense").json() == {"status": "paused"}, "a lenient server ignores it"
    ok(server.http.post("/resume"))
    assert server.post("/abort_requests", request_ids=["a"]).status_code == 400
    assert said(server) == (before, {})


def test_the_prefix_cache_can_be_emptied(server: Any) -> None:
    said(server)
    assert cached(server) == 8
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert cached(server) == 0


def test_a_budget_must_have_room_for_both(other: str) -> None:
    make = partial(InProcessClient, lambda: slow_engine(MODEL), "tiny")
    for server in serving(make, PoolSettings(budget=Budget(1000, 0))):
        answer = update(server, path=other)
        assert answer.status_code == 400
        assert "--memory" in answer.json()["error"]["message"]


def test_only_an_engine_with_weights_can_update_them(parrot: Any) -> None:
    answer = update(parrot, path="/tmp")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_weights")


# -- SGLang's routes ------------------------------------------------------------------------------------------------


def test_sglangs_training_loops_work(server: Any, other: str, expected: str) -> None:
    assert ok(server.http.post("/pause_generation"))["status"] == "ok"
    assert ok(server.get("/is_paused")) == {"is_paused": True}
    told = ok(server.post("/update_weights_from_disk", model_path=other, weight_version="v9", flush_cache=True))
    assert told["success"] is True
    assert ok(server.post("/continue_generation", torch_empty_cache=True))["status"] == "ok"
    assert ok(server.get("/weight_version")) == ok(server.get("/get_weight_version")) == {"weight_version": "v9"}
    assert ok(server.get("/model_info"))["weight_version"] == "v9"
    assert said(server)[0] == expected
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    meta = ok(server.post("/generate", text=PROMPT, sampling_params=params))["meta_info"]
    assert meta["weight_version"] == "v9"


def test_sglang_refuses_with_a_message(server: Any) -> None:
    answer = server.post("/update_weights_from_disk", model_path="/no/such/folder")
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "/no/such/folder" in answer.json()["message"]


@pytest.mark.usefixtures("pace")
def test_sglang_pauses_and_aborts(server: Any, other: str) -> None:
    with ThreadPoolExecutor() as pool:
        params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
        asked = pool.submit(server.post, "/generate", text=PROMPT, sampling_params=params)
        server.until(lambda: server.client.stats.running > 0)
        ok(server.post("/pause_generation", mode="abort"))
        assert ok(asked.result(60))["meta_info"]["finish_reason"]["type"] == "abort"
        held = pool.submit(server.post, "/generate", text=PROMPT, sampling_params=params)
        server.until(lambda: server.client.stats.waiting == 1)
        told = ok(server.post("/update_weights_from_disk", model_path=other, abort_all_requests=True, keep_pause=True))
        assert told["success"]
        assert ok(held.result(60))["meta_info"]["finish_reason"]["type"] == "abort"
        again = pool.submit(server.post, "/generate", text=PROMPT, sampling_params=params)
        server.until(lambda: server.client.stats.waiting == 1)
        ok(server.post("/pause_generation", mode="abort"))
        assert ok(again.result(60))["meta_info"]["finish_reason"]["type"] == "abort"
    assert ok(server.get("/is_paused")) == {"is_paused": True}


# -- engines that come and go ---------------------------------------------------------------------------------------


def kill_and_wait(process: Any, paused: bool) -> None:
    client, restarts = process.client, process.client.restarts
    os.kill(client.hello.pid, signal.SIGKILL)
    process.until(lambda: client.restarts > restarts)
    process.until(lambda: client.weights.updates == 1 and client.weights.paused == paused)


def test_an_engine_that_died_comes_back_with_its_weights_and_its_pause(process: Any, other: str, expected: str) -> None:
    ok(update(process, path=other, weight_version="v2"))
    kill_and_wait(process, paused=False)
    ok(process.http.post("/pause"))
    kill_and_wait(process, paused=True)
    ok(process.http.post("/resume"))
    text, report = said(process)
    assert (text, report["weight_version"]) == (expected, "v2")


def test_a_model_that_was_unloaded_comes_back_with_its_weights(server: Any, other: str, expected: str) -> None:
    ok(update(server, path=other, weight_version="v2"))
    assert server.http.post("/sleep").status_code == 200
    text, report = said(server)
    assert (text, report["weight_version"]) == (expected, "v2")
