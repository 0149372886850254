"""The plan's numbers against what is really taken, and steps that find no memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.graphs import Graphs, common_shapes, padded
from penstock.backend.cuda.storage import StorageRules, storage_of
from penstock.backend.cuda.transfer import Transfer
from penstock.engine.assemble import assemble
from penstock.errors import OutOfMemory
from penstock.model.load import load_model, open_checkpoint
from penstock.model.roles import Role
from penstock.model.tensor import FORMATS, Tensor
from penstock.types import Limits, Request, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.cuda.test_backend import GOLDENS, loaded

PROMPTS = {1: (3, 5, 5), 2: (3, 6, 5)}


@pytest.mark.parametrize(
    ("format", "quantize", "bits"),
    [
        ("BF16", "", 16),
        ("F32", "", 16),
        ("BF16", "fp8", 8),
        ("BF16", "int4", 4.5),
        ("Q4_K", "", 4.625),
        ("F16", "", 16),
    ],
)
def test_matrices_by_format(format: str, quantize: str, bits: float) -> None:
    matrix = Tensor("w", FORMATS[format], (512, 1024), np.empty(0, np.uint8), role=Role.MLP_IN)
    assert storage_of(matrix, StorageRules(quantize)).bytes == pytest.approx(512 * 1024 * bits / 8, rel=0.01)


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe", "glm4_moe", "lfm2", "jamba"])
def test_workspace_is_about_what_a_program_takes(name: str) -> None:
    backend = CudaBackend(512, 64, device=DEVICE, dtype=HALF)
    checkpoint = open_checkpoint(GOLDENS / name)
    told = backend.footprint(checkpoint.spec, checkpoint.tensors.values())
    backend.load(load_model(checkpoint, backend))
    taken = sum(buffer.numel() * buffer.element_size() for buffer in backend._programs[0].program._buffers)
    assert taken <= told.workspace <= 4 * taken
    assert told.kv_token == backend.memory_needs().kv_bytes_per_token


def test_bytes_arrive_as_they_are() -> None:
    data = np.random.default_rng(0).integers(0, 256, 5_000_000, np.uint8)
    target = torch.zeros(len(data) // 2, dtype=torch.bfloat16, device=DEVICE)
    transfer = Transfer(torch.device(DEVICE))
    transfer.send(data, target)
    transfer.finish()
    assert np.array_equal(target.view(torch.uint8).cpu().numpy(), data)
    assert np.array_equal(transfer.fetch(data).cpu().numpy(), data)
    transfer.close()


def test_common_shapes_are_shapes_of_graphs() -> None:
    shapes = list(common_shapes(256, 2048, 384, (4, 16)))
    assert len(shapes) == len(set(shapes))
    assert all(shape == padded(shape) for shape in shapes)
    assert {shape.decodes for shape in shapes if not shape.tiles} >= {1, 2, 4, 8, 16, 64, 256}
    assert {(shape.tokens, shape.decodes) for shape in shapes if shape.tiles} >= {(384, 64), (1536, 256), (2048, 0)}


def test_rehearsals_leave_no_trace() -> None:
    """Steps that only pad, as they are run to get ready, between real ones."""
    backend = loaded("llama3", CudaBackend(256, 8, device=DEVICE, dtype=torch.float32, prefill_budget=64))
    backend.reserve_kv(64, 4)
    tokens = [5, 6, 7, 8, 9]
    before = backend.logits(greedy_batch([Chunk(tokens, 0, range(4))]))
    program = backend._programs[0]
    for shape in common_shapes(8, 256, 64, *program.program.split_sizes):
        backend._preparation.rehearse(program, backend._steps.pad(program, shape), sampling=True)
    after = backend.logits(greedy_batch([Chunk([10], 5, range(4))]))
    backend.reserve_kv(64, 4)
    whole = backend.logits(greedy_batch([Chunk([*tokens, 10], 0, range(4))]))
    assert np.allclose(whole, np.concatenate([before, after]), atol=1e-4)


def test_no_shape_is_made_ready_that_steps_are_too_small_for() -> None:
    """Steps of 200 tokens at most: those that would be padded to 256 are left out, and all others stay."""
    backend = loaded("llama3", CudaBackend(200, 8, device=DEVICE, dtype=torch.float32, prefill_budget=64))
    backend.reserve_kv(64, 4)
    shapes = [shape for _, shape in backend._preparation.shapes_ahead()]
    assert {shape.tokens for shape in shapes if shape.tiles} == {128}
    assert {shape.decodes for shape in shapes if not shape.tiles} >= {1, 2, 4, 8}
    for shape in shapes:
        backend._preparation.rehearse(backend._programs[0], shape)


def test_a_step_without_memory_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded("llama3", CudaBackend(64, 8, device=DEVICE, dtype=torch.float32))
    backend.reserve_kv(32, 4)
    limits = Limits(64, 8, 64, 4, 32, 64)
    alone = answers(backend, limits)
    sampler = backend._programs[0].sampler
    sample, calls = sampler.sample, []

    def scarce(*args: Any) -> Any:
        calls.append(1)
        answer = sample(*args)
        if len(calls) == 3:
            raise torch.cuda.OutOfMemoryError("no memory")
        return answer

    monkeypatch.setattr(type(sampler), "sample", lambda self, *args: scarce(*args))
    assert answers(backend, limits) == alone
    assert len(calls) > 3


def test_a_shortage_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded("llama3", CudaBackend(64, 8, device=DEVICE, dtype=torch.float32))

    def none(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory\nand more")

    monkeypatch.setattr(torch, "zeros", none)
    with pytest.raises(OutOfMemory, match=r"no memory for a cache of 32 blocks: no memory$"):
        backend.reserve_kv(32, 4)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing")
def test_first_answers_wait_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    backend = loaded("llama3", CudaBackend(256, 8, prefill_budget=64))
    backend.reserve_kv(64, 4)
    backend.warm_up()
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    limits = Limits(64, 8, 256, 4, 64, 64)
    before = answers(backend, limits, {1: (3, 4, 5)})
    assert compiled == []
    while backend.prepare_in_idle():
        pass
    program = backend._programs[0]
    shapes = common_shapes(8, 256, 64, *program.program.split_sizes)
    assert all(program.graphs.has(shape) for shape in shapes if shape == backend._steps.pad(program, shape))
    compiled.clear()
    assert answers(backend, limits, {1: (3, 4, 5)}) == before
    answers(backend, limits, {id: (3, 4, id) for id in range(1, 7)})
    assert compiled == []


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is captured in the interpreter")
def test_garbage_is_left_alone_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free what an arena has given out waits for the device, which a capture does not allow."""
    backend = loaded("llama3", CudaBackend(64, 8, device=DEVICE))
    backend.reserve_kv(32, 4)
    seen, launch = set(), Graphs.launch

    def watched(graphs: Graphs, step: Any) -> Any:
        seen.add((torch.cuda.is_current_stream_capturing(), gc.isenabled()))
        return launch(graphs, step)

    monkeypatch.setattr(Graphs, "launch", watched)
    backend.prepare(1)
    assert seen == {(False, True), (True, False)}
    assert gc.isenabled()


def answers(
    backend: CudaBackend, limits: Limits, prompts: Mapping[int, tuple[int, ...]] = PROMPTS
) -> dict[int, list[int]]:
    engine = assemble(backend, limits, depth=1)
    for id, prompt in prompts.items():
        engine.add(Request(id, prompt, SamplingParams(temperature=0), 6))
    found: dict[int, list[int]] = {id: [] for id in prompts}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.seq] += event.tokens
    return found
