"""Mixtures of experts on a GPU: are they right, and how fast, in layers of the Qwen3-30B-A3B shape.

    PYTHONPATH=src python bench/gpu/experts.py [--kinds bf16,Q4_K,MXFP4] [--tokens 1,8,64,512,4096]

Needs torch and Triton, and a GPU to itself. Times are of CUDA graphs over several layers, more than a cache holds.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from products import seconds
from random_weights import random_codes

from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import device_properties
from penstock.backend.cuda.experts import DenseExperts, ExpertMatrices, QuantizedExperts, compute_experts
from penstock.backend.cuda.kernels.dequantize import dequantize_matrix
from penstock.backend.cuda.kernels.expert_routing import ExpertPermutation
from penstock.model.ops import ExpertWeights
from penstock.model.spec import ExpertSpec

DEVICE = torch.device("cuda")
SPEC, DIM = ExpertSpec(128, 8, 768, renormalize=True), 2048
LAYERS = 4
BANDWIDTH = 4.2e12


def matrices(kind: str, rows: int, width: int) -> ExpertMatrices:
    if kind == "bf16":
        values = torch.empty(rows, width, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02)
        return DenseExperts(values, None, Tilings.of(device_properties(DEVICE)))
    return QuantizedExperts(random_codes(kind, rows, width), None)


def values_of(matrices: Any) -> Any:
    if isinstance(matrices, DenseExperts):
        return matrices.weight.float()
    values = torch.empty(matrices.weight.rows, matrices.weight.width, device=DEVICE, dtype=torch.bfloat16)
    dequantize_matrix(matrices.weight, values)
    return values.float()


def bytes_of(matrices: Any) -> int:
    weight = matrices.weight
    return int(weight.nbytes if isinstance(matrices, DenseExperts) else weight.bytes)


class Layer:
    """Holds the experts of one layer and what they compute with."""

    def __init__(self, kind: str, tokens: int) -> None:
        self.experts = ExpertWeights(
            matrices(kind, SPEC.count * 2 * SPEC.hidden, DIM), matrices(kind, SPEC.count * DIM, SPEC.hidden), None
        )
        self.permutation = ExpertPermutation.on(DEVICE, SPEC, tokens)
        half = {"device": DEVICE, "dtype": torch.bfloat16}
        self.x, self.out = torch.randn(tokens, DIM, **half), torch.empty(tokens, DIM, **half)
        self.router_logits = torch.randn(tokens, SPEC.count, device=DEVICE)
        self.choice = [torch.empty(tokens, SPEC.top_k, device=DEVICE) for _ in range(2)]
        widths = 2 * SPEC.hidden, SPEC.hidden, DIM
        self.pairs = [torch.empty(tokens, SPEC.top_k * width, **half) for width in widths]

    def __call__(self) -> None:
        shared = {"experts": self.experts, "spec": SPEC, "permutation": self.permutation}
        compute_experts(self.x, self.router_logits, self.out, *self.choice, *self.pairs, **shared)

    def wanted(self, token: int) -> Any:
        shares, experts = self.router_logits[token].softmax(0).topk(SPEC.top_k)
        up = values_of(self.experts.up).view(SPEC.count, 2, SPEC.hidden, DIM)
        down = values_of(self.experts.down).view(SPEC.count, DIM, SPEC.hidden)
        x = self.x[token].float()
        given = [down[e] @ (torch.nn.functional.silu(up[e, 0] @ x) * (up[e, 1] @ x)) for e in experts.tolist()]
        return (torch.stack(given) * (shares / shares.sum())[:, None]).sum(0)


def measure(kind: str, tokens: int) -> str:
    layers = [Layer(kind, tokens) for _ in range(LAYERS)]
    layers[0]()
    checked = [0, tokens // 2, tokens - 1]
    differences = [
        float((layers[0].out[t].float() - want).abs().max() / want.abs().max())
        for t, want in ((t, layers[0].wanted(t)) for t in checked)
    ]
    assert max(differences) < 2e-2, f"{kind}, {tokens} tokens: {differences}"
    before = layers[0].out.clone()
    time = seconds(list(layers))
    assert torch.equal(before, layers[0].out), f"{kind}, {tokens} tokens: a graph gives something else"
    chosen = layers[0].choice[0].view(torch.int32).unique().numel()
    read = chosen / SPEC.count * sum(bytes_of(part) for part in (layers[0].experts.up, layers[0].experts.down))
    work = 6 * tokens * SPEC.top_k * DIM * SPEC.hidden
    return (
        f"{kind:6} {tokens:5} tokens: {time * 1e6:8.1f} us a layer, {read / time / 1e12:5.2f} TB/s "
        f"({read / BANDWIDTH / time:4.0%} of memory), {work / time / 1e12:6.1f} TFLOP/s, off by {max(differences):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="bf16,Q4_K,MXFP4")
    parser.add_argument("--tokens", default="1,8,64,512,4096")
    options = parser.parse_args()
    for kind in options.kinds.split(","):
        for tokens in map(int, options.tokens.split(",")):
            print(measure(kind, tokens), flush=True)


if __name__ == "__main__":
    main()
