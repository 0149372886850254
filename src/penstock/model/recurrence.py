"""Describes recurrent layers, which keep a fixed-size state of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from penstock.errors import MalformedFile, UnsupportedModel

MAX_CONV_WIDTH = 16  # positions, including the current one
MAX_STATE_SIZE = 256  # numbers per channel in a selective scan
CHUNK = 64  # prompt tokens per chunk of a delta net on a GPU
MAX_CHUNKED_KEYS = 128  # largest key that chunks support: its chunk must fit into registers and shared memory


class RecurrentSpec(Protocol):
    """Describes a recurrent layer's memory, for any kind of layer."""

    @property
    def width(self) -> int:
        """Returns the number of convolved or scanned channels."""

    @property
    def state_floats(self) -> int:
        """Returns the state size of a sequence in one layer."""

    @property
    def workspace(self) -> int:
        """Returns the 16-bit activations per token that a GPU needs while the layer computes."""

    def check(self) -> None:
        """Raises if no backend supports these sizes."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Describes a gated delta net. Each value head has a state [k_dim, v_dim], which keys update and queries read."""

    k_heads: int  # query and key heads
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int  # positions in the preceding convolution, including the current one
    tiled: bool = False  # value head h uses key head h % k_heads; else neighbours share one
    channel_decay: bool = False  # each row of a head's state has its own decay
    gate: Literal["silu", "sigmoid"] = "silu"  # activation of z, which multiplies the output

    @property
    def k_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def width(self) -> int:
        return 2 * self.k_width + self.v_width

    @property
    def decay_width(self) -> int:
        return self.v_heads * (self.k_dim if self.channel_decay else 1)

    @property
    def state_floats(self) -> int:
        return self.k_dim * self.v_width + (self.conv_width - 1) * self.width

    @property
    def chunked(self) -> bool:
        """Returns True if a GPU processes prompts in chunks. Per-channel decay prevents matrix products, and chunks
        took 1.5 times as long as single tokens.
        """
        return self.k_dim <= MAX_CHUNKED_KEYS and not self.channel_decay

    @property
    def pairs_width(self) -> int:
        return CHUNK * self.v_heads if self.chunked else 0

    @property
    def workspace(self) -> int:
        return 3 * self.width + 4 * self.v_width + self.decay_width + 4 * self.pairs_width

    def check(self) -> None:
        if self.v_heads % self.k_heads:
            raise MalformedFile(
                f"{self.v_heads} value heads of a delta net cannot share {self.k_heads} key heads evenly"
            )
        check_convolution(self.conv_width)


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Describes a causal per-channel convolution over time."""

    width: int  # channels
    conv_width: int  # positions, including the current one
    gated: bool = False  # the product of two inputs is convolved and multiplied by a third; else silu follows

    @property
    def state_floats(self) -> int:
        return (self.conv_width - 1) * self.width

    @property
    def workspace(self) -> int:
        return (4 if self.gated else 3) * self.width

    def check(self) -> None:
        if self.conv_width < 2:
            raise UnsupportedModel("the convolution covers 1 position, so it has no state; supported: 2 or more")
        check_convolution(self.conv_width)


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """Describes Mamba's selective scan, where each channel has a small state."""

    width: int  # channels
    state_size: int  # numbers per channel

    @property
    def state_floats(self) -> int:
        return self.width * self.state_size

    @property
    def workspace(self) -> int:
        return 3 * self.width + 4 * self.state_size

    def check(self) -> None:
        if self.state_size > MAX_STATE_SIZE:
            raise UnsupportedModel(
                f"each channel of the selective scan has {self.state_size} numbers; supported: at most {MAX_STATE_SIZE}"
            )


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Describes a Mamba layer: a convolution and a selective scan, each with a state of its own."""

    conv: ConvSpec
    scan: ScanSpec
    dt_rank: int  # input width of the time step projection

    @property
    def width(self) -> int:
        return self.conv.width

    @property
    def state_floats(self) -> int:
        return self.conv.state_floats + self.scan.state_floats

    @property
    def workspace(self) -> int:
        return self.conv.workspace + self.scan.workspace + 2 * self.dt_rank

    def check(self) -> None:
        self.conv.check()
        self.scan.check()


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Describes Mamba2 (state space duality). Each head's state [state_dim, head_dim] decays by one number a token."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int  # neighbouring heads share their group's B and C
    conv_width: int  # positions in the preceding convolution, including the current one
    eps: float = 1e-5
    norm_groups: int = 1  # separately normed parts of the output; 0: gated, not normed
    z_scale: float = 1.0
    dt_scale: float = 1.0
    dt_min: float = 0.0  # clamps of the time steps
    dt_max: float = inf

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Returns the convolved width: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def in_width(self) -> int:
        return self.inner + self.width + self.heads

    @property
    def state_floats(self) -> int:
        return self.state_dim * self.inner + (self.conv_width - 1) * self.width

    @property
    def workspace(self) -> int:
        return self.in_width + 2 * self.width + 3 * self.inner

    def check(self) -> None:
        if self.heads % self.groups:
            raise MalformedFile(f"{self.heads} heads of Mamba2 cannot share {self.groups} groups of B and C evenly")
        if self.norm_groups and self.inner % self.norm_groups:
            raise MalformedFile(f"the width {self.inner} of Mamba2 cannot be normed in {self.norm_groups} equal groups")
        check_convolution(self.conv_width)


def check_convolution(width: int) -> None:
    """Raises if no backend supports a convolution of this width."""
    if width > MAX_CONV_WIDTH:
        raise UnsupportedModel(f"the convolution covers {width} positions; supported: at most {MAX_CONV_WIDTH}")
