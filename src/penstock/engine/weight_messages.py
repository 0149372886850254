"""Defines the control messages about pauses and weights. The answer to each is a WeightState or a Failed with the
message's id, which is taken from the same numbers as those of requests."""

from __future__ import annotations

from typing import NamedTuple

from penstock.types import PAUSE_KEEP


class Pause(NamedTuple):
    """Asks for no further step. New requests wait. `mode` says what becomes of those that have begun: they are kept as
    they are, waited for, or aborted."""

    id: int
    mode: str = PAUSE_KEEP


class Resume(NamedTuple):
    """Asks for steps again."""

    id: int


class AbortAll(NamedTuple):
    """Asks for all requests to be ended; new ones run as usual."""

    id: int


class UpdateWeights(NamedTuple):
    """Asks for the weights of a folder or file to take the place of the loaded ones, between two steps."""

    id: int
    path: str
    version: str = ""  # empty: the number of the update
    recompute: bool = True  # KV of running requests is computed again; False: they keep that of the old weights
    number: int = 0  # of the update, where another engine had it before; 0: the next one


class DescribeWeights(NamedTuple):
    """Asks which weights are loaded, and whether there is a pause."""

    id: int


WeightMessage = Pause | Resume | AbortAll | UpdateWeights | DescribeWeights
