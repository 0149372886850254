"""A fleet on a Ray cluster of three machines, all of them this one. Ray places and starts: when it dies, nothing that
answers requests does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ConfigError
from penstock.fleet.client import FleetClient
from penstock.fleet.ground import steward_address
from penstock.fleet.run_file import read_run_file
from penstock.fleet.steward_link import StewardLink, ask, lives
from penstock.fleet.steward_wire import DrainReplica, FleetSpec, ScaleFleet
from penstock.types import Request, SamplingParams, Tokens
from tests.fleet.test_steward import SECRET, Fleet, gone, play, spec_of

pytestmark = pytest.mark.ray

SAID = b"abcdefg"
ENDLESS = 30_000  # tokens, of two milliseconds each
GIVING_UP = "5"  # seconds after which Ray's processes end without its head: 60, unless somebody says otherwise
ASK = """
import ray, sys
ray.init(sys.argv[1], namespace="penstock", log_to_driver=False, logging_level="error")
print(*(each["name"] for each in ray.util.list_named_actors(all_namespaces=True)))
print(ray.available_resources().get("CPU", 0))
"""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three machines with one processor each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", GIVING_UP)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def on_ray(folder: Path, address: str, replicas: int) -> FleetSpec:
    about = {"ground": "ray", "ray": address, "address": steward_address(str(folder), "ray")}
    return msgspec.structs.replace(spec_of(folder, replicas), **about)


def ask_ray(cluster: Any) -> tuple[set[str], float]:
    """Returns the names of all actors, and how many processors are free."""
    done = subprocess.run([sys.executable, "-c", ASK, cluster.address], capture_output=True, text=True, check=True)
    names, free = done.stdout.splitlines()[-2:]
    return set(names.split()), float(free)


async def recite(client: FleetClient, letters: list[int]) -> None:
    """Follows an answer without end."""
    request = Request(client.next_id(), tuple(b"[*" + SAID + b"]"), SamplingParams(seed=0), ENDLESS)
    async for events in client.submit(request):
        letters += [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def test_ray_places_replicas_and_may_die(cluster: Any, tmp_path: Path) -> None:
    spec = on_ray(tmp_path, cluster.address, 3)
    left: set[int] = set()

    async def scene(fleet: Fleet) -> None:
        first = await fleet.until_ready("toy-0", "toy-1", "toy-2")
        assert all(each.address.startswith("tcp://") for each in first.values())
        actors = {f"penstock:toy:toy-{number}" for number in range(3)}
        assert await asyncio.to_thread(ask_ray, cluster) == (actors, 0)  # one on each machine
        await ask(spec, DrainReplica(SECRET, "toy-1"))
        await fleet.until_ready("toy-0", "toy-2")
        await ask(spec, ScaleFleet(SECRET, 3))
        before = await fleet.until_ready("toy-0", "toy-2", "toy-3")  # there is room for it again
        left.update(await fleet.processes())
        client = FleetClient(StewardLink(read_run_file(Path(spec.run_file))))
        await client.start()
        letters: list[int] = []
        stream = asyncio.create_task(recite(client, letters))

        steward, version = (await fleet.status()).steward, fleet.latest.version
        cluster.head_node.kill_gcs_server()
        await fleet.until(lambda there: fleet.latest.version > version and len(there) == 3)
        assert (await fleet.status()).steward != steward  # Ray has ended it, as it ends every driver
        await asyncio.sleep(2 * float(GIVING_UP))
        assert await fleet.until_ready("toy-0", "toy-2", "toy-3") == before
        assert all(lives(each.pid) for each in before.values())
        assert not stream.done()  # it has gone on all the time
        heard = len(letters)
        await fleet.until(lambda _: len(letters) > heard)
        assert all(letter == SAID[at % len(SAID)] for at, letter in enumerate(letters))
        stream.cancel()
        await client.close()

    play(scene, spec)
    assert gone(left)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot connect to the Ray cluster .127\.0\.0\.1:9."):
        play(None, on_ray(tmp_path, "127.0.0.1:9", 1))  # type: ignore[arg-type]
