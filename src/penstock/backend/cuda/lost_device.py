"""Decides whether a GPU still works after an error. It needs no torch: the caller gives the check."""

from __future__ import annotations

from collections.abc import Callable


def cannot_go_on(synchronize: Callable[[], object]) -> bool:
    """Returns True if every further call to a GPU will fail. After an illegal access, a failed assertion in a kernel or
    a launch failure, CUDA answers all later calls of the process with that error. Other errors, such as a shortage of
    memory or a wrong argument, are raised once."""
    try:
        synchronize()
    except RuntimeError:  # torch's own kinds are kinds of it
        return True
    return False
