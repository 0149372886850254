"""What a model is: the numbers its architecture needs, read from a checkpoint's own config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: position p turns pair i by p * inv_freq[i]; cos and sin are scaled by `scale`."""

    inv_freq: tuple[float, ...]
    interleaved: bool  # pairs are (2i, 2i+1) as in GGUF llama files, or (i, i + dims/2) as in Hugging Face's
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int = 0  # 0: sees everything before; else the last `window` positions, itself included

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

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
