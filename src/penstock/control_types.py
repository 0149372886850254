"""Defines what the engine says about weights and pauses. `types` has all of it."""

from __future__ import annotations

from typing import NamedTuple

PAUSE_KEEP, PAUSE_WAIT, PAUSE_ABORT = PAUSE_MODES = ("keep", "wait", "abort")  # what becomes of running requests
FIRST_VERSION = "default"  # of the weights that a model is loaded with, as SGLang calls it


class WeightSpan(NamedTuple):
    """Says which weights computed an answer's tokens from one on, up to the next span."""

    version: str
    first: int = 0  # counts the answer's tokens; below 0 for scores of the prompt's last ones
    mixed: bool = False  # they saw KV that older weights had computed


class WeightState(NamedTuple):
    """Answers a control message about pauses and weights: what holds once it was carried out."""

    seq: int = 0  # the message's id
    version: str = FIRST_VERSION
    path: str = ""  # that the weights were updated from; empty: they are the model's own
    updates: int = 0
    paused: bool = False
