"""Engines that answer probes but no requests: they are found, and slow honest answers are not taken for them."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.fleet.foreign import mute
from penstock.fleet.foreign.mute import ANSWER_SECONDS, FIRST_SECONDS, OVERTAKEN, PROMPT_SECONDS, mute_requests
from tests.fleet.foreign.scripted import ScriptedEngine, chat, engine, gateway, moved, states
from tests.server.conftest import Server

LONG = 6000  # tokens
LATE = FIRST_SECONDS + 1


def waiting(sent: float = 0.0, tokens: int = 10, whole: float = 0.0, overtaken: int = 0) -> Any:
    return SimpleNamespace(sent=sent, tokens=tokens, whole=whole, overtaken=overtaken)


@pytest.mark.parametrize(
    ("requests", "heard", "now", "mute"),
    [
        ([waiting()], 0.0, FIRST_SECONDS, 0),
        ([waiting()], 0.0, LATE, 1),
        ([waiting(sent=10)], 0.0, LATE, 0),  # it has not waited for long
        ([waiting()], 10.0, LATE, 0),  # other answers go on: it may wait in a queue
        ([waiting(tokens=LONG)], 0.0, LATE, 0),  # a long prompt
        ([waiting(tokens=LONG)], 0.0, LATE + LONG * PROMPT_SECONDS, 1),
        ([waiting(tokens=LONG), waiting(sent=1)], 0.0, 2 * LATE, 0),  # one that waits for a long prompt
        ([waiting(sent=1, tokens=LONG), waiting()], 0.0, LATE, 1),  # one before it
        ([waiting(whole=inf)], 0.0, 500.0, 0),  # a whole answer without a limit takes as long as it takes
        ([waiting(whole=100)], 0.0, LATE, 0),
        ([waiting(whole=100)], 0.0, LATE + 100 * ANSWER_SECONDS, 1),
        ([waiting(whole=inf), waiting(sent=1)], 0.0, 500.0, 0),  # an engine with one place
        ([waiting(overtaken=OVERTAKEN)], 300.0, 300.0, 1),  # others are answered all the time
        ([waiting(overtaken=OVERTAKEN - 1)], 300.0, 300.0, 0),
        ([waiting(overtaken=OVERTAKEN, sent=290)], 300.0, 300.0, 0),
        ([waiting(overtaken=OVERTAKEN, whole=100)], 300.0, 300.0, 0),  # answers differ in their lengths
        ([waiting(), waiting(sent=1)], 0.0, LATE + 2, 2),
    ],
)
def test_who_is_given_up(requests: list[Any], heard: float, now: float, mute: int) -> None:
    assert len(mute_requests(requests, heard, now)) == mute


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with engine(kind="vllm") as first, engine(kind="vllm") as second:
        yield [first, second]


@pytest.mark.parametrize("fields", [{"stream": True}, {"max_tokens": 1}])
def test_a_request_leaves_a_mute_engine(
    engines: list[ScriptedEngine], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mute, "FIRST_SECONDS", 1.0)
    first, second = engines
    with gateway(f"{first.url},name=first", f"{second.url},name=second,priority=1") as server:
        first.held = True
        assert chat(server, **fields).status_code == 200
        assert (len(first.bodies), len(second.bodies)) == (1, 1)
        assert moved(server, "fallback") == 1
        assert chat(server, **fields).status_code == 200
        assert len(first.bodies) == 1  # nothing more is sent there for a while
        server.until(lambda: states(server)["first"] == "ready")  # its probes are answered
        first.held = False


def test_an_engine_without_a_stand_in_is_waited_for(
    engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mute, "FIRST_SECONDS", 0.2)
    first = engines[0]
    with gateway(f"{first.url},name=first") as server:
        first.held = True
        release_soon(server, first)
        assert chat(server, stream=True).status_code == 200
        assert len(first.bodies) == 1


def release_soon(server: Server, held: ScriptedEngine) -> None:
    import threading

    def release() -> None:
        held.held = False

    threading.Timer(2.0, release).start()
