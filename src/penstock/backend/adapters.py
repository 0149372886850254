"""Holds what backends have in common about adapters: a refusal where they have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.errors import NotSupported
from penstock.model.low_rank import LowRankUpdate


class NoAdapters:
    """Refuses adapters, on devices that cannot compute with them: see AdapterSlots."""

    def __init__(self, device: str) -> None:
        self._device = device

    def check(self) -> None:
        self._refuse()

    def pack(self, updates: Sequence[LowRankUpdate]) -> Any:
        self._refuse()

    def load(self, slot: int, packed: Any) -> None:
        self._refuse()

    def drop(self, slot: int) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotSupported(
            f"adapters on {self._device} are not there yet: use --device cpu, or `penstock merge` the adapter into "
            "its model"
        )
