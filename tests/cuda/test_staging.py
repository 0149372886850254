"""Host buffers that a late device reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.backend.cuda.staging import Staging


class LateDevice:
    """Does nothing of what is queued until somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.done = 0

    def record(self) -> Mark:
        return Mark(self, len(self.queue))

    def run(self, until: int) -> None:
        for work in self.queue[self.done : until]:
            work()
        self.done = max(self.done, until)


class Mark:
    def __init__(self, device: LateDevice, at: int) -> None:
        self._device, self._at = device, at

    def synchronize(self) -> None:
        self._device.run(self._at)


def test_no_buffer_is_written_before_the_device_has_read_it() -> None:
    device, seen = LateDevice(), []
    staging = Staging([np.zeros(1, np.int32) for _ in range(3)], device.record)
    for step in range(10):
        buffer = staging.take()
        buffer[0] = step
        device.queue.append(lambda buffer=buffer: seen.append(int(buffer[0])))
        staging.queued()
    device.run(10)
    assert seen == list(range(10))


def test_the_host_runs_ahead_as_far_as_there_are_buffers() -> None:
    device = LateDevice()
    staging = Staging([np.zeros(1, np.int32) for _ in range(3)], device.record)
    for _ in range(3):
        staging.take()
        device.queue.append(lambda: None)
        staging.queued()
    assert device.done == 0
    staging.take()
    assert device.done == 1
