"""Chooses a repository's files with this machine's memory plan, from their headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.errors import ConfigError
from penstock.store.quantizations import preferred


class PlannedFit(NamedTuple):
    """Describes a model's fit on this machine."""

    fits: bool
    summary: str  # required and available memory; if it does not fit, the shortage
    roomy: bool = False  # it fits with a context of some thousand tokens
    quantize: str = ""  # the --quantize that plain weights need to fit


class Advisor(Protocol):
    """Plans models before they are downloaded, and reports the choice."""

    force: bool  # download models that do not fit

    def plan(self, path: Path) -> PlannedFit | None:
        """Returns a model's fit from a copy without weights; None if unknown."""

    def tell(self, text: str) -> None: ...


class Chosen(NamedTuple):
    """Holds a chosen quantization and its fit."""

    name: str
    fit: PlannedFit


def choose_planned(sizes: Mapping[str, int], plan: Callable[[str], PlannedFit | None]) -> Chosen | None:
    """Returns the first preferred quantization that is roomy, else the first that fits, else the smallest, although it
    does not fit; None if unknown. Quantizations larger than one that does not fit are not planned.
    """
    tried: list[Chosen] = []
    too_large = float("inf")
    for name in preferred(sizes):
        if sizes[name] >= too_large:
            continue
        if (fit := plan(name)) is None:
            return None
        tried.append(Chosen(name, fit))
        if fit.roomy:
            break
        if not fit.fits:
            too_large = sizes[name]
    return _best(tried)


def _best(tried: Sequence[Chosen]) -> Chosen:
    fitting = [each for each in tried if each.fit.fits]
    roomy = [each for each in fitting if each.fit.roomy]
    return (roomy or fitting or tried[-1:])[0]


def check_plain(source: str, fit: PlannedFit | None, advisor: Advisor) -> str:
    """Returns the --quantize that a safetensors model needs, and reports it; raises ConfigError if it cannot fit."""
    if fit is None:
        return ""
    if not fit.fits and not advisor.force:
        raise ConfigError(
            f"{source} does not fit, with no --quantize either: {fit.summary}. Use a smaller model, or a repository "
            "with GGUF files of fewer bits. `penstock pull --force` downloads it anyway"
        )
    if fit.quantize:
        advisor.tell(f"{source}: --quantize {fit.quantize} is used: plain weights leave too little room; {fit.summary}")
    return fit.quantize
