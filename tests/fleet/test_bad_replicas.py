"""A replica that a gateway cannot use is told of in /health and counted, and the others answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.fleet import replica
from penstock.fleet.client import FleetClient
from penstock.fleet.directory import Directory
from tests.fleet.fleets import Keepers
from tests.fleet.test_seen import of_replicas
from tests.fleet.test_survive_kinds import KINDS
from tests.server.conftest import Server, serving
from tests.server.test_restart import MODEL
from tests.server.toys import ToyText


class Misled(Keepers):
    """Says that the second engine is where nobody is."""

    nowhere = ""

    def _directory(self) -> Directory:
        found = super()._directory()
        told = [each._replace(address=self.nowhere) if each.name == "fake-1" else each for each in found.replicas]
        return found._replace(replicas=tuple(told))


def check_that_the_rest_goes_on(server: Server, reason: str) -> None:
    server.until(lambda: of_replicas(server, "refused_total", "not_joined")[1] >= 2)  # it is tried again
    first, second = sorted(told_of(server), key=lambda each: str(each["name"]))
    assert (first["name"], first["state"], second["name"], second["state"]) == ("fake-0", "ready", "fake-1", "starting")
    assert re.search(reason, second["reason"])
    assert first["epoch"] > 0
    assert of_replicas(server, "up") == [1, 0]
    assert of_replicas(server, "refused_total", "not_joined")[0] == 0
    for number in range(4):
        asked = {"model": MODEL, "prompt": f"[{number} words]", "max_tokens": 8}
        answer = server.post("/v1/completions", **asked)
        assert answer.status_code == 200
        assert answer.headers["x-penstock-route"].startswith("fake-0")


def told_of(server: Server) -> list[dict[str, Any]]:
    health = server.get("/health")
    assert health.status_code == 200
    replicas: list[dict[str, Any]] = health.json()["replicas"]
    return replicas


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "JOIN_SECONDS", 0.2)
    keepers = Misled(2, launcher=KINDS, models=("parrot",) * 2, name=MODEL)
    keepers.nowhere = f"ipc://{tmp_path}/nobody"
    with serving(FleetClient(keepers), ToyText(), MODEL) as server:
        check_that_the_rest_goes_on(server, "fake-1 (did not answer within|cannot be joined at)")


def test_an_engine_of_an_older_protocol() -> None:
    keepers = Keepers(2, launcher=KINDS, models=("parrot", "older"), name=MODEL)
    with serving(FleetClient(keepers), ToyText(), MODEL) as server:
        check_that_the_rest_goes_on(server, "this engine speaks protocol 0 and the client 1: upgrade the older one")
