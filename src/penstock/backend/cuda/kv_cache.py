"""Keeps the KV cache of layers: in the type of activations, or in 8 or 4 bits with scales (see kernels/kv8.py).

Keys and values in one format, of 8 or 16 bits, lie in one tensor; else each has a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.arena import Arena
from penstock.backend.kv_formats import KV_FORMATS, KvFormats
from penstock.errors import ConfigError
from penstock.model.spec import AttentionSpec, KvGroup

KINDS = {"bf16": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}


class LayerCache(NamedTuple):
    """Holds the keys and values of a layer, or of all layers that lie at the same place within blocks."""

    lines: Any  # [blocks, 2, kv_heads, block_size, D], or keys and values apart; for MLA [blocks, block_size, D]
    scales: Any | None  # [blocks, 2, kv_heads, block_size] float32, or a pair; for MLA [blocks, 2, block_size]
    index_keys: Any | None = None  # [blocks, block_size, D] index keys, where positions are selected

    def by_block(self) -> Iterator[Any]:
        """Yields its arrays as bytes of each block: [blocks, bytes]. Torch does not index every type."""
        for part in self.parts():
            yield part.view(torch.uint8).reshape(len(part), -1)

    def parts(self) -> list[Any]:
        sides = [part if isinstance(part, tuple) else (part,) for part in self]
        return [part for pair in sides for part in pair if part is not None]


class KvLayout(NamedTuple):
    """Describes the layout of caches."""

    dtype: torch.dtype
    scaled: bool
    activations: torch.dtype  # the type of index keys, which have no scales
    apart: KvFormats | None = None  # formats of keys and values in separate tensors

    @property
    def is_kv8(self) -> bool:
        return self.scaled and self.apart is None

    def bytes_per_token(self, spec: AttentionSpec) -> int:
        if self.apart:
            self.apart.check(spec)
            return spec.kv_heads * sum(self._side_bytes(side, spec.head_dim) for side in self.apart)
        values, index = (spec.kv_values - spec.index_dim) * self.dtype.itemsize, self.activations.itemsize
        return int(values + spec.index_dim * index) + (8 * spec.kv_heads if self.scaled else 0)

    def _side_bytes(self, side: str, dims: int) -> int:
        return int(dims * self.activations.itemsize) if KINDS[side] is None else KV_FORMATS[side].bytes(dims)

    def _reserve_sides(self, sides: KvFormats, spec: AttentionSpec, size: tuple[int, int], arena: Arena) -> LayerCache:
        sides.check(spec)
        lines, scales, rows = [], [], (size[0], spec.kv_heads, size[1])
        for side in sides:
            dtype, format = KINDS[side], KV_FORMATS[side]
            width = spec.head_dim // 2 if format.group else spec.head_dim * (dtype or self.activations).itemsize
            lines.append(arena.zeros((*rows, width), torch.uint8).view(dtype or self.activations))
            if format.group:
                scales.append(arena.zeros((*rows, spec.head_dim // format.group), torch.float16))
            else:
                scales.append(arena.zeros(rows) if dtype else None)
        return LayerCache(tuple(lines), tuple(scales))

    def reserve(self, spec: AttentionSpec, num_blocks: int, block_size: int, arena: Arena) -> LayerCache:
        if self.apart:
            return self._reserve_sides(self.apart, spec, (num_blocks, block_size), arena)
        size = (num_blocks, 2, block_size) if spec.v_dim else (num_blocks, 2, spec.kv_heads, block_size)
        rows = (num_blocks, block_size) if spec.v_dim else size
        lines = arena.zeros((*rows, spec.head_dim * self.dtype.itemsize), torch.uint8)
        scales = arena.zeros(size) if self.scaled else None
        if not spec.index_dim:
            return LayerCache(lines.view(self.dtype), scales)
        index = arena.zeros((*rows, spec.index_dim), self.activations)
        return LayerCache(lines.view(self.dtype), scales, index)


def layout_of(kind: str, activations: torch.dtype) -> KvLayout:
    formats = KvFormats.parse(kind, list(KINDS), "on CUDA")
    keys = KINDS[formats.keys]
    apart = formats.keys != formats.values or KV_FORMATS[formats.keys].group
    return KvLayout(keys or activations, keys is not None, activations, formats if apart else None)


class KvPlace(NamedTuple):
    """Says where a layer lies within each block: in which plane, and after how many values of a token there."""

    plane: int
    offset: int


def places_of(layers: Mapping[int, AttentionSpec], groups: Sequence[KvGroup]) -> dict[int, KvPlace]:
    """Returns where layers lie. A plane has room for the largest layer, or for several smaller ones, and each
    group fills planes from the first one on: a block belongs to one group at a time. Without groups all layers are one.
    Raises ValueError if a layer is in no group, or in two."""
    listed = [group.layers for group in groups] or [tuple(layers)]
    if sorted(layer for group in listed for layer in group) != sorted(layers):
        raise ValueError(f"every layer that keeps KV is in one group, once; got {listed} for layers {sorted(layers)}")
    room = max([spec.kv_values for spec in layers.values()], default=0)
    places: dict[int, KvPlace] = {}
    for group in listed:
        if any(layers[layer].v_dim for layer in group):  # MLA: each layer has a plane of its own shape
            places |= {layer: KvPlace(index, 0) for index, layer in enumerate(group)}
            continue
        plane = offset = 0
        for layer in group:
            values = layers[layer].kv_values
            if offset + values > room:
                plane, offset = plane + 1, 0
            places[layer] = KvPlace(plane, offset)
            offset += values
    return places


def reserve_caches(
    layout: KvLayout,
    layers: Mapping[int, AttentionSpec],
    groups: Sequence[KvGroup],
    size: tuple[int, int],
    arena: Arena,
) -> tuple[dict[int, LayerCache], list[LayerCache]]:
    """Makes empty caches of `size` (blocks, positions of each); returns each layer's, and the planes of
    all blocks. Layers that lie at the same place in different groups share a cache."""
    places = places_of(layers, groups)
    shapes = {(spec.kv_heads, spec.head_dim) for spec in layers.values()}
    if len(shapes) <= 1 or any(spec.v_dim for spec in layers.values()):
        specs = {place: layers[layer] for layer, place in places.items()}
        planes = {place: layout.reserve(spec, *size, arena) for place, spec in specs.items()}
        return {layer: planes[place] for layer, place in places.items()}, list(planes.values())
    if layout.apart:
        raise ConfigError(
            f"a KV cache in {layout.apart.name} is not possible on a GPU for a model whose layers have heads of "
            "different sizes: leave out --kv, or use int8"
        )
    return reserve_mixed(layout, layers, places, size, arena)


def reserve_mixed(
    layout: KvLayout,
    layers: Mapping[int, AttentionSpec],
    places: Mapping[int, KvPlace],
    size: tuple[int, int],
    arena: Arena,
) -> tuple[dict[int, LayerCache], list[LayerCache]]:
    """Makes caches for layers of different shapes, which are views of their planes. Scales are kept for each shape."""
    (blocks, block_size), unit = size, lcm(*(spec.head_dim for spec in layers.values()))
    room = max(spec.kv_values for spec in layers.values()) * block_size
    room = -(-room // unit) * unit  # a whole number of lines of every shape
    count = 1 + max(place.plane for place in places.values())
    memory = [arena.zeros((blocks, room * layout.dtype.itemsize), torch.uint8) for _ in range(count)]
    planes = [LayerCache(plane.view(layout.dtype), None) for plane in memory]
    found: dict[tuple[KvPlace, int, int], LayerCache] = {}
    for layer, place in places.items():
        spec = layers[layer]
        key = place, spec.kv_heads, spec.head_dim
        if key in found:
            continue
        shape = blocks, 2, spec.kv_heads, block_size, spec.head_dim
        line = spec.head_dim
        strides = room, spec.kv_heads * block_size * line, block_size * line, line, 1
        plane = planes[place.plane].lines
        lines = plane.as_strided(shape, strides, plane.storage_offset() + place.offset * block_size)
        scales = arena.zeros((blocks, room // line)) if layout.scaled else None
        found[key] = LayerCache(lines, scales)
    caches = {layer: found[place, layers[layer].kv_heads, layers[layer].head_dim] for layer, place in places.items()}
    return caches, planes + [LayerCache(None, cache.scales) for cache in found.values() if cache.scales is not None]


def copy_blocks(caches: Iterable[LayerCache], source: Any, target: Any) -> None:
    for cache in caches:
        for data in cache.by_block():
            data[target] = data[source]


def export_blocks(caches: Iterable[LayerCache], blocks: Any) -> bytes:
    found = torch.cat([data[blocks] for cache in caches for data in cache.by_block()], dim=1)
    return bytes(found.cpu().numpy().tobytes())


def import_blocks(caches: Sequence[LayerCache], blocks: Any, data: bytes | memoryview) -> None:
    targets = [target for cache in caches for target in cache.by_block()]
    sizes = [target.shape[1] for target in targets]
    if len(data) != len(blocks) * sum(sizes):
        raise ValueError(f"{len(blocks)} KV blocks take {len(blocks) * sum(sizes)} bytes; got {len(data)}")
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(blocks.device).view(len(blocks), sum(sizes))
    for target, values in zip(targets, sent.split(sizes, dim=1), strict=True):
        target[blocks] = values
