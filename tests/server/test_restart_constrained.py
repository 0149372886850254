"""The engine process is killed under streams that are held to schemas, call tools, meet stop strings and are penalized:
what each has said so far counts for the rest, and no client notices."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from penstock.config import Config
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.text.tool_formats import AnswerFormat, find_tool_format
from tests.engine.test_grammar import Bytes
from tests.server.conftest import serving
from tests.server.test_restart import kill, plain
from tests.server.toys import ToyText, ToyTokenizer

MODEL = "toy/babble"
BABBLE = SpawnLauncher((sys.executable, "-m", "tests.fleet.kind_host"))
NUMBER = {"type": "integer", "minimum": 100, "maximum": 999}
NUMBERS = {"type": "array", "items": NUMBER, "minItems": 50, "maxItems": 50}
OBJECT = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"], "additionalProperties": False}
CHAT = {"messages": [{"role": "user", "content": "Go on."}], "seed": 3, "max_tokens": 400}
TEXT = {"prompt": "Go on.", "seed": 4, "max_tokens": 250}
LETTERS = {"structured_outputs": {"regex": "[a-z]{250}"}}
TOOL = {"type": "function", "function": {"name": "count", "parameters": OBJECT}}

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": OBJECT}}},
    ),
    "tools": (
        "/v1/chat/completions",
        CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "penalties": (
        "/v1/completions",
        TEXT | {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3, "temperature": 0.4},
    ),
    "no penalties": ("/v1/completions", TEXT | {"temperature": 0.4}),
    "letters": ("/v1/completions", TEXT | LETTERS | {"temperature": 0.9}),
}


class BabbleTokenizer(ToyTokenizer):
    token_bytes = Bytes.token_bytes  # type: ignore[assignment]
    vocab_size = 260


class BabbleText(ToyText):
    tokenizer = BabbleTokenizer()
    format = AnswerFormat(find_tool_format("", "hermes"))


@pytest.fixture
def babble() -> Iterator[Any]:
    """An engine process that follows grammars and whose logits are noise, five milliseconds a step."""
    client = ProcessClient(Config(model="grammars", post_mortem="off"), BABBLE)
    with serving(client, BabbleText(), MODEL) as server:
        yield server


def stream(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    with server.http.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data:").strip() for line in answer.iter_lines()]
    return [plain(json.loads(line)) for line in lines if line.startswith("{")]


def said(events: list[Any]) -> str:
    """Returns the text, or the arguments of the call, of a streamed answer."""
    parts = [choice.get("delta", choice) for event in events for choice in event["choices"]]
    calls = [call for part in parts for call in part.get("tool_calls") or ()]
    return "".join(call["function"].get("arguments") or "" for call in calls) or "".join(
        part.get("content") or part.get("text") or "" for part in parts
    )


def test_what_restrains_an_answer_restrains_its_rest(babble: Any) -> None:
    alone = {name: stream(babble, *asked) for name, asked in ASKED.items()}
    letters = said(alone["letters"])
    stop = letters[200:205]
    asked = ASKED | {"stop": ("/v1/completions", ASKED["letters"][1] | {"stop": [stop]})}
    alone["stop"] = stream(babble, *asked["stop"])
    for name in ("schema", "tools"):
        jsonschema.validate(json.loads(said(alone[name])), OBJECT)
    assert said(alone["penalties"]) != said(alone["no penalties"])
    assert said(alone["stop"]) == letters[: letters.index(stop)]

    with ThreadPoolExecutor(len(asked)) as pool:
        answers = {name: pool.submit(stream, babble, *each) for name, each in asked.items()}
        for _ in range(3):
            enough = babble.client.stats.generated_tokens + 25 * len(asked)
            babble.until(
                lambda enough=enough: (
                    babble.client.stats.generated_tokens > enough or any(map(Future.done, answers.values()))
                )
            )
            assert babble.client.in_flight > 0, "the kill must hit something"
            kill(babble)
        for name, answer in answers.items():
            assert answer.result() == alone[name], name
    assert babble.client.restarts == 3
    assert 'reason="error"' not in babble.get("/metrics").text
