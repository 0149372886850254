"""Is imported by every Python process of a server whose PYTHONPATH has this folder: a signal then lets an engine's next
step fail as a device's does. Without a GPU a stand-in raises what the CUDA backend would."""

from __future__ import annotations

import signal
import sys
from typing import Any

FREE = getattr(signal, "SIGRTMIN", 34)  # Linux alone has such signals
ASSERTION, SHORTAGE = FREE + 3, FREE + 4
STEPS = (
    ("penstock.backend.cuda.backend", "CudaBackend", "_forward"),
    ("penstock.backend.cpu.backend", "CpuBackend", "_compute"),
)


def fail_next_step(number: int, _: Any) -> None:
    for module, name, method in STEPS:
        if backend := getattr(sys.modules.get(module), name, None):
            whole = getattr(backend, method)
            setattr(backend, method, failing(backend, method, whole, number))


def failing(backend: Any, method: str, whole: Any, number: int) -> Any:
    def fail(self: Any, *about: Any) -> Any:
        setattr(backend, method, whole)
        on_gpu = backend.__name__ == "CudaBackend"
        if number == ASSERTION:
            (assert_on_gpu if on_gpu else lose_device)(self)
        else:
            (exhaust_gpu if on_gpu else run_short)(self)
        return whole(self, *about)

    return fail


def assert_on_gpu(_: Any) -> None:
    """Has a kernel fail an assertion. What CUDA is asked next reports it."""
    import torch

    values = torch.zeros(4, device="cuda")
    values[torch.tensor([1 << 20], device="cuda")]


def exhaust_gpu(_: Any) -> None:
    import torch

    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def lose_device(backend: Any) -> None:
    backend.is_lost = lambda: True
    raise RuntimeError("stand-in for: device-side assert triggered")


def run_short(_: Any) -> None:
    from penstock.errors import OutOfMemory

    raise OutOfMemory("stand-in for: the device has no memory")


if __name__ == "sitecustomize":  # and not imported by a test
    for each in (ASSERTION, SHORTAGE):
        signal.signal(each, fail_next_step)
