"""Kills processes of `penstock serve` again and again under streams, and compares every answer with the one that comes
without kills: `python bench/crash.py --seconds 60 --signals KILL,SEGV,STOP --victims engine,parent,standby,renderer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from served import free_port, until_ready

QUESTIONS = (
    "Why is the sky blue?",
    "Tell a short story about a lighthouse.",
    "How does a bicycle stay upright?",
    "List five uses of a paper clip.",
    "What is a prime number?",
    "Describe the city of Rome.",
    "How is bread made?",
    "Explain what a compiler does.",
)
TEXT = {"type": "string", "maxLength": 60}
SCHEMA = {
    "type": "object",
    "properties": {"title": TEXT, "points": {"type": "array", "items": TEXT, "maxItems": 3}},
    "required": ["title", "points"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the web",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "notes", "schema": SCHEMA}}},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "n=2": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}


@dataclass
class Tally:
    """Counts what became of the streams."""

    answers: int = 0
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    gaps: dict[str, list[float]] = field(default_factory=dict)  # the longest of each stream, in seconds, by its reason
    kills: list[tuple[float, str]] = field(default_factory=list)  # when, and by which signal

    def note_gap(self, seconds: float, end: float) -> None:
        """Counts the longest gap of a stream with the first signal in it."""
        reason = next((kind for at, kind in self.kills if end - seconds < at < end), "no signal in it")
        self.gaps.setdefault(reason, []).append(seconds)


@dataclass(frozen=True)
class Question:
    """Is one of the requests that are asked again and again."""

    kind: str
    text: str
    seed: int
    tokens: int

    def body(self, model: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.text}]
        asked = {"model": model, "messages": messages, "seed": self.seed, "max_tokens": self.tokens, "stream": True}
        return asked | KINDS[self.kind] | {"stream_options": {"include_usage": True}}


class Gap(NamedTuple):
    """Is a time between two events of a stream, in seconds, and when it ended."""

    seconds: float
    end: float


class Streams:
    """Asks questions over HTTP, and keeps the answers that came without kills."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self._known: dict[Question, Any] = {}

    async def ask(self, question: Question) -> tuple[Any, Gap]:
        """Returns an answer in a form that can be compared, and the longest time between two of its events: that until
        the first one is the queue's."""
        said: dict[int, list[Any]] = {}
        usage: dict[str, Any] = {}
        last, gap = 0.0, Gap(0.0, 0.0)
        async with self._http.stream("POST", "/v1/chat/completions", json=question.body(self._model)) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:300]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                last, gap = now, max(gap, Gap(now - (last or now), now))
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:300])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said.setdefault(choice["index"], []).append(choice)
        answers = {index: _joined(choices) for index, choices in said.items()}
        if "tools" in KINDS[question.kind]:  # the server ends these after a step, and drafts make steps longer
            return {index: answer["calls"] for index, answer in answers.items()}, gap
        return (answers, usage.get("prompt_tokens"), usage.get("completion_tokens")), gap

    async def learn(self, questions: list[Question]) -> list[float]:
        """Keeps the answers of an engine that lives; returns the longest gap of each."""
        answers = await asyncio.gather(*(self.ask(question) for question in questions))
        self._known = {question: answer for question, (answer, _) in zip(questions, answers, strict=True)}
        return [gap.seconds for _, gap in answers]

    async def check(self, question: Question, tally: Tally) -> None:
        """Asks a question once more and counts what came of it."""
        tally.answers += 1
        try:
            answer, gap = await self.ask(question)
        except (httpx.HTTPError, RuntimeError) as error:
            tally.lost.append(f"{question.kind}: {error!r}")
            return
        tally.note_gap(*gap)
        if answer != self._known[question]:
            tally.different.append(f"{question}: {answer} instead of {self._known[question]}")


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a choice says, however it was cut into events."""
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    return {
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "calls": [
            "".join(call["function"].get(part) or "" for call in calls if call["index"] == index)
            for index in sorted({call["index"] for call in calls})
            for part in ("name", "arguments")
        ],
        "logprobs": [each for choice in choices for each in (choice.get("logprobs") or {}).get("content") or ()],
        "end": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
    }


def children_of(pid: int) -> dict[int, str]:
    """Returns the command lines of the processes that a process has started, by their ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(pid):
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


def victim(server: int, engine: int, kind: str) -> int | None:
    """Returns a process of the server: its engine, the parent that engines are forked from, the standby or the renderer
    of chat templates; None if there is none now."""
    if kind == "engine":
        return engine
    children = children_of(server)
    parent = next((pid for pid, line in children.items() if "forkserver" in line), None)
    if kind == "parent":
        return parent
    if kind == "renderer":
        return next((pid for pid, line in children.items() if "penstock.templates" in line), None)
    return next((pid for pid in children_of(parent or 0) if pid != engine), None)


async def kill_again_and_again(http: httpx.AsyncClient, server: int, options: argparse.Namespace, tally: Tally) -> None:
    """Sends a signal to one of the processes at a fixed interval."""
    kinds, victims = options.signals.split(","), options.victims.split(",")
    while True:
        await asyncio.sleep(options.every)
        health = (await http.get("/health")).json()
        if health["engine"] is None:
            continue
        kind, whom = kinds[len(tally.kills) % len(kinds)], random.choice(victims)
        if (pid := victim(server, health["engine"]["pid"], whom)) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[f"SIG{kind}"])
                tally.kills.append((time.perf_counter(), kind if victims == ["engine"] else f"{kind} of the {whom}"))


async def ask_until(streams: Streams, questions: list[Question], end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        await streams.check(random.choice(questions), tally)


def questions_of(tokens: int) -> list[Question]:
    """Returns every question in every kind, with a limit on the tokens of the answer."""
    pairs = ((text, kind) for text in QUESTIONS for kind in KINDS)
    return [Question(kind, text, seed, tokens) for seed, (text, kind) in enumerate(pairs)]


async def measure(options: argparse.Namespace, url: str, server: int) -> Tally:
    questions = questions_of(options.tokens)
    tally = Tally()
    limits = httpx.Limits(max_connections=options.streams + 8)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await until_ready(http)
        streams = Streams(http, options.model)
        tally.gaps["before any signal"] = await streams.learn(questions)
        killing = asyncio.create_task(kill_again_and_again(http, server, options, tally))
        end = time.monotonic() + options.seconds
        await asyncio.gather(*(ask_until(streams, questions, end, tally) for _ in range(options.streams)))
        killing.cancel()
    return tally


async def serve(model: str, port: int, more: list[str]) -> Process:
    command = sys.executable, "-m", "penstock", "serve", model, "--port", str(port), *more
    return await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)


def report(tally: Tally) -> None:
    kills = dict(Counter(kind for _, kind in tally.kills))
    print(f"{tally.answers} answers, {len(tally.lost)} lost, {len(tally.different)} different; kills {kills}")
    for reason, found in tally.gaps.items():
        gaps = sorted(found)
        middle, high = gaps[len(gaps) // 2], gaps[min(int(len(gaps) * 0.99), len(gaps) - 1)]
        print(f"longest gap of {len(gaps)} streams, {reason}: median {middle:.2f} s, p99 {high:.2f} s, ", end="")
        print(f"most {gaps[-1]:.2f} s")
    for line in (tally.lost + tally.different)[:5]:
        print(line[:1000])


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two kills")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    parser.add_argument("--signals", default="KILL", help="KILL, SEGV and STOP, in turn")
    parser.add_argument("--victims", default="engine", help="engine, parent, standby and renderer, at random")
    options, more = parser.parse_known_args()
    port = free_port()
    server = await serve(options.model, port, more)
    try:
        tally = await measure(options, f"http://127.0.0.1:{port}", server.pid)
    finally:
        server.terminate()
        await server.wait()
    report(tally)
    return 1 if tally.lost or tally.different else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
