"""Loads models when they are asked for, and unloads those that must make room or that nobody uses.

A request uses one model from its beginning to its end (`use`). Requests for a model that is being loaded share one
load; a model that waits for memory does not delay others. Every model has an engine process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from penstock.errors import EngineUnavailable, PenstockError
from penstock.ipc.client import EngineClient
from penstock.server.access.expected_wait import WaitForecast
from penstock.server.context.request_context import RequestContext
from penstock.server.models.adapters import adapted, kept, restore
from penstock.server.models.derived import derive
from penstock.server.models.directory import Alias, ModelDirectory
from penstock.server.models.entry import FOR_EVER, ModelEntry, ModelState
from penstock.server.models.fallbacks import Fallbacks
from penstock.server.models.foreign import ForeignModels
from penstock.server.models.ledger import Budget, Refuse, Unload, excess, make_room
from penstock.server.models.request_paths import RequestPaths
from penstock.server.models.served_model import ServedModel
from penstock.server.models.source import Discover, ModelSource
from penstock.server.models.visible import may_see, unknown_model
from penstock.server.models.weights import restore_weights
from penstock.server.status.health_probe import GenerateProbes
from penstock.server.telemetry.compat_metrics import DEFAULT_SETS
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Text
from penstock.types.messages import Sleep, Wake

log = logging.getLogger(__name__)
UNLIMITED = Budget(2**62, 0)
POLL_SECONDS = 0.1  # until it is asked again whether an answer that nobody waits for has ended


class PoolSettings(NamedTuple):
    """Says how models are kept."""

    budget: Budget = UNLIMITED
    keep_alive: float = FOR_EVER  # default seconds that an unused model stays loaded
    aliases: tuple[Alias, ...] = ()
    trust_templates: bool = False  # chat templates in requests are rendered
    fallbacks: Fallbacks = MappingProxyType({})  # models that answer instead of others
    paths: RequestPaths = RequestPaths()  # paths that requests may name


DEFAULT_SETTINGS = PoolSettings()


class ModelPool:
    """Holds the models of a server, the default one first. All of it runs on one event loop."""

    def __init__(
        self,
        sources: Sequence[ModelSource],
        settings: PoolSettings = DEFAULT_SETTINGS,
        metric_sets: Sequence[str] = DEFAULT_SETS,
        discover: Discover | None = None,
        foreign: ForeignModels | None = None,
    ) -> None:
        """Takes the models at first and, if they may change while the server runs, what finds them again. `foreign` are
        models that other engines compute; with them there may be none of its own."""
        self.created = int(time.time())
        self.settings = settings
        self.foreign = foreign
        self.models = ModelDirectory(sources, settings.aliases, settings.fallbacks, discover, foreign)
        self.metrics = Metrics(self.models.clients, sources[0].name if sources else "", metric_sets)
        self.probes = GenerateProbes()
        if foreign is not None:
            foreign.use_metrics(self.metrics)
        self._changed = asyncio.Event()  # the next change sets it; then there is a new one
        self._reaper: asyncio.Task[None] | None = None

    # -- using -------------------------------------------------------------------------------------------------------

    async def use(self, name: str | None, context: RequestContext) -> ServedModel:
        """Returns a request's model, loaded; it stays so until the context ends. An unknown name means the default
        model, if that is loaded: the dialect decides whether to accept the name."""
        if not name and self.models.default.served is None:
            self.models.refresh()
        context.unknown_model = partial(unknown_model, self.models, context)
        entry = self.models.find(name) if name else self.models.default
        if entry is None:
            stands_in = self.models.default.awake is not None and may_see(context, self.models.default)
            entry = self.models.default if stands_in else self.models.get(name or "", context)
        context.caller.check_allowed(entry.name)
        if not context.caller.may_see(self.models.derived(entry, name)):
            raise context.unknown_model(name or entry.name)
        context.notes.model = entry.name
        entry.users += 1
        context.on_end(lambda: self._release(entry, context.service.keep_alive))
        if entry.awake is None:
            began = time.monotonic()
            try:
                await self._awake(entry)
            finally:
                context.service.loading_seconds = time.monotonic() - began
        served = await adapted(entry, self._variant(entry, name), name)
        context.service.adapters = served.adapters or entry.default_adapters
        return served

    def _variant(self, entry: ModelEntry, name: str | None) -> ServedModel:
        """Returns the loaded model as this name means it: with the settings of a derived model, if it is one's."""
        assert entry.awake is not None
        derived = self.models.derived(entry, name)
        if derived is None:
            return entry.awake
        if derived.digest not in entry.variants:
            entry.variants[derived.digest] = derive(entry.awake, derived)
        return entry.variants[derived.digest]

    def _release(self, entry: ModelEntry, keep_alive: float | None) -> None:
        entry.users -= 1
        self.models.forget_removed(entry)
        if keep_alive is not None:
            entry.pinned = keep_alive == FOR_EVER
        entry.keep(FOR_EVER if entry.pinned else self.settings.keep_alive if keep_alive is None else keep_alive)
        self._notify()

    # -- loading and unloading ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the only model of a server at once, and begins to unload what expires."""
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
            if self.foreign is not None:
                await self.foreign.start()
            if len(self.models.entries) == 1:
                await self.load(self.models.default.name)

    async def load(self, name: str) -> ServedModel:
        """Returns a model, which is loaded now if it was not."""
        entry = self.models.get(name)
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

    async def discard(self, name: str) -> None:
        """Unloads a model whose files were deleted, unless it answers requests: then it stays until it is unloaded."""
        self.models.refresh()
        entry = next((each for each in self.models.entries if each.name == name), None)
        if entry is not None and entry.removed and not entry.busy:
            await self._unload(entry)

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
        entry = self.models.get(name)
        if entry.loading is not None:
            await asyncio.wait({entry.loading})
        while entry.busy:
            await self._change(POLL_SECONDS)
        return entry

    async def close(self) -> None:
        tasks = [task for task in (self._reaper, *(entry.loading for entry in self.models.entries)) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(client.close() for _, client in self.models.clients()))
        if self.foreign is not None:
            await self.foreign.close()

    async def _awake(self, entry: ModelEntry) -> ServedModel:
        """Returns a model that is loaded. One load serves all requests that wait, and continues if they leave."""
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
            if entry.served is None and any(each.served is not None for each in self.models.entries):
                await asyncio.to_thread(entry.source.check)  # nobody makes room for what cannot be loaded
            await self._make_room(entry)
            if entry.served is not None:
                await entry.served.client.ask(Wake())
            else:
                others = any(each.busy for each in self.models.entries if each is not entry)
                client, text = await _open(entry, yielding=others)
                entry.served = self._served(entry.source, client, text)
        except BaseException as error:
            entry.state = ModelState.STORED if entry.served is None else ModelState.ASLEEP
            entry.reserved, entry.error = 0, str(error)
            raise
        else:
            entry.state, entry.error, entry.reserved = ModelState.AWAKE, "", max(entry.needed, 1)
            return entry.served
        finally:
            entry.loading = None
            self._notify()

    async def _put_to_sleep(self, entry: ModelEntry, client: EngineClient) -> bool:
        """Puts a model's engine to sleep, which frees its memory; returns False where that is not possible."""
        if client.hello is None or not client.hello.can_sleep:
            return False
        entry.state = ModelState.UNLOADING
        try:
            use = await client.ask(Sleep())
        except PenstockError as error:
            log.warning("%s is unloaded, because it cannot sleep: %s", entry.name, error)
            return False
        except BaseException:
            entry.state = ModelState.AWAKE  # nobody waits for it any more; it wakes for the next request
            self._notify()
            raise
        entry.reserved, entry.host_bytes, entry.expires, entry.pinned = use.device, use.host, FOR_EVER, False
        return True

    async def _make_room(self, entry: ModelEntry) -> None:
        """Waits until there is memory for a model and takes it. What must leave is unloaded."""
        needed = entry.needed
        while entry.state is ModelState.UNLOADING or (leaving := self._leaving(entry, needed)) is None:
            await self._change(POLL_SECONDS)
        entry.state, entry.reserved = ModelState.LOADING, max(needed, 1)
        await asyncio.gather(*(self._unload(each) for each in leaving))

    def _leaving(self, entry: ModelEntry, needed: int) -> list[ModelEntry] | None:
        """Returns the models to unload for one that needs `needed` bytes; None: it has to wait. Raises if
        there will be none."""
        held = [each.loaded() for each in self.models.entries if each.bytes and each is not entry]
        decision = make_room(entry.name, needed, held, self.settings.budget)
        if isinstance(decision, Refuse):
            raise EngineUnavailable(f"{decision.reason}: raise --memory, or unload a model")
        return [self.models.get(name) for name in decision.names] if isinstance(decision, Unload) else None

    async def make_room_for_adapter(self, entry: ModelEntry, needed: int) -> None:
        """Makes room for one more adapter of a loaded model by unloading idle models. Raises if that is not enough."""
        leaving = self._leaving(entry, entry.reserved + max(needed, entry.bytes - entry.reserved))
        if leaving is None:
            raise EngineUnavailable(
                f"the adapter needs {needed / 1e6:.1f} MB beside {entry.name}, and no other model is idle: try again "
                "later, or raise --memory"
            )
        await asyncio.gather(*(self._unload(each) for each in leaving))

    def _served(self, source: ModelSource, client: EngineClient, text: Text) -> ServedModel:
        return ServedModel(
            client,
            text,
            source.name,
            self.created,
            self.metrics,
            path=source.path,
            aliases=self.models.aliases_of(source.name),
            trust_templates=self.settings.trust_templates,
            waits=WaitForecast(),
        )

    async def _unload(self, entry: ModelEntry) -> None:
        entry.kept_adapters = kept(entry)
        if entry.served is not None:
            entry.kept_weights = entry.served.client.weights
        served, entry.served, entry.state = entry.served, None, ModelState.UNLOADING
        entry.variants.clear()
        try:
            if served is not None:
                await served.client.close()
        finally:
            entry.state, entry.reserved, entry.host_bytes = ModelState.STORED, 0, 0
            entry.expires, entry.pinned = FOR_EVER, False
            self.models.forget_removed(entry)
            self._notify()

    async def _reap(self) -> None:
        """Unloads models that nobody has used for as long as they were to be kept, and idle ones if models have grown
        beyond the budget."""
        while True:
            now = time.monotonic()
            over = excess([entry.loaded() for entry in self.models.entries if entry.bytes], self.settings.budget)
            leaving = [entry for entry in self.models.entries if entry.expires <= now or entry.name in over]
            expired = [entry for entry in leaving if entry.served is not None]
            await asyncio.gather(*(self._unload(entry) for entry in expired if not entry.busy))
            nearest = min(
                (entry.expires for entry in self.models.entries if entry.served is not None), default=FOR_EVER
            )
            await self._change(None if nearest == FOR_EVER else max(nearest - now, POLL_SECONDS))

    async def _change(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _open(entry: ModelEntry, yielding: bool) -> tuple[EngineClient, Text]:
    """Starts a model's engine and loads its tokenizer meanwhile. If `yielding`, the engine yields to others that
    compute."""
    client = entry.source.make_client()
    loading = asyncio.create_task(asyncio.to_thread(entry.source.load_text))
    try:
        await client.start(yielding=yielding)
        await restore(entry, client)
        await restore_weights(entry, client)
        return client, await loading
    except BaseException:
        loading.cancel()
        await client.close()
        raise
