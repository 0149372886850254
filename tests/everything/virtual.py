"""Takes the place of clocks and threads: time passes when the world says so, and what threads would do is done between
two steps, in an order that depends on the world's seed alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty
from random import Random
from typing import Any
from unittest.mock import patch

from penstock.backend.fake import FakeAdapter
from penstock.core import loop_guard, sequence
from penstock.engine.grammars import grammar
from penstock.engine.kv_disk import loading, writing
from penstock.engine.kv_transfer import pulls
from penstock.engine.lora import adapters
from penstock.engine.reading import Reader, Reading

ADAPTER_BYTES = 100
TICK = 1e-7  # seconds


class VirtualTime:
    """Is the clock of a world, and does the work of its threads."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.owner = 0  # whose threads the jobs are of that come
        self._random = Random(seed)
        self._jobs: deque[tuple[int, Callable[[], object]]] = deque()

    def __call__(self) -> float:
        """Returns the present time, as `time.perf_counter` does: later than any time before."""
        self.now += TICK
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def add(self, job: Callable[[], object]) -> None:
        """Takes on what a thread would do."""
        self._jobs.append((self.owner, job))

    def drop(self, owner: int) -> None:
        """Forgets what the threads of a process would do, which has ended."""
        self._jobs = deque(entry for entry in self._jobs if entry[0] != owner)

    def work(self) -> None:
        """Does some of what threads would have done by now."""
        for _ in range(self._random.choice((0, 1, 1, 2, 8))):
            self.work_once()

    def work_once(self) -> None:
        if self._jobs:
            self._jobs.popleft()[1]()

    def wait(self, seconds: float) -> None:
        """Stands for an engine that waits for a thread."""
        self.work_once()
        self.advance(seconds)


@contextmanager
def virtual(seed: int, every: int) -> Iterator[VirtualTime]:
    """Lets time be virtual and threads be jobs, makes loops short enough for small answers (they are looked for after
    `every` tokens), and lets adapters be numbers."""
    clock = VirtualTime(seed)
    with ExitStack() as stack:

        def instead(owner: Any, **others: Any) -> None:
            for name, other in others.items():
                stack.enter_context(patch.object(owner, name, other))

        instead(time, perf_counter=clock)
        instead(Reader, read=lambda self, reading: clock.add(reading.run))
        for kind in (Reading, loading.Loading, grammar.Compiling):
            instead(kind, wait=lambda self, seconds: clock.wait(seconds))
        instead(grammar.Grammars, _enqueue=lambda self, compiling: clock.add(partial(_compile, self, compiling)))
        instead(loading.Loader, start=lambda self: None, load=lambda self, load: _load(clock, self, load))
        instead(pulls.PullThreads, start=lambda self, pull: clock.add(partial(_pull, self, pull)))
        instead(writing.Writer, write=lambda self, block: _write(clock, self, block))
        small = {"EVERY": every, "SPAN": 16, "REPEATS": 3, "LONGEST": 5, "TAIL": 16}
        instead(loop_guard, **small)
        instead(sequence, EVERY=every, TAIL=16)
        instead(adapters, adapter_bytes=lambda path: ADAPTER_BYTES)
        instead(adapters.Adapters, _load=_load_adapter, _rank_at=lambda self, path: 1)
        yield clock


def _compile(grammars: Any, compiling: Any) -> None:
    grammars._queue.append(compiling)
    grammars._workers += 1
    grammars._work()


def _load(clock: VirtualTime, loader: Any, load: Any) -> None:
    for _ in range(loading.THREADS):
        clock.add(partial(load.run, loader._store))


def _pull(threads: Any, pull: Any) -> None:
    threads._queue.put(pull)
    threads._queue.put(None)
    threads._work()


def _write(clock: VirtualTime, writer: Any, block: Any) -> None:
    def append() -> None:
        with suppress(Empty):
            writer._store.append(*writer._queue.get_nowait())

    writer._queue.put_nowait(block)
    clock.add(append)


def _load_adapter(self: Any, sources: Any) -> adapters.ReadAdapter:
    value = sum(round(int(source.registered.path.name) * source.scale) for source in sources)
    return adapters.ReadAdapter(
        FakeAdapter(value, ADAPTER_BYTES), tuple(f"digest of {each.registered.path.name}" for each in sources)
    )
