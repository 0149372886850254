"""Requests that arrive at random, in every precision: each gets what it gets alone, up to what rounding decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix
from penstock.backend.cuda.kernels.fp8 import quantize_fp8
from penstock.backend.cuda.pack_quantized import quantize_int4
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.model.dequantize import dequantize
from penstock.model.tensor import FORMATS, Tensor
from penstock.types import Finished, Limits, Request, SamplingParams, TokenLogprob, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.cuda.small import load_small, spec_for

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=8)


class Kind(NamedTuple):
    format: str = "F32"
    quantize: str = ""
    kv: str = "auto"
    apart: float = 0.1  # logprobs of the reference: where something is wrong, they are whole nats apart
    steady: float = 0.1  # and of the same request alone


KINDS = {
    "plain": Kind(),
    "fp8 weights": Kind(quantize="fp8", apart=0.4, steady=0.4),  # activations have 8 bits too
    "int4 weights": Kind(quantize="int4"),
    "fp8 KV": Kind(kv="fp8", apart=0.2),
    "int8 KV": Kind(kv="int8"),
    **{name: Kind(name) for name in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")},
}
IN_INTERPRETER = ("int4 weights", "fp8 KV", "Q4_0")  # the others take it minutes
SEEDS = range(4 if DEVICE == "cuda" else 1)


class Rounded(RefBackend):
    """The reference, with weights that are quantized at load."""

    def __init__(self, quantize: str) -> None:
        super().__init__()
        self._quantize = quantize

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        return super().pack_matrix([rounded(part, self._quantize) for part in parts], bias)


def rounded(part: Tensor, quantize: str) -> Tensor:
    values = torch.from_numpy(dequantize(part)).to(DEVICE, HALF)
    out = torch.empty(part.shape, device=DEVICE)
    if quantize == "int4":
        dequantize_matrix(quantize_int4(values), out)
    elif quantize == "fp8":
        weight = quantize_fp8(values)
        out = weight.values.float() * weight.scales[:, None]
    else:
        return part
    return replace(part, format=FORMATS["F32"], source=out.cpu().numpy().reshape(-1).view(np.uint8))


def backend_of(kind: Kind) -> CudaBackend:
    backend = CudaBackend(24, 4, device=DEVICE, dtype=HALF, quantize=kind.quantize, kv=kind.kv)
    return load_small(backend, kind.format)


def answers(backend: Any, kind: Kind, requests: list[Request], rng: np.random.Generator) -> dict[int, list[Any]]:
    """Runs the requests, arriving at random, to their ends: what each was told."""
    limits = Limits(60, 4, 24, BLOCK_SIZE, num_blocks=24, vocab=spec_for(kind.format).vocab)
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
    engine = assemble(backend, limits, depth=backend.depth)
    told: dict[int, list[TokenLogprob]] = {request.id: [] for request in requests}
    waiting, ended = list(requests), 0
    while ended < len(requests):
        while waiting and (engine.idle or rng.random() < 0.5):
            engine.add(waiting.pop())
        for event in engine.step():
            if isinstance(event, Tokens):
                told[event.seq] += event.logprobs
            else:
                assert isinstance(event, Finished)
                ended += 1
    return told


def check_alike(got: list[TokenLogprob], wanted: list[TokenLogprob], tolerance: float) -> None:
    """The same tokens, unless two are so close that rounding may decide between them; then the rest may be another."""
    for mine, other in zip(got, wanted, strict=True):
        known = dict(other.top)
        assert abs(mine.logprob - known[mine.token]) < tolerance
        if mine.token != other.token:
            assert other.logprob - known[mine.token] < tolerance
            return


def some_requests(rng: np.random.Generator) -> list[Request]:
    """Most of them begin alike."""
    shared = rng.integers(0, 40, 20).tolist()
    count, length = (6, 8) if DEVICE == "cuda" else (2, 2)
    return [
        Request(id, (*shared[: rng.integers(4, 21)], *rng.integers(0, 40, rng.integers(1, 8)).tolist()), GREEDY, length)
        for id in range(count)
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_request_gets_what_it_gets_alone(name: str, seed: int) -> None:
    """A small cache, small steps, shared prefixes, one step in flight; alone, the reference answers, and so does the
    same backend."""
    if DEVICE == "cpu" and name not in IN_INTERPRETER:
        pytest.skip("needs a GPU")
    kind, rng = KINDS[name], np.random.default_rng(seed)
    requests = some_requests(rng)
    backend = backend_of(kind)
    together = answers(backend, kind, requests, rng)
    reference = load_small(Rounded(kind.quantize), kind.format)
    for request in requests:
        [alone] = answers(reference, kind, [request], rng).values()
        check_alike(together[request.id], alone, kind.apart)
    for request in requests if DEVICE == "cuda" else ():
        [alone] = answers(backend, kind, [request], rng).values()
        check_alike(together[request.id], alone, kind.steady)


def test_weights_are_what_was_asked_for() -> None:
    """A model that was kept as it is would pass all of the above."""
    tokens = [3, 1, 4, 1, 5]
    exact = logits(load_small(RefBackend(), "F32"), tokens)
    for name, least, most in (("fp8 weights", 0.01, 0.1), ("int4 weights", 0.04, 0.3), ("fp8 KV", 1e-4, 0.1)):
        moved = np.linalg.norm(logits(backend_of(KINDS[name]), tokens) - exact) / np.linalg.norm(exact)
        assert least < moved < most, name


def logits(backend: Any, tokens: list[int]) -> np.ndarray:
    backend.reserve_kv(4, BLOCK_SIZE)
    return backend.logits(greedy_batch([Chunk(tokens, 0, range(4))]))
