"""Tests that a trace is sent at its times with its shared prefixes, and that what came of it is summed up."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.cli.app import run_command
from penstock.errors import EngineUnavailable
from penstock.fleet.scale import ServiceTargets
from penstock.tools.bench import DraftTotals, RequestTiming, UrlTarget
from penstock.tools.trace_replay import ReplayOptions, replay
from penstock.tools.traces import Trace, TracedRequest
from tests.cli.test_bench import Stub

TRACE = Trace(
    8,
    [
        TracedRequest(0.0, 20, 3, (1, 2)),
        TracedRequest(60.0, 28, 2, (1, 2, 3)),
        TracedRequest(60.0, 5, 1),
        TracedRequest(120.0, 16, 1, (1, 9)),
    ],
)


class Slow:
    """Answers after a while and fails where asked to."""

    vocab = range(100, 200)

    def __init__(self, fails: int = 0) -> None:
        self.prompts: list[tuple[float, list[int]]] = []
        self.fails = fails
        self.at_once = self.most_at_once = 0

    async def complete(self, prompt: Sequence[int], max_tokens: int, timing: RequestTiming) -> None:
        self.prompts.append((time.perf_counter(), list(prompt)))
        timing.begin()
        if len(self.prompts) <= self.fails:
            raise EngineUnavailable("not today")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        for _ in range(max_tokens):
            await asyncio.sleep(0.02)
            timing.arrive()
        self.at_once -= 1
        timing.prompt_tokens, timing.cached_tokens, timing.output_tokens = len(prompt), len(prompt) // 2, max_tokens

    async def drafts(self) -> DraftTotals:
        return DraftTotals()


def test_prompts_share_what_the_trace_shares_and_come_at_its_times() -> None:
    target = Slow()
    report = asyncio.run(replay(TRACE, [target], ReplayOptions()))
    (begun, first), (then, second), (_, alone), (_, other) = sorted(target.prompts, key=lambda each: (each[0], each[1]))
    if len(second) < len(alone):
        second, alone = alone, second
    assert [len(each) for each in (first, second, alone, other)] == [20, 28, 5, 16]
    assert first[:16] == second[:16]
    assert first[16:] != second[16:20]
    assert other[:8] == first[:8] != other[8:]
    assert then - begun > 0.04
    assert (report.requests, report.errors, report.held_back) == (4, 0, 0)
    assert 15 < report.ttft_mean_ms < 1000 * report.seconds
    assert report.reuse == pytest.approx((10 + 14 + 2 + 8) / (20 + 28 + 5 + 16))
    assert report.goodput == pytest.approx(4 / report.seconds)


def test_several_targets_take_turns_and_a_failure_is_counted() -> None:
    targets = [Slow(fails=1), Slow()]
    report = asyncio.run(replay(TRACE, targets, ReplayOptions(targets=ServiceTargets(0.001, 50.0))))
    assert [len(each.prompts) for each in targets] == [2, 2]
    assert (report.errors, report.first_error, report.goodput) == (1, "not today", 0.0)


def test_requests_at_once_are_bounded() -> None:
    target = Slow()
    trace = Trace(8, [TracedRequest(0.0, 4, 2) for _ in range(4)])
    report = asyncio.run(replay(trace, [target], ReplayOptions(concurrency=1)))
    assert target.most_at_once == 1
    assert report.held_back == 3


def test_lengths_scale_and_prefixes_stay_shared() -> None:
    scaled = TRACE.scaled(0.5)
    assert (scaled.block_size, scaled.requests[1]) == (4, TracedRequest(60.0, 14, 1, (1, 2, 3)))
    assert TRACE.scaled(1.0) == TRACE
    assert TRACE.scaled(0.01).requests[2].prompt == 1


@pytest.fixture
def server() -> Iterator[Stub]:
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield stub
        stub.shutdown()


def test_the_command_sends_a_trace_over_http(
    tmp_path: Path, server: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 1100, "output_length": 6, "hash_ids": [7, at]} for at in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    words = ["--trace", str(path), "--url", server.url, "--limit", "2", "--scale", "0.1", "--speed", "2"]
    assert run_command("fleet replay", [*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["errors"]) == (2, 0)
    first, second = sorted((body["prompt"] for body in server.bodies if len(body["prompt"]) > 8), key=str)
    assert len(first) == 2 * 51 + 8
    assert first[:51] == second[:51]
    assert run_command("fleet replay", words) == 0
    assert "goodput" in capsys.readouterr().out
    server.breaks = True
    assert run_command("fleet replay", words) == 1
    assert "[engine_unavailable]" in capsys.readouterr().err

    async def agree(target: UrlTarget) -> None: ...

    monkeypatch.setattr(UrlTarget, "negotiate", agree)
    assert run_command("fleet replay", words) == 1
    assert "[replay_errors]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_command("fleet replay", ["--trace", str(path)])
    assert "--url URL is needed" in capsys.readouterr().err
