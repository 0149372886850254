"""Stands in for the streams of a GPU on a machine without one, to find what waits for too little.

Nothing that is queued on a stream happens at once. It happens later, in any order that a GPU may choose: each stream
goes through its own queue in order, and none passes an event that has not happened.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import Event, local
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xEE  # what memory holds before it is written
MADE_AT_ONCE = ("aten.empty", "aten.lift_fresh", "aten.detach", "aten.scalar_tensor")


class LazyGpu(TorchDispatchMode):
    """Queues every op on tensors on the current stream. What makes a new tensor returns memory that is filled when the
    op happens."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.driver = LazyDriver()
        self.streams: list[LazyStream] = []
        self.current = self.steps = LazyStream(self)
        self.happening = False
        self._ahead = self.steps

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.happening or func.is_view or str(func).startswith(MADE_AT_ONCE):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.current.queue.append(lambda: func(*args, **kwargs))
            return args[0]
        made = func(*args, **kwargs).fill_(POISON % 128)
        self.current.queue.append(lambda: made.copy_(func(*args, **kwargs)))
        return made

    def run_until(self, done: Callable[[], bool]) -> None:
        """Lets streams go on, one thing at a time of a stream chosen at random, which mostly stays the same, so that
        one gets far ahead of the others."""
        self.happening = True
        while not done():
            able = [stream for stream in self.streams if stream.able]
            assert able, "streams wait for each other"
            if self._ahead not in able or self.random.random() < 0.1:
                self._ahead = self.random.choice(able)
            self._ahead.go_on()
        self.happening = False

    def run_some(self) -> None:
        """Lets any number of things happen, as they do while the host is busy."""
        left = iter(range(self.random.randrange(20)))
        self.run_until(lambda: next(left, None) is None or not any(stream.able for stream in self.streams))

    def run_alone(self, stream: LazyStream) -> None:
        """Lets one stream go on as far as it can while no other does."""
        self.happening = True
        while stream.able:
            stream.go_on()
        self.happening = False

    @contextmanager
    def on(self, stream: LazyStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class LazyStream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, gpu: LazyGpu) -> None:
        self._gpu = gpu
        self.queue: deque[Callable[[], object] | LazyEvent] = deque()  # an event is waited for
        gpu.streams.append(self)

    @property
    def able(self) -> bool:
        """Returns whether the next thing in the queue can happen."""
        return bool(self.queue) and (not isinstance(head := self.queue[0], LazyEvent) or head.happened)

    def go_on(self) -> None:
        head = self.queue.popleft()
        if not isinstance(head, LazyEvent):
            head()

    def wait_event(self, event: LazyEvent) -> None:
        self.queue.append(event)

    def record_event(self) -> LazyEvent:
        event = LazyEvent(self._gpu)
        with self._gpu.on(self):
            event.record()
        return event

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: not self.queue)


class LazyEvent:
    """Stands in for torch.cuda.Event."""

    def __init__(self, gpu: LazyGpu) -> None:
        self._gpu = gpu
        self.happened = False

    def record(self) -> None:
        self._gpu.current.queue.append(lambda: setattr(self, "happened", True))

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: self.happened)

    def elapsed_time(self, other: LazyEvent) -> float:
        assert self.happened
        assert other.happened
        return 2.0


class LazyDriver:
    """Stands in for the library that pins host memory. Each thread must have chosen its GPU, as it need not for calls
    that name a stream."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.refuses_after = 1 << 30  # segments; then it waits for `go_on`
        self.go_on = Event()
        self._chosen = local()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self._chosen.device = device
        yield
        del self._chosen.device

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert hasattr(self._chosen, "device"), "this thread has chosen no GPU"
        if len(self.registered) >= self.refuses_after:
            self.go_on.wait(60)
            time.sleep(0.1)
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        assert hasattr(self._chosen, "device"), "this thread has chosen no GPU"
        self.registered.remove(address)


@contextmanager
def lazy_gpu(random: Random) -> Iterator[LazyGpu]:
    """Puts such a GPU in the place of torch's own, as long as the context lasts."""
    gpu = LazyGpu(random)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Stream", lambda device: LazyStream(gpu))
        patched.setattr(torch.cuda, "Event", lambda enable_timing: LazyEvent(gpu))
        patched.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
        patched.setattr(torch.cuda, "stream", gpu.on)
        patched.setattr(torch.cuda, "device", gpu.driver.device)
        patched.setattr(torch.cuda, "cudart", lambda: gpu.driver)
        patched.setattr(torch.Tensor, "pin_memory", lambda self: self)
        with gpu:
            yield gpu
    assert not gpu.driver.registered, "host memory stays pinned"
