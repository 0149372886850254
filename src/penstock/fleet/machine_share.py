"""Divides a machine among the engines of a fleet, where no option does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import AUTO

CACHE_SHARE = 4  # 1/4 of the free memory holds all KV caches of a machine
RAM_SHARE = 8  # 1/8 of the free memory holds blocks evicted from GPUs


def cpu_share(engines: int, options: Mapping[str, Any], cores: int, memory: int) -> dict[str, Any]:
    """Returns the options of each engine on a machine's processors; `memory` is free, in bytes."""
    threads = {} if options["threads"] else {"threads": max(cores // engines, 1)}
    return threads | ({} if options["kv_memory"] else {"kv_memory": memory // CACHE_SHARE // engines})


def gpu_share(engines: int, options: Mapping[str, Any], memory: int) -> dict[str, Any]:
    """Returns the options of each engine on a machine's GPUs. Blocks of other engines are read into host memory, which
    an engine on a GPU has only if an option asks for it."""
    return {} if options["kv_ram"] != AUTO else {"kv_ram": str(memory // RAM_SHARE // engines)}


def cluster_threads(cores: Sequence[float], replicas: int) -> int:
    """Returns the threads of each replica: the most with which all find room, and one more during an upgrade."""
    most = int(max(cores, default=1))
    fits = (each for each in range(most, 1, -1) if sum(int(has) // each for has in cores) > replicas)
    return next(fits, 1)
