"""A gateway in front of other engines: dialects, fallbacks, streams that break, keys and limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from penstock.cli.app import run_command
from penstock.fleet.foreign.engine import parse_engine
from penstock.fleet.foreign.gateway import ForeignGateway
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.server.access.usage import Price, UsageRecord, read_usage
from tests.fleet.foreign.scripted import ScriptedEngine, chat, engine, gateway, metric, moved, states
from tests.server import toys
from tests.server.conftest import WAIT, Server, serving

HELLO = [{"role": "user", "content": "[hello]"}]
COUNT: Any = [{"role": "user", "content": "count"}]
TOOL: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def one() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm") as scripted:
        yield scripted


@pytest.fixture
def two() -> Iterator[ScriptedEngine]:
    with engine(kind="vllm") as scripted:
        yield scripted


@pytest.fixture(scope="module")
def penstock() -> Iterator[tuple[Server, Server]]:
    """Another Penstock, and a gateway in front of it."""
    with (
        serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "toy/parrot") as foreign,
        gateway(f"{foreign.url},name=other", aliases=("claude*",)) as server,
    ):
        yield foreign, server


@pytest.fixture(scope="module")
def two_engines() -> Iterator[Server]:
    with engine(kind="vllm") as first, engine(kind="llamacpp") as second, gateway(first.url, second.url) as server:
        yield server


def anthropic_of(server: Server, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=WAIT)


# -- a second Penstock, through the SDKs ----------------------------------------------------------------------------


def test_the_kind_the_models_and_the_health_are_found_out(penstock: tuple[Server, Server]) -> None:
    _, server = penstock
    (told,) = server.get("/health").json()["engines"]
    assert (told["kind"], told["state"], told["models"]) == ("penstock", "ready", ["toy/parrot"])
    assert [model.id for model in server.sdk().models.list()] == ["toy/parrot"]
    assert server.sdk().models.retrieve("toy/parrot").owned_by == "penstock"
    assert "toy/parrot:latest" in [each.model for each in ollama.Client(host=server.url).list().models]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_sdk_gets_the_same_answer_from_both(penstock: tuple[Server, Server], stream: bool) -> None:
    def ask(server: Server) -> Any:
        given = {"model": "toy/parrot", "messages": HELLO, "stream": stream}
        answer = server.sdk().chat.completions.create(**given)
        if not stream:
            return answer.choices[0].message.content, answer.usage.completion_tokens
        chunks = list(answer)
        assert all(chunk.usage is None for chunk in chunks)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason

    foreign, server = penstock
    assert ask(server) == ask(foreign)


def test_completions_and_embeddings_are_relayed(penstock: tuple[Server, Server]) -> None:
    _, server = penstock
    answer = server.sdk().completions.create(model="toy/parrot", prompt="[hello]", max_tokens=9)
    assert answer.choices[0].text == "hello"
    vector = server.sdk().embeddings.create(model="toy/parrot", input="abc").data[0].embedding
    assert len(vector) == 8
    assert len(ollama.Client(host=server.url).embed("toy/parrot", "abc").embeddings[0]) == 8


def test_anthropics_sdk_gets_messages_and_streams(penstock: tuple[Server, Server]) -> None:
    sdk = anthropic_of(penstock[1])
    given: Any = {"model": "claude-any", "max_tokens": 20, "messages": HELLO}
    message = sdk.messages.create(**given)
    assert (message.content[0].text, message.stop_reason, message.model) == ("hello", "end_turn", "toy/parrot")
    assert message.usage.output_tokens == 6
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len("user:[hello]\nassistant:")
    with sdk.messages.stream(**given) as stream:
        assert "".join(stream.text_stream) == "hello"
        assert stream.get_final_message().usage.output_tokens == 6
    assert sdk.messages.create(**given | {"max_tokens": 2}).stop_reason == "max_tokens"
    counted = sdk.messages.count_tokens(model="claude-any", messages=HELLO)  # type: ignore[arg-type]
    assert counted.input_tokens == len("user:[hello]\nassistant:")


def test_ollamas_sdk_chats_generates_and_streams(penstock: tuple[Server, Server]) -> None:
    sdk = ollama.Client(host=penstock[1].url, timeout=WAIT)
    answer = sdk.chat("toy/parrot", HELLO)
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("hello", "stop", 6)
    parts = list(sdk.chat("toy/parrot", HELLO, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "hello"
    assert parts[-1].done
    assert parts[-1].prompt_eval_count == len("user:[hello]\nassistant:")
    assert sdk.generate("toy/parrot", "[hello]").response == "hello"
    assert sdk.generate("toy/parrot", "[hello]", raw=True).response == "hello"
    assert sdk.generate("toy/parrot", "[hello]", options={"num_predict": 2}).response == "he"


def test_a_wrong_request_is_refused_in_the_engines_own_words(penstock: tuple[Server, Server]) -> None:
    foreign, server = penstock
    given: Any = {"model": "toy/parrot", "messages": HELLO, "temperature": -1}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as here:
            server.sdk().chat.completions.create(**given, stream=stream)
        with pytest.raises(openai.BadRequestError) as there:
            foreign.sdk().chat.completions.create(**given, stream=stream)
        assert here.value.message == there.value.message
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        anthropic_of(server).messages.create(
            model="claude",
            max_tokens=5,
            messages=HELLO,
            extra_body={"temperature": -1},  # type: ignore[arg-type]
        )


def test_other_names_and_routes_are_refused(penstock: tuple[Server, Server]) -> None:
    _, server = penstock
    with pytest.raises(openai.NotFoundError, match="toy/parrot"):
        server.sdk().chat.completions.create(model="other", messages=HELLO)  # type: ignore[arg-type]
    assert server.post("/infill", model="toy/parrot", input_prefix="x").status_code == 501


def test_responses_are_relayed_to_engines_that_have_them(penstock: tuple[Server, Server]) -> None:
    _, server = penstock
    given: Any = {"model": "toy/parrot", "input": "[hello]"}
    whole = server.sdk().responses.create(**given)
    assert (whole.output_text, whole.usage and whole.usage.output_tokens) == ("hello", 6)
    events = list(server.sdk().responses.create(**given, stream=True))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "hello"
    assert events[-1].type == "response.completed"
    assert metric(server, "penstock_request_generated_tokens_sum") >= 12
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        server.sdk().responses.create(**given, previous_response_id=whole.id)


# -- what is sent, and what comes back ------------------------------------------------------------------------------


def test_fields_of_anthropics_dialect_reach_the_engine(one: ScriptedEngine) -> None:
    one.tool = {"name": "weather", "arguments": '{"city": "Paris"}'}
    one.words = ()
    tools: Any = [{"name": "weather", "description": "d", "input_schema": TOOL}]
    past: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
    ]
    given: Any = {"model": "m", "max_tokens": 7, "messages": past, "tools": tools, "system": "be short"}
    given |= {"stop_sequences": ["END"], "tool_choice": {"type": "any"}}
    given |= {"extra_body": {"temperature": 0.5, "top_k": 3}}
    with gateway(one.url) as server, anthropic_of(server).messages.stream(**given) as stream:
        message = stream.get_final_message()
    assert (message.stop_reason, message.content[0].input) == ("tool_use", {"city": "Paris"})
    (sent,) = one.bodies
    assert [each["role"] for each in sent["messages"]] == ["system", "user", "assistant", "tool"]
    called = sent["messages"][2]["tool_calls"][0]["function"]
    assert (called["name"], json.loads(called["arguments"])) == ("weather", {"city": "x"})
    assert sent["messages"][3] == {"role": "tool", "tool_call_id": "t1", "content": "rain"}
    assert sent["tool_choice"] == "required"
    assert sent["tools"][0]["function"]["parameters"]["properties"] == TOOL["properties"]
    settings = {name: sent[name] for name in ("max_tokens", "stop", "temperature", "top_k", "stream")}
    assert settings == {"max_tokens": 7, "stop": ["END"], "temperature": 0.5, "top_k": 3, "stream": True}


def test_fields_of_ollamas_dialect_reach_the_engine(one: ScriptedEngine) -> None:
    one.tool = {"name": "weather", "arguments": '{"city": "Paris"}'}
    one.words = ()
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": TOOL}}]
    options = {"num_predict": 7, "temperature": 0.5, "seed": 3, "repeat_penalty": 1.2, "num_ctx": 99, "stop": ["END"]}
    with gateway(one.url) as server:
        sdk = ollama.Client(host=server.url, timeout=WAIT)
        answer = sdk.chat("m", COUNT, tools=tools, options=options, format={"type": "object"}, think=True)
    assert answer.message.tool_calls is not None
    assert answer.message.tool_calls[0].function.arguments == {"city": "Paris"}
    (sent,) = one.bodies
    assert (sent["max_tokens"], sent["temperature"], sent["seed"], sent["stop"]) == (7, 0.5, 3, ["END"])
    assert sent["repetition_penalty"] == 1.2
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent["tools"][0]["function"]["name"] == "weather"


def test_the_usage_event_comes_only_to_who_asked_for_it(one: ScriptedEngine) -> None:
    with gateway(one.url) as server:
        plain = chat(server, stream=True).text
        asked = chat(server, stream=True, stream_options={"include_usage": True}).text
    assert "usage" not in plain
    assert asked.count('"usage"') == 1
    assert plain.endswith("data: [DONE]\n\n")
    assert all(body["stream_options"] == {"include_usage": True} for body in one.bodies)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("vllm", {"top_k": 3, "repetition_penalty": 1.2, "chat_template_kwargs": {"enable_thinking": True}}),
        ("llamacpp", {"top_k": 3, "repeat_penalty": 1.2, "chat_template_kwargs": {"enable_thinking": True}}),
        ("ollama", {"top_k": 3, "repetition_penalty": 1.2}),
        ("openai", {}),
    ],
)
def test_each_kind_gets_the_fields_that_it_knows(kind: str, sent: dict[str, Any]) -> None:
    fields = {"top_k", "repetition_penalty", "repeat_penalty", "chat_template_kwargs"}
    with engine(kind=kind) as scripted, gateway(scripted.url) as server:
        options = {"top_k": 3, "repeat_penalty": 1.2}
        server.post("/api/chat", model="m", messages=COUNT, options=options, think=True)
    assert {name: value for name, value in scripted.bodies[0].items() if name in fields} == sent


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_the_name_that_clients_know(stream: bool) -> None:
    with engine(model="/secret/place/m.gguf") as scripted, gateway(scripted.url) as server:
        text = chat(server, stream=stream).text
        assert "secret" not in text
        assert '"model":"m"' in text.replace(" ", "")
        assert scripted.bodies[0]["model"] == "/secret/place/m.gguf"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate"]
)
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": 3, "prompt": {"a": 1}},
        {"messages": [3], "tools": "x", "stream": True},
        {"messages": [{"role": 1, "content": {"a": []}}], "n": "x", "max_tokens": "y", "stream": 1},
        {"messages": COUNT, "stream_options": 7, "stream": True, "options": 4, "max_tokens": -1},
        {},
    ],
)
def test_malformed_bodies_break_nothing(two_engines: Server, path: str, fields: dict[str, Any]) -> None:
    assert two_engines.post(path, model="m", **fields).status_code < 500


# -- which engine ---------------------------------------------------------------------------------------------------


def test_engines_take_turns_by_weight(one: ScriptedEngine, two: ScriptedEngine) -> None:
    with gateway(f"{one.url},weight=3", two.url) as server:
        for _ in range(8):
            assert chat(server).status_code == 200
    assert (len(one.bodies), len(two.bodies)) == (6, 2)


def test_a_prompt_goes_where_its_beginning_was_computed(one: ScriptedEngine, two: ScriptedEngine) -> None:
    def ask(server: Server, text: str) -> str:
        answer = chat(server, messages=[{"role": "user", "content": text * 700}])
        return answer.headers["x-penstock-route"].partition(":")[0]

    with gateway(f"{one.url},name=one", f"{two.url},name=two") as server:
        homes = {text: ask(server, text) for text in "abcd"}
        assert set(homes.values()) == {"one", "two"}
        assert all(ask(server, text) == home for text, home in homes.items() for _ in range(3))


def test_cached_tokens_correct_the_guess(one: ScriptedEngine, two: ScriptedEngine) -> None:
    one.cached = two.cached = 0  # nothing is ever reused, so no engine is the better one
    with gateway(f"{one.url},name=one", f"{two.url},name=two") as server:
        for _ in range(6):
            chat(server, messages=[{"role": "user", "content": "a" * 3000}])
    assert one.bodies
    assert two.bodies


def test_the_lower_priority_number_is_tried_first_and_the_next_one_after_a_death(
    one: ScriptedEngine, two: ScriptedEngine
) -> None:
    with gateway(f"{one.url},name=one", f"{two.url},name=two,priority=1") as server:
        assert chat(server).status_code == 200
        one.stop()  # type: ignore[attr-defined]
        assert chat(server, stream=True).text.count("data:") == 6
        assert (len(one.bodies), len(two.bodies)) == (1, 1)
        assert states(server) == {"one": "down", "two": "ready"}
        (down,) = [each for each in server.get("/health").json()["engines"] if each["name"] == "one"]
        assert "cannot be reached" in down["reason"] or "closed" in down["reason"]
        assert metric(server, "penstock_foreign_up{") == 0.0


def test_a_refusal_is_respected_and_the_next_engine_asked(one: ScriptedEngine, two: ScriptedEngine) -> None:
    one.refusal = 429, {"retry-after": "30"}, {"error": {"message": "busy"}}
    with gateway(f"{one.url},name=one", f"{two.url},name=two,priority=1") as server:
        for _ in range(3):
            assert chat(server).status_code == 200
        assert (len(one.bodies), len(two.bodies)) == (1, 3)
        assert moved(server, "fallback") == 1
        two.refusal = one.refusal
        for _ in range(2):
            refused = chat(server)
            assert refused.status_code == 429
            assert 25 <= float(refused.headers["retry-after"]) <= 30
        assert len(two.bodies) == 4


def test_an_engine_that_is_not_there_does_not_keep_the_rest_from_starting(one: ScriptedEngine) -> None:
    with gateway("http://127.0.0.1:9,name=nobody", f"{one.url},name=one") as server:
        assert states(server) == {"nobody": "down", "one": "ready"}
        assert chat(server).status_code == 200


def test_without_any_engine_the_error_says_why() -> None:
    with engine() as scripted, gateway(f"{scripted.url},name=one") as server:
        scripted.stop()  # type: ignore[attr-defined]
        refused = chat(server)
        assert refused.status_code == 503
        assert "the engine one failed" in refused.json()["error"]["message"]
        assert "no engine answers for 'm' now: one is down" in chat(server).json()["error"]["message"]
        assert server.get("/health").status_code == 503


def test_an_engine_that_comes_back_is_used_again(one: ScriptedEngine) -> None:
    one.refusal = 503, {"retry-after": "0.2"}, {"error": "loading"}
    with gateway(one.url) as server:
        assert chat(server).status_code == 503
        one.refusal = None
        server.until(lambda: chat(server).status_code == 200)


# -- streams that break ---------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_is_continued_by_another_engine() -> None:
    with (
        engine(kind="vllm", words=("one ", "two ", "never")) as first,
        engine(kind="vllm", words=("three ", "four")) as second,
        gateway(f"{first.url},name=first", f"{second.url},name=second,priority=1") as server,
    ):
        first.break_at = 2
        given: Any = {"model": "m", "messages": COUNT, "max_tokens": 10, "stream_options": {"include_usage": True}}
        chunks = list(server.sdk().chat.completions.create(**given, stream=True))
        with server.sdk().chat.completions.stream(model="m", messages=COUNT) as stream:
            collected = stream.get_final_completion()
        assert moved(server, "resumed") >= 1
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "one two three four"
    assert len({each.id for each in chunks}) == 1
    assert [each.model_extra["penstock"] for each in chunks if each.model_extra] == [{"resumed_on": ["second"]}]
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (32, 10)
    assert second.bodies[0]["messages"][-1] == {"role": "assistant", "content": "one two "}
    assert second.bodies[0]["continue_final_message"] is True
    assert second.bodies[0]["max_tokens"] == 10 - len("one two ")  # its /tokenize takes bytes for tokens
    assert collected.choices[0].message.role == "assistant"


@pytest.mark.parametrize("dialect", ["anthropic", "ollama"])
def test_other_dialects_are_continued_too(dialect: str) -> None:
    with (
        engine(kind="llamacpp", words=("one ", "two ", "never")) as first,
        engine(kind="llamacpp", words=("one two ", "three ", "four")) as second,  # llama.cpp repeats what it continues
        gateway(f"{first.url},name=first", f"{second.url},name=second,priority=1") as server,
    ):
        first.break_at = 2
        if dialect == "anthropic":
            with anthropic_of(server).messages.stream(model="m", max_tokens=9, messages=COUNT) as stream:
                text = "".join(stream.text_stream)
            server.until(lambda: states(server)["first"] == "ready")
            told = server.post("/v1/messages", model="m", max_tokens=9, messages=COUNT).json()
        else:
            lines = list(ollama.Client(host=server.url, timeout=WAIT).chat("m", COUNT, stream=True))
            text = "".join(line.message.content or "" for line in lines)
            server.until(lambda: states(server)["first"] == "ready")
            told = server.post("/api/chat", model="m", messages=COUNT, stream=False).json()
    assert text == "one two three four"
    assert told["penstock"]["resumed_on"] == ["second"]
    assert "continue_final_message" not in second.bodies[0]


def test_a_completion_is_continued_by_its_prompt() -> None:
    with (
        engine(words=("one ", "never")) as first,
        engine(words=("two",)) as second,
        gateway(first.url, f"{second.url},priority=1") as server,
    ):
        first.break_at = 1
        chunks = list(server.sdk().completions.create(model="m", prompt="count: ", stream=True))
    assert "".join(each.choices[0].text for each in chunks) == "one two"
    assert second.bodies[0]["prompt"] == "count: one "


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("openai", {}, "no other engine can continue"),
        ("vllm", {"n": 2}, "several choices"),
        ("vllm", {"response_format": {"type": "json_object"}}, "given format"),
    ],
)
def test_what_cannot_be_continued_ends_with_an_error(kind: str, fields: dict[str, Any], told: str) -> None:
    with (
        engine(kind=kind) as first,
        engine(kind=kind) as second,
        gateway(f"{first.url},name=first", f"{second.url},priority=1") as server,
    ):
        first.break_at = 1
        with pytest.raises(openai.APIError, match=f"first broke off after .*{told}"):
            list(server.sdk().chat.completions.create(model="m", messages=COUNT, stream=True, **fields))
        assert moved(server, "broken") == 1


def test_a_whole_answer_that_breaks_is_asked_again(one: ScriptedEngine, two: ScriptedEngine) -> None:
    one.break_at = 0
    one.refusal = 500, {}, {"error": "a bug"}
    with gateway(one.url, f"{two.url},priority=1") as server:
        assert chat(server).json()["choices"][0]["message"]["content"] == "one two three"


def test_a_client_that_leaves_ends_the_engines_work(one: ScriptedEngine) -> None:
    one.pause, one.words = 0.02, ("word ",) * 500
    with gateway(one.url) as server:
        with server.http.stream(
            "POST", "/v1/chat/completions", json={"model": "m", "messages": COUNT, "stream": True}
        ) as answer:
            next(answer.iter_bytes())
        server.until(lambda: metric(server, "penstock_foreign_requests{") == 0.0)


# -- keys, limits, usage --------------------------------------------------------------------------------------------


def test_keys_limits_and_usage_hold_for_models_of_other_engines(one: ScriptedEngine, tmp_path: Path) -> None:
    file, record = tmp_path / "keys.json", tmp_path / "usage.sqlite"
    secrets = {name: new_key() for name in ("alice", "bob", "carol")}
    limits: dict[str, dict[str, Any]] = {"alice": {}, "bob": {"models": ("other",)}, "carol": {"tokens_per_minute": 40}}
    with changing(file) as keys:
        keys += [Key(name=n, sha256=digest(s.encode()), created=now(), **limits[n]) for n, s in secrets.items()]
    one.cached = 30
    usage = UsageRecord(record, {"m": Price(1.0, 10.0, 0.5)})
    with gateway(one.url, rules=Rules(keys=file), usage=usage) as server:

        def ask(name: str, **fields: Any) -> int:
            given = {"model": "m", "messages": COUNT, "max_tokens": 5} | fields
            return server.http.post(
                "/v1/chat/completions", json=given, headers={"x-api-key": secrets[name]}
            ).status_code

        assert server.post("/v1/chat/completions", model="m", messages=COUNT).status_code == 401
        assert [ask("alice"), ask("alice", stream=True)] == [200, 200]
        assert (
            anthropic_of(server, secrets["alice"])
            .messages.create(model="m", max_tokens=5, messages=COUNT)
            .usage.output_tokens
            == 3
        )
        assert ask("bob") == 403
        assert [ask("carol"), ask("carol")] == [200, 429]
    assert [key for key in one.headers[0] if key in ("authorization", "x-api-key")] == []
    alice, carol = read_usage(record)
    assert alice[:6] == ("alice", "m", 3, 120, 90, 9)
    assert alice.cost == pytest.approx((30 * 1.0 + 90 * 0.5 + 9 * 10.0) / 1e6)
    assert carol[:6] == ("carol", "m", 1, 40, 30, 3)


def test_the_engines_own_key_is_sent(one: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_KEY", "sk-one")
    with gateway(f"{one.url},key-env=ONE_KEY") as server:
        assert chat(server).status_code == 200
        one.refusal = 401, {}, {"error": {"message": "no"}}
        refused = chat(server)
    assert one.headers[0]["authorization"] == "Bearer sk-one"
    assert refused.status_code == 503
    assert "key-env" in refused.json()["error"]["message"]


def test_own_models_and_models_of_other_engines_are_served_together(one: ScriptedEngine) -> None:
    """Asks one server for both; a name that both have means its own."""
    client = InProcessClient(toys.open_parrot, "parrot")
    foreign = ForeignGateway([parse_engine(one.url), parse_engine(f"{one.url},model=toy/parrot")])
    with serving(client, toys.ToyText(), "toy/parrot", pool={"foreign": foreign}) as server:
        names = {model.id for model in server.sdk().models.list()}
        assert names == {"toy/parrot", "m"}
        assert chat(server).json()["choices"][0]["message"]["content"] == "one two three"
        own = chat(server, model="toy/parrot", messages=HELLO).json()
        assert own["choices"][0]["message"]["content"] == "hello"


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_serves_other_engines_alone_and_records_their_cost(one: ScriptedEngine, tmp_path: Path) -> None:
    words = ["fleet", "serve", "--engine", f"{one.url},name=one", "--port", "0", "--price", "m=1,10", "--alias", "x=m"]
    run: Any = {"env": os.environ | {"PENSTOCK_HOME": str(tmp_path)}, "text": True, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "penstock", *words], **run) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("serving m on "))
        url = line.split()[3]
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "x", "messages": COUNT}, timeout=WAIT)
        assert answer.json()["choices"][0]["message"]["content"] == "one two three"
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    (row,) = read_usage(tmp_path / "usage.sqlite")
    assert row[:6] == ("", "m", 1, 40, 0, 3)
    assert row.cost == pytest.approx(70e-6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "ftp://x"], "no URL of an engine"),
        (["--engine", "http://x,colour=red"], "weight"),
        (["--engine", "http://x", "--price", "m=1"], "MODEL=IN,OUT"),
    ],
)
def test_wrong_options_are_errors_that_say_what_to_write(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("fleet serve", words) == 1
    assert told in capsys.readouterr().err
