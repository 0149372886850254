"""From events to text, without a network: deltas, several choices at once, and what happens when one fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies

from penstock.errors import EngineUnavailable, InvalidRequest, PenstockError, StepFailed
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.request_stream import EventReader
from penstock.server.chat.stream import deltas, together
from penstock.server.context.request_context import RequestContext
from penstock.server.models.served_model import ServedModel
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Delta
from penstock.types import (
    Aborted,
    Event,
    Failed,
    Finished,
    Request,
    SamplingParams,
    Stats,
    TokenLogprob,
    Tokens,
    WeightState,
)
from tests.server import toys


class Script:
    """A client whose engine has but one thing to say."""

    hello = None
    restarts = 0
    unavailable_reason = ""
    stats = Stats()
    weights = WeightState()

    def __init__(self, steps: list[list[Event]]) -> None:
        self.steps = steps
        self.left = False

    def abort(self, _: int) -> None: ...

    def when_ended(self, _: int, __: Any) -> None: ...

    def when_placed(self, _: int, __: Any) -> None: ...

    async def run(self, _: Request, read: EventReader) -> None:
        told = 0
        try:
            for events in self.steps:
                told += 1
                if read(events):
                    break
                await asyncio.sleep(0)
        finally:
            self.left = told < len(self.steps)


def served(client: Any) -> ServedModel:
    return ServedModel(client, toys.ToyText(), "toy", 0, Metrics(lambda: [("toy", client)], "toy"))  # type: ignore[arg-type]


def said(steps: list[list[Event]], **sampling: Any) -> tuple[list[Delta], Script]:
    script = Script(steps)
    request = Request(1, (1,), SamplingParams(**sampling), 100)

    got: list[Delta] = []
    asyncio.run(deltas(served(script), RequestContext(), request)(lambda _, delta: got.append(delta)))
    return got, script


def spelled(text: bytes, logprobs: bool = False) -> Tokens:
    return Tokens(1, tuple(text), tuple(TokenLogprob(token, -1.0) for token in text if logprobs))


def test_the_stop_token_is_counted_but_not_told() -> None:
    (delta,), _ = said([[Tokens(1, (104, 105, toys.END)), Finished(1, "stop", toys.END)]])
    assert (delta.text, len(delta.tokens), delta.silent, delta.finish) == ("hi", 3, 1, "stop")


def test_a_stop_string_within_a_step_of_several_tokens() -> None:
    steps: list[list[Event]] = [[spelled(b"one t", True)], [spelled(b"wo three", True)], [spelled(b"four")]]
    got, script = said(steps, stop=("two",))
    assert "".join(delta.text for delta in got) == "one "
    assert [delta.finish for delta in got] == [None, "stop"]
    assert b"".join(bytes(delta.tokens) for delta in got) == b"one two"
    assert sum(len(delta.logprobs) for delta in got) == 7
    assert script.left


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    got, _ = said([[spelled(b"to t")], [spelled(b"w"), Finished(1, "length")]], stop=("two",))
    assert [delta.text for delta in got] == ["to ", "tw"]


@given(strategies.text(), strategies.lists(strategies.integers(1, 5)), strategies.sampled_from(["", "a", "0é", "ab"]))
def test_however_the_steps_are_cut_the_text_is_the_same(text: str, cuts: list[int], stop: str) -> None:
    data, steps = text.encode(), []
    for cut in [*cuts, len(data) + 1]:
        steps.append([spelled(data[:cut])])
        data = data[cut:]
    steps.append([Finished(1, "stop")])
    got, _ = said([events for events in steps if events[0] != spelled(b"")], stop=(stop,) if stop else ())
    assert "".join(delta.text for delta in got) == (text.partition(stop)[0] if stop else text)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Failed(1, "engine_died", "it died"), EngineUnavailable),
        (Failed(1, "invalid_request", "no"), InvalidRequest),
        (Failed(1, "step_failed", "oops"), StepFailed),
        (Aborted(1), EngineUnavailable),
    ],
)
def test_failures_are_raised(event: Event, kind: type[PenstockError]) -> None:
    with pytest.raises(kind) as caught:
        said([[spelled(b"a")], [event]])
    assert type(caught.value) is kind


def test_an_answer_that_its_engine_ends_without_a_report_has_its_end() -> None:
    """A pause or an abort of all ends requests that wait so, which have no report."""
    script, got = Script([[Finished(1, "abort")]]), list[Delta]()
    request = Request(1, (1,), SamplingParams(), 100, explain=True)
    asyncio.run(deltas(served(script), RequestContext(), request)(lambda _, delta: got.append(delta)))
    assert [delta.finish for delta in got] == ["abort"]


def test_when_one_choice_fails_the_others_are_left() -> None:
    scripts = [Script([[spelled(b"a")]] * 50), Script([[spelled(b"a")], [Failed(1, "step_failed", "oops")]])]
    request = Request(1, (1,), SamplingParams(), 100)

    both = together([deltas(served(script), RequestContext(), request) for script in scripts])
    with pytest.raises(PenstockError, match="oops"):
        asyncio.run(both(lambda choice, delta: None))
    assert scripts[0].left


def test_a_long_prompt_is_encoded_beside_the_event_loop(serve: Callable[..., Any]) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(toys.ToyText):
        def encode_prompt(self, text: str) -> list[int]:
            entered.set()
            go_on.wait(30)
            return super().encode_prompt("[hello]")

    with serve(InProcessClient(toys.open_parrot), Slow(), "toy") as server:
        answers: list[Any] = []
        asked = {"model": "toy", "prompt": "x" * 10_000}
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", **asked)))
        asking.start()
        assert entered.wait(30)
        assert server.get("/health").status_code == 200
        go_on.set()
        asking.join(30)
    assert answers[0].json()["choices"][0]["text"] == "hello"
