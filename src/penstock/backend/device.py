"""Defines the declaration of a kind of device. It imports nothing that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.backend.base import Backend
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache
    from penstock.config import Config

Open = Callable[["Config", "Device", "Sequence[PackedCache | None]", "KvFile | None"], "Backend"]
Tune = Callable[[Callable[[str], None]], object]


class LayerShape(NamedTuple):
    """Gives the shape of the layers of a calibration model."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


class Calibration(NamedTuple):
    """Gives the sizes of the models that calibrate a device: usual matrices, and more bytes than its caches hold."""

    large: LayerShape
    small: LayerShape  # its layers cost little more than the overhead of a layer
    bytes: int  # all weights
    tokens: int  # one prompt
    rows: tuple[int, ...]  # sequences that decode together
    formats: tuple[str, ...]  # the usual formats of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Declares a kind of device. Every backend has one declaration, `DEVICE` in its device.py."""

    name: str  # as in --device
    help: str  # its names in --help
    noun: str = ""  # "a GPU"; empty: this machine's processors
    indexed: bool = False  # NAME:N is the device with the index N
    order: int  # --device auto takes the first available kind
    open: Open  # `packed`: a file of packed weights per program; `kv_file`: memory for the KV cache
    is_available: Callable[[], bool]  # imports the libraries if it has to; logs a reason that a user would not expect
    is_present: Callable[[], bool] = lambda: True  # quick: a look for the hardware

    defaults: Mapping[str, int]  # values of options whose default is 0
    fp8_defaults: Mapping[str, int] = field(default_factory=dict)  # those that differ for FP8 weights
    quantizations: Mapping[str, str]  # --quantize: the format that weights are recoded to; empty: the backend does it
    quantizes_heads: bool = True  # there are quantized kernels for the per-head matrices of MLA
    kv_formats: tuple[str, ...]  # the first is the default
    exact_kv: str = "auto"  # KV format of encoders
    cached_weights: bool = False  # packed weights are kept on disk
    kv_in_file: bool = False  # the KV cache can lie in a file, which the next engine process maps
    exports_memory: bool = False  # the next engine process can map the device's memory

    own_memory: bool = False  # separate from the host's, and with room for one engine
    computes_in_numpy: bool = False
    kernel_cache: str = ""  # environment variable with the folder of compiled kernels
    cluster_resource: str = ""  # name of the device in a cluster's resources
    packages: tuple[str, ...] = ()  # optional packages that it needs
    extra: str = ""  # the extra of Penstock that installs them
    hardware: str = ""  # "NVIDIA GPUs", in lists of packages

    eval_windows: int = 1  # windows of a text that are evaluated in one step
    calibration: Calibration | None = None  # None: speed is not measured
    tune: Tune | None = None  # measures kernels and keeps the fastest; returns the file


class Device(NamedTuple):
    """Names one device."""

    kind: DeviceKind
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name}:{self.number}" if self.kind.indexed else self.kind.name
