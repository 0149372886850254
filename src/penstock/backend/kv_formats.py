"""Defines the formats of KV caches: their rounding of keys and values, and their bytes.

`--kv` names one format, or two with a colon between them, KEYS:VALUES. int8 has one scale for each
position and head. int4 has one for every 32 dimensions, and keys get a Hadamard transform first, which queries get too:
keys have a few large dimensions, which it spreads over all. Values have none, so they stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from penstock.backend.base import Floats
from penstock.config import AUTO
from penstock.config.values import kv_parts
from penstock.errors import ConfigError
from penstock.model.spec import AttentionSpec

GROUP = 32  # dimensions of a head that share a scale of int4


class KvFormat(NamedTuple):
    """Says how one side of a KV cache, keys or values, is stored."""

    bits: int  # per value
    scale_bytes: int = 0
    group: int = 0  # dimensions that share a scale; 0: all of a head

    def bytes(self, dims: int) -> int:
        return dims * self.bits // 8 + self.scale_bytes * (dims // self.group if self.group else 1)


KV_FORMATS = {
    "f32": KvFormat(32),
    "f16": KvFormat(16),
    "bf16": KvFormat(16),
    "fp8": KvFormat(8, 4),
    "int8": KvFormat(8, 4),
    "int4": KvFormat(4, 2, GROUP),
}


class KvFormats(NamedTuple):
    """Names the formats of keys and of values."""

    keys: str
    values: str

    @classmethod
    def parse(cls, kv: str, known: Sequence[str], device: str) -> KvFormats:
        """Reads what `--kv` takes on a device that knows these formats; the first of them is what auto means. Raises
        ConfigError for any other."""
        parts = [known[0] if part == AUTO else part for part in kv_parts(kv)]
        if not set(parts) <= set(known):
            raise ConfigError(
                f"unknown KV type {kv!r} {device}: use auto, one of {', '.join(known)}, or two of them, "
                "KEYS:VALUES, for keys and values"
            )
        return cls(*parts)

    @property
    def name(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}:{self.values}"

    def check(self, spec: AttentionSpec) -> None:
        groups = [KV_FORMATS[side].group for side in self]
        if spec.v_dim and (any(groups) or self.keys != self.values):
            raise ConfigError(
                f"a KV cache in {self.name} is not possible for this model: its attention (MLA) keeps keys and values "
                "in one vector: leave out --kv, or use int8"
            )
        if any(group and spec.head_dim % group for group in groups):
            raise ConfigError(
                f"a KV cache in {self.name} is not possible for this model: int4 needs heads of a multiple of {GROUP} "
                f"dimensions, and this model's have {spec.head_dim}: leave out --kv, or use int8"
            )

    def bytes_per_token(self, spec: AttentionSpec) -> int:
        """Returns the bytes of one token in a layer: of each head's key and value, or of the one vector of MLA, which
        has two scales; and of its index key."""
        self.check(spec)
        keys, values = (KV_FORMATS[side] for side in self)
        index = keys.bytes(spec.index_dim) if spec.index_dim else 0
        if spec.v_dim:
            return keys.bytes(spec.head_dim) + keys.scale_bytes + index
        return spec.kv_heads * (keys.bytes(spec.head_dim) + values.bytes(spec.head_dim)) + index

    def stored_keys(self, keys: Floats) -> Floats:
        if not KV_FORMATS[self.keys].group:
            return rounded(keys, self.keys)
        matrix = hadamard(keys.shape[-1])
        return rounded(keys @ matrix, self.keys) @ matrix

    def stored_values(self, values: Floats) -> Floats:
        return rounded(values, self.values)

    def stored_mla(self, keys: Floats, v_dim: int) -> Floats:
        """Returns vectors of MLA as a cache gives them back. The last dimensions are the values; both parts have
        their own scales."""
        parts = np.split(keys, [keys.shape[-1] - v_dim], axis=-1)
        return np.concatenate([rounded(part, self.keys) for part in parts], axis=-1)


@cache
def hadamard(dims: int) -> Floats:
    """Returns the matrix [dims, dims] of the transform, its own inverse: a Hadamard matrix for each run of dimensions
    as long as the largest power of two that divides them."""
    matrix = np.ones((1, 1), np.float32)
    while dims % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    runs = np.eye(dims // len(matrix), dtype=np.float32)
    return np.asarray(np.kron(runs, matrix / np.sqrt(len(matrix))), np.float32)


def rounded(x: Floats, name: str) -> Floats:
    if name == "int8":
        scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        return np.asarray(np.rint(divided(x, scale)) * scale, np.float32)
    if name == "int4":
        return rounded_to_int4(x.reshape(*x.shape[:-1], -1, GROUP)).reshape(x.shape)
    return x.astype(np.float16).astype(np.float32) if name == "f16" else x


def rounded_to_int4(x: Floats) -> Floats:
    """Returns groups [..., GROUP] as int4 rounds them. The largest value by magnitude has the code -8, so that the
    one code without a counterpart is used."""
    most, least = x.max(-1, keepdims=True), x.min(-1, keepdims=True)
    scale = np.where(-least >= most, least, most) / np.float32(-8)
    scale = np.clip(scale, -65504, 65504).astype(np.float16).astype(np.float32)
    return np.asarray(np.clip(np.rint(divided(x, scale)), -8, 7) * scale, np.float32)


def divided(x: Floats, scale: Floats) -> Floats:
    return np.asarray(np.where(scale == 0, 0, x / np.where(scale == 0, 1, scale)), np.float32)
