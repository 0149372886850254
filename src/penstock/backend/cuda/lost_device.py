"""Tells whether a GPU can go on after an error. It needs no torch: what asks the GPU is given."""

from __future__ import annotations

from collections.abc import Callable


def cannot_go_on(synchronize: Callable[[], object]) -> bool:
    """Returns whether a GPU has nothing but errors to say from now on. After an illegal access, a failed assertion in a
    kernel or a launch failure, CUDA answers every later call of the process with that error, this one too. All other
    errors, such as a shortage of memory or a wrong argument, were told once, to whoever made the call."""
    try:
        synchronize()
    except RuntimeError:  # torch's own kinds are kinds of it
        return True
    return False
