"""Keeps the tilings that `penstock doctor --tune` measured, in a JSON file in the store's folder. It imports no torch.

The file has an entry for each GPU and each version of Penstock and Triton: with another version, kernels are others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from math import log2
from pathlib import Path

from penstock import __version__
from penstock.config import home

log = logging.getLogger(__name__)
FILE = "tilings.json"
FARTHEST = 1.0  # powers of two, in rows and width together, up to which a measured matrix stands for another


@dataclass(frozen=True, slots=True)
class Product:
    """Names a product that has a tiling: `count` rows with a matrix [rows, width]."""

    kernel: str
    kind: str  # the matrix: bits, groups
    count: int
    rows: int
    width: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class TunedTilings:
    """Finds measured tilings."""

    measured: dict[Product, tuple[int, ...]] = field(default_factory=dict)

    def find(self, product: Product) -> tuple[int, ...] | None:
        """Returns the tiling of the nearest measured matrix, for the same number of rows or the next larger one that
        was measured; None if there is none near enough."""
        alike = [
            (each.count, distance(each, product), tiling)
            for each, tiling in self.measured.items()
            if (each.kernel, each.kind, each.gated) == (product.kernel, product.kind, product.gated)
            and each.count >= product.count
        ]
        near = [each for each in alike if each[1] <= FARTHEST]
        return min(near)[2] if near else None


def distance(a: Product, b: Product) -> float:
    """Returns how different two matrices are, in powers of two."""
    return abs(log2(a.rows / b.rows)) + abs(log2(a.width / b.width))


def default_path() -> Path:
    return home() / FILE


def entry_name(device_name: str) -> str:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{device_name}, penstock {__version__}, triton {triton}"


def read_tuned(path: Path, device_name: str) -> TunedTilings:
    """Returns the tilings measured on this GPU with these versions; none, with one line in the log, if the file is
    unreadable or has only others."""
    name = entry_name(device_name)
    try:
        entries = json.loads(path.read_text())
        if name not in entries:
            log.info("%s has no tilings for %s: they are ignored", path, name)
            return TunedTilings()
        return TunedTilings({Product(**each["product"]): tuple(map(int, each["tiling"])) for each in entries[name]})
    except FileNotFoundError:
        return TunedTilings()
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read and is ignored (%r): run `penstock doctor --tune` again", path, error)
        return TunedTilings()


def write_tuned(path: Path, device_name: str, measured: Iterable[tuple[Product, tuple[int, ...]]]) -> None:
    """Writes the entry of this GPU and these versions, and keeps the others."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        entries = {}
    if not isinstance(entries, dict):
        entries = {}
    entries[entry_name(device_name)] = [
        {"product": asdict(product), "tiling": list(tiling)} for product, tiling in measured
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(entries, indent=1))
    part.replace(path)
