"""Keeps the KV cache of layers: in the type of activations, or in 8 bits with scales (kernels/kv.py says why)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from penstock.errors import ConfigError
from penstock.model.spec import AttentionSpec, KvGroup

KINDS = {"bf16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


class LayerCache(NamedTuple):
    """Holds the keys and values of a layer, or of all layers that have the same index within their KV groups."""

    lines: Any  # [blocks, 2, kv_heads, block_size, D]; for MLA [blocks, block_size, D]
    scales: Any | None  # [blocks, 2, kv_heads, block_size] float32; for MLA [blocks, 2, block_size]
    index_keys: Any | None = None  # [blocks, block_size, D] index keys, where positions are selected

    def by_block(self) -> Iterator[Any]:
        """Yields its arrays as bytes of each block: [blocks, bytes]. Torch does not index every type."""
        for part in self:
            if part is not None:
                yield part.view(torch.uint8).reshape(len(part), -1)


class KvLayout(NamedTuple):
    """Says what caches are made of."""

    dtype: torch.dtype
    scaled: bool
    activations: torch.dtype  # the type of index keys, which have no scales

    def bytes_per_token(self, spec: AttentionSpec) -> int:
        """Returns the bytes of one token in one layer."""
        values, index = (spec.kv_values - spec.index_dim) * self.dtype.itemsize, self.activations.itemsize
        return int(values + spec.index_dim * index) + (8 * spec.kv_heads if self.scaled else 0)

    def reserve(self, spec: AttentionSpec, num_blocks: int, block_size: int, device: torch.device) -> LayerCache:
        """Makes an empty cache for layers of this shape."""
        size = (num_blocks, 2, block_size) if spec.v_dim else (num_blocks, 2, spec.kv_heads, block_size)
        rows = (num_blocks, block_size) if spec.v_dim else size
        lines = torch.zeros((*rows, spec.head_dim * self.dtype.itemsize), dtype=torch.uint8, device=device)
        scales = torch.zeros(size, device=device) if self.scaled else None
        if not spec.index_dim:
            return LayerCache(lines.view(self.dtype), scales)
        index = torch.zeros((*rows, spec.index_dim), dtype=self.activations, device=device)
        return LayerCache(lines.view(self.dtype), scales, index)


def layout_of(kind: str, activations: torch.dtype) -> KvLayout:
    """Returns the layout that `--kv` names."""
    if kind not in ("auto", *KINDS):
        raise ConfigError(f"unknown KV type {kind!r} on CUDA: use auto or one of {', '.join(KINDS)}")
    eight = None if kind == "auto" else KINDS[kind]
    return KvLayout(eight or activations, eight is not None, activations)


def by_index(layers: Mapping[int, AttentionSpec], groups: Sequence[KvGroup]) -> list[list[int]]:
    """Returns the layers that share a cache: those that have the same index within their groups. Without groups each
    layer has its own. Raises ValueError if a layer is missing or has another shape than those it would share with."""
    listed = [group.layers for group in groups] or [tuple(layers)]
    if sorted(layer for group in listed for layer in group) != sorted(layers):
        raise ValueError(f"every layer that keeps KV is in one group, once; got {listed} for layers {sorted(layers)}")
    sharing = [[group[index] for group in listed if index < len(group)] for index in range(max(map(len, listed)))]
    for some in sharing:
        shapes = {(a.kv_heads, a.head_dim, a.v_dim, a.index_dim) for a in map(layers.__getitem__, some)}
        if len(shapes) > 1:
            raise ValueError(f"groups need layers of the same shape; layers {some} differ")
    return sharing


def copy_blocks(caches: Iterable[LayerCache], source: Any, target: Any) -> None:
    """Copies blocks, given as two tensors of block ids."""
    for cache in caches:
        for data in cache.by_block():
            data[target] = data[source]


def export_blocks(caches: Iterable[LayerCache], blocks: Any) -> bytes:
    """Returns the contents of blocks, one after the other, fetched with one copy."""
    found = torch.cat([data[blocks] for cache in caches for data in cache.by_block()], dim=1)
    return bytes(found.cpu().numpy().tobytes())


def import_blocks(caches: Sequence[LayerCache], blocks: Any, data: bytes) -> None:
    """Writes the contents of blocks as `export_blocks` returned them, sent with one copy."""
    targets = [target for cache in caches for target in cache.by_block()]
    sizes = [target.shape[1] for target in targets]
    if len(data) != len(blocks) * sum(sizes):
        raise ValueError(f"{len(blocks)} KV blocks take {len(blocks) * sum(sizes)} bytes; got {len(data)}")
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(blocks.device).view(len(blocks), sum(sizes))
    for target, values in zip(targets, sent.split(sizes, dim=1), strict=True):
        target[blocks] = values
