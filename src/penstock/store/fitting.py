"""Chooses the files of a repository by what the memory plan of this machine says about their headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from penstock.errors import ConfigError
from penstock.store.quantizations import preferred


class PlannedFit(NamedTuple):
    """Says how a model fits on this machine."""

    fits: bool
    summary: str  # what it takes and what there is; of one that does not fit, what is missing
    roomy: bool = False  # it fits with a context of some thousand tokens
    quantize: str = ""  # the --quantize that its plain weights need to fit


class Advisor(Protocol):
    """Plans models before they are downloaded, and tells the user what was chosen."""

    force: bool  # download what does not fit, too

    def plan(self, path: Path) -> PlannedFit | None:
        """Returns how a model fits, given a copy of it that has no weights; None if that cannot be said."""

    def tell(self, text: str) -> None: ...


class Chosen(NamedTuple):
    """Holds the quantization that was chosen, and how it fits."""

    name: str
    fit: PlannedFit


def choose_planned(sizes: Mapping[str, int], plan: Callable[[str], PlannedFit | None]) -> Chosen | None:
    """Returns the first of the preferred quantizations that is roomy, else the first that fits, else the smallest,
    which does not fit; None if nothing can be said. Those larger than one that does not fit are not planned."""
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
    """Returns the --quantize that a model in safetensors needs, and tells so; raises ConfigError if it does not fit at
    all."""
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
