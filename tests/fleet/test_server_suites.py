"""The server's own tests of SDKs, batches, files and keys, over a gateway with two replicas in place of one engine.
Each test is the server's; only the fixtures are other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import ModuleType
from typing import Any

import pytest

from penstock.fleet.client import FleetClient
from penstock.server.access.guard import Rules
from tests.fleet.fleets import Keepers
from tests.server import (
    test_anthropic_sdk,
    test_batches_sdk,
    test_files_sdk,
    test_keys,
    test_ollama_sdk,
    test_openai_sdk,
)
from tests.server.conftest import Server, serving
from tests.server.test_keys import Locked, changing
from tests.server.test_ollama_sdk import shelf as shelf
from tests.server.toys import ToyText

MODEL = "toy/parrot"
SUITES = (test_openai_sdk, test_anthropic_sdk, test_ollama_sdk, test_batches_sdk, test_files_sdk, test_keys)
FIXTURES = {"parrot", "strict_parrot", "slow_parrot", "locked"}
LEFT_OUT = {
    "test_no_route_answers_without_a_key",  # a hundred routes, none of which comes as far as an engine
    "test_clients_go_first_and_batches_take_turns",  # counts the rows of one engine
    "test_a_batch_ends_with_its_window",  # waits for two seconds
    "test_the_other_dialects_say_it_too",  # what comes as far as an engine is in others; its server takes 5 s to end
}


@contextmanager
def fleet_serving(model: str, **settings: Any) -> Iterator[Server]:
    keepers = Keepers(2, models=(model,) * 2, name=MODEL)
    with serving(FleetClient(keepers), ToyText(), MODEL, **settings) as server:
        server.until(lambda: [each.state for each in server.client.replicas] == ["ready"] * 2)
        yield server


@pytest.fixture(scope="module")
def parrot() -> Iterator[Server]:
    with fleet_serving("parrot") as server:
        yield server
        used = [each.routed for each in server.client.replica_figures]
        assert min(used) > 0  # or it was no test of a fleet


@pytest.fixture(scope="module")
def strict_parrot() -> Iterator[Server]:
    with fleet_serving("parrot", rules=Rules(lenient=False)) as server:
        yield server


@pytest.fixture(scope="module")
def slow_parrot() -> Iterator[Server]:
    with fleet_serving("slow parrot") as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    with changing(file):
        pass
    with fleet_serving("slow parrot", rules=Rules(keys=file)) as server:
        yield Locked(server, file)


def chosen_from(suite: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yields the tests of a suite that take one of the fixtures above, by names that no other suite has."""
    for name, test in vars(suite).items():
        if name.startswith("test_") and name not in LEFT_OUT and FIXTURES & signature(test).parameters.keys():
            yield f"{suite.__name__.rpartition('.')[2]}_{name.removeprefix('test_')}", test


for each in SUITES:
    globals().update(chosen_from(each))
