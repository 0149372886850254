"""Adapters (LoRA) on a GPU: what a decode step costs with them, in a model of the shape of Llama-3.1-8B.

    PYTHONPATH=src python bench/gpu/adapters.py [--kinds bf16,fp8] [--rows 64] [--rank 16] [--profile]

Needs torch and Triton, and a GPU to itself. Weights are random. Steps are CUDA graphs of rows with 512 tokens of
context; sides take turns, and the best of all rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from cells import BLOCK_SIZE, decode_batch, llama8b
from random_weights import RandomWeights

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.adapters import CudaAdapter
from penstock.model.families.llama import build
from penstock.model.low_rank import LowRankPart, LowRankUpdate, PlacedPart, Placement

ADAPTERS = 100
CONTEXT = 512
PROMPT = 2048
BLOCKS = 256 * CONTEXT // BLOCK_SIZE
ROUNDS = 5
DRAWS = 3  # of adapters by Zipf


class PlacedWeights(RandomWeights):
    """Remembers which tensors each matrix is made of."""

    placements: list[Placement]

    def matrix(self, *parts: tuple[str, int], width: int) -> Any:
        weight = super().matrix(*parts, width=width)
        self.placements = [*getattr(self, "placements", ()), Placement(weight, tuple(PlacedPart(*p) for p in parts))]
        return weight


class Loaded(NamedTuple):
    """Holds a backend with adapters in its slots, and what one adapter is packed from."""

    backend: CudaBackend
    updates: list[LowRankUpdate]


def load(kind: str, rank: int, layers: int) -> Loaded:
    backend = CudaBackend(PROMPT, 256)
    weights = PlacedWeights(backend._packer.target.workspace, kind)
    backend.load(build(llama8b(layers), weights))
    backend.reserve_kv(BLOCKS, BLOCK_SIZE)
    updates = [update_of(place, rank) for place in weights.placements if place.parts[0].name.startswith("layers")]
    began = time.perf_counter()
    packed = backend.adapters.pack(updates)
    print(f"packed {packed.nbytes / 1e6:.0f} MB in {time.perf_counter() - began:.2f} s")
    for slot in range(ADAPTERS):
        backend.adapters.load(slot, copy_of(packed, 1 - slot / ADAPTERS))
    return Loaded(backend, updates)


def update_of(place: Placement, rank: int) -> LowRankUpdate:
    """Returns a random update of all parts of a weight, small beside it."""
    dice, width, first, parts = np.random.default_rng(len(place.parts)), place.weight.width, 0, []
    for part in place.parts:
        a = dice.standard_normal((rank, width), np.float32) * width**-0.5
        parts.append(LowRankPart(first, a, dice.standard_normal((part.rows, rank), np.float32) * 0.5))
        first += part.rows
    return LowRankUpdate(place.weight, tuple(parts))


def copy_of(packed: CudaAdapter, scale: float) -> CudaAdapter:
    """Returns another adapter of the same sizes, with memory of its own: packing a hundred would take too long."""
    memory, records = packed.memory.clone(), packed.records.clone().pin_memory()
    values = int(records[:, 2][records[:, 2] > 0].min()) - packed.memory.data_ptr()  # bytes before the blocks
    memory[:values].view(torch.bfloat16).mul_(scale)
    records[:, :3] += memory.data_ptr() - packed.memory.data_ptr()
    torch.cuda.synchronize()
    return CudaAdapter(memory, records, packed.sizes)


# -- what is measured ---------------------------------------------------------------------------------------------


def sides_of(rows: int) -> dict[str, list[list[int]]]:
    """Returns the adapters of rows by name of a side, several draws where they are random."""
    dice, numbers = np.random.default_rng(0), np.arange(ADAPTERS)
    share = 1 / (1 + numbers)
    zipf = [dice.choice(numbers, rows, p=share / share.sum()).tolist() for _ in range(DRAWS)]
    distinct = {count: [[row % count for row in range(rows)]] for count in (1, 8, 64) if count <= rows}
    half = [[row % 8 if row % 2 else -1 for row in range(rows)]]
    named = {f"{count} adapters": slots for count, slots in distinct.items()}
    return {"no adapters": [[]], **named, "8, half of the rows": half, f"Zipf of {ADAPTERS}": zipf}


def measure(loaded: Loaded, rows: int) -> None:
    """Prints how long a decode step takes on each side."""
    plain, sides = decode_batch(rows, CONTEXT, BLOCKS, 0), sides_of(rows)
    best: dict[str, list[float]] = {name: [float("inf")] * len(draws) for name, draws in sides.items()}
    for _ in range(ROUNDS):
        for name, draws in sides.items():
            for i, slots in enumerate(draws):
                best[name][i] = min(best[name][i], loaded.backend.time_step(with_slots(plain, slots), 10))
    base = best["no adapters"][0]
    for name, times in best.items():
        distinct = statistics.mean(len({slot for slot in slots if slot >= 0}) for slots in sides[name])
        took = statistics.mean(times)
        print(f"  {rows} rows, {name:>20}: {took * 1e3:7.3f} ms, {base / took:6.1%}  ({distinct:.0f} distinct)")


def measure_prompt(loaded: Loaded) -> None:
    """Prints how long a prompt takes with an adapter and without."""
    step = greedy_batch([Chunk([1] * PROMPT, 0, range(PROMPT // BLOCK_SIZE), 0, 1)])
    base, one = (loaded.backend.time_step(with_slots(step, slots), 5) for slots in ([], [0]))
    print(f"  a prompt of {PROMPT} tokens: {base * 1e3:.2f} ms, with an adapter {one * 1e3:.2f} ms, {base / one:.1%}")


def with_slots(step: Batch, slots: Sequence[int]) -> Batch:
    return replace(step, adapters=np.array(slots, np.int32))


def check(loaded: Loaded, rows: int, tolerance: float) -> None:
    """Prints how far rows among others are from the same rows where all have their adapter."""
    step = decode_batch(rows, 1, BLOCKS, 0)
    mixed = loaded.backend.logits(with_slots(step, [row % 8 - 1 for row in range(rows)]))
    plain = loaded.backend.logits(step)
    apart = []
    for slot in (-1, 0, 6):
        alone = loaded.backend.logits(with_slots(step, [slot] * rows)) if slot >= 0 else plain
        apart.append(np.abs(mixed - alone)[slot + 1 :: 8].max() / np.abs(alone).max())
    changed = np.abs(mixed - plain)[1::8].max() / np.abs(plain).max()
    print(f"  rows among others differ from rows alone by {max(apart):.1e}; adapters change logits by {changed:.1e}")
    assert max(apart) < tolerance
    assert changed > 0.05


def measure_loading(loaded: Loaded, rows: int) -> None:
    """Prints how long steps of others take while a thread packs an adapter."""
    backend, step = loaded.backend, decode_batch(rows, CONTEXT, BLOCKS, 0)
    packing = threading.Thread(target=backend.adapters.pack, args=(loaded.updates,))
    before = list(step_times(backend, step, 20))
    packing.start()
    during = [spent for _ in range(400) if packing.is_alive() for spent in step_times(backend, step, 1)]
    packing.join()
    print(
        f"  steps: {statistics.median(before) * 1e3:.2f} ms; {len(during)} while an adapter is packed: median "
        f"{statistics.median(during) * 1e3:.2f}, longest {max(during) * 1e3:.2f} ms"
    )


def step_times(backend: CudaBackend, step: Batch, count: int) -> Iterator[float]:
    for _ in range(count):
        began = time.perf_counter()
        backend.wait(backend.launch(step))
        yield time.perf_counter() - began


def profile(loaded: Loaded, rows: int) -> None:
    """Prints which kernels the time of a step goes to, with no adapter, one, and one for each row."""
    plain = decode_batch(rows, CONTEXT, BLOCKS, 0)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for name, draws in sides_of(rows).items():
        step = with_slots(plain, draws[0])
        loaded.backend.wait(loaded.backend.launch(step))
        with torch.profiler.profile(activities=activities) as profiler:
            loaded.backend.wait(loaded.backend.launch(step))
        found = [(e.device_time_total / 1e3, e.count, e.key) for e in profiler.key_averages() if e.device_time_total]
        print(f"  {name}: {sum(ms for ms, *_ in found):.3f} ms in kernels, which may overlap")
        for ms, count, key in sorted(found, reverse=True)[:10]:
            print(f"    {ms:8.3f} ms {count:5d} x {ms / count * 1e3:7.2f} us  {key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bf16,fp8")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        loaded = load(kind, options.rank, options.layers)
        print(f"{kind} base, rank {options.rank}:", flush=True)
        check(loaded, options.rows, 0.3 if kind == "fp8" else 0.05)  # FP8 rounds activations too
        measure(loaded, options.rows)
        measure_prompt(loaded)
        measure_loading(loaded, options.rows)
        if options.profile:
            profile(loaded, options.rows)
        loaded.backend.close()
        del loaded
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
