"""Holds keys, values and recurrent states as NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backend.base import Floats
from penstock.backend.kv_formats import KvFormats
from penstock.model.spec import AttentionSpec, KvGroup

F32 = KvFormats("f32", "f32")


class RefCache:
    """Holds keys and values in blocks, [blocks, block_size, kv_heads, D], as their formats round them; for MLA only
    keys and, if positions are selected, index keys. Layers of the same shape that have the same index
    within their KV groups share an array: a block belongs to one group at a time."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        states: int = 0,
        groups: Sequence[KvGroup] = (),
        kv: KvFormats = F32,
    ) -> None:
        self.num_blocks = num_blocks
        self.kv = kv
        self.block_size = block_size
        self.layers: dict[tuple[int, int, int], tuple[Floats, ...]] = {}  # key: index within a group, and shape
        self.states = states
        self.recurrent: dict[int, tuple[Floats, ...]] = {}
        self._places = {
            layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)
        }
        self.hidden_group = next((number for number, group in enumerate(groups) if not group.window), 0)

    def group(self, layer: int) -> int:
        return self._places.get(layer, (0, layer))[0]

    def layer(self, layer: int, spec: AttentionSpec) -> tuple[Floats, ...]:
        key = self._places.get(layer, (0, layer))[1], spec.kv_heads, spec.head_dim
        if key not in self.layers:
            self.kv.check(spec)
            dims = [spec.head_dim] if spec.v_dim else [spec.head_dim] * 2
            dims += [spec.index_dim] if spec.index_dim else []
            shape = (self.num_blocks, self.block_size, spec.kv_heads)
            self.layers[key] = tuple(np.zeros((*shape, each), np.float32) for each in dims)
        return self.layers[key]

    @property
    def arrays(self) -> list[Floats]:
        """Returns all arrays whose first axis is the block, in a fixed order."""
        return [array for index in sorted(self.layers) for array in self.layers[index]]

    def state(self, index: int, shapes: Sequence[tuple[int, ...]]) -> tuple[Floats, ...]:
        """Returns the arrays of a recurrent layer's states, [states, *shape] for each shape."""
        if index not in self.recurrent:
            self.recurrent[index] = tuple(np.full((self.states, *shape), np.nan, np.float32) for shape in shapes)
        return self.recurrent[index]
