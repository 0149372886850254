"""An answer at temperature 0 that repeats itself without end is ended, and every dialect tells."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
TEXT = f"[{'ab' * 700}]"
SAID = [{"role": "user", "content": TEXT}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 1300}
OURS = {"index": 0, "phrase_tokens": 2}


@pytest.fixture(scope="module")
def parrot() -> Iterator[Server]:
    engine = partial(toys.open_paced_parrot, 0.0, max_len=4096, num_blocks=600)
    with serving(InProcessClient(engine, "parrot"), toys.ToyText(), MODEL) as server:
        yield server


def ended(report: dict[str, Any]) -> dict[str, Any]:
    (loop,) = report["loops"]
    assert "loop_guard" in loop.pop("message")
    return dict(loop)


def test_a_loop_is_told_without_being_asked_for(parrot: Server) -> None:
    answer = parrot.post("/v1/completions", prompt=TEXT, **GREEDY).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["text"])) == ("length", "repetition", 1024)
    assert ended(answer["penstock"]) == OURS
    answer = parrot.post("/v1/chat/completions", messages=SAID, penstock=True, **GREEDY).json()
    assert answer["penstock"]["choices"][0]["finish"] == {"reason": "length", "by": "repetition"}
    assert ended(answer["penstock"]) == OURS
    answer = parrot.post("/v1/messages", messages=SAID, **GREEDY).json()
    assert (answer["stop_reason"], ended(answer["penstock"])) == ("max_tokens", OURS)
    options = {"temperature": 0, "num_predict": 1300}
    answer = parrot.post("/api/chat", model=MODEL, messages=SAID, options=options, stream=False).json()
    assert (answer["done_reason"], ended(answer["penstock"])) == ("length", OURS)


def test_of_several_choices_the_last_tells_which(parrot: Server) -> None:
    answer = parrot.post("/v1/completions", prompt=["[hello]", TEXT], **GREEDY).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert ended(answer["penstock"]) == {"index": 1, "phrase_tokens": 2}


@pytest.mark.parametrize("fields", [{"loop_guard": False}, {"temperature": 1.0}])
def test_a_request_may_want_it(parrot: Server, fields: dict[str, Any]) -> None:
    answer = parrot.post("/v1/completions", **{"prompt": TEXT, **GREEDY, **fields}).json()
    assert len(answer["choices"][0]["text"]) == 1300
    assert "penstock" not in answer


def test_every_dialect_may_want_it(parrot: Server) -> None:
    off: dict[str, Any] = {"loop_guard": False}
    answer = parrot.post("/v1/messages", messages=SAID, **GREEDY, **off).json()
    assert len(answer["content"][0]["text"]) == 1300
    options = {"temperature": 0, "num_predict": 1300, **off}
    answer = parrot.post("/api/chat", model=MODEL, messages=SAID, options=options, stream=False).json()
    assert len(answer["message"]["content"]) == 1300
    answer = parrot.post("/generate", inputs=TEXT, parameters={"max_new_tokens": 1300, **off}).json()
    assert len(answer["generated_text"]) == 1300


def test_a_stop_string_ends_it_first(parrot: Server) -> None:
    answer = parrot.post("/v1/completions", prompt=f"[{'ab' * 511}x]", stop="x", **GREEDY).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "penstock" not in answer
