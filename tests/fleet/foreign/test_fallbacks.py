"""Models that answer in place of others, and settings of single models of an engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest
from starlette.responses import Response
from starlette.types import Message

from penstock.cli.app import run_command
from penstock.cli.foreign_engines import ForeignOptions
from penstock.config import Config
from penstock.errors import ConfigError, EngineUnavailable
from penstock.fleet.foreign.engine import ModelSettings, parse_engine
from penstock.fleet.foreign.gateway import ForeignGateway
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.server.access.usage import Price, UsageRecord, read_usage
from penstock.server.context.request_context import RequestContext
from penstock.server.models.fallback_response import FallbackResponse
from penstock.server.models.fallbacks import fallbacks_of, parse_fallbacks
from penstock.server.telemetry.metrics import Metrics
from tests.fleet.foreign.scripted import ScriptedEngine, chat, engine, gateway, metric, states
from tests.server import toys
from tests.server.conftest import WAIT, Server, serving
from tests.server.test_tracing import Traced, open_traces

COUNT: Any = [{"role": "user", "content": "count"}]
HELLO: Any = [{"role": "user", "content": "[hello]"}]
BUSY = 429, {"retry-after": "30"}, {"error": {"message": "busy"}}
DEAD = "http://127.0.0.1:9"


@pytest.fixture
def big() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm", model="big", words=("big ", "answer")) as scripted:
        yield scripted


@pytest.fixture
def small() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm", model="small", words=("small ", "answer")) as scripted:
        yield scripted


def fallbacks(server: Server, model: str, to: str) -> float:
    return metric(server, f'penstock_model_fallbacks_total{{model="{model}",to="{to}"}}')


# -- what options say ------------------------------------------------------------------------------------------------


def test_fallbacks_are_followed_in_their_order_each_once() -> None:
    said = parse_fallbacks(["a=b,c", "b=d", "a=e", " c = d , f "])
    assert fallbacks_of(said, "a") == ["b", "d", "c", "f", "e"]
    assert fallbacks_of(said, "d") == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["a=a"], "a -> a"),
        (["a=b", "b=c,d", "d=a"], "a -> b -> d -> a"),
        (["x=a", "a=b", "b=a"], "a -> b -> a"),
        (["a"], "MODEL=OTHER"),
        (["a="], "MODEL=OTHER"),
        (["=b"], "MODEL=OTHER"),
        (["a=b,,c"], "MODEL=OTHER"),
    ],
)
def test_circles_and_nonsense_are_refused(options: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_fallbacks(options)


def test_the_command_refuses_a_circle_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--engine", DEAD, "--fallback", "a=b", "--fallback", "b=a"]
    assert run_command("fleet serve", words) == 1
    assert "a circle, a -> b -> a" in capsys.readouterr().err


def test_without_other_engines_a_fallback_is_one_of_the_served_models() -> None:
    assert ForeignOptions(fallback=["a=b"]).fallbacks(["a", "b"]) == {"a": ("b",)}
    assert ForeignOptions(engines=[DEAD], fallback=["x=b"]).fallbacks(["b"]) == {"x": ("b",)}
    with pytest.raises(ConfigError, match="'x', which is not served here: name one of a, b"):
        ForeignOptions(fallback=["a=x"]).fallbacks(["a", "b"])


def test_a_setting_of_one_model_names_it() -> None:
    spec = parse_engine("http://h,weight=2,weight@qwen3:4b=5,priority@qwen3:4b=1,alias@a/b=x,alias@a/b=y*,model@a/b=z")
    assert spec.weight == 2.0
    assert spec.models == {"qwen3:4b": ModelSettings("", (), 5.0, 1), "a/b": ModelSettings("z", ("x", "y*"))}


@pytest.mark.parametrize(
    "option",
    ["weight@=2", "weight@m=0", "kind@m=vllm", "@m=2", "weight@m", "model@a=x,model@b=x", "priority@m=low"],
)
def test_a_wrong_setting_of_a_model_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        parse_engine(f"http://h,{option}")


# -- several models of one engine ------------------------------------------------------------------------------------


def test_each_model_of_an_engine_has_its_own_weight_priority_and_names() -> None:
    """Model a is shared three to one, b is asked of the second engine first, though the first one is before it."""
    with engine(model="a,b") as one, engine(model="a,b") as two:
        first = f"{one.url},name=one,weight@a=3,priority@b=1,alias@b=old-*,model@a=chat"
        with gateway(first, f"{two.url},name=two,model=chat") as server:
            assert {model.id for model in server.sdk().models.list()} == {"chat", "b"}
            for _ in range(8):
                assert chat(server, model="chat").status_code == 200
            assert [len(one.bodies), len(two.bodies)] == [6, 2]
            routes = {chat(server, model=name).headers["x-penstock-route"][:3] for name in ("b", "old-b")}
            told = server.get("/health").json()["engines"][0]
    assert {body["model"] for body in one.bodies} == {"a"}
    assert routes == {"two"}
    assert told["model_settings"] == {"chat": {"priority": 0, "weight": 3.0}, "b": {"priority": 1, "weight": 1.0}}


def test_a_model_that_an_option_names_and_the_engine_has_not_is_told(big: ScriptedEngine) -> None:
    with gateway(f"{big.url},name=one,weight@bigg=2") as server:
        assert server.get("/health").json()["engines"][0]["not_listed"] == ["bigg"]


# -- who answers in place of whom ------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["busy", "down", "never there"])
def test_another_model_answers_when_no_engine_of_the_first_can(
    big: ScriptedEngine, small: ScriptedEngine, trouble: str
) -> None:
    url = DEAD if trouble == "never there" else big.url
    with gateway(f"{url},name=one", f"{small.url},name=two", fallbacks=("big=small",)) as server:
        if trouble == "busy":
            big.refusal = BUSY
        elif trouble == "down":
            big.stop()  # type: ignore[attr-defined]
        for stream in (False, True):
            answer = chat(server, model="big", stream=stream)
            assert "small " in answer.text
            assert '"model":"small"' in answer.text.replace(" ", "")
            assert answer.headers["x-penstock-model"] == "small"
            assert answer.headers["x-penstock-route"].startswith("small in place of big (")
            assert answer.headers["x-penstock-route"].endswith("; two: no other engine")
        assert fallbacks(server, "big", "small") == 2
        assert chat(server, model="small").headers.get("x-penstock-model") is None
    assert all(body["model"] == "small" for body in small.bodies)


@pytest.mark.parametrize("dialect", ["anthropic", "ollama", "completions"])
def test_other_dialects_fall_back_and_name_the_model(big: ScriptedEngine, small: ScriptedEngine, dialect: str) -> None:
    big.refusal = BUSY
    with gateway(big.url, small.url, fallbacks=("big=small",)) as server:
        if dialect == "anthropic":
            sdk = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=WAIT)
            with sdk.messages.stream(model="big", max_tokens=9, messages=COUNT) as stream:
                message = stream.get_final_message()
            told = message.content[0].text, message.model  # type: ignore[union-attr]
        elif dialect == "ollama":
            answer = ollama.Client(host=server.url, timeout=WAIT).chat("big", COUNT)
            told = answer.message.content, answer.model
        else:
            completion = server.sdk().completions.create(model="big", prompt="count")
            told = completion.choices[0].text, completion.model
    assert told == ("small answer", "small")


def test_a_wrong_request_and_a_stream_that_has_begun_do_not_fall_back(
    big: ScriptedEngine, small: ScriptedEngine
) -> None:
    big.refusal = 400, {}, {"error": {"message": "wrong"}}
    with gateway(f"{big.url},name=one", small.url, fallbacks=("big=small",)) as server:
        assert chat(server, model="big").status_code == 400
        big.refusal, big.break_at = None, 1
        assert "broke off after" in chat(server, model="big", stream=True).text
        server.until(lambda: states(server)["one"] == "ready")
        assert server.post("/v1/embeddings", model="big", input="x").status_code == 200
        big.stop()  # type: ignore[attr-defined]
        assert server.post("/v1/embeddings", model="big", input="x").status_code == 503
    assert small.bodies == []


def test_if_no_fallback_answers_the_error_is_the_first_models(big: ScriptedEngine, small: ScriptedEngine) -> None:
    big.refusal = BUSY
    small.refusal = 500, {}, {"error": {"message": "a bug"}}
    with gateway(f"{big.url},name=one", small.url, fallbacks=("big=small,none",)) as server:
        for stream in (False, True):
            refused = chat(server, model="big", stream=stream)
            assert refused.status_code == 429
            assert not {"x-penstock-model", "x-penstock-route"} & refused.headers.keys()
            assert 25 <= float(refused.headers["retry-after"]) <= 30
        assert "model_fallbacks_total{" not in server.get("/metrics").text


def test_a_trace_tells_of_the_fallback(big: ScriptedEngine, small: ScriptedEngine) -> None:
    big.refusal = BUSY
    traces, kept = open_traces()
    options = f"{big.url},name=one", f"{small.url},name=two"
    with gateway(*options, fallbacks=("big=small",), traces=traces) as server:
        chat(server, model="big")
        spans = Traced(server, kept).spans(5)
    assert [span.name for span in spans] == ["route", "engine one", "route", "engine two", "chat small"]
    assert [(span.attributes or {}).get("error.type") for span in spans] == [None, "interrupted", None, None, None]
    (event,) = spans[-1].events
    assert event.name == "penstock.fallback"
    assert (event.attributes or {})["penstock.fallback.to"] == "small"


def test_the_first_attempt_is_the_request_as_it_is() -> None:
    """Its name may mean an adapter or a derived model of the one that has the fallback."""
    context, asked = RequestContext(), list[str | None]()

    async def answer(model: str | None) -> Response:
        asked.append(model)
        if model != "tiny":
            raise EngineUnavailable("it is down")
        return Response(b"answer")

    response = FallbackResponse(["big", "small", "tiny"], answer, context, Metrics(lambda: (), "big"))
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(response({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
    assert asked == [None, "small", "tiny"]
    assert [message.get("body") for message in sent] == [None, b"answer"]
    assert context.notes.route == "tiny in place of big (it is down)"


def test_usage_and_rights_are_those_of_the_model_that_answers(
    big: ScriptedEngine, small: ScriptedEngine, tmp_path: Path
) -> None:
    file, record = tmp_path / "keys.json", tmp_path / "usage.sqlite"
    secrets = {name: new_key() for name in ("alice", "bob")}
    with changing(file) as keys:
        keys += [Key(name="alice", sha256=digest(secrets["alice"].encode()), created=now())]
        keys += [Key(name="bob", sha256=digest(secrets["bob"].encode()), created=now(), models=("big",))]
    usage = UsageRecord(record, {"small": Price(1.0, 10.0, 1.0)})
    options = big.url, small.url
    with gateway(*options, fallbacks=("big=small",), rules=Rules(keys=file), usage=usage) as server:
        big.stop()  # type: ignore[attr-defined]

        def ask(name: str) -> int:
            given = {"model": "big", "messages": COUNT}
            told = {"x-api-key": secrets[name]}
            return server.http.post("/v1/chat/completions", json=given, headers=told).status_code

        assert [ask("alice"), ask("alice"), ask("bob")] == [200, 200, 503]
    (row,) = read_usage(record)
    assert row[:6] == ("alice", "small", 2, 80, 0, 4)
    assert row.cost == pytest.approx((80 * 1.0 + 4 * 10.0) / 1e6)


def test_an_own_model_answers_for_one_of_another_engine(big: ScriptedEngine) -> None:
    big.refusal = BUSY
    pool = {"foreign": ForeignGateway([parse_engine(big.url)]), "fallbacks": parse_fallbacks(["big=toy/parrot"])}
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "toy/parrot", pool=pool) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            for stream in (False, True):
                answer = server.post(path, model="big", messages=HELLO, stream=stream, max_tokens=20)
                assert answer.status_code == 200
                assert answer.headers["x-penstock-model"] == "toy/parrot"
                assert "toy/parrot" in answer.text


def test_a_model_of_another_engine_answers_for_an_own_one_whose_engine_died(small: ScriptedEngine) -> None:
    """A stream of an own model asks its engine only after the endpoint has returned."""
    client = ProcessClient(Config(model="parrot", post_mortem="off"), toys.HOST, ())
    pool = {"foreign": ForeignGateway([parse_engine(small.url)]), "fallbacks": parse_fallbacks(["toy/parrot=small"])}
    with serving(client, toys.ToyText(), "toy/parrot", pool=pool) as server:
        assert "hello" in chat(server, model="toy/parrot", messages=HELLO).text
        os.kill(server.get("/health").json()["engine"]["pid"], signal.SIGKILL)
        server.until(lambda: client.hello is None)
        for stream in (False, True):
            for fields in ({"model": "toy/parrot"}, {"model": None}):  # no name means the own model
                answer = chat(server, messages=HELLO, stream=stream, **fields)
                assert "small " in answer.text
                assert answer.headers["x-penstock-route"].startswith("small in place of toy/parrot (")
        assert fallbacks(server, "toy/parrot", "small") == 4
