"""What the engines of a fleet have of the machines that they share, on one machine and on those of a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import fleet_serve
from penstock.config import DEFAULTS, Config
from penstock.fleet import ray_ground
from penstock.fleet.machine_share import cluster_threads, cpu_share, gpu_share
from penstock.fleet.ray_ground import shared, with_threads
from penstock.fleet.steward_wire import FleetSpec, KeeperSpec, ScaleSpec

GIB = 1 << 30
PLAIN = {"threads": 0, "kv_memory": 0, "kv_ram": "auto"}


def test_engines_divide_what_no_option_says() -> None:
    assert cpu_share(4, PLAIN, 16, 64 * GIB) == {"threads": 4, "kv_memory": 4 * GIB}
    assert cpu_share(4, PLAIN | {"threads": 2}, 16, 64 * GIB) == {"kv_memory": 4 * GIB}
    assert cpu_share(4, PLAIN | {"kv_memory": 1}, 2, 64 * GIB) == {"threads": 1}
    assert gpu_share(2, PLAIN, 64 * GIB) == {"kv_ram": str(4 * GIB)}
    assert gpu_share(2, PLAIN | {"kv_ram": "0"}, 64 * GIB) == {}


@given(cores=st.lists(st.integers(1, 128), min_size=1, max_size=12), replicas=st.integers(1, 64))
def test_all_replicas_and_one_more_find_room_with_the_threads_that_they_use(cores: list[int], replicas: int) -> None:
    threads = cluster_threads(cores, replicas)
    room = [sum(has // each for has in cores) for each in (threads, threads + 1)]
    assert threads >= 1
    assert room[0] > replicas or threads == 1
    assert room[1] <= replicas  # one thread more would be too many


def ray_with(*cores: int, gpus: int = 0) -> Any:
    nodes = [{"Alive": True, "Resources": {"CPU": float(has)}} for has in cores]
    nodes += [{"Alive": False, "Resources": {"CPU": 512.0}}, {"Alive": True, "Resources": {}}]
    return SimpleNamespace(nodes=lambda: nodes, cluster_resources=lambda: {"GPU": gpus} if gpus else {})


def placed(ray: Any, replicas: int, most: int = 0, **options: Any) -> tuple[Config, dict[str, float]]:
    """Returns the config of a replica, and what Ray reserves for it."""
    config = Config(model="m", name="m", **options)
    scaling = ScaleSpec(replicas, most) if most else None
    spec = FleetSpec("m", "", "", "", "", config, replicas, "ray", scaling=scaling)
    keeper = with_threads(ray, spec, KeeperSpec("m-0", "", "", "", "", config, 0))
    return keeper.config, ray_ground._needs(ray, keeper)


def test_ray_reserves_the_threads_that_an_engine_uses() -> None:
    config, needs = placed(ray_with(16, 16, 16), 5)
    assert config.threads == 8
    assert needs == {"CPU": 8.0}
    config, needs = placed(ray_with(16, 16, 16), 2, most=11)
    assert config.threads == 4
    assert needs == {"CPU": 4.0}
    config, needs = placed(ray_with(16, 16, 16), 5, threads=3)
    assert config.threads == 3
    assert needs == {"CPU": 3.0}
    config, needs = placed(ray_with(1, 1), 2)
    assert config.threads == 1
    assert needs == {"CPU": 1.0}


def test_a_replica_on_a_gpu_takes_one_and_a_processor() -> None:
    for device in ("cuda", "auto"):
        config, needs = placed(ray_with(16, gpus=2), 2, device=device)
        assert config.threads == 0
        assert needs == {"CPU": 1.0, "GPU": 1.0}
    config, needs = placed(ray_with(16, gpus=2), 1, device="cpu")
    assert needs == {"CPU": float(config.threads)} == {"CPU": 8.0}


def test_replicas_on_one_machine_of_a_cluster_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ground, "available_memory", lambda: 64 * GIB)
    monkeypatch.setattr(ray_ground.os, "cpu_count", lambda: 16)
    assert shared(Config(model="m", threads=4), ()).kv_memory == 4 * GIB
    assert shared(Config(model="m", threads=16), ()).kv_memory == 16 * GIB
    assert shared(Config(model="m", threads=4, kv_memory=GIB), ()).kv_memory == GIB
    on_gpu = shared(Config(model="m"), [3])
    assert (on_gpu.device, on_gpu.kv_memory) == ("cuda:3", 0)
    assert 0 < int(on_gpu.kv_ram) <= 8 * GIB
    assert shared(Config(model="m", kv_ram="0"), [3]).kv_ram == "0"
    assert msgspec.json.decode(msgspec.json.encode(on_gpu), type=Config) == on_gpu


def test_engines_on_gpus_of_this_machine_have_host_memory_for_blocks_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.config.available_memory", lambda: 64 * GIB)
    on_gpu = DEFAULTS | {"device": "cuda"}
    assert fleet_serve.shares_of(2, on_gpu) == {"kv_ram": str(4 * GIB)}
    assert fleet_serve.shares_of(1, on_gpu) == {}
    assert fleet_serve.shares_of(2, on_gpu | {"kv_ram": "0"}) == {}
    on_cpu = fleet_serve.shares_of(2, DEFAULTS | {"device": "cpu"})
    assert on_cpu.keys() == {"threads", "kv_memory"}
    assert on_cpu["kv_memory"] == 8 * GIB
