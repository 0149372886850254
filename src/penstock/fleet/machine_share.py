"""Decides what each engine has of a machine that it shares with others of its fleet, where no option says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import AUTO

CACHE_SHARE = 4  # of the free memory, one part for all KV caches of a machine, as one engine takes it
RAM_SHARE = 8  # of the free memory, one part for blocks that have left the KV caches of GPUs


def cpu_share(engines: int, options: Mapping[str, Any], cores: int, memory: int) -> dict[str, Any]:
    """Returns the options of each of so many engines that compute on a machine's processors, of which `cores` are
    theirs, with so many bytes of free memory."""
    threads = {} if options["threads"] else {"threads": max(cores // engines, 1)}
    return threads | ({} if options["kv_memory"] else {"kv_memory": memory // CACHE_SHARE // engines})


def gpu_share(engines: int, options: Mapping[str, Any], memory: int) -> dict[str, Any]:
    """Returns the options of each of so many engines on GPUs of a machine. Blocks that another engine has are read into
    host memory, of which an engine on a GPU has none unless it is told to."""
    return {} if options["kv_ram"] != AUTO else {"kv_ram": str(memory // RAM_SHARE // engines)}


def cluster_threads(cores: Sequence[float], replicas: int) -> int:
    """Returns how many threads each of so many replicas has, and one more that an upgrade starts before it ends
    another: the most with which all find room on machines with so many processors, and at least 1."""
    most = int(max(cores, default=1))
    fits = (each for each in range(most, 1, -1) if sum(int(has) // each for has in cores) > replicas)
    return next(fits, 1)
