"""Replicas are killed amid streams over HTTP that follow a JSON schema, call tools or have three choices, in every
dialect that has such: none is lost, and none differs from the one without the kill."""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jsonschema

from penstock.fleet.client import FleetClient
from tests.fleet.fleets import Keepers
from tests.fleet.test_survive import engines_in_use
from tests.fleet.test_survive_kinds import KINDS
from tests.server.conftest import Server, serving
from tests.server.test_restart import MODEL, events_of
from tests.server.toys import Hermes

Asked = dict[str, tuple[str, dict[str, Any]]]

WORDS = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{9}$"}, "minItems": 8, "maxItems": 8}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{60}$"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "words", "strict": True, "schema": WORDS}}
TOOL: dict[str, Any] = {"name": "weather", "description": "Weather.", "parameters": PLACE}
CHAT = [{"role": "user", "content": "words, please"}]
CHAT_PATH, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

# The engine says anything that the grammar allows: whoever loses its place in the grammar says something else.
SCHEMAS: Asked = {
    "openai": (CHAT_PATH, {"messages": CHAT, "response_format": SCHEMA, "n": 3, "seed": 5}),
    "openai, text": (
        "/v1/completions",
        {"prompt": "words:", "guided_json": WORDS, "n": 3, "seed": 6, "max_tokens": 200},
    ),
    "anthropic": (
        MESSAGES,
        {
            "messages": CHAT,
            "max_tokens": 200,
            "temperature": 0,
            "output_format": SCHEMA["json_schema"] | {"type": "json_schema"},
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": "words",
            "temperature": 0,
            "text": {"format": {"type": "json_schema", "name": "words", "schema": WORDS}},
        },
    ),
    "ollama": ("/api/chat", {"messages": CHAT, "format": WORDS, "options": {"seed": 7}}),
    "ollama, text": ("/api/generate", {"prompt": "words", "format": WORDS, "options": {"seed": 8}}),
    "llama.cpp": ("/completion", {"prompt": "words:", "json_schema": WORDS, "n_predict": 200, "seed": 9}),
    "sglang": (
        "/generate",
        {
            "text": "words:",
            "sampling_params": {"json_schema": json.dumps(WORDS), "temperature": 0, "max_new_tokens": 200},
        },
    ),
    "tgi": (
        "/generate_stream",
        {
            "inputs": "words:",
            "parameters": {"grammar": {"type": "json", "value": WORDS}, "seed": 4, "max_new_tokens": 200},
        },
    ),
}
FORCED: Asked = {
    "openai, forced": (
        CHAT_PATH,
        {
            "messages": CHAT,
            "tools": [{"type": "function", "function": TOOL}],
            "seed": 3,
            "n": 3,
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "anthropic, forced": (
        MESSAGES,
        {
            "messages": CHAT,
            "max_tokens": 300,
            "temperature": 0,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "tools": [{"name": "weather", "input_schema": PLACE}],
        },
    ),
    "responses, forced": (
        RESPONSES,
        {
            "input": "words",
            "temperature": 0,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
}

# Here the engine says what it is told to say, as a model does that calls a tool of its own accord.
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{"Z" + "u" * 60}"}}}}\n</tool_call>'
TOLD = [{"role": "user", "content": f"[={CALL.encode().hex()}]"}]
CALLS: Asked = {
    "openai": (CHAT_PATH, {"messages": TOLD, "tools": [{"type": "function", "function": TOOL}], "n": 3}),
    "anthropic": (
        MESSAGES,
        {"messages": TOLD, "max_tokens": 300, "tools": [{"name": "weather", "input_schema": PLACE}]},
    ),
    "responses": (RESPONSES, {"input": TOLD[0]["content"], "tools": [{"type": "function", **TOOL}]}),
    "ollama": ("/api/chat", {"messages": TOLD, "tools": [{"type": "function", "function": TOOL}]}),
}


def said(events: list[dict[str, Any]]) -> dict[Any, str]:
    """Returns the text and the calls of each choice. Events may be cut elsewhere after a death: what a grammar leaves
    no choice about comes at once."""
    parts: defaultdict[Any, str] = defaultdict(str)
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            calls = [call["function"] for call in delta.get("tool_calls", ())]
            pieces = [choice.get("text"), delta.get("content"), choice["finish_reason"]]
            pieces += [call.get(name) for call in calls for name in ("name", "arguments")]
            parts[choice["index"]] += "".join(piece for piece in pieces if piece)
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                parts[index] += block.get("name", "")
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                parts[index] += delta.get("text", "") + delta.get("partial_json", "")
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                parts["end"] += reason
            case {"type": "response.completed", "response": {"output": output}}:
                parts[0] = _response(output)
            case {"message": {"content": str(text), **rest}}:  # Ollama's
                parts[0] += text + (json.dumps(rest["tool_calls"]) if "tool_calls" in rest else "")
            case {"response": str(text)} | {"content": str(text)} | {"token": {"text": text}}:
                parts[0] += text
            case {"text": text, "meta_info": _}:
                parts[0] = text
    return dict(parts)


def _response(output: list[dict[str, Any]]) -> str:
    """Returns what the items of a response have: text, or the names and arguments of calls."""
    texts = [part["text"] for item in output for part in item.get("content", ())]
    return "".join(texts) + "".join(item["name"] + item["arguments"] for item in output if "name" in item)


def survives(kind: str, asked: Asked) -> dict[str, dict[Any, str]]:
    """Asks all of it undisturbed, then twice amid deaths; returns the answers, which are the same."""
    keepers = Keepers(3, launcher=KINDS, models=(kind,) * 3, name=MODEL)
    client = FleetClient(keepers)
    with serving(client, Hermes(), MODEL) as server, ThreadPoolExecutor(2 * len(asked)) as pool:
        server.until(lambda: [each.state for each in client.replicas] == ["ready"] * 3)
        answers = pool.map(lambda each: said(events_of(server, *each)), asked.values())
        alone = dict(zip(asked, answers, strict=True))
        for _ in range(5):  # once, unless the machine was so busy that all had ended before anybody was killed
            again = [(name, pool.submit(events_of, server, *each)) for name, each in asked.items() for _ in range(2)]
            for _ in range(2):
                _kill_amid(server, keepers, [asking for _, asking in again])
            for name, asking in again:
                assert said(asking.result()) == alone[name], name
            if any(each.resumed for each in client.replica_figures):
                break
        assert any(each.resumed for each in client.replica_figures)
        assert 'reason="error"' not in server.get("/metrics").text
        return alone


def _kill_amid(server: Server, keepers: Keepers, asking: list[Future[Any]]) -> None:
    """Kills a replica once all of them have said a good part of what they have to say."""
    enough = server.client.stats.generated_tokens + 20 * len(asking)
    server.until(lambda: server.client.stats.generated_tokens > enough or all(map(Future.done, asking)))
    keepers.kill(min(engines_in_use(server.client), default="fake-0"))


def test_schemas_and_forced_calls_survive_in_every_dialect() -> None:
    alone = survives("grammars", SCHEMAS | FORCED)
    for name in SCHEMAS:
        for choice, text in alone[name].items():
            if choice != "end":
                jsonschema.validate(json.loads(text.removesuffix("stop").removesuffix("<end>")), WORDS)
    for name in FORCED:
        calls = [text for choice, text in alone[name].items() if choice != "end"]
        assert all(call.startswith('weather{"city') or call.startswith('weather{ "city') for call in calls), calls
    assert [len(alone[name]) for name in ("openai", "openai, text", "openai, forced")] == [3, 3, 3]
    assert len(set(alone["openai"].values())) == 3  # or a choice could take the place of another


def test_calls_that_a_model_makes_by_itself_survive() -> None:
    alone = survives("parrot", CALLS)
    assert alone["openai"] == dict.fromkeys(range(3), 'weather{"city": "' + "Z" + "u" * 60 + '"}tool_calls')
    assert all(
        "u" * 60 in "".join(answer.values()) and "weather" in "".join(answer.values()) for answer in alone.values()
    )
