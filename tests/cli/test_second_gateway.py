"""A gateway that joins a fleet goes by what the fleet was started with, from its run file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import fleet_serve
from penstock.cli.app import app
from penstock.cli.serve import ServerOptions
from penstock.config import Config, configure
from penstock.fleet.client import FleetClient
from penstock.fleet.ledger import Load
from penstock.fleet.run_file import write_run_file
from penstock.fleet.split import NO_TARGET, PromptToSplit
from penstock.fleet.timing import EngineTiming
from penstock.service_levels import Targets

Started = tuple[ServerOptions, Callable[[Config], FleetClient]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Started]:
    """Runs a command up to where it would serve; returns its options and what makes the clients of its engines."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(fleet_serve, "make_folder", lambda: str(tmp_path))
    monkeypatch.setattr(fleet_serve.FleetClients, "begin", lambda _: None)
    started: list[Started] = []

    def note(_: object, server: ServerOptions, __: object, clients: Any) -> None:
        started.append((server, clients))

    monkeypatch.setattr(fleet_serve, "run_server", note)

    def run(*words: str) -> Started:
        with pytest.raises(SystemExit) as ending:
            app(["fleet", *words])
        assert not ending.value.code
        return started.pop()

    return run


def decision(client: FleetClient) -> tuple[int, str]:
    """Returns how many of three replicas are on duty, and what is decided of a long prompt; closes the client."""
    loads = dict.fromkeys(range(3), Load(rows=1))
    duty = client._router.split.on_duty(loads, 1.0)
    client._router.split.decide(PromptToSplit(100_000), 2, loads, EngineTiming(), 1.0)
    ((reason, _),) = client._router.split.decisions.items()
    asyncio.run(client.close())
    return len(duty), reason


def serve(start: Callable[..., Started], model: Path, *words: str) -> tuple[ServerOptions, tuple[int, str]]:
    """Starts a fleet's first gateway, and writes the run file as its steward does. Returns its options and decision."""
    server, clients = start("serve", str(model), "--replicas", "3", *words)
    client = clients(configure(model, {}, name="tiny"))
    write_run_file(client._members._source._spec)  # type: ignore[attr-defined]
    return server, decision(client)


def test_another_gateway_splits_as_the_first_does(start: Callable[..., Started], smollm2: Path) -> None:
    _, first = serve(start, smollm2, "--itl", "40", "--roles", "prefill=1")
    _, clients = start("gateway")
    duty, reason = decision(clients(Config(model="")))
    assert (duty, reason) == first
    assert duty == 1
    assert reason != NO_TARGET


def test_without_a_target_neither_splits(start: Callable[..., Started], smollm2: Path) -> None:
    _, first = serve(start, smollm2)
    _, clients = start("gateway")
    assert decision(clients(Config(model=""))) == first == (0, NO_TARGET)


def test_another_gateway_has_the_targets_of_the_first_unless_it_states_others(
    start: Callable[..., Started], smollm2: Path
) -> None:
    server, _ = serve(start, smollm2, "--itl", "40", "--ttft-target", "1500")
    assert server.share.terms().targets == Targets(1.5, 0.04)
    assert start("gateway")[0].share.terms().targets == Targets(1.5, 0.04)
    assert start("gateway", "--itl-target", "80")[0].share.terms().targets == Targets(1.5, 0.08)
    assert start("gateway", "--profile", "voice")[0].share.terms().targets == Targets(1.0, 0.05)
