"""The collector stays paused as long as anybody needs that, in whatever thread."""

from __future__ import annotations

import pytest

from penstock.system import runtime
from penstock.system.runtime import Pauses


class Collector:
    """Stands in for Python's own, which other tests need."""

    def __init__(self) -> None:
        self.on = True

    def isenabled(self) -> bool:
        return self.on

    def disable(self) -> None:
        self.on = False

    def enable(self) -> None:
        self.on = True


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    stand_in = Collector()
    monkeypatch.setattr(runtime, "gc", stand_in)
    monkeypatch.setattr(runtime, "_pauses", Pauses())
    return stand_in


def test_a_pause_outlives_those_that_began_before_it(collector: Collector) -> None:
    """A tokenizer is read in a thread when a graph is to be captured, and is ready before the graph is."""
    reading, capturing = runtime.no_collection(), runtime.no_collection()
    with reading:
        capturing.__enter__()
    assert not collector.on
    capturing.__exit__(None, None, None)
    assert collector.on


def test_errors_and_pauses_within_pauses_end_them_once(collector: Collector) -> None:
    @runtime.no_collection()
    def fail() -> None:
        assert not collector.on
        raise ValueError

    with runtime.no_collection():
        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                fail()
        assert not collector.on
    assert collector.on


def test_a_collector_that_was_off_stays_off(collector: Collector) -> None:
    collector.disable()
    with runtime.no_collection():
        pass
    assert not collector.on
