"""Describes recurrent layers: those that keep what they have seen of a sequence in a state of one size."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

from penstock.errors import MalformedFile, UnsupportedModel

MAX_CONV_WIDTH = 16  # positions that a convolution sees at most, its own included
MAX_STATE_SIZE = 256  # numbers of a channel's state in a selective scan
CHUNK = 64  # tokens of a prompt that a GPU takes through a delta net at once
MAX_CHUNKED_KEYS = 128  # numbers of a key, where it does: those of a chunk must fit into registers and shared memory


class RecurrentSpec(Protocol):
    """Describes a recurrent layer of any kind to those that only make room for it."""

    @property
    def width(self) -> int:
        """Returns how many channels are convolved or scanned."""

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state in a layer."""

    @property
    def workspace(self) -> int:
        """Returns how many activations of 16 bits a token takes on a GPU while the layer computes."""

    def check(self) -> None:
        """Raises if no backend computes such sizes."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Describes a gated delta net. Each value head has a state [k_dim, v_dim] that keys write values to and queries
    read."""

    k_heads: int  # heads of queries and keys
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int  # positions that the convolution before it sees, its own included
    tiled: bool = False  # value head h has key head h % k_heads; else neighbours share one
    channel_decay: bool = False  # each row of a head's state decays by a gate of its own; else all by one
    gate: Literal["silu", "sigmoid"] = "silu"  # what the output is multiplied by, of z

    @property
    def k_width(self) -> int:
        """Returns the width of the keys of all heads."""
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        """Returns the width of the values of all heads."""
        return self.v_heads * self.v_dim

    @property
    def width(self) -> int:
        """Returns the width of what is convolved: q, k and v."""
        return 2 * self.k_width + self.v_width

    @property
    def decay_width(self) -> int:
        """Returns how many gates decide how fast the states of all heads decay."""
        return self.v_heads * (self.k_dim if self.channel_decay else 1)

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state in a layer: the heads' states and the last inputs of the
        convolution."""
        return self.k_dim * self.v_width + (self.conv_width - 1) * self.width

    @property
    def chunked(self) -> bool:
        """Returns whether a GPU takes prompts through in chunks, and not token by token. With a gate for each channel,
        products of keys are no matrix products: chunks took 1.5 times as long as tokens."""
        return self.k_dim <= MAX_CHUNKED_KEYS and not self.channel_decay

    @property
    def pairs_width(self) -> int:
        """Returns how many numbers of all heads a token has for the tokens of its chunk."""
        return CHUNK * self.v_heads if self.chunked else 0

    @property
    def workspace(self) -> int:
        """Returns how many activations a token takes on a GPU while the delta net computes; some are of 32 bits."""
        return 3 * self.width + 4 * self.v_width + self.decay_width + 4 * self.pairs_width

    def check(self) -> None:
        """Raises if no backend computes such sizes."""
        if self.v_heads % self.k_heads:
            raise MalformedFile(
                f"{self.v_heads} value heads of a delta net cannot share {self.k_heads} key heads evenly"
            )
        check_convolution(self.conv_width)


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Describes a causal convolution over time, which each channel has for itself."""

    width: int  # channels
    conv_width: int  # positions that it sees, its own included
    gated: bool = False  # it takes the product of two inputs and is multiplied by a third; else silu follows

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state in a layer: the last inputs of the convolution."""
        return (self.conv_width - 1) * self.width

    @property
    def workspace(self) -> int:
        """Returns how many activations a token takes on a GPU while the convolution computes."""
        return (4 if self.gated else 3) * self.width

    def check(self) -> None:
        """Raises if no backend computes such sizes."""
        if self.conv_width < 2:
            raise UnsupportedModel("the convolution covers 1 position, so it has no state; supported: 2 or more")
        check_convolution(self.conv_width)


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """Describes the selective scan of Mamba, where each channel has a state of a few numbers."""

    width: int  # channels
    state_size: int  # numbers of each

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state in a layer."""
        return self.width * self.state_size

    @property
    def workspace(self) -> int:
        """Returns how many activations a token takes on a GPU while the scan computes; some are of 32 bits."""
        return 3 * self.width + 4 * self.state_size

    def check(self) -> None:
        """Raises if no backend computes such sizes."""
        if self.state_size > MAX_STATE_SIZE:
            raise UnsupportedModel(
                f"each channel of the selective scan has {self.state_size} numbers; supported: at most {MAX_STATE_SIZE}"
            )


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Describes a Mamba layer: a convolution and a selective scan, each with a state of its own."""

    conv: ConvSpec
    scan: ScanSpec
    dt_rank: int  # width of what time steps are projected from

    @property
    def width(self) -> int:
        """Returns how many channels it has."""
        return self.conv.width

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's states in a layer."""
        return self.conv.state_floats + self.scan.state_floats

    @property
    def workspace(self) -> int:
        """Returns how many activations a token takes on a GPU while the layer computes."""
        return self.conv.workspace + self.scan.workspace + 2 * self.dt_rank

    def check(self) -> None:
        """Raises if no backend computes such sizes."""
        self.conv.check()
        self.scan.check()


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Describes Mamba2 (state space duality). Each head has a state [state_dim, head_dim] that decays by one number per
    token."""

    heads: int
    head_dim: int
    state_dim: int
    groups: int  # neighbouring heads share the B and C of their group
    conv_width: int  # positions that the convolution before it sees, its own included
    eps: float = 1e-5  # of its norm
    norm_groups: int = 1  # parts of its output that are normed on their own; 0: it is gated and not normed
    z_scale: float = 1.0
    dt_scale: float = 1.0
    dt_min: float = 0.0  # time steps are clamped to between these
    dt_max: float = inf

    @property
    def inner(self) -> int:
        """Returns the width of all heads."""
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """Returns the width of what is convolved: x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def in_width(self) -> int:
        """Returns the width of its input: z, x, B, C and dt."""
        return self.inner + self.width + self.heads

    @property
    def state_floats(self) -> int:
        """Returns the size of a sequence's state in a layer: the heads' states and the last inputs of the
        convolution."""
        return self.state_dim * self.inner + (self.conv_width - 1) * self.width

    @property
    def workspace(self) -> int:
        """Returns how many activations a token takes on a GPU while Mamba2 computes; some are of 32 bits."""
        return self.in_width + 2 * self.width + 3 * self.inner

    def check(self) -> None:
        """Raises if no backend computes such sizes."""
        if self.heads % self.groups:
            raise MalformedFile(f"{self.heads} heads of Mamba2 cannot share {self.groups} groups of B and C evenly")
        if self.norm_groups and self.inner % self.norm_groups:
            raise MalformedFile(f"the width {self.inner} of Mamba2 cannot be normed in {self.norm_groups} equal groups")
        check_convolution(self.conv_width)


def check_convolution(width: int) -> None:
    """Raises if a convolution over time covers more positions than backends compute."""
    if width > MAX_CONV_WIDTH:
        raise UnsupportedModel(f"the convolution covers {width} positions; supported: at most {MAX_CONV_WIDTH}")
