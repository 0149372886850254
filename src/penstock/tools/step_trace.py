"""Converts the steps and requests of GET /engine to Chrome's trace format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.ipc.step_history import StepSample

MICRO = 1_000_000
Event = dict[str, Any]
View = Mapping[str, Any]


class StepTrace:
    """Collects the steps and requests of successive views. A view has only the last few seconds of each."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], StepSample] = {}  # by model and number
        self._requests: dict[tuple[str, str], View] = {}  # by model and id

    def add(self, view: View) -> None:
        for model in view["models"]:
            steps = [StepSample(*numbers) for numbers in model["steps"]]
            self._steps |= {(model["name"], step.step): step for step in steps}
        self._requests |= {(request["model"], request["id"]): request for request in view["ended"]}

    def to_json(self) -> dict[str, Any]:
        """Returns the trace: for each model a track of steps, counters, and a span with stages for each request."""
        models = sorted({model for model, _ in (*self._steps, *self._requests)})
        process = {model: at for at, model in enumerate(models, 1)}
        events = [_named(number, model) for model, number in process.items()]
        for (model, _), step in sorted(self._steps.items()):
            events += _step_events(process[model], step)
        for (model, id), request in self._requests.items():
            events += _request_events(process[model], id, request)
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(process: int, model: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": model}}


def _step_events(process: int, step: StepSample) -> Iterator[Event]:
    start, end = (step.at - step.seconds) * MICRO, step.at * MICRO
    sizes = {"tokens": step.tokens, "generated": step.generated}
    yield _event("X", process, start, f"step {step.step}", dur=round(end - start), tid=0, args=sizes)
    yield _event("C", process, end, "requests", args={"running": step.running, "waiting": step.waiting})
    yield _event("C", process, end, "KV blocks", args={"used": step.blocks_used})


def _request_events(process: int, id: str, request: View) -> Iterator[Event]:
    """Yields a span from the request's start to its end, and within it one for each stage with a known length."""
    start, end = (request["ended"] - request["seconds"]) * MICRO, request["ended"] * MICRO
    numbers = ("prompt_tokens", "cached_tokens", "generated_tokens", "reason", "route")
    about = {name: request[name] for name in numbers if name in request}
    ours = {"cat": "request", "id": id}
    yield _event("b", process, start, id, **ours, args=about)
    at = start
    for name, seconds in _stages(request):
        stage_end = min(at + seconds * MICRO, end)
        yield _event("b", process, at, name, **ours)
        yield _event("e", process, stage_end, name, **ours)
        at = stage_end
    yield _event("e", process, end, id, **ours)


def _stages(request: View) -> Iterator[tuple[str, float]]:
    known = {"loading": request.get("loading"), **request.get("waited", {})}
    known |= {name: request.get(name) for name in ("queue", "prefill", "decode")}
    return ((name, seconds) for name, seconds in known.items() if seconds)


def _event(phase: str, process: int, micros: float, name: str, **more: Any) -> Event:
    return {"ph": phase, "pid": process, "ts": round(micros), "name": name, **more}
