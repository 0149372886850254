"""Gives requests their adapters, and registers, unregisters and lists adapters while steps continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.backend.base import Backend
from penstock.config import Config, available_memory, parse_adapter
from penstock.engine.background_reader import Reading
from penstock.engine.feature import End, Feature
from penstock.engine.lora.adapters import Adapters
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import PATIENCE, Need
from penstock.errors import NotSupported, PenstockError
from penstock.model.adapter_files import AdapterBase
from penstock.planning.memory_plan import adapter_memory
from penstock.types import AdapterInfo, AdapterList, Event, Failed
from penstock.types.messages import ListAdapters, RegisterAdapter, UnregisterAdapter

SHARE = 8  # adapters may take one part in SHARE of the free memory
SPARE = 1 << 29  # bytes of a GPU that are free in any case


class NoAdapters(Feature):
    """Refuses adapters, where an engine has none."""

    answers = (RegisterAdapter, UnregisterAdapter, ListAdapters)

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        if any(use.scale for use in record.request.adapters):
            raise NotSupported("this engine has no adapters")
        return ()

    def answer(self, message: Any) -> Sequence[Event]:
        raise NotSupported("this engine has no adapters")


class AdapterControl(NoAdapters):
    """Leases adapters to requests, from their arrival to their end."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._registering: list[tuple[RegisterAdapter, Reading[int]]] = []  # whose files are being checked

    @property
    def busy(self) -> bool:
        return bool(self._registering)

    def listed(self) -> tuple[AdapterInfo, ...]:
        return self.adapters.listed()

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        uses = [use for use in record.request.adapters if use.scale]
        if not uses:
            return ()
        record.lease = self.adapters.hold(uses)
        if not record.lease.in_slot:
            return [Need("adapter", record.lease, record.adapt)]
        record.adapt()
        return ()

    def ended(self, record: RequestRecord, event: End | None) -> None:
        if record.lease is not None:
            self.adapters.release(record.lease)

    def before_plan(self) -> None:
        if self._registering:
            self.engine.emit(self._register_ready())
        if self.engine.waiting_room:
            self.adapters.advance()

    def answer(self, message: Any) -> Sequence[Event]:
        match message:
            case RegisterAdapter():
                path = Path(message.path).expanduser()
                reading = self.adapters.begin_registration(message.name, path, message.scale, replace=message.replace)
                self._registering.append((message._replace(path=str(path)), reading))
                return ()
            case UnregisterAdapter(name, id=id):
                return [AdapterList(id, (self.adapters.unregister(name),))]
        return [AdapterList(message.id, self.listed())]

    def release_device(self) -> None:
        self.adapters.evict_unheld()

    def stats(self) -> Mapping[str, Any]:
        adapters = self.adapters
        return {"adapter_slots": adapters.most, "adapter_bytes": adapters.used, "adapters": adapters.requests()}

    def hello(self) -> Mapping[str, Any]:
        return {"adapters": self.listed()}

    def close(self) -> None:
        self.adapters.close()

    def _register_ready(self) -> list[Event]:
        """Registers the adapters whose files were checked and returns the answers. If there is nothing to compute, it
        waits a little for the first."""
        if not self.engine.computing:
            self._registering[0][1].wait(PATIENCE)
        answers: list[Event] = []
        for message, reading in [one for one in self._registering if one[1].ready]:
            self._registering.remove((message, reading))
            try:
                info = self.adapters.registered(
                    message.name, Path(message.path), message.scale, reading.result(), replace=message.replace
                )
                answers.append(AdapterList(message.id, (info,)))
            except PenstockError as error:
                answers.append(Failed(message.id, error.code, error.message))
        return answers


def open_adapters(config: Config, backend: Backend, base: AdapterBase) -> Adapters:
    memory = config.adapter_memory or available_memory() // SHARE
    if backend.own_memory:
        memory = config.adapter_memory or max(adapter_memory(config), SPARE)
    adapters = Adapters(backend.adapters, base, config.max_adapters, memory)
    for text in config.adapter:
        name, path, scale = parse_adapter(text)
        adapters.register(name, Path(path).expanduser(), scale)
    return adapters
