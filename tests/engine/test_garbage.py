"""The collector stays paused as long as anybody needs that, in whatever thread."""

from __future__ import annotations

import gc
from threading import Event, Thread

import pytest

from penstock.garbage import no_collection


def test_a_pause_outlives_those_that_began_before_it() -> None:
    """A tokenizer is read in a thread while a graph is captured, and ends first."""
    begun, leave = Event(), Event()

    def read() -> None:
        with no_collection():
            begun.set()
            leave.wait(60)

    thread = Thread(target=read)
    thread.start()
    assert begun.wait(60)
    with no_collection():
        leave.set()
        thread.join(60)
        assert not gc.isenabled()
    assert gc.isenabled()


def test_errors_and_pauses_within_pauses_end_them_once() -> None:
    @no_collection()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError

    with no_collection():
        with pytest.raises(ValueError):  # noqa: PT011
            fail()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
