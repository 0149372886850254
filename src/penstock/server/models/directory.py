"""Finds the model that a name means, among the server's models and the models of other engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from threading import Lock
from typing import NamedTuple

from penstock import store
from penstock.errors import EngineUnavailable, ModelNotFound
from penstock.ipc.client import EngineClient, EngineState
from penstock.server.context.request_context import RequestContext
from penstock.server.models.derived import base_of, serves
from penstock.server.models.entry import ModelEntry
from penstock.server.models.fallbacks import Fallbacks, fallbacks_of
from penstock.server.models.foreign import ForeignModels
from penstock.server.models.served_model import CLIENTS_NAMES
from penstock.server.models.source import Discover, ModelSource
from penstock.server.models.visible import unknown_model
from penstock.store import DerivedModel


class Alias(NamedTuple):
    """Gives a model further names: those that match the pattern."""

    pattern: str
    model: str  # empty: the default one


def client_aliases() -> tuple[Alias, ...]:
    """Returns aliases for the names that clients insist on: they mean the default model, whichever it is."""
    return tuple(Alias(pattern, "") for pattern in CLIENTS_NAMES)


class ModelDirectory:
    """Lists the models of a server, the default one first, and knows their names."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        aliases: Sequence[Alias],
        fallbacks: Fallbacks,
        discover: Discover | None,
        foreign: ForeignModels | None,
    ) -> None:
        self._entries = {source.name: ModelEntry(source) for source in sources}  # replaced, never changed
        self._aliases = aliases
        self._fallbacks = fallbacks
        self._discover = discover
        self.foreign = foreign
        self._refreshing = Lock()

    @property
    def entries(self) -> list[ModelEntry]:
        """Returns all models, the default one first."""
        return list(self._entries.values())

    @property
    def default(self) -> ModelEntry:
        """Returns the model that is meant where none is named: the first one."""
        for entry in self._entries.values():
            return entry
        raise ModelNotFound("this server has no model left: pull one, or copy one into its folder")

    @property
    def default_name(self) -> str:
        """Returns the name of the default model, or one for a server that has only models of other engines."""
        return self.default.name if self._entries or self.foreign is None else "gateway"

    def clients(self) -> Iterator[tuple[str, EngineClient]]:
        for entry in self._entries.values():
            if entry.served is not None:
                yield entry.name, entry.served.client

    def end_answers(self, reason: str) -> None:
        for _, client in self.clients():
            client.end_answers(reason)

    def listed(self) -> Iterator[tuple[str, ModelEntry]]:
        """Yields every name that a client may ask for, without those that only patterns describe, and its model."""
        self.refresh()
        for entry in self._entries.values():
            yield entry.name, entry
        for pattern, model in self._aliases:
            if pattern not in CLIENTS_NAMES and not set(pattern) & set("*?[") and model in self._entries:
                yield pattern, self._entries[model]
        for entry in self._entries.values():
            for adapter in entry.listed_adapters:
                yield adapter.name, entry

    @property
    def rows(self) -> int:
        """Returns how many sequences all engines compute at once; 0: without an engine."""
        return sum(client.hello.limits.max_rows for _, client in self.clients() if client.hello is not None)

    def check_health(self) -> None:
        """Raises if the engine of a loaded model does not answer requests now."""
        for _, client in self.clients():
            if client.state is not EngineState.READY:
                raise EngineUnavailable(client.unavailable_reason)

    def find(self, name: str) -> ModelEntry | None:
        """Returns the model of this name, the one with an adapter so named, the one that the name stands for, or the
        one that it is derived from. If it is not loaded, the list of models is refreshed first."""
        entry = self._find(name)
        if entry is None or entry.served is None:
            self.refresh()
            entry = self._find(name)
        return entry

    def _find(self, name: str) -> ModelEntry | None:
        plain = name.removesuffix(":latest")
        for each in (name, plain):
            if each in self._entries:
                return self._entries[each]
        full = store.full_name(plain)  # the catalogue's name, with its tag
        if full in self._entries and store.derived_model(plain) is None:
            return self._entries[full]
        for entry in self._entries.values():
            if entry.adapter_named(name):
                return entry
        for pattern, model in self._aliases:
            if fnmatchcase(name, pattern) and (not model or model in self._entries):
                return self._entries[model] if model else self.default
        derived = store.derived_model(plain)
        return None if derived is None else base_of(self._entries.values(), derived)

    def foreign_model(self, name: str | None, context: RequestContext | None = None) -> str | None:
        """Returns the model of other engines that a name means; None: it means one of the pool's own. Those have
        precedence by their very names, but not by patterns."""
        if self.foreign is None or (name is None and self._entries):
            return None
        if name is not None and {name, name.removesuffix(":latest")} & self._entries.keys():
            return None
        found = self.foreign.find(name)
        if found is None and not self._entries:
            raise unknown_model(self, context, name or "")
        return found

    def with_fallbacks(self, name: str | None) -> list[str]:
        """Returns the model that a name means and those that answer in its place, in their order; none: it has no
        fallback."""
        fallbacks = self._fallbacks
        meant = name if name in fallbacks or not fallbacks else self._meant(name)
        return [] if meant is None else [meant, *fallbacks_of(fallbacks, meant)]

    def _meant(self, name: str | None) -> str | None:
        """Returns the model that a name means, of the pool's own or of other engines; the name itself if none has
        it."""
        with suppress(ModelNotFound):
            if (foreign := self.foreign_model(name)) is not None:
                return foreign
            entry = self.find(name) if name else self.default
            return name if entry is None else entry.name
        return name

    def get(self, name: str, context: RequestContext | None = None) -> ModelEntry:
        entry = self.find(name)
        if entry is not None:
            return entry
        raise unknown_model(self, context, name)

    def refresh(self) -> None:
        """Updates the list of models. A loaded one that is gone stays until it is unloaded."""
        if self._discover is None:
            return
        with self._refreshing:  # some routes look for models in threads
            sources = self._discover()
            if sources is None:
                return
            entries = dict(self._entries)
            for source in sources:
                entry = entries.setdefault(source.name, ModelEntry(source))
                entry.source, entry.removed = source, False
            for name in entries.keys() - {source.name for source in sources}:
                entries[name].removed = True
            self._entries = {
                name: entry for name, entry in entries.items() if not entry.removed or entry.busy_or_loaded
            }
            for entry in self._entries.values():
                if entry.served is not None:  # the default model may be another one
                    entry.served = entry.served._replace(aliases=self.aliases_of(entry.name))
                    entry.variants.clear()

    def forget_removed(self, entry: ModelEntry) -> None:
        if entry.removed and not entry.busy_or_loaded:
            self._entries = {name: each for name, each in self._entries.items() if each is not entry}

    def derived(self, entry: ModelEntry, name: str | None) -> DerivedModel | None:
        """Returns the derived model that a name means, of those that the model is under another name; None: it means
        the model itself."""
        derived = store.derived_model((name or entry.name).removesuffix(":latest"))
        if derived is None or not serves(entry.name, entry.source.path, derived):
            return entry.source.derived
        return derived

    def aliases_of(self, name: str) -> tuple[str, ...]:
        names = (name, "") if name == self.default.name else (name,)
        return tuple(pattern for pattern, model in self._aliases if model in names)
