"""Fixtures shared by every test, and the choice between the short run and the long one.

`pytest` is the short run: property tests have few examples, tests marked `long` do not run, and tests marked
`long(cases=3)` run three of their parametrized cases, always the same. `pytest -m long` is the rest: those tests with
all cases, and property tests with all examples; `pytest -m "long or not long"` is everything at once. A test that is
named (`FILE::TEST`) runs whole.
"""

from __future__ import annotations

import os
import signal
import sys
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


def is_long(config: pytest.Config) -> bool:
    """Returns whether the long run was asked for."""
    asked = str(config.getoption("-m"))
    named = any("::" in argument for argument in config.args)
    return named or asked.count("long") > asked.count("not long")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("repeatable" if is_long(config) else "few")  # --hypothesis-profile replaces it


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if is_property and not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.long(cases=sys.maxsize))
    if not is_long(config):
        left_out = left_to_the_long_run(items)
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def left_to_the_long_run(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns the long tests, but for the `cases` of each that the short run has, at equal distances."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = set[pytest.Item]()
    for same in cases.values():
        if mark := same[0].get_closest_marker("long"):
            count = min(mark.kwargs.get("cases", 0), len(same))
            left_out |= {*same} - {same[(2 * at + 1) * len(same) // (2 * count)] for at in range(count)}
    return left_out


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
