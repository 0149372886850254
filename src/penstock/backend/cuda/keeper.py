"""Keeps weights and KV cache on the device for the engine process that comes after this one.

Memory that is exported as a file descriptor lives as long as anybody holds the descriptor (cuMemRelease in the driver's
documentation). So no process with a context has to hold it: the server's store of descriptors does
(system/descriptor_store.py), which no fault of a device reaches. The next engine maps the same memory.

The store has two entries, each of which is put there as a whole, once all of it is written: until then, the memory ends
with this process. An entry is a description, a descriptor of each part of the memory, and descriptors of the device.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from io import BytesIO
from typing import Any, NamedTuple

import torch

from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.devices import checked_device
from penstock.backend.cuda.kept_range import KeptRange
from penstock.backend.weight_exchange import KeepingPacker, PackedWeight, ReplayingPacker
from penstock.model.packer import Packs
from penstock.system.descriptor_store import get_descriptors, put_descriptors

log = logging.getLogger(__name__)

WEIGHTS, KV = "weights", "kv"


def open_arena(device: str, address: str) -> Arena:
    """Returns an arena on a device. With the address of a store, its memory may outlive this process."""
    arena = Arena.on(checked_device(device))
    if address:
        arena.keeper = CudaKeeper(arena, address)
    return arena


class Description(NamedTuple):
    """Describes kept memory. `identity`: another one needs other contents or another layout."""

    identity: str
    id: str
    sizes: list[int]
    room: int = 0  # bytes that the KV cache could have had


class Found(NamedTuple):
    """Is memory that the engine before has left."""

    file: int
    about: Description
    weights: bytes
    parts: list[int]


class CudaKeeper:
    """Implements DeviceKeeper with the store of descriptors at an address."""

    def __init__(self, arena: Arena, address: str) -> None:
        self._arena = arena
        self._address = address
        self._found: dict[str, Found] | None = None  # None: the store was not asked yet
        self._ranges: dict[str, KeptRange] = {}
        self._abouts: dict[str, Description] = {}
        self._packed: KeepingPacker | None = None
        self._pickled = b""
        self._stored: dict[str, int] = {}  # the files of descriptions
        self._keeps = False

    @property
    def kv_id(self) -> bytes:
        return self._abouts[KV].id.encode() if KV in self._abouts else b""

    @property
    def waiting_bytes(self) -> int:
        """Returns the bytes that an engine has left and that this one has not mapped yet."""
        return sum(sum(each.about.sizes) for each in self._look().values())

    @property
    def kv_room(self) -> int:
        """Returns the bytes that the KV cache of the engine before could have had, if that is kept."""
        return self._look()[KV].about.room if KV in self._look() else 0

    def packer(self, identity: str, packer: Packs) -> Packs:
        self._keeps = not self._why_not()
        if not self._keeps:
            return packer
        found = self._look().get(WEIGHTS)
        if found is not None and found.about.identity == identity:
            if (range := self._restore(WEIGHTS, kept=True)) is not None:
                with self._logged("the weights that were kept cannot be used"):
                    weights = WeightUnpickler(found.weights, range, self._arena.shared).load()
                    self._pickled = found.weights
                    return ReplayingPacker(weights)
            self._forget(WEIGHTS)
        elif found is not None:  # the engine before was another one
            self.withdraw()
        range = self._ranges[WEIGHTS] = KeptRange(self._arena, kept=True)
        self._abouts[WEIGHTS] = Description(identity, "", [])
        self._arena.use(range, kept=True)
        self._packed = KeepingPacker(packer)
        return self._packed

    @contextmanager
    def kv(self, identity: str, room: int) -> Iterator[None]:
        """Takes the memory for KV caches and states, which have this layout, from the engine before or anew."""
        if not self._keeps:
            yield
            return
        self._ranges.pop(KV, None)
        found, range = self._look().get(KV), None
        if found is not None and found.about.identity == identity:
            range = self._restore(KV, kept=False)
        if range is None:
            self._forget(KV)
            range = KeptRange(self._arena, kept=False)
            self._abouts[KV] = Description(identity, secrets.token_hex(8), [], room)
        self._arena.use(range, kept=False)
        try:
            yield
        except BaseException:
            self._ranges.pop(KV, None)
            self._abouts.pop(KV)
            self._forget(KV)
            raise
        finally:
            self._arena.use(None, kept=False)
        self._ranges[KV] = range

    def keep(self) -> None:
        self._arena.use(None, kept=True)
        for name in self._ranges.keys() - self._stored.keys():
            with self._logged(f"the next engine will not find this one's {name}"):
                self._put(name)

    def withdraw(self) -> None:
        """Drops what the store has, so that the memory is given back with this process's own mappings."""
        for name in (WEIGHTS, KV):
            self._forget(name)

    def change_weights(self) -> None:
        """Drops the weights, because others are about to be written over them."""
        self._forget(WEIGHTS)
        self._ranges.pop(WEIGHTS, None)

    def synchronize(self) -> None:
        assert self._arena.driver is not None
        self._arena.driver.synchronize()

    # -- the store ---------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Found]:
        """Returns the memory that the engine before has left, unless it is mapped or dropped by now."""
        if self._found is None:
            self._found = {}
            for name in (WEIGHTS, KV):
                with self._logged(f"the {name} of the engine before are not found"):
                    if descriptors := get_descriptors(self._address, name):
                        try:
                            self._found[name] = _read(descriptors)
                        except ValueError:  # it was dropped without the store
                            self._forget(name)
        return self._found

    def _put(self, name: str) -> None:
        driver, range = self._arena.driver, self._ranges[name]
        assert driver is not None
        if name == WEIGHTS and self._packed is not None:
            driver.synchronize()  # all of it is written
            self._pickled = pickled(self._packed.kept, range, tuple(self._arena.shared))
            self._packed = None
        about = self._abouts[name] = self._abouts[name]._replace(sizes=range.sizes)
        file = _written(about, self._pickled if name == WEIGHTS else b"")
        self._stored[name] = file
        descriptors = [os.dup(file)]
        try:
            descriptors += range.export()
            with self._logged("the device may be reset between two engines, and forget what is kept"):
                descriptors += driver.hold_device()
            put_descriptors(self._address, name, descriptors)
        finally:
            _close(descriptors)

    def _restore(self, name: str, kept: bool) -> KeptRange | None:
        """Maps what the engine before has left; returns None if that is not possible."""
        found = self._look().pop(name)
        try:
            with self._logged(f"the {name} that were kept cannot be mapped"):
                range = KeptRange(self._arena, kept)
                range.restore(found.about.sizes, found.parts)
                self._ranges[name], self._abouts[name] = range, found.about
                self._stored[name] = os.dup(found.file)
                return range
        finally:
            _close([found.file, *found.parts])
        return None

    def _forget(self, name: str) -> None:
        """Drops an entry of the store. If the store does not answer, the entry is empty all the same."""
        found, file = self._look().pop(name, None), self._stored.pop(name, None)
        if found is not None:
            _close(found.parts)
        for each in (file, found and found.file):
            if each is not None:
                os.ftruncate(each, 0)
                os.close(each)
        with self._logged(f"the {name} that were kept cannot be dropped"):
            put_descriptors(self._address, name, [])

    def _why_not(self) -> str:
        """Tries to export a little memory. Returns why that is not possible, and logs it; empty: it is."""
        driver = self._arena.driver
        reason = "" if driver is not None and driver.exports_memory else "the driver exports no memory"
        if driver is not None and not reason:
            try:
                _close(get_descriptors(self._address, WEIGHTS))
                size = driver.granularity
                address = driver.reserve(size)
                try:
                    handle = driver.map(address, size, exportable=True)
                    try:
                        _close([driver.export(handle)])
                    finally:
                        driver.unmap(address, size, handle)
                finally:
                    driver.free(address, size)
            except Exception as error:
                reason = str(error)
        if reason:
            log.warning("weights and KV cache end with this engine process: %s", reason)
        return reason

    @contextmanager
    def _logged(self, what: str) -> Iterator[None]:
        """Logs a problem. It is never a reason to fail: the engine loads as if nothing were kept."""
        try:
            yield
        except Exception as error:
            log.warning("%s: %s", what, error)


class WeightPickler(pickle.Pickler):
    """Writes packed weights without the contents of their tensors."""

    def __init__(self, file: BytesIO, range: KeptRange, shared: tuple[type, ...]) -> None:
        super().__init__(file, protocol=5)
        self._range = range
        self._shared = shared

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            size = (last + 1) * value.element_size() if value.numel() else 0
            offset = self._range.offset_of(value.data_ptr(), size) if size else 0
            return "tensor", offset, size, str(value.dtype), tuple(value.shape), value.stride()
        if isinstance(value, torch.dtype):
            return "dtype", str(value)
        return ("shared", self._shared.index(type(value))) if type(value) in self._shared else None

    def reducer_override(self, value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):  # made anew, it takes the workspace that it needs
            return type(value), tuple(getattr(value, field.name) for field in fields(value) if field.init)
        return NotImplemented


class WeightUnpickler(pickle.Unpickler):
    """Reads packed weights whose tensors lie in a range."""

    def __init__(self, data: bytes, range: KeptRange, shared: dict[type, Any]) -> None:
        super().__init__(BytesIO(data))
        self._range = range
        self._shared = list(shared.values())

    def persistent_load(self, value: Any) -> Any:
        kind, *about = value
        if kind == "shared":
            return self._shared[about[0]]
        if kind == "dtype":
            return _dtype(about[0])
        offset, size, dtype, shape, stride = about
        return self._range.view(offset, size).view(_dtype(dtype)).as_strided(shape, stride)

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("penstock."):
            raise pickle.UnpicklingError(f"packed weights have no {module}.{name}")
        return super().find_class(module, name)


def pickled(weights: Sequence[PackedWeight], range: KeptRange, shared: tuple[type, ...]) -> bytes:
    """Returns packed weights, all of whose tensors lie in a range, without the contents of these."""
    file = BytesIO()
    WeightPickler(file, range, shared).dump(list(weights))
    return file.getvalue()


def _dtype(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _written(about: Description, weights: bytes) -> int:
    """Returns the descriptor of a file with a description, and pickled weights behind it."""
    descriptor = os.memfd_create("penstock-kept", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(about).encode() + b"\n" + weights)
    return descriptor


def _read(descriptors: list[int]) -> Found:
    """Reads an entry of the store. Of its descriptors, the file and the parts stay open."""
    try:
        with open(descriptors[0], "rb", closefd=False) as file:
            file.seek(0)
            about = Description(*json.loads(file.readline()))
            found = Found(descriptors[0], about, file.read(), descriptors[1 : 1 + len(about.sizes)])
    except BaseException:
        _close(descriptors)
        raise
    _close(descriptors[1 + len(about.sizes) :])
    return found


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        with suppress(OSError):
            os.close(each)
