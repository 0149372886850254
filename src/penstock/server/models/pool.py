"""Loads models when they are asked for, and unloads those that must make room or that nobody uses.

A request uses one model from its beginning to its end (`use`). Requests for a model that is being loaded wait for the
one load; a model that must wait for memory waits alone. Every model has an engine process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from penstock import store
from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc.client import EngineClient
from penstock.server.models.adapters import adapted, kept, restore
from penstock.server.models.derived import base_of, derive, serves
from penstock.server.models.entry import FOR_EVER, ModelEntry, ModelState
from penstock.server.models.ledger import Budget, Refuse, Unload, make_room
from penstock.server.models.source import ModelSource
from penstock.server.request_context import RequestContext
from penstock.server.served_model import CLIENTS_NAMES, ServedModel, unknown_model
from penstock.server.telemetry.compat_metrics import DEFAULT_SETS
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Text

log = logging.getLogger(__name__)
UNLIMITED = Budget(2**62, 0)
POLL_SECONDS = 0.1  # until it is asked again whether an answer that nobody waits for has ended


class Alias(NamedTuple):
    """Gives a model further names: those that match the pattern."""

    pattern: str
    model: str


def client_aliases(model: str) -> tuple[Alias, ...]:
    """Returns aliases for the names that clients insist on."""
    return tuple(Alias(pattern, model) for pattern in CLIENTS_NAMES)


class PoolSettings(NamedTuple):
    """Says how models are kept."""

    budget: Budget = UNLIMITED
    keep_alive: float = FOR_EVER  # seconds that a model stays loaded unused, unless a request says otherwise
    aliases: tuple[Alias, ...] = ()
    trust_templates: bool = False  # chat templates in requests are rendered


DEFAULT_SETTINGS = PoolSettings()


class ModelPool:
    """Holds the models of a server, the default one first. All of it runs on one event loop."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        settings: PoolSettings = DEFAULT_SETTINGS,
        metric_sets: Sequence[str] = DEFAULT_SETS,
    ) -> None:
        self.created = int(time.time())
        self.settings = settings
        self.metrics = Metrics(self.clients, sources[0].name, metric_sets)
        self._entries = {source.name: ModelEntry(source) for source in sources}
        self._changed = asyncio.Event()  # the next change sets it; then there is a new one
        self._reaper: asyncio.Task[None] | None = None

    # -- what is here ------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[ModelEntry]:
        """Returns all models, the default one first."""
        return list(self._entries.values())

    @property
    def default(self) -> ModelEntry:
        """Returns the model that is meant where none is named: the first one."""
        return next(iter(self._entries.values()))

    def clients(self) -> Iterator[tuple[str, EngineClient]]:
        """Yields the name and the client of every loaded model."""
        for entry in self._entries.values():
            if entry.served is not None:
                yield entry.name, entry.served.client

    def listed(self) -> Iterator[tuple[str, ModelEntry]]:
        """Yields every name that a client may ask for, without those that only patterns describe, and its model."""
        for entry in self._entries.values():
            yield entry.name, entry
        for pattern, model in self.settings.aliases:
            if pattern not in CLIENTS_NAMES and not set(pattern) & set("*?["):
                yield pattern, self._entries[model]
        for entry in self._entries.values():
            for adapter in entry.listed_adapters:
                yield adapter.name, entry

    @property
    def rows(self) -> int:
        """Returns how many sequences all engines compute at once; 0: there is no engine."""
        return sum(client.hello.limits.max_rows for _, client in self.clients() if client.hello is not None)

    def check_health(self) -> None:
        """Raises if a loaded model has no engine."""
        for _, client in self.clients():
            if client.hello is None:
                raise EngineUnavailable(client.unavailable_reason)

    def find(self, name: str) -> ModelEntry | None:
        """Returns the model of this name, the one with an adapter so named, the one that the name stands for, or the
        one that it is derived from."""
        plain = name.removesuffix(":latest")
        for each in (name, plain):
            if each in self._entries:
                return self._entries[each]
        full = store.full_name(plain)  # of the catalogue, with its tag
        if full in self._entries and store.derived_model(plain) is None:
            return self._entries[full]
        for entry in self._entries.values():
            if entry.adapter_named(name):
                return entry
        for pattern, model in self.settings.aliases:
            if fnmatchcase(name, pattern):
                return self._entries[model]
        derived = store.derived_model(plain)
        return None if derived is None else base_of(self._entries.values(), derived)

    def get(self, name: str) -> ModelEntry:
        """Returns the model of this name; raises if there is none."""
        entry = self.find(name)
        if entry is not None:
            return entry
        raise unknown_model(name, get_close_matches(name, self._entries, n=3) or list(self._entries)[:3])

    # -- using -------------------------------------------------------------------------------------------------------

    async def use(self, name: str | None, context: RequestContext) -> ServedModel:
        """Returns a request's model, loaded; it stays so until the context ends. A name that no model has means the
        default one, if that is loaded: the dialect says what it thinks of the name."""
        entry = self.find(name) if name else self.default
        if entry is None:
            entry = self.default if self.default.awake else self.get(name or "")
        context.check_allowed(entry.name)
        context.model = entry.name
        entry.users += 1
        context.on_end(lambda: self._release(entry, context.keep_alive))
        if entry.awake is None:
            began = time.monotonic()
            try:
                await self._awake(entry)
            finally:
                context.loading_seconds = time.monotonic() - began
        served = await adapted(entry, self._variant(entry, name), name)
        context.adapters = served.adapters or entry.default_adapters
        return served

    def _variant(self, entry: ModelEntry, name: str | None) -> ServedModel:
        """Returns the loaded model as this name means it: with the settings of a derived model, if it is one's."""
        assert entry.awake is not None
        derived = store.derived_model((name or entry.name).removesuffix(":latest"))
        if derived is None or not serves(entry.name, entry.source.path, derived):
            derived = entry.source.derived
        if derived is None:
            return entry.awake
        if derived.digest not in entry.variants:
            entry.variants[derived.digest] = derive(entry.awake, derived)
        return entry.variants[derived.digest]

    def _release(self, entry: ModelEntry, keep_alive: float | None) -> None:
        entry.users -= 1
        if keep_alive is not None:
            entry.pinned = keep_alive == FOR_EVER
        entry.keep(FOR_EVER if entry.pinned else self.settings.keep_alive if keep_alive is None else keep_alive)
        self._notify()

    # -- loading and unloading ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the only model of a server at once, and begins to unload what expires."""
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
            if len(self._entries) == 1:
                await self.load(self.default.name)

    async def load(self, name: str) -> ServedModel:
        """Returns a model, which is loaded now if it was not."""
        entry = self.get(name)
        entry.users += 1
        try:
            return await self._awake(entry)
        finally:
            self._release(entry, None)

    async def unload(self, name: str) -> bool:
        """Unloads a model once its answers have ended; returns whether it was loaded."""
        entry = await self._idle(name)
        if entry.served is None:
            return False
        await self._unload(entry)
        return True

    async def sleep(self, name: str, keep_weights: bool = True) -> None:
        """Takes a model's memory away once its answers have ended. The next request wakes it. Its engine stays and
        keeps the weights in host memory, if it can and they are to be kept; else it is unloaded."""
        entry = await self._idle(name)
        if entry.state is ModelState.ASLEEP and keep_weights:
            return
        if entry.served is not None and not (keep_weights and await self._put_to_sleep(entry, entry.served.client)):
            await self._unload(entry)
        entry.state = ModelState.ASLEEP
        self._notify()

    async def _idle(self, name: str) -> ModelEntry:
        """Returns a model once it has nothing to do."""
        entry = self.get(name)
        if entry.loading is not None:
            await asyncio.wait({entry.loading})
        while entry.busy:
            await self._change(POLL_SECONDS)
        return entry

    async def close(self) -> None:
        """Unloads everything, whoever uses it."""
        tasks = [task for task in (self._reaper, *(entry.loading for entry in self.entries)) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(client.close() for _, client in self.clients()))

    async def _awake(self, entry: ModelEntry) -> ServedModel:
        """Returns a model that is loaded. One load serves all who wait for it, and goes on if they leave."""
        if entry.awake is not None:
            return entry.awake
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry))
            entry.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(entry.loading)

    async def _load(self, entry: ModelEntry) -> ServedModel:
        """Wakes a model whose engine sleeps, or starts its engine."""
        try:
            if entry.engine_died:
                await self._unload(entry)
            await self._make_room(entry)
            if entry.served is not None:
                await entry.served.client.wake()
            else:
                client, text = await _open(entry)
                entry.served = self._served(entry.source, client, text)
        except BaseException as error:
            entry.state = ModelState.STORED if entry.served is None else ModelState.ASLEEP
            entry.bytes, entry.error = 0, str(error)
            raise
        else:
            entry.state, entry.error, entry.bytes = ModelState.AWAKE, "", max(entry.needed, 1)
            return entry.served
        finally:
            entry.loading = None
            self._notify()

    async def _put_to_sleep(self, entry: ModelEntry, client: EngineClient) -> bool:
        """Has a model's engine give its memory back and stay; returns False where that is not possible."""
        if client.hello is None or not client.hello.can_sleep:
            return False
        entry.state = ModelState.UNLOADING
        try:
            use = await client.sleep()
        except PenstockError as error:
            log.warning("%s is unloaded, because it cannot sleep: %s", entry.name, error)
            return False
        except BaseException:
            entry.state = ModelState.AWAKE  # nobody waits for it any more; it wakes for the next request
            self._notify()
            raise
        entry.bytes, entry.host_bytes, entry.expires, entry.pinned = use.device, use.host, FOR_EVER, False
        return True

    async def _make_room(self, entry: ModelEntry) -> None:
        """Waits until there is memory for a model and takes it. What must leave is unloaded."""
        while (leaving := self._leaving(entry)) is None:
            await self._change(POLL_SECONDS)
        entry.state, entry.bytes = ModelState.LOADING, max(entry.needed, 1)
        await asyncio.gather(*(self._unload(each) for each in leaving))

    def _leaving(self, entry: ModelEntry) -> list[ModelEntry] | None:
        """Returns the models that make room for this one; None: there is no room now. Raises if there will be none."""
        if entry.state is ModelState.UNLOADING:
            return None
        held = [each.loaded() for each in self._entries.values() if each.bytes and each is not entry]
        decision = make_room(entry.name, entry.needed, held, self.settings.budget)
        if isinstance(decision, Refuse):
            raise EngineUnavailable(f"{decision.reason}: raise --memory, or unload a model")
        return [self._entries[name] for name in decision.names] if isinstance(decision, Unload) else None

    def _served(self, source: ModelSource, client: EngineClient, text: Text) -> ServedModel:
        aliases = tuple(pattern for pattern, model in self.settings.aliases if model == source.name)
        trusted = self.settings.trust_templates
        return ServedModel(client, text, source.name, self.created, self.metrics, source.path, aliases, trusted)

    async def _unload(self, entry: ModelEntry) -> None:
        entry.kept_adapters = kept(entry)
        served, entry.served, entry.state = entry.served, None, ModelState.UNLOADING
        entry.variants.clear()
        try:
            if served is not None:
                await served.client.close()
        finally:
            entry.state, entry.bytes, entry.host_bytes = ModelState.STORED, 0, 0
            entry.expires, entry.pinned = FOR_EVER, False
            self._notify()

    async def _reap(self) -> None:
        """Unloads models that nobody has used for as long as they were to be kept."""
        while True:
            now = time.monotonic()
            expired = [entry for entry in self.entries if entry.served is not None and entry.expires <= now]
            await asyncio.gather(*(self._unload(entry) for entry in expired if not entry.busy))
            nearest = min((entry.expires for entry in self.entries if entry.served is not None), default=FOR_EVER)
            await self._change(None if nearest == FOR_EVER else max(nearest - now, POLL_SECONDS))

    async def _change(self, seconds: float | None) -> None:
        """Waits for the next change, or at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        """Wakes all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _open(entry: ModelEntry) -> tuple[EngineClient, Text]:
    """Starts a model's engine, and loads its tokenizer meanwhile."""
    client = entry.source.make_client()
    loading = asyncio.create_task(asyncio.to_thread(entry.source.load_text))
    try:
        await client.start()
        await restore(entry, client)
        return client, await loading
    except BaseException:
        loading.cancel()
        await client.close()
        raise
