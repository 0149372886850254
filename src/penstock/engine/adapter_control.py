"""Registers, unregisters and lists an engine's adapters while its steps go on."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.adapter_messages import AdapterMessage, ListAdapters, RegisterAdapter, UnregisterAdapter
from penstock.engine.adapters import Adapters
from penstock.engine.reading import Reading
from penstock.errors import NotSupported, PenstockError
from penstock.types import AdapterInfo, AdapterList, Event, Failed


class AdapterControl:
    """Answers control messages about adapters, if the engine has any."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._registering: list[tuple[RegisterAdapter, Reading[int]]] = []

    def __bool__(self) -> bool:
        """Returns whether the files of an adapter are being checked."""
        return bool(self._registering)

    @property
    def adapters(self) -> Adapters:
        """Returns the adapters; raises NotSupported where there are none."""
        if self._adapters is None:
            raise NotSupported("this engine has no adapters")
        return self._adapters

    def listed(self) -> tuple[AdapterInfo, ...]:
        """Returns the adapters that requests may name."""
        return () if self._adapters is None else self._adapters.listed()

    def answer(self, message: AdapterMessage) -> list[Event]:
        """Begins what a message asks for and returns the answer, if there is one already. Raises what cannot be
        done."""
        adapters = self.adapters
        match message:
            case RegisterAdapter():
                path = Path(message.path).expanduser()
                reading = adapters.begin_registration(message.name, path, message.scale, replace=message.replace)
                self._registering.append((message._replace(path=str(path)), reading))
                return []
            case UnregisterAdapter(id, name):
                return [AdapterList(id, (adapters.unregister(name),))]
            case ListAdapters(id):
                return [AdapterList(id, adapters.listed())]

    def register_ready(self, patience: float) -> list[Event]:
        """Registers the adapters whose files were checked and returns the answers. It waits so many seconds for the
        first."""
        if patience:
            self._registering[0][1].wait(patience)
        answers: list[Event] = []
        for message, reading in [one for one in self._registering if one[1].ready]:
            self._registering.remove((message, reading))
            try:
                _, name, path, scale, replace = message
                info = self.adapters.registered(name, Path(path), scale, reading.result(), replace=replace)
                answers.append(AdapterList(message.id, (info,)))
            except PenstockError as error:
                answers.append(Failed(message.id, error.code, error.message))
        return answers
