"""Requests in the shape of programs that are too large to install for every run: each is answered, and what has no
effect is listed. Those of aider and LlamaIndex were recorded; the others are written from what the programs
document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from tests.server import toys
from tests.server.test_ollama_create import FillingText

MODEL = "toy/parrot"
SAID = [{"role": "user", "content": "[hi]"}]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(InProcessClient(lambda: toys.open_paced_parrot(0.0)), toys.ToyText(), MODEL) as server:
        yield server


TITLE = "### Task:\nGenerate a concise title.\n### Chat History:\nuser: Hello [hi]"
OPEN_WEBUI: list[tuple[dict[str, Any], list[str]]] = [
    (
        {
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "system", "content": "s"}, *SAID],
            "metadata": {"chat_id": "c", "user_id": "u"},
            "params": {"function_calling": "native"},
            "features": {"web_search": False},
            "session_id": "s",
            "tool_ids": [],
        },
        ["features", "params", "session_id", "tool_ids"],
    ),
    ({"stream": False, "messages": [{"role": "user", "content": TITLE}], "max_completion_tokens": 1000}, []),
    ({"stream": False, "messages": SAID, "stream_options": {"include_usage": True}}, ["stream_options"]),
]


@pytest.mark.parametrize(("fields", "ignored"), OPEN_WEBUI)
def test_open_webui_chats(server: Any, fields: dict[str, Any], ignored: list[str]) -> None:
    answer = server.post("/v1/chat/completions", model=MODEL, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-penstock-ignored", "") == ", ".join(ignored)


def test_open_webui_finds_the_models(server: Any) -> None:
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [MODEL]
    assert server.get("/api/tags").json()["models"][0]["model"] == f"{MODEL}:latest"
    assert server.get("/api/version").json()["version"]
    assert server.get("/api/ps").status_code == 200
    options = {"num_ctx": 131072, "mirostat": 1, "mirostat_eta": 0.1, "repeat_last_n": 64, "tfs_z": 1.0, "num_gpu": 9}
    answer = server.post("/api/chat", model=f"{MODEL}:latest", messages=SAID, options=options, keep_alive="5m")
    assert answer.headers["x-penstock-ignored"] == "options.num_ctx"


def test_continue_fills_in_the_middle(serve: Callable[..., Any]) -> None:
    with serve(InProcessClient(lambda: toys.open_paced_parrot(0.0)), FillingText(), MODEL) as server:
        asked = {"prompt": "def f():\n", "suffix": "[ pass]\n", "stream": True}
        stops = ["\n\n", "/src/", "```"]
        answer = server.post("/v1/completions", model=MODEL, max_tokens=5, stop=stops, temperature=0.01, **asked)
        assert (answer.status_code, "x-penstock-ignored" in answer.headers) == (200, False)
        options = {"num_predict": 5, "stop": stops, "num_ctx": 4096, "temperature": 0.01}
        for raw in ({}, {"raw": True}):
            answer = server.post("/api/generate", model=MODEL, options=options, keep_alive=1800, **asked, **raw)
            assert (answer.status_code, "x-penstock-ignored" in answer.headers) == (200, False)


def test_llamaindex_and_aider_over_ollama(server: Any) -> None:
    options = {"temperature": 0.75, "num_ctx": 128000}
    answer = server.post("/api/chat", model=MODEL, messages=SAID, options=options, think=False, tools=[], stream=False)
    assert (answer.json()["message"]["content"], answer.headers["x-penstock-ignored"]) == ("hi", "options.num_ctx")
    shown = server.post("/api/show", name=MODEL)
    assert shown.json()["capabilities"] == ["completion", "embedding"]


def test_litellm_over_anthropic(server: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    tool = {"name": "f", "type": "custom", "input_schema": {"type": "object", "properties": {}}}
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "[hi]"}]}], "max_tokens": 2048}
    answer = server.post("/v1/messages", model="claude-sonnet-4-5", tools=[tool], thinking=thinking, **asked)
    assert answer.json()["content"] == [{"type": "text", "text": "hi"}]
    assert answer.json()["penstock"]["ignored_fields"] == ["thinking", "thinking.budget_tokens"]


def test_embeddings_list_what_was_ignored(server: Any) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        answer = server.post(path, model=MODEL, input="hi", input_type="query")
        assert answer.json()["penstock"]["ignored_fields"] == ["input_type"]
        assert "penstock" not in server.post(path, model=MODEL, input="hi").json()
