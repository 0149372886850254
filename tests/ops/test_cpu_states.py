"""Delta nets on a CPU: each token has the same bits however its prompt is divided into steps, and among any others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.backend.base import StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import isas
from penstock.backend.ref.cases import BLOCK_SIZE, OneOp, pack
from penstock.backend.ref.delta_cases import delta_net
from penstock.backend.ref.random_steps import random_steps
from penstock.model.recurrence import DeltaSpec

LENGTHS = 150, 1, 33, 70
BLOCKS = -(-LENGTHS[0] // BLOCK_SIZE)
SPECS = {
    "one gate": DeltaSpec(1, 2, 32, 80, 4),  # 80 columns: several vectors at once, and one by itself
    "odd widths": DeltaSpec(1, 2, 7, 21, 3),
    "by channel": DeltaSpec(1, 2, 32, 64, 4, channel_decay=True),
}


def backend_of(spec: DeltaSpec, threads: int, isa: str) -> CpuBackend:
    trial = delta_net(np.random.default_rng(4), spec=spec, steps=(), tokens=LENGTHS[0])
    backend = CpuBackend(threads, isa=isa)
    backend.load(OneOp(trial.forward, [pack(weight, backend) for weight in trial.weights]))
    backend.reserve_kv(len(LENGTHS) * BLOCKS, BLOCK_SIZE, 8)
    return backend


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_token_is_bitwise_the_same_in_any_chunking_batch_and_thread_count(spec: DeltaSpec, isa: str) -> None:
    prompts = [range(length) for length in LENGTHS]  # all begin with the same tokens
    wanted = backend_of(spec, 1, isa).logits(greedy_batch([Chunk(prompts[0], 0, range(BLOCKS))]))
    for seed, (threads, longest) in enumerate([(1, 1), (2, 7), (3, 90)]):
        backend = backend_of(spec, threads, isa)
        for chunks in random_steps(np.random.default_rng(seed), prompts, BLOCK_SIZE, longest):
            parts = [wanted[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks]
            assert np.array_equal(backend.logits(greedy_batch(chunks)), np.concatenate(parts))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_goes_on_from_a_saved_state_has_the_same_bits(spec: DeltaSpec, isa: str) -> None:
    backend, blocks = backend_of(spec, 2, isa), range(BLOCKS)
    wanted = backend.logits(greedy_batch([Chunk(range(150), 0, blocks)]))
    saving = replace(greedy_batch([Chunk(range(100), 0, blocks)]), moves=(StateMove(0, -1, 6, 37),))
    assert np.array_equal(backend.logits(saving), wanted[:100])
    resumed = replace(greedy_batch([Chunk(range(37, 150), 37, blocks, 1)]), moves=(StateMove(0, 6, -1, 0),))
    assert np.array_equal(backend.logits(resumed), wanted[37:])
