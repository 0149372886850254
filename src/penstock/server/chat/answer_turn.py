"""Defines the view of a turn that a dialect's writer has, for our engines and others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec import UnsetType

from penstock.server.generation.explain import AnswerReport
from penstock.text import Delta
from penstock.text.parse import AnswerPart


class AnswerTurn(Protocol):
    """Is implemented by ChatTurn, and by fleet/foreign for answers of other engines."""

    @property
    def prompt_tokens(self) -> int:
        """Returns how many tokens the prompt has, as far as is known."""

    def parts(self, delta: Delta, choice: int = 0) -> list[AnswerPart]:
        """Returns the parts that a delta adds to its choice."""

    def calls(self, choice: int = 0) -> int:
        """Returns how many tools the choice has called so far."""


class AnswerExplanation(Protocol):
    """Collects the `penstock` object of an answer."""

    def end(self, choice: int, delta: Delta) -> None: ...

    def report(self, order: Iterable[int] | None = None) -> AnswerReport | UnsetType:
        """Returns the report once every choice has ended, unless there is nothing that it must contain."""
