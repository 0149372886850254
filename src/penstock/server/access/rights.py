"""Defines the rights that routes need."""

from __future__ import annotations

from enum import Enum, auto

from penstock.errors import Forbidden
from penstock.server.access.accounts import Account


class Right(Enum):
    """Names the right that a request needs in addition to a valid key."""

    READ = auto()  # nothing: the route changes nothing, and shows only data that the key may see
    MONITOR = auto()  # a key made with --monitor or --admin: the route shows all keys and models
    USE = auto()  # no foreign web page: the route may load a model, computes, or changes what belongs to its owner
    ADMIN = auto()  # the same, and a key made with --admin: the route changes what every request finds


def check_right(right: Right, path: str, payer: Account | None, page: str) -> None:
    """Raises if a request may not do this; `page` describes the web page that it comes from, if that is a foreign
    one."""
    if page and right in (Right.USE, Right.ADMIN):
        raise Forbidden(
            f"{path} changes what the server does, and {page}: start the server with --cors ORIGIN to allow a page"
        )
    if payer is None or payer.admin:
        return
    if right is Right.ADMIN:
        raise payer.forbidden("admin", f"use {path}: this needs a key made with --admin")
    if right is Right.MONITOR and not payer.monitor:
        raise payer.forbidden("monitor", f"use {path}: this needs a key made with --monitor or --admin")
