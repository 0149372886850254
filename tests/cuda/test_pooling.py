"""Embeddings beside answers on the device: each is what the reference makes of it alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.backend.cuda import CudaBackend
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.types import Finished, Limits, Request, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.cuda.small import SMALL, load_small

LIMITS = Limits(60, 4, 24, 4, num_blocks=24, vocab=SMALL.vocab, dim=SMALL.dim)
ROUNDS = 6 if DEVICE == "cuda" else 1  # graphs are taken of shapes that come again


def embeddings(backend: Any, requests: list[Request]) -> dict[int, np.ndarray]:
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    engine = assemble(backend, LIMITS, depth=backend.depth)
    found: dict[int, np.ndarray] = {}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        for event in engine.step():
            assert isinstance(event, Tokens | Finished), event
            if isinstance(event, Finished) and event.pooled:
                found[event.seq] = np.frombuffer(event.pooled, "<f4")
    return found


def test_embeddings_beside_answers_are_those_of_the_reference() -> None:
    """In chunks of a step, pushed out by answers that grow, and with prefixes that are cached already."""
    rng = np.random.default_rng(0)
    backend = load_small(CudaBackend(24, 4, device=DEVICE, dtype=HALF), "F32")
    reference = load_small(RefBackend(), "F32")
    shared = rng.integers(0, 40, 30).tolist()
    for _ in range(ROUNDS):
        greedy = SamplingParams(temperature=0.0)
        asked = [
            Request(id, (*shared, *rng.integers(0, 40, id).tolist()), greedy, 0, pooling=("mean", "last")[id % 2])
            for id in range(1, 5)
        ]
        answers = [Request(id, (*shared[:20], id), greedy, 3 * ROUNDS) for id in (10, 11)]
        got = embeddings(backend, [*answers, *asked])
        for request in asked:
            wanted = embeddings(reference, [request])[request.id]
            assert np.abs(got[request.id] - wanted).max() / np.abs(wanted).max() < 3e-2
