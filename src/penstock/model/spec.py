"""What a model is: the numbers its architecture needs, read from a checkpoint's own config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: position p turns pair i by p * inv_freq[i]; cos and sin are scaled by `scale`. Dimensions of a
    head beyond those pairs stay as they are; so do all where there are none."""

    inv_freq: tuple[float, ...]
    interleaved: bool  # pairs are (2i, 2i+1) as in GGUF llama files, or (i, i + pairs) as in Hugging Face's
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # 0: sees everything before; else the last `window` positions, itself included
    multiplier: float = 0.0  # of scores; 0: one over the root of head_dim
    soft_cap: float = 0.0  # of scores; 0: none
    qk_norm: Literal["", "head", "all"] = ""  # over what q and k are normed: nothing, each head, all of them

    @property
    def scale(self) -> float:
        return self.multiplier or float(self.head_dim**-0.5)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    arch: str  # a key of model.registry
    layers: int
    dim: int
    hidden: int
    vocab: int
    max_len: int
    eps: float
    attn: AttentionSpec
    act: str = "silu"
    tied: bool = False  # the output head is the embedding table
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # 0: none
    gain_offset: float = 0.0  # what is added to the gain of every norm
    layer_attn: tuple[AttentionSpec, ...] = ()  # of each layer, where they differ; all have the heads of `attn`
    biases: frozenset[str] | None = None  # parts of a layer that have one; None: the checkpoint does not say

    def attention(self, layer: int) -> AttentionSpec:
        return self.layer_attn[layer] if self.layer_attn else self.attn

    def with_attention(self, layers: Sequence[AttentionSpec]) -> ModelSpec:
        """With these in each layer."""
        differ = len(set(layers)) > 1
        return replace(self, attn=layers[0], layer_attn=tuple(layers) if differ else ())

    def with_windows(self, sliding: Sequence[bool], window: int) -> ModelSpec:
        """With a window in those layers that have one."""
        return self.with_attention([replace(self.attn, window=window if one else 0) for one in sliding])


def all_but_each(nth: int, layers: int) -> list[bool]:
    return [(layer + 1) % nth != 0 for layer in range(layers)]
