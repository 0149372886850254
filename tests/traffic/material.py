"""Holds prompts, tools and schemas for requests: our own, and those of public collections in a folder."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
LONGEST_PROMPT = 12_000  # characters; longer documents are cut
LARGEST_SCHEMA = 1_500  # characters

QUESTIONS = (
    "Hello!",
    "What is the weather in Paris for 3 days?",
    "Why is the sky blue?",
    "Name three rivers and one sea, as a list.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Translate to French: the cat sleeps on the warm roof.",
    "Write a Python function that adds two numbers, and explain it.",
    "Wie spät ist es in 東京? Antworte kurz. 🙂",
    "Count from one to fifty.",
    "Repeat the word sea for ever.",
)
NOTES = " ".join(
    f"Note {number}: the ship {name} left harbour {number % 7} with {number * 13 % 97} crates and came back on day"
    f" {number * 5 % 31}."
    for number, name in enumerate(("Heron", "Kestrel", "Plover", "Swift", "Tern") * 24)
)
INSTRUCTIONS = "You are a careful assistant on a ship. Answer in one sentence."
SESSION: tuple[Message, ...] = (
    {"role": "system", "content": f"{INSTRUCTIONS} These are your notes. {NOTES[:2000]}"},
    {"role": "user", "content": "Which ship left harbour 3?"},
    {"role": "assistant", "content": "The Swift left harbour 3."},
    {"role": "user", "content": "How many crates did she have?"},
    {"role": "assistant", "content": "She had 39 crates."},
    {"role": "user", "content": "And when did she come back?"},
)


def function(name: str, about: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": about, "parameters": parameters}


TOOLS = (
    function(
        "weather",
        "Tells the weather of a city",
        {"city": {"type": "string"}, "days": {"type": "integer"}},
        ["city", "days"],
    ),
    function("search", "Searches the notes", {"query": {"type": "string", "maxLength": 30}}, ["query"]),
    function("stop_engines", "Stops the engines", {}, []),
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"sea": {"enum": ["large", "small"]}}, "required": ["sea"]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 20},
            "points": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
            "done": {"type": "boolean"},
        },
        "required": ["title", "points"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}]},
)


@dataclass(frozen=True)
class Material:
    """Has what requests are made of. A tool set comes with a question for it."""

    conversations: tuple[tuple[Message, ...], ...]
    tool_sets: tuple[tuple[tuple[Message, ...], tuple[dict[str, Any], ...]], ...]
    schemas: tuple[dict[str, Any], ...]
    ours: bool  # every schema and tool is known to be accepted


def asked(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def our_material() -> Material:
    long = asked(f"{NOTES}\n\nWhich ship carried the most crates?")
    exclaimed = tuple(asked(f"{QUESTIONS[1]}{'!' * count}") for count in range(4))
    return Material(
        conversations=(*map(asked, QUESTIONS), SESSION, SESSION[:4], long),
        tool_sets=(*((each, TOOLS[:1]) for each in exclaimed), (SESSION, TOOLS), (asked(QUESTIONS[0]), TOOLS[2:])),
        schemas=SCHEMAS,
        ours=True,
    )


def material_of(folder: Path) -> Material:
    """Reads Spec-Bench, conversations of ShareGPT's shape, agents' sessions, BFCL's tools and JSON schemas."""
    return Material(
        conversations=(*_spec_bench(folder), *_shared_conversations(folder), *_agent_sessions(folder)),
        tool_sets=tuple(_tool_sets(folder)),
        schemas=tuple(_schemas(folder)),
        ours=False,
    )


def _lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def _spec_bench(folder: Path) -> list[tuple[Message, ...]]:
    rows = _lines(folder / "prompts" / "spec_bench_question.jsonl")
    return [asked(row["turns"][0][:LONGEST_PROMPT]) for row in rows]


def _shared_conversations(folder: Path) -> list[tuple[Message, ...]]:
    rows = json.loads((folder / "prompts" / "fastchat_dummy_conversation_sharegpt_format.json").read_text())
    roles = {"human": "user", "gpt": "assistant"}
    found = []
    for row in rows:
        turns = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if turns:
            found.append(tuple(turns))
    return found


def _agent_sessions(folder: Path) -> list[tuple[Message, ...]]:
    """Returns the beginnings of agents' sessions, each to the end of a message of the user's side."""
    found = []
    for path in sorted((folder / "traces" / "swe_agent").glob("*.json")):
        history = json.loads(path.read_text())["history"]
        turns = [{"role": turn["role"], "content": str(turn["content"])[:4000]} for turn in history if turn["content"]]
        for end, turn in enumerate(turns, 1):
            size = sum(len(each["content"]) for each in turns[:end])
            if turn["role"] == "user" and size <= LONGEST_PROMPT:
                found.append(tuple(turns[:end]))
    return found


def _tool_sets(folder: Path) -> list[tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]]:
    found = []
    for path in sorted((folder / "tools" / "bfcl").glob("*.json")):
        for row in _lines(path):
            functions = tuple(
                each | {"name": each["name"].replace(".", "_"), "parameters": _json_schema(each["parameters"])}
                for each in row["function"]
            )
            found.append((tuple(row["question"][0]), functions))
    return found


def _json_schema(parameters: Any) -> Any:
    """Returns parameters in JSON Schema's words: BFCL writes types as Python and Java call them."""
    if isinstance(parameters, list):
        return [_json_schema(each) for each in parameters]
    if not isinstance(parameters, dict):
        return parameters
    words = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    plain = {name: _json_schema(value) for name, value in parameters.items() if name != "optional"}
    if isinstance(plain.get("type"), str):
        plain["type"] = words.get(plain["type"], plain["type"])
    return plain


def _schemas(folder: Path) -> list[dict[str, Any]]:
    rows = _lines(folder / "schemas" / "maskbench_400.jsonl.gz")
    return [row["schema"] for row in rows if len(json.dumps(row["schema"])) <= LARGEST_SCHEMA]
