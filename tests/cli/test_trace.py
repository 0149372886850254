"""`penstock trace` writes what a server's steps and requests did in a format that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import app
from penstock.ipc.step_history import StepSample
from penstock.tools.step_trace import StepTrace
from tests.cli.conftest import RECITED
from tests.cli.test_models_come_and_go import answer, serving

STEP = StepSample(at=10.0, step=1, seconds=0.5, tokens=9, generated=1, running=1, waiting=0, blocks_used=2)
REQUEST = {"id": "a", "model": "m", "ended": 11.0, "seconds": 2.0, "queue": 0.5, "prefill": 0.5, "decode": 0.9}


def events(*views: dict[str, Any]) -> list[dict[str, Any]]:
    trace = StepTrace()
    for view in views:
        trace.add(view)
    made: list[dict[str, Any]] = trace.to_json()["traceEvents"]
    return made


def view(steps: list[StepSample], ended: list[dict[str, Any]]) -> dict[str, Any]:
    return {"models": [{"name": "m", "steps": steps}], "ended": ended}


def test_a_step_that_two_views_have_is_one_event() -> None:
    again = view([STEP, STEP._replace(step=2, at=10.5)], [])
    steps = [event for event in events(view([STEP], []), again) if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in steps] == [
        ("step 1", 9_500_000, 500_000),
        ("step 2", 10_000_000, 500_000),
    ]


def test_stages_follow_each_other_within_their_request() -> None:
    request = REQUEST | {"loading": 0.05, "waited": {"grammar": 0.05}, "decode": 5.0}  # it cannot outlast the request
    spans = [(event["ph"], event["name"], event["ts"]) for event in events(view([], [request])) if event["ph"] in "be"]
    assert [(phase, name) for phase, name, _ in spans] == [
        ("b", "a"),
        *((phase, name) for name in ("loading", "grammar", "queue", "prefill", "decode") for phase in "be"),
        ("e", "a"),
    ]
    times = [time for *_, time in spans]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (9_000_000, 11_000_000)


def test_the_trace_of_a_server_has_its_steps_and_requests(reciter: Path, tmp_path: Path) -> None:
    with serving(reciter) as client:
        assert answer(client, reciter.name) == RECITED
        with pytest.raises(SystemExit) as ended:
            app(["trace", "--url", str(client.base_url), "--output", str(tmp_path / "made.json")])
    assert ended.value.code == 0
    made = json.loads((tmp_path / "made.json").read_text())["traceEvents"]
    steps = [event for event in made if event["ph"] == "X"]
    spans = [event for event in made if event["ph"] == "b"]
    assert sum(event["args"]["generated"] for event in steps) > 0
    assert {"prefill", "decode"} <= {event["name"] for event in spans}
    assert len({event["id"] for event in spans}) == 1
