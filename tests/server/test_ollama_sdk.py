"""Ollama's own client is the judge: it checks every answer strictly, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ollama
import pytest

from penstock import store
from penstock.errors import DownloadError

MODEL = "toy/parrot"


@cache
def opened(url: str) -> ollama.Client:
    return ollama.Client(url, timeout=120.0)


def sdk(server: Any) -> ollama.Client:
    return opened(server.url)


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"[{text}]"}]} | fields


def lines(server: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    """As they are on the wire."""
    answer = server.post(path, **fields)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.split("\n")[:-1]]


COUNTS = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}
TEXTS = ["hello", "naïve café", "漢字かな交じり文", "👩‍👩‍👧 family", 'quotes " and \\ slashes\n', ""]


@pytest.mark.parametrize("text", TEXTS)
def test_chat_whole_and_streamed_read_the_same(parrot: Any, text: str) -> None:
    client = sdk(parrot)
    whole = client.chat(**say(text))
    assert (whole.model, whole.message.role, whole.message.content) == (MODEL, "assistant", text)
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count == len(text.encode()) + 1
    assert whole.prompt_eval_count == len(f"user:[{text}]\nassistant:".encode())
    parts = list(client.chat(**say(text), stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


@pytest.mark.parametrize("text", TEXTS)
def test_generate_whole_and_streamed_read_the_same(parrot: Any, text: str) -> None:
    client = sdk(parrot)
    whole = client.generate(MODEL, f"[{text}]", system="be brief")
    assert (whole.response, whole.done_reason) == (text, "stop")
    assert whole.prompt_eval_count == len(f"system:be brief\nuser:[{text}]\nassistant:".encode())
    parts = list(client.generate(MODEL, f"[{text}]", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == text
    assert parts[-1].prompt_eval_count == len(f"[{text}]".encode())


def test_async_whole_and_streamed(parrot: Any) -> None:
    async def scenario() -> None:
        client = ollama.AsyncClient(parrot.url)
        whole, stream = await asyncio.gather(client.chat(**say("one")), client.chat(**say("two"), stream=True))
        assert whole.message.content == "one"
        assert "".join([part.message.content or "" async for part in stream]) == "two"
        assert (await client.generate(MODEL, "[three]")).response == "three"
        stream = await client.generate(MODEL, "[four]", stream=True)
        assert "".join([part.response or "" async for part in stream]) == "four"
        assert (await client.list()).models[0].model == f"{MODEL}:latest"
        with pytest.raises(ollama.ResponseError):
            await client.chat(**say("x", model="other"))

    asyncio.run(scenario())


def test_the_lines_of_a_stream(parrot: Any) -> None:
    told = lines(parrot, "/api/chat", **say("abc"))
    assert [line.get("message", {}).get("content") for line in told] == ["a", "b", "c", ""]
    assert all(set(line) == {"model", "created_at", "done", "message"} for line in told[:-1])
    assert set(told[-1]) == {"model", "created_at", "done", "message", "done_reason"} | COUNTS
    assert all(isinstance(told[-1][name], int) for name in COUNTS)
    assert told[-1]["prompt_eval_duration"] + told[-1]["eval_duration"] == told[-1]["total_duration"]
    assert all(line["created_at"].endswith("Z") for line in told)
    told = lines(parrot, "/api/generate", model=MODEL, prompt="[ab]")
    assert [line["response"] for line in told] == ["a", "b", ""]


def test_an_empty_request_loads(strict_parrot: Any) -> None:
    client = sdk(strict_parrot)
    told = client.generate(MODEL)
    assert (told.response, told.done, told.done_reason) == ("", True, "load")
    assert client.chat(MODEL, [], keep_alive="5m").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match=r"unknown field 'options\.mood'"):
        client.chat(MODEL, [], options={"mood": 1})
    with pytest.raises(ollama.ResponseError, match=r"tools\[0\]\.type"):
        client.chat(MODEL, [], tools=[TOOL | {"type": "web"}])


def test_limits_and_stops(parrot: Any) -> None:
    client = sdk(parrot)
    short = client.chat(**say("hello", options={"num_predict": 3}))
    assert (short.message.content, short.done_reason) == ("hel", "length")
    assert client.chat(**say("one, two", options={"stop": [","]})).message.content == "one"
    endless = client.chat(**say("*abc", options={"num_predict": -1}))
    assert endless.done_reason == "length"
    assert (endless.prompt_eval_count or 0) + (endless.eval_count or 0) == 512
    assert client.chat(**say("*abc", options={"num_predict": 9999})).eval_count == endless.eval_count


def test_sampler_options_reach_the_engine(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = parrot.client.run
    monkeypatch.setattr(parrot.client, "run", lambda asked, read: seen.append(asked.sampling) or run(asked, read))
    for options in (
        {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
        {"typical_p": 0.7},
        {"repeat_penalty": 1.2},
        {"repeat_penalty": 1.2, "repeat_last_n": -1},
        {},
    ):
        sdk(parrot).chat(**say("hi", options=options))
    first, typical, window, everything, none = seen
    assert (first.chain.mirostat, first.chain.mirostat_tau, first.chain.mirostat_eta) == (2, 4.0, 0.2)
    assert (typical.chain.typical_p, none.chain) == (0.7, None)
    assert [each.penalty_window for each in (window, everything, none)] == [64, -1, -1]


def test_a_context_above_the_servers_is_limited_and_that_is_told(parrot: Any) -> None:
    answer = parrot.post("/api/chat", **say("hi", options={"num_ctx": 32768}), stream=False)
    assert answer.json()["penstock"]["ignored_fields"] == ["options.num_ctx"]
    assert answer.headers["x-penstock-ignored"] == "options.num_ctx"


def test_names_with_latest_and_options_that_change_nothing(parrot: Any) -> None:
    options = {"num_ctx": 512, "num_thread": 4, "num_gpu": 99, "use_mmap": True, "num_keep": 5, "typical_p": 1.0}
    options |= {"temperature": 0.1, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.1}
    told = sdk(parrot).chat(**say("hi", model=f"{MODEL}:latest", options=options, keep_alive=-1, think=False))
    assert told.message.content == "hi"


def test_logprobs(parrot: Any) -> None:
    client = sdk(parrot)
    whole = client.chat(**say("ab"), logprobs=True, top_logprobs=2)
    assert [entry.token for entry in whole.logprobs or ()] == ["a", "b"]
    assert [top.token for top in (whole.logprobs or ())[1].top_logprobs or ()] == ["b", "A"]
    parts = list(client.generate(MODEL, "[ab]", logprobs=True, stream=True))
    assert [entry.token for part in parts for entry in part.logprobs or ()] == ["a", "b"]


def test_tools_used_before_are_part_of_the_prompt(parrot: Any) -> None:
    call = {"function": {"name": "look", "arguments": {"far": True}}}
    said = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "thinking": "I should look.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look", "content": "[fog]"},
    ]
    told = sdk(parrot).chat(MODEL, said)
    assert told.message.content == "fog"
    assert told.prompt_eval_count == len("user:look\nassistant:\ntool:[fog]\nassistant:")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": {"num_ctx": 4096}}, "options.num_ctx is not supported with this value: 4096"),
        ({"options": {"temperature": -1}}, "temperature must be between"),
        ({"options": {"mirostat": 3}}, "mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z is not supported"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": -2}}, "options.repeat_last_n"),
        ({"options": {"no_such_option": 1}}, "unknown field 'options.no_such_option'"),
        ({"keep_alive": "soon"}, "'soon' is not a duration"),
        ({"think": True}, "think is not supported"),
        ({"think": "high"}, "think is not supported"),
        ({"tools": [TOOL | {"type": "web"}]}, r"tools\[0\].type"),
        ({"messages": [{"role": "user", "content": "x", "images": [b"1234"]}]}, r"messages\[0\].images"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context holds 512"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_refusals_are_told_by_name(strict_parrot: Any, fields: dict[str, Any], told: str, streaming: bool) -> None:
    with pytest.raises(ollama.ResponseError, match=told) as caught:
        list(sdk(strict_parrot).chat(**say("hi", **fields), stream=streaming))
    assert caught.value.status_code == 400


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"images": ["eA=="]}, {"context": [1, 2]}])
def test_generate_refuses_by_name(parrot: Any, fields: dict[str, Any]) -> None:
    answer = parrot.post("/api/generate", model=MODEL, prompt="x", **fields)
    assert answer.status_code == 400
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(f"{next(iter(fields))} is not supported")


def test_other_errors_in_its_shape(parrot: Any) -> None:
    client = sdk(parrot)
    for call in (lambda: client.chat(**say("x", model="other")), lambda: client.show("other")):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == 404
    assert parrot.http.post("/api/chat", content=b"{").json()["error"].startswith("the body is not valid JSON")
    assert parrot.get("/api/nothing").json() == {"error": "Not Found: GET /api/nothing"}
    assert parrot.post("/api/show").status_code == 400


def test_an_engine_that_dies_is_told_in_the_stream_and_after(mortal_parrot: Any) -> None:
    client = sdk(mortal_parrot)
    stream = client.chat(**say("*abc"), stream=True)
    next(stream)
    os.kill(mortal_parrot.get("/health").json()["engine"]["pid"], signal.SIGKILL)
    with pytest.raises(ollama.ResponseError):
        list(stream)
    mortal_parrot.until(lambda: mortal_parrot.client.hello is None)
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(**say("hi"))
    assert caught.value.status_code == 503


# -- models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own, with one file in it that is no model."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    model = tmp_path / "models" / "hf--a--b--c.gguf"
    model.mkdir(parents=True)
    (model / "c.gguf").write_bytes(b"x" * 10)
    record = {"name": "hf:a/b/c.gguf", "source": "hf:a/b/c.gguf", "path": "models/hf--a--b--c.gguf/c.gguf"}
    (tmp_path / "records").mkdir()
    record |= {"size": 10, "sha256": "ab", "fetched": "2026-01-01T00:00:00+00:00"}  # type: ignore[dict-item]
    (tmp_path / "records" / "hf--a--b--c.gguf.json").write_text(json.dumps(record))
    return tmp_path


def test_root_and_version(parrot: Any) -> None:
    assert parrot.get("/").text == "Ollama is running"
    assert parrot.http.head("/").status_code == 200
    assert parrot.get("/api/version").json()["version"].count(".") == 2


def test_list_show_and_ps(parrot: Any, shelf: Path) -> None:
    client = sdk(parrot)
    first, second = client.list().models
    assert (first.model, second.model) == (f"{MODEL}:latest", "hf:a/b/c.gguf:latest")
    assert (second.size, second.digest) == (10, "ab")
    shown = client.show(MODEL)
    assert shown.capabilities == ["completion", "embedding"]
    assert shown.modelinfo == {"general.context_length": 512}
    (here,) = client.ps().models
    assert (here.model, here.context_length) == (f"{MODEL}:latest", 512)


def test_deleting(parrot: Any, shelf: Path) -> None:
    client = sdk(parrot)
    client.delete("hf:a/b/c.gguf")
    assert not (shelf / "models" / "hf--a--b--c.gguf").exists()
    assert len(client.list().models) == 1
    with pytest.raises(ollama.ResponseError, match="being served"):
        client.delete(MODEL)
    for name in ("hf:a/b/c.gguf", "/etc/passwd", "../records"):
        with pytest.raises(ollama.ResponseError, match="not found"):
            client.delete(name)


@pytest.mark.parametrize("name", ["smollm2", "hf.co/a/b", "hf.co/a/b:Q8_0", "hf:a/b/c.gguf"])
def test_pulling_tells_its_progress(parrot: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = []

    def fetch(ref: str, *, progress: Callable[[str, int, int | None], None]) -> Path:
        asked.append(ref)
        progress("downloading", 0, None)
        progress("downloading", 5, 10)
        return Path()

    monkeypatch.setattr(store, "fetch", fetch)
    client = sdk(parrot)
    told = [(line.status, line.completed, line.total) for line in client.pull(name, stream=True)]
    assert told == [
        ("pulling manifest", None, None),
        ("downloading", 0, None),
        ("downloading", 5, 10),
        ("success", None, None),
    ]
    assert client.pull(name).status == "success"
    assert asked == [name.replace("hf.co/", "hf:")] * 2


def test_names_of_the_catalogue_can_be_pulled(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(store, "fetch", lambda ref, *, progress: asked.append(ref))
    client = sdk(parrot)
    for name in ("llama3.2", "llama3.2:latest", "llama3.2:1b", "llama3.2:1b-instruct-q8_0"):
        assert client.pull(name).status == "success"
    small, large = "hf:bartowski/Llama-3.2-1B-Instruct-GGUF", "hf:bartowski/Llama-3.2-3B-Instruct-GGUF"
    assert asked == [large, large, small, f"{small}:Q8_0"]


def test_a_name_without_its_tag_is_that_of_the_catalogue(parrot: Any, shelf: Path) -> None:
    client = sdk(parrot)
    with pytest.raises(ollama.ResponseError, match=r"'llama3\.2' not found; pull llama3\.2:3b first"):
        client.show("llama3.2")
    (record,) = (shelf / "records").iterdir()
    fields = json.loads(record.read_text()) | {"name": "llama3.2:3b"}
    record.write_text(json.dumps(fields))
    for name in ("llama3.2", "llama3.2:latest", "llama3.2:3b"):
        assert client.show(name).modified_at is not None


def test_pulling_what_fails_or_is_no_reference(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(ref: str, *, progress: Any) -> Path:
        raise DownloadError(f"{ref} is out of reach")

    monkeypatch.setattr(store, "fetch", fetch)
    client = sdk(parrot)
    with pytest.raises(ollama.ResponseError, match="hf:a/b is out of reach"):
        list(client.pull("hf.co/a/b", stream=True))
    with pytest.raises(ollama.ResponseError, match="out of reach"):
        client.pull("hf.co/a/b")
    for name in ("/etc/passwd", "./here", "llama3", "pypi:a/b.gguf"):
        with pytest.raises(ollama.ResponseError, match="cannot be pulled") as caught:
            list(client.pull(name, stream=True))
        assert caught.value.status_code == 404
