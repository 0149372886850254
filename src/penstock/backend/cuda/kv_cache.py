"""The KV cache of a layer: in the type of activations, or in 8 bits with scales (kernels/kv.py says why)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.model.spec import AttentionSpec

KINDS = {"bf16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


class Cache(NamedTuple):
    lines: Any  # [blocks, 2, kv_heads, block_size, D]; of latent attention [blocks, block_size, D]
    scales: Any | None  # [blocks, 2, kv_heads, block_size] float32; of latent attention [blocks, 2, block_size]

    def copy_blocks(self, source: Any, target: Any) -> None:
        for part in self:
            if part is not None:
                data = part.view(torch.uint8)  # torch does not index every type
                data[target] = data[source]


class Layout(NamedTuple):
    """What caches are made of."""

    dtype: torch.dtype
    scaled: bool

    def bytes_per_token(self, spec: AttentionSpec) -> int:
        return spec.kv_values * int(self.dtype.itemsize) + (8 * spec.kv_heads if self.scaled else 0)

    def reserve(self, spec: AttentionSpec, num_blocks: int, block_size: int, device: torch.device) -> Cache:
        size = (num_blocks, 2, block_size) if spec.v_dim else (num_blocks, 2, spec.kv_heads, block_size)
        rows = (num_blocks, block_size) if spec.v_dim else size
        lines = torch.zeros((*rows, spec.head_dim * self.dtype.itemsize), dtype=torch.uint8, device=device)
        return Cache(lines.view(self.dtype), torch.zeros(size, device=device) if self.scaled else None)


def layout_of(kind: str, activations: torch.dtype) -> Layout:
    if kind not in ("auto", *KINDS):
        raise ConfigError(f"unknown KV type {kind!r} on CUDA: use auto or one of {', '.join(KINDS)}")
    eight = None if kind == "auto" else KINDS[kind]
    return Layout(eight or activations, eight is not None)
