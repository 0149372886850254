"""One config for every tier. Read once, resolved once into `Limits`, never changed."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.types import Limits, blocks_for

SAVED_PER_ROW = 4  # states, where there is room: of its system prompt, its conversation and some others'


DEVICES = ("auto", "cpu", "cuda", "ref")  # kinds; of several GPUs, cuda:N is the one with that index


class Device(NamedTuple):
    """Names what computes: a kind of device and, of GPUs, which one."""

    kind: str  # one of DEVICES
    index: int = 0  # type: ignore[assignment]  # a device is no one's list: tuple.index is not missed

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads what `--device` takes; raises ConfigError for anything else."""
        kind, colon, index = text.partition(":")
        if kind not in DEVICES or (colon and not (kind == "cuda" and index.isascii() and index.isdigit())):
            raise ConfigError(f"unknown device {text!r}: use one of {', '.join(DEVICES)}, or cuda:N for GPU number N")
        return cls(kind, int(index or 0))

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: str  # a GGUF file or a Hugging Face folder
    name: str = ""  # what clients call it; empty: from the file
    device: str = "auto"  # auto, cpu, cuda, cuda:N, ref
    threads: int = 0  # 0: every core this process may use
    max_len: int = 0  # 0: the model's own context length
    max_rows: int = 0  # 0 here and in the next two: what suits the device
    step_tokens: int = 0  # tokens per step
    prefill_budget: int = 0  # per step while up to 64 rows answer
    quantize: str = ""  # plain weights at load: q8_0, q4_k, int4, fp8, or empty to keep them
    kv: str = "auto"  # what the KV cache holds; auto: the backend's own choice
    kv_memory: int = 0  # bytes; 0: what the backend finds it may take
    block_size: int = 16


def resolve(
    config: Config,
    *,
    context: int,
    vocab: int,
    kv_bytes: int,
    memory: int,
    windows: tuple[int, ...] = (0,),
    encoder: bool = False,
    state_bytes: int = 0,
) -> Limits:
    """Returns the limits of a config with all defaults filled in, for a model with `context` positions, where KV and
    states may take `memory` bytes. A token costs `kv_bytes` in one layer group, `windows` has the window of each group,
    and a sequence has `state_bytes` besides. An `encoder` computes its whole prompt in one step and needs room for what
    two steps compute."""
    if config.max_len > context:
        raise ConfigError(f"max_len {config.max_len} is beyond the model's context of {context} tokens: lower max_len")
    max_len = config.max_len or context
    block_bytes = kv_bytes * config.block_size
    budget = config.kv_memory or memory
    rows, saved = _states(config.max_rows, state_bytes, budget // 2)
    step_tokens = max(config.step_tokens, rows)
    needed = partial(blocks_for, windows=windows, block_size=config.block_size)
    if encoder:
        max_len = min(max_len, step_tokens)
        wanted = 2 * (needed(step_tokens) + rows)
    else:
        wanted = (rows - 1) * needed(max_len) + needed(max_len, chunk=step_tokens)
    num_blocks = min(wanted, (budget - (rows + saved) * state_bytes) // block_bytes)
    if num_blocks < 2 * len(windows) or not rows:
        least = 2 * max(len(windows) * block_bytes, 2 * state_bytes)
        raise ConfigError(
            f"the KV cache needs at least {least} bytes; got {budget}: raise kv_memory or free some memory"
        )
    return Limits(
        max_len=_longest(max_len, num_blocks, partial(needed, chunk=step_tokens)),
        max_rows=rows,
        step_tokens=step_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        vocab=vocab,
        prefill_budget=config.prefill_budget,
        encoder=encoder,
        states=saved,
        windows=windows,
    )


def _longest(most: int, num_blocks: int, needed: Callable[[int], int]) -> int:
    """Returns how many tokens, `most` at most, a sequence may have that is alone and needs `needed(tokens)` blocks."""
    return bisect_right(range(1, most + 1), num_blocks, key=needed)


def _states(max_rows: int, size: int, memory: int) -> tuple[int, int]:
    """Returns how many rows there can be and how many states can be saved: at least as many, where memory is short."""
    if not size:
        return max_rows, 0
    rows = min(max_rows, memory // size // 2)
    return rows, min(SAVED_PER_ROW * rows, memory // size - rows)


def available_memory() -> int:
    """Bytes that could be had without pushing others out, within this process's control group."""
    granted = [int(limit) for limit in _lines("/sys/fs/cgroup/memory.max") if limit.isdigit()]
    return min([_system_memory(), *granted])


def _system_memory() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return total_memory() // 2


def total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: str) -> list[str]:
    """Of a system file; none on systems that do not have it."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
