"""The delta rule in chunks gives what it gives token by token, saved states among it, however rows are divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from penstock.backend.base import Batch, StateMove
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda.kernels.causal_conv import StateRows
from penstock.backend.cuda.kernels.delta_chunk import delta_chunks
from penstock.backend.cuda.kernels.delta_rule import Gates, HeadSizes, delta_rule
from penstock.backend.cuda.recurrent_states import LEAST_CHUNKED, fill, most_chunks, split, words
from penstock.model.recurrence import CHUNK, DeltaSpec
from tests.cuda.device import DEVICE, close, normal

STATES = 6
ROWS, TOKENS = 4, 192


def step_of(*rows: tuple[int, int], moves: tuple[StateMove, ...] = ()) -> Batch:
    """Returns a step of rows with so many tokens, the first at such a position."""
    chunks = [Chunk(range(count), at, [0] * 99, slot) for slot, (count, at) in enumerate(rows)]
    return replace(greedy_batch(chunks), moves=moves)


def described(batch: Batch) -> StateRows:
    numbers = np.full(words(ROWS, TOKENS), 2, np.int32)  # of a step before, where nothing is written
    fill(numbers, batch, ROWS, TOKENS)
    return StateRows(*split(torch.from_numpy(numbers).to(DEVICE), ROWS, TOKENS))


def cuts_of(batch: Batch) -> list[list[int]]:
    """Returns where each row is cut, its begin and its end among it; nothing for one that is not divided."""
    rows = described(batch)
    of_rows = [rows.chunks[first : first + count].tolist() for first, count in rows.numbers[: len(batch.slots), 6:8]]
    for chunks in of_rows:
        assert all(at + count == then for (at, count), (then, _) in pairwise(chunks))
    used = sum(map(len, of_rows))
    assert not rows.chunks[used:].any()
    assert used <= most_chunks(len(batch.slots), len(batch.tokens))
    return [[at for at, _ in chunks] + [sum(chunks[-1])] if chunks else [] for chunks in of_rows]


def test_rows_are_divided_at_multiples_of_positions_and_where_a_state_is_saved() -> None:
    few, long = LEAST_CHUNKED - 1, 2 * CHUNK + 1
    assert cuts_of(step_of((few, 0), (LEAST_CHUNKED, 0))) == [[], [few, few + LEAST_CHUNKED]]
    assert cuts_of(step_of((long, 0))) == [[0, CHUNK, 2 * CHUNK, long]]
    assert cuts_of(step_of((long, CHUNK - 1))) == [[0, 1, CHUNK + 1, long]]
    saved = StateMove(0, -1, 5, 70)
    assert cuts_of(step_of((long, CHUNK - 1), moves=(saved,))) == [[0, 1, CHUNK + 1, 70, long]]
    at_a_cut, at_the_end = StateMove(0, -1, 5, CHUNK), StateMove(1, -1, 4, 40)
    batch = step_of((CHUNK + 8, 0), (40, 0), moves=(at_a_cut, at_the_end))
    assert cuts_of(batch) == [[0, CHUNK, CHUNK + 8], [CHUNK + 8, CHUNK + 48]]


def both_ways(spec: DeltaSpec, batch: Batch, rate: float, alike: float = 0.0) -> None:
    """Compares chunks with tokens one by one, over states that are full of numbers."""
    mixed = normal(TOKENS, spec.width)
    keys = mixed[:, : 2 * spec.k_width].view(TOKENS, -1, spec.k_dim)
    keys[:] = torch.nn.functional.normalize(alike * keys[:1] + (1 - alike) * keys, dim=-1)
    gates = Gates(
        3 * normal(TOKENS, spec.v_heads, seed=1),
        normal(TOKENS, spec.decay_width, seed=2),
        -torch.exp(rate + normal(spec.v_heads, seed=3)),
        normal(spec.decay_width, seed=4),
    )
    rows, sizes = described(batch), HeadSizes.of(spec)
    states = [normal(STATES, spec.state_floats, seed=5) for _ in range(2)]
    out = [torch.zeros(TOKENS, spec.v_width, device=DEVICE) for _ in range(2)]
    solved = [torch.full((TOKENS, CHUNK * spec.v_heads), torch.nan, device=DEVICE) for _ in range(2)]
    delta_rule(mixed, gates, sizes, states[0], rows, out[0], leave_chunks=False)
    delta_rule(mixed, gates, sizes, states[1], rows, out[1], leave_chunks=True)
    delta_chunks(mixed, gates, sizes, states[1], rows, *solved, out[1])
    assert close(out[1], out[0])
    assert close(states[1], states[0])


def test_one_gate_for_a_head() -> None:
    """Some rows are divided and some are not; one begins with the state of another slot."""
    saved, begun = StateMove(0, -1, 4, 30), StateMove(2, 5, -1, 0)
    batch = step_of((40, 60), (3, 0), (33, 9), moves=(saved, begun))
    both_ways(DeltaSpec(1, 2, 16, 16, 4), batch, rate=-3)


def test_large_keys_that_are_alike_and_states_that_last() -> None:
    both_ways(DeltaSpec(1, 1, 96, 16, 4), step_of((66, 1)), rate=-12, alike=0.9)


def test_states_that_decay_to_nothing() -> None:
    both_ways(DeltaSpec(2, 2, 16, 16, 4, tiled=True), step_of((64, 0)), rate=4)
