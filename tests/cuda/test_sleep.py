"""A model that slept answers as before, to the bit, with the graphs that it had. Without a GPU, its memory is the fake
driver's, which overwrites what a sleeping model has given back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.arena import Arena, tensors_in
from penstock.engine.assemble import assemble
from penstock.engine.loop import advance
from penstock.model.load import load_model, open_checkpoint
from penstock.types import Limits, MemoryUse, Request, SamplingParams, Tokens
from penstock.types.messages import Add, Sleep
from tests.cuda.device import DEVICE, HALF
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.small import load_small

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
BLOCK_SIZE = 4
GB = 1 << 30
SLACK = 3 * GB // 4  # the context, kernels, torch's and cuBLAS's own buffers, graphs


def backend_of(**options: Any) -> CudaBackend:
    arena = None if DEVICE == "cuda" else Arena(torch.device(DEVICE), FakeDriver())
    return CudaBackend(32, 4, device=DEVICE, arena=arena, **{"dtype": HALF} | options)


def asleep(backend: CudaBackend) -> int:
    """Puts the backend to sleep; returns the bytes of host memory that this takes."""
    assert backend.sleeper is not None
    host = backend.sleeper.sleep()
    assert backend._packer.target.workspace.arena.device_bytes == 0
    return host


@pytest.mark.parametrize(
    ("format", "quantize", "kv"),
    [
        ("F32", "fp8", "auto"),
        ("Q8_0", "", "auto"),
        ("F32", "", "auto"),
        ("F32", "int4", "int8"),
        ("Q4_K", "", "int8:int4"),
    ],
)
def test_steps_after_sleep_are_those_before_to_the_bit(format: str, quantize: str, kv: str) -> None:
    if quantize == "fp8" and DEVICE == "cpu":
        pytest.skip("the interpreter has no fp8 here")
    backend = load_small(backend_of(quantize=quantize, kv=kv), format)
    backend.reserve_kv(40, BLOCK_SIZE, 4)

    def logits() -> np.ndarray:
        prompt, step = Chunk([3, 1, 4, 1, 5], 0, range(10), 0, 1), Chunk([9], 5, range(10))
        return np.concatenate([backend.logits(greedy_batch([chunk])) for chunk in (prompt, step)])

    for _ in range(3 if DEVICE == "cuda" else 1):  # launched, captured, replayed
        before = logits()
    graphs = dict(backend._programs[0].graphs._graphs)
    assert np.isfinite(before).all()
    assert graphs or DEVICE == "cpu"
    for _ in range(2 if DEVICE == "cuda" else 1):
        assert asleep(backend) == backend._packer.target.workspace.arena.kept_bytes > 0
        assert backend.sleeper is not None
        backend.sleeper.wake()
        assert np.array_equal(logits(), before)
    assert backend._programs[0].graphs._graphs == graphs, "no graph was captured again"


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe", "deepseek_v3", "jamba", "gemma3n", "qwen3next", "gpt_oss"])
def test_all_weights_leave_the_device(name: str) -> None:
    backend = backend_of()
    backend.load(load_model(open_checkpoint(GOLDENS / name), backend))
    backend._packer.target.workspace.transfer.finish()
    weights = [
        t for t in tensors_in([node.attributes for node in backend._programs[0].program.recorded.nodes]) if t.nbytes
    ]
    assert len(weights) > 5
    assert all(backend._packer.target.workspace.arena._holds(weight.data_ptr()) for weight in weights)


@pytest.mark.skipif(DEVICE != "cuda", reason="takes the interpreter half a minute")
def test_an_engine_answers_as_before() -> None:
    """Its recurrent states are gone, and what was cached of the prompt."""
    backend = backend_of(dtype=torch.float32)
    backend.load(load_model(open_checkpoint(GOLDENS / "lfm2"), backend))
    limits = Limits(64, 4, 32, BLOCK_SIZE, 40, backend._programs[0].program.answer.width, states=4)
    backend.reserve_kv(limits.num_blocks, limits.block_size, limits.max_rows + limits.states)
    engine = assemble(backend, limits, depth=backend.depth, sleeper=backend.sleeper)
    params = SamplingParams(temperature=0.0, ignore_eos=True)

    def answer(id: int) -> list[int]:
        events = advance(engine, [Add(Request(id, tuple(range(5, 14)), params, 2))])
        while not engine.idle:
            events += engine.step()
        return [token for event in events if isinstance(event, Tokens) for token in event.tokens]

    first = answer(1)
    (use,) = advance(engine, [Sleep(id=2)])
    assert use == MemoryUse(2, 0, backend._packer.target.workspace.arena.host_bytes)
    assert answer(3) == first


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_the_device_gets_its_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    backend = load_small(backend_of(), "F32")
    token = backend.memory_needs().kv_bytes_per_token
    backend.reserve_kv(2 * GB // (token * BLOCK_SIZE), BLOCK_SIZE, 4)
    backend.logits(greedy_batch([Chunk([1, 2, 3], 0, range(10))]))
    awake = torch.cuda.mem_get_info()[0]
    assert before - awake >= 2 * GB
    asleep(backend)
    assert torch.cuda.mem_get_info()[0] >= 0.95 * before - SLACK
    assert torch.cuda.mem_get_info()[0] - awake >= 2 * GB
    assert backend.sleeper is not None
    backend.sleeper.wake()
    assert abs(torch.cuda.mem_get_info()[0] - awake) < GB // 2
    del backend
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before - SLACK, "nothing of it is left"
