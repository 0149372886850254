"""Replays excerpts of the Azure and Mooncake traces (scripts/make_trace_excerpt.py), smaller, on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.types import Claim, Finished, Limits, Tokens
from tests.core.test_tenants import Backlog, Size
from tests.core.world import limits, step

SMALLER = 64  # times
TRACES = json.loads((Path(__file__).parent / "data" / "traces.json").read_text())


def sizes(name: str) -> Iterator[Size]:
    for _, prompt, answer in cycle(TRACES[name]):
        yield 1 + prompt // SMALLER, 1 + answer // SMALLER


def some() -> Limits:
    return limits(max_len=2048, max_rows=8, step_tokens=64, num_blocks=1024)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_traces_of_two_busy_tenants_get_their_shares_at_every_step(weight: float) -> None:
    lines = {"azure": sizes("azure"), "mooncake": sizes("mooncake")}
    world = Backlog(some(), lines, {"azure": weight, "mooncake": 1.0}, depth=16)
    for _ in range(400):
        world.step()
        assert world.difference("azure", "mooncake") <= world.bound
    assert world.work["azure"] / world.work["mooncake"] == pytest.approx(weight, rel=0.15)


def first_tokens(fair: bool) -> list[float]:
    """Returns the steps to the first tokens of Azure's requests, which come one by one, while all of Mooncake's came at
    once. All end."""
    scheduler = Scheduler(some())
    arrivals = sorted(
        (at / pace, name, 1 + prompt // SMALLER, 1 + answer // SMALLER)
        for name, pace in (("azure", 100), ("mooncake", 10_000))
        for at, prompt, answer in TRACES[name][:60]
    )
    sent, waits, ended = dict[int, float](), dict[int, float](), 0
    coming = list(enumerate(arrivals))
    while coming or scheduler.sequences:
        scheduler.now += 1.0
        while coming and coming[0][1][0] <= scheduler.now:
            id, (_, name, prompt, answer) = coming.pop(0)
            sent[id] = scheduler.now
            tokens = tuple((id * 7 + at * at) % 100 for at in range(prompt))
            scheduler.add(
                Sequence(id, tokens, answer, SequenceParams(claim=Claim(name if fair else "")), prefix_cache=False)
            )
        for event in step(scheduler)[1]:
            ended += isinstance(event, Finished)
            if isinstance(event, Tokens):
                waits.setdefault(event.seq, 1 + scheduler.now - sent[event.seq])
    assert ended == len(arrivals)
    return sorted(wait for id, wait in waits.items() if arrivals[id][1] == "azure")


def test_requests_of_one_trace_do_not_wait_for_the_backlog_of_the_other() -> None:
    fair, first_come = first_tokens(fair=True), first_tokens(fair=False)
    assert sum(fair) < 0.2 * sum(first_come)
    assert fair[-1] < 0.2 * first_come[-1]
