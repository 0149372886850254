"""Defines the control messages with which an engine is asked to offer KV blocks."""

from __future__ import annotations

from typing import NamedTuple

from penstock.types import Request

LEASE = 5.0  # seconds, where nobody says how many


class Offer(NamedTuple):
    """Asks for the blocks of a prompt to be offered that the prefix cache has, from block `first` on. The answer is an
    Offered with this id, which is taken from the same numbers as those of requests."""

    id: int
    prompt: tuple[int, ...]
    salt: str = ""
    first: int = 0
    seconds: float = LEASE  # that they are kept for whoever reads them
    device: str = ""  # that the reader computes on, by the name that its Hello has


class Prefill(NamedTuple):
    """Asks for the prompt of a request to be computed, and then to be offered as an Offer asks for it. The request's
    own id, sampling and length do not matter: it is answered elsewhere."""

    id: int
    request: Request
    first: int = 0
    seconds: float = LEASE
    device: str = ""


class Release(NamedTuple):
    """Asks for an offer to end. It has no answer; one that has ended already is left alone."""

    offer: bytes
