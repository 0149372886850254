"""Keeps the adapters (LoRA) that requests may name, and decides which of them are in the backend's slots.

A registered adapter costs a few hundred bytes until a request names it. Then a thread reads it while others are
computed, and it stays in its slot until the room is needed. A slot that a waiting or running request holds is never
taken away. If requests keep all slots busy and others wait for too long, some slots take no new requests: they drain.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.backend.base import AdapterSlots
from penstock.config import available_memory
from penstock.engine.background_reader import Reader, Reading
from penstock.errors import AdapterError, AdapterNotFound, Overloaded, PenstockError
from penstock.model.adapter_files import AdapterBase, adapter_bytes, read_adapter, updates_of
from penstock.types import AdapterInfo, AdapterRequests, AdapterUse

MAX_NAME = 256  # characters
READING = 2  # memory while an adapter is read, in its sizes: the file and the packed adapter
MAX_PASSED = 64  # steps that pass a request which waits for a slot, before a slot is drained for it


class RegisteredAdapter(NamedTuple):
    """Says where an adapter that requests may name comes from."""

    name: str
    path: Path
    scale: float
    rank: int
    number: int  # differs between any two registrations, so that a name used again means the new one


class Source(NamedTuple):
    """Names one adapter of a slot and what its update is multiplied by."""

    registered: RegisteredAdapter
    scale: float


class ReadAdapter(NamedTuple):
    """Holds an adapter that a thread has read and packed."""

    packed: Any  # see PackedAdapter
    digests: tuple[str, ...]  # digest of each source


class AdapterLease:
    """Is held by requests that are computed with the same adapters, from their arrival to their end."""

    def __init__(self, sources: tuple[Source, ...], load: Callable[[Sequence[Source]], ReadAdapter]) -> None:
        self.sources = sources
        self.reading = Reading(lambda: load(sources), AdapterError)
        self.holders = 0
        self.arrived = 0  # at which call of `advance`
        self.slot = -1  # -1: none yet
        self.nbytes = 0
        self.digests: tuple[str, ...] = ()
        self.error: PenstockError | None = None
        self.in_slot = False

    @property
    def begun(self) -> bool:
        return self.reading.begun

    @property
    def ready(self) -> bool:
        return self.in_slot or self.error is not None

    def wait(self, seconds: float) -> None:
        self.reading.wait(seconds)

    def check(self) -> None:
        """Raises why it could not be put into a slot, if it could not."""
        if self.error is not None:
            raise self.error

    @property
    def salt(self) -> str:
        """Returns the salt of prompts computed with these adapters: KV is never shared with others."""
        parts = zip(self.digests, self.sources, strict=True)
        return "".join(f"\0adapter {digest} {source.scale!r}" for digest, source in parts)


class AdapterNames:
    """Knows the adapters that requests may name."""

    def __init__(self) -> None:
        self._registered: dict[str, RegisteredAdapter] = {}
        self._count = 0  # registrations so far

    def __iter__(self) -> Iterator[RegisteredAdapter]:
        yield from self._registered.values()

    def __contains__(self, name: str) -> bool:
        return name in self._registered

    def check(self, name: str, path: Path, scale: float, replace: bool) -> None:
        """Raises AdapterError if an adapter cannot have this name."""
        if not 0 < len(name) <= MAX_NAME:
            raise AdapterError(f"an adapter's name has 1 to {MAX_NAME} characters; got {len(name)}", param="name")
        known = self._registered.get(name)
        if known and not replace and (known.path, known.scale) != (path, scale):
            raise AdapterError(
                f"an adapter named {name!r} is registered already, from {known.path}: unregister it first, or take "
                "another name",
                param="name",
            )

    def find(self, name: str) -> RegisteredAdapter:
        if name not in self._registered:
            known = ", ".join(list(self._registered)[:8]) or "none"
            raise AdapterNotFound(f"no adapter is registered as {name!r}; registered: {known}")
        return self._registered[name]

    def add(self, name: str, path: Path, scale: float, rank: int) -> None:
        """Registers an adapter, unless it is registered already."""
        if name not in self._registered:
            self._count += 1
            self._registered[name] = RegisteredAdapter(name, path, scale, rank, self._count)

    def remove(self, name: str) -> RegisteredAdapter:
        return self._registered.pop(name)


class Adapters:
    """Registers adapters and moves them into slots: at most `most` of them, which take at most `memory` bytes."""

    def __init__(
        self,
        slots: AdapterSlots,
        base: AdapterBase,
        most: int,
        memory: int,
        available: Callable[[], int] = available_memory,
    ) -> None:
        self._slots = slots
        self._base = base
        self._memory = memory
        self._available = available
        self.most = most
        self._free = list(range(most - 1, -1, -1))
        self._names = AdapterNames()
        self._digests: dict[int, str] = {}  # registration number -> digest, once loaded
        self._leases: OrderedDict[tuple[Source, ...], AdapterLease] = OrderedDict()  # the least recently used first
        self._draining: list[AdapterLease] = []  # keep their slot for current requests, and get no new ones
        self._queue: deque[AdapterLease] = deque()  # without a slot yet, in order of arrival
        self._advanced = 0  # calls of `advance`
        self._reading: list[AdapterLease] = []
        self._reader = Reader("penstock-adapters")

    # -- names ---------------------------------------------------------------------------------------------------

    def register(self, name: str, path: Path, scale: float = 1.0) -> AdapterInfo:
        """Registers an adapter under a name; raises AdapterError if it does not fit the model, or if another has the
        name. The same path and scale again change nothing."""
        return self.registered(name, path, scale, self._rank_at(path))

    def begin_registration(self, name: str, path: Path, scale: float, *, replace: bool = False) -> Reading[int]:
        """Begins to register an adapter while steps run: its files are checked in a thread."""
        self._names.check(name, path, scale, replace)
        reading = Reading(lambda: self._rank_at(path), AdapterError)
        self._reader.read(reading)
        return reading

    def registered(self, name: str, path: Path, scale: float, rank: int, *, replace: bool = False) -> AdapterInfo:
        """Registers an adapter whose files were checked. With `replace` it takes the place of one of the same name,
        which requests that have begun keep."""
        self._names.check(name, path, scale, replace)
        if replace and name in self._names:
            self.unregister(name)
        self._names.add(name, path, scale, rank)
        return self._info(self._names.find(name))

    def _rank_at(self, path: Path) -> int:
        return read_adapter(path, self._base).rank

    def unregister(self, name: str) -> AdapterInfo:
        """Forgets an adapter; requests that have begun keep it. Raises AdapterNotFound for an unknown name."""
        info = self._info(self._names.find(name))
        number = self._names.remove(name).number
        self._digests.pop(number, None)
        for key, lease in list(self._leases.items()):
            held = lease.holders or not lease.in_slot
            if not held and any(source.registered.number == number for source in key):
                self._evict(lease)
        return info

    def listed(self) -> tuple[AdapterInfo, ...]:
        return tuple(map(self._info, self._names))

    def _info(self, known: RegisteredAdapter) -> AdapterInfo:
        loaded = any(
            lease.in_slot and source.registered.number == known.number
            for lease in self._all_leases()
            for source in lease.sources
        )
        digest = self._digests.get(known.number, "")
        return AdapterInfo(known.name, str(known.path), known.scale, known.rank, digest, loaded)

    # -- slots ---------------------------------------------------------------------------------------------------

    def hold(self, uses: Sequence[AdapterUse]) -> AdapterLease:
        """Returns a lease of the adapters together, which may have to wait for its slot; it must be released. Raises
        AdapterNotFound for an unknown name."""
        sources = tuple(
            Source(known := self._names.find(use.name), known.scale * use.scale) for use in uses if use.scale
        )
        lease = self._leases.get(sources)
        if lease is None or lease.error:
            lease = self._leases[sources] = AdapterLease(sources, self._load)
            lease.arrived = self._advanced
            self._queue.append(lease)
        lease.holders += 1
        self._leases.move_to_end(sources)
        return lease

    def release(self, lease: AdapterLease) -> None:
        """Gives a lease back. Its adapters stay in their slot while there is room."""
        lease.holders -= 1
        if lease.holders:
            return
        if lease in self._draining:
            self._draining.remove(lease)
            self._free_slot(lease)
        if lease.slot < 0 and lease in self._queue:
            self._queue.remove(lease)
        if lease.slot < 0 and self._leases.get(lease.sources) is lease:
            del self._leases[lease.sources]

    def advance(self) -> None:
        """Puts adapters that were read into slots, and begins to read those with room, in order of arrival. It never
        waits. It is called before every step while requests wait."""
        self._advanced += 1
        for lease in [lease for lease in self._reading if lease.reading.ready]:
            self._reading.remove(lease)
            try:
                self._put(lease, lease.reading.result())
            except PenstockError as error:
                self._give_up(lease, error)
        while self._queue:
            try:
                needed = sum(adapter_bytes(source.registered.path) for source in self._queue[0].sources)
                fits = self._make_room(needed)
            except PenstockError as error:
                self._give_up(self._queue.popleft(), error)
                continue
            if not fits:
                if self._advanced - self._queue[0].arrived >= MAX_PASSED:
                    self._drain(needed)
                return
            lease = self._queue.popleft()
            lease.slot, lease.nbytes = self._free.pop(), needed
            self._reading.append(lease)
            self._reader.read(lease.reading)

    def close(self) -> None:
        self._reader.close()

    def _put(self, lease: AdapterLease, loaded: ReadAdapter) -> None:
        lease.nbytes, lease.digests = loaded.packed.nbytes, loaded.digests
        if lease.nbytes > self._memory:
            raise AdapterError(
                f"the adapter takes {lease.nbytes} bytes, and all of them together may take {self._memory}: raise "
                "--adapter-memory"
            )
        self._slots.load(lease.slot, loaded.packed)
        lease.in_slot = True
        for source, digest in zip(lease.sources, lease.digests, strict=True):
            self._digests[source.registered.number] = digest

    def _give_up(self, lease: AdapterLease, error: PenstockError) -> None:
        """Frees the slot of a failed lease: its requests fail, and a later one tries again."""
        lease.error = error
        if lease.slot >= 0:
            self._free.append(lease.slot)
            lease.slot = -1
        if self._leases.get(lease.sources) is lease:
            del self._leases[lease.sources]

    def _make_room(self, needed: int) -> bool:
        """Frees a slot, and the bytes if they can be had; returns whether there is room. The first adapter is always
        let in, because its size in a slot is known only when it is read. Raises Overloaded if the machine's memory is
        too short even so."""
        while not self._free or (self.used and self.used + needed > self._memory) or self._short(needed):
            if unheld := self._unheld():
                self._evict(unheld[0])
            elif len(self._free) < self.most:
                return False
            else:
                raise Overloaded(
                    f"reading the adapter takes {READING * needed / 1e6:.1f} MB, and {self._available() / 1e6:.1f} MB "
                    "of memory are free: unload a model, or try again later"
                )
        return True

    def evict_unheld(self) -> None:
        """Frees all slots that no request holds. Their adapters are read again when a request names them."""
        for lease in self._unheld():
            self._evict(lease)

    def _unheld(self) -> list[AdapterLease]:
        return [lease for lease in self._leases.values() if lease.in_slot and not lease.holders]

    def _short(self, needed: int) -> bool:
        return READING * needed > self._available()

    def _drain(self, needed: int) -> None:
        """Refuses new requests for some adapters in slots, so that a slot and its bytes become free when their current
        requests end. Adapters with the fewest requests drain first: they end soonest."""
        draining = self._draining
        held = [lease for lease in self._leases.values() if lease.in_slot]
        for lease in sorted(held, key=lambda each: each.holders):
            if draining and self.used - sum(each.nbytes for each in draining) + needed <= self._memory:
                return
            del self._leases[lease.sources]
            draining.append(lease)

    @property
    def used(self) -> int:
        return sum(lease.nbytes for lease in self._all_leases() if lease.slot >= 0)

    def _all_leases(self) -> Iterator[AdapterLease]:
        yield from self._leases.values()
        yield from self._draining

    def _evict(self, lease: AdapterLease) -> None:
        del self._leases[lease.sources]
        if lease.in_slot:
            self._free_slot(lease)

    def _free_slot(self, lease: AdapterLease) -> None:
        self._slots.drop(lease.slot)
        self._free.append(lease.slot)
        lease.slot, lease.in_slot = -1, False

    def requests(self) -> tuple[AdapterRequests, ...]:
        """Returns how many requests run with each adapter, and how many wait for its slot, by name. Adapters without
        requests are left out."""
        counts: dict[str, list[int]] = {}
        for lease in self._all_leases():
            for source in lease.sources if lease.holders else ():
                counts.setdefault(source.registered.name, [0, 0])[0 if lease.in_slot else 1] += lease.holders
        return tuple(AdapterRequests(name, *both) for name, both in counts.items())

    # -- in the reader's thread ----------------------------------------------------------------------------------

    def _load(self, sources: Sequence[Source]) -> ReadAdapter:
        adapters = [(read_adapter(source.registered.path, self._base), source.scale) for source in sources]
        packed = self._slots.pack(updates_of(adapters, self._base.placements))
        return ReadAdapter(packed, tuple(adapter.digest() for adapter, _ in adapters))
