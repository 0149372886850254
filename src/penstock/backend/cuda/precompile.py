"""Compiles kernels in parallel, before anything waits for them.

A launch within `Compiler.watching` is not run: threads compile its kernel, and a C compiler its launcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from triton.runtime import JITFunction, driver
from triton.runtime._async_compile import active_mode

from penstock.config import available_threads

log = logging.getLogger(__name__)
MOST_THREADS = 12


class Compiler:
    """Stands where Triton looks for something that compiles later."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(min(available_threads(), MOST_THREADS), "penstock-kernels")
        self._under_way: dict[Any, tuple[Future[Any], Callable[[Any], None]]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        run = JITFunction.run
        token = active_mode.set(self)

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(self, *args, grid=grid, warmup=True, **options)

        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
            active_mode.reset(token)

    def submit(self, key: Any, compile: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        if key not in self._under_way:
            self._under_way[key] = self._threads.submit(compiled, compile), finish

    def done(self, seconds: float | None = None) -> bool:
        pending = wait([future for future, _ in self._under_way.values()], seconds).not_done
        if pending:
            return False
        for future, finish in self._under_way.values():
            if error := future.exception():
                log.warning("a kernel could not be compiled ahead: %s", error)
            else:
                finish(future.result())
        self._under_way.clear()
        return True

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def compiled(compile: Callable[[], Any]) -> Any:
    kernel = compile()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # finds or makes the module that launches it
    return kernel
