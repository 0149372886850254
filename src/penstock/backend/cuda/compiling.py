"""Tells when a step compiles a kernel: that takes seconds, in which nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from triton import knobs
from triton.runtime._async_compile import active_mode


def tell_of_compiling(tell: Callable[[bool], None]) -> None:
    """Calls `tell` with True when this thread begins to compile a kernel that it waits for, and with False at the end.
    Triton's hook returns whether to skip the compilation: False."""
    thread = get_ident()

    def hook(compiling: bool) -> Callable[..., bool]:
        def told(**_: Any) -> bool:
            if get_ident() == thread and active_mode.get() is None:  # else other threads compile (precompile.py)
                tell(compiling)
            return False

        return told

    knobs.runtime.jit_cache_hook = hook(True)
    knobs.runtime.jit_post_compile_hook = hook(False)
