"""Fixtures shared by every test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# The same examples on every machine, so that a failure is the change's own; `pytest --hypothesis-profile=explore`
# looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.register_profile("few", settings.get_profile("repeatable"), max_examples=20)  # enough to reach every line
unshrunk = (Phase.explicit, Phase.generate)  # for those who want to know whether a test fails, and not why
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=unshrunk)
settings.load_profile("repeatable")

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched on first use as a user's first run would."""
    given = os.environ.get("PENSTOCK_TEST_MODEL")
    if given:
        return Path(given)
    from penstock.store import fetch

    return fetch("smollm2")


@pytest.fixture
def overcommitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sequences start as if no answer would get longer, so that they run out of blocks and are preempted."""
    from penstock.core.memory_forecast import MemoryForecast

    monkeypatch.setattr(MemoryForecast, "peak", lambda *_: 0.0)
