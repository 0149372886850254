"""Sleep and wake of a model of the shape of Llama-3.1-8B with random weights, on one GPU.

    PYTHONPATH=src python bench/gpu/sleep.py [--kinds bf16,fp8] [--layers 32] [--kv GB] [--times 3]

Needs torch and Triton, a GPU to itself and as much free host memory as the weights take. The KV cache takes all memory
that is left, as it does in a server, unless --kv says otherwise. The first sleep also pins host memory, which later
ones use again. Says where the time went, by calls of the driver, and whether the tokens after are those before.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from cells import BLOCK_SIZE, llama8b
from random_weights import RandomWeights

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.model.families.llama import build

GB = 1e9
STEP_TOKENS, ROWS = 2048, 64
PROMPT = range(1000, 1064)
ANSWER = 16  # tokens
CALLS = ("map", "unmap", "pin", "to_host", "to_device", "zero", "synchronize")


def timed(driver: Any) -> dict[str, float]:
    """Has the driver's calls timed; returns where their seconds are added up."""
    spent: dict[str, float] = defaultdict(float)

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[name] += time.perf_counter() - began

        return run

    for name in CALLS:
        setattr(driver, name, watched(name, getattr(driver, name)))
    return spent


def answer(backend: CudaBackend) -> list[int]:
    """Greedy tokens after the prompt, which is computed again each time."""
    tokens, table = list(PROMPT), range(16)
    fed, start = tokens, 0
    for step in range(ANSWER):
        batch = greedy_batch([Chunk(fed, start, table, 0, 1)], step=step)
        (token,) = backend.wait(backend.launch(batch)).rows[0].tokens
        fed, start = [token], len(tokens)
        tokens.append(token)
    return tokens[len(PROMPT) :]


def seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def taken(before: int) -> str:
    """How much more memory of the GPU is in use than `before` anything was loaded."""
    return f"{(before - torch.cuda.mem_get_info()[0]) / GB:.2f} GB"


def loaded(kind: str, layers: int, kv: float) -> CudaBackend:
    backend = CudaBackend(STEP_TOKENS, ROWS)
    backend.load(build(llama8b(layers), RandomWeights(backend._packer.target.workspace, kind)))
    needs = backend.memory_needs()
    memory = int(kv * GB) or needs.kv_memory
    backend.reserve_kv(memory // (needs.kv_bytes_per_token * BLOCK_SIZE), BLOCK_SIZE)
    return backend


def run(kind: str, layers: int, kv: float, times: int) -> None:
    before = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    backend = loaded(kind, layers, kv)
    arena, sleeper = backend._packer.target.workspace.arena, backend.sleeper
    if sleeper is None:
        raise SystemExit("this GPU cannot map memory to reserved addresses: its models cannot sleep")
    kept, cache, spent = arena.kept_bytes, backend._programs.blocks.nbytes, time.perf_counter() - began
    print(f"{kind}: {kept / GB:.2f} GB of weights, {cache / GB:.2f} GB of KV cache, loaded in {spent:.1f} s")
    for _ in range(3):  # compiled, captured, replayed
        wanted = answer(backend)
    graphs = dict(backend._programs[0].graphs._graphs)
    print(f"  awake: {taken(before)} taken, {len(graphs)} graphs")
    calls = timed(arena._driver)
    for turn in range(times):
        calls.clear()
        slept = seconds(sleeper.sleep)
        print(f"  sleep {turn + 1}: {slept:.3f} s, {kept / GB / slept:.1f} GB/s, {taken(before)} taken; {where(calls)}")
        calls.clear()
        woken = seconds(sleeper.wake)
        first = seconds(lambda: answer(backend))
        same = answer(backend) == wanted and backend._programs[0].graphs._graphs == graphs
        print(f"  wake  {turn + 1}: {woken:.3f} s, {kept / GB / woken:.1f} GB/s, {taken(before)} taken; {where(calls)}")
        print(f"    then {ANSWER} tokens in {first:.3f} s; tokens and graphs are {'the same' if same else 'OTHERS'}")
    backend.close()


def where(spent: dict[str, float]) -> str:
    return ", ".join(f"{name} {spent[name]:.3f}" for name in CALLS if spent[name] >= 5e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="bf16,fp8")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv", type=float, default=0.0, help="GB; 0: all memory that is left")
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    for kind in given.kinds.split(","):
        run(kind, given.layers, given.kv, given.times)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
