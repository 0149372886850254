"""Defines the control messages about adapters. The answer to each is an AdapterList or a Failed with the message's id,
which is taken from the same numbers as those of requests."""

from __future__ import annotations

from typing import NamedTuple


class RegisterAdapter(NamedTuple):
    """Asks for requests to be able to name an adapter."""

    id: int
    name: str
    path: str
    scale: float = 1.0
    replace: bool = False  # another adapter of that name is forgotten, once this one was found to fit


class UnregisterAdapter(NamedTuple):
    """Asks for an adapter to be forgotten; requests that have begun keep it."""

    id: int
    name: str


class ListAdapters(NamedTuple):
    """Asks for all registered adapters."""

    id: int


AdapterMessage = RegisterAdapter | UnregisterAdapter | ListAdapters
