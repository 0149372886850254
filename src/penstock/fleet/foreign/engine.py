"""Represents one engine of another kind: its models, its health and its settings."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from penstock.errors import ConfigError
from penstock.fleet.foreign.http import EngineHttp, EngineLost, EngineUrl, parse_url
from penstock.fleet.foreign.kinds import PROBES, TRAITS, EngineKind, EngineModel, KindTraits, kind_of, models_of

log = logging.getLogger(__name__)

PROBE_SECONDS = 3.0  # limit for all probes of one look
PROBE_WAITS = 10  # in which that time is waited: a gateway that stood still itself has used up only one of them
SILENT_LOOKS = 3  # over new connections, after which requests are given up: a busy engine may not accept more of them
WATCH_SECONDS = 1.0  # between two looks at an engine that answers
LOST_SECONDS = 0.5  # between two looks at one that does not, at first
MODELS_SECONDS = 30.0  # after which its models are listed again
REFUSED_SECONDS = 1.0  # pause after a refusal without Retry-After
MOST_REFUSED_SECONDS = 60.0


class EngineHealth(StrEnum):
    STARTING = "starting"  # it has not been asked yet
    READY = "ready"
    LOADING = "loading"  # it answers that it cannot answer yet
    DOWN = "down"  # it does not answer


class ModelSettings(NamedTuple):
    """Settings of one model in an --engine option; those of the engine apply where one is missing."""

    name: str = ""  # its name at this gateway
    aliases: tuple[str, ...] = ()  # further names of it; wildcards are allowed
    weight: float | None = None
    priority: int | None = None


class EngineSpec(NamedTuple):
    """Holds a parsed --engine option."""

    url: EngineUrl
    name: str = ""  # default: host and port
    model: str = ""  # what the engine's first model is called here
    aliases: tuple[str, ...] = ()  # further names of it; wildcards are allowed
    weight: float = 1.0  # its share among engines of the same priority
    priority: int = 0  # lower is tried first
    key: str = ""  # API key that the engine wants
    events: str = ""  # where it publishes KV events, such as tcp://host:5557
    replay: str = ""  # where it sends them again
    kind: EngineKind | None = None  # None: it is found out
    models: Mapping[str, ModelSettings] = {}  # keys: names as the engine lists them


def parse_engine(text: str) -> EngineSpec:
    """Parses an option such as http://host:8000,weight=2,priority=1; raises ConfigError if it is wrong."""
    url, *settings = text.split(",")
    spec = EngineSpec(parse_url(url.strip()))
    for setting in settings:
        name, equals, value = setting.strip().partition("=")
        name, at, model = name.partition("@")
        known: Collection[str] = _MODEL_SETTINGS if at else _SETTINGS
        if not equals or name not in known or not value or bool(at) != bool(model):
            raise ConfigError(
                f"--engine {text}: {setting!r} is no setting; write NAME=VALUE with one of {', '.join(_SETTINGS)}, or "
                f"NAME@MODEL=VALUE with one of {', '.join(_MODEL_SETTINGS)}"
            )
        try:
            spec = _of_model(spec, model, name, value) if model else _SETTINGS[name](spec, value)
        except ValueError as error:
            raise ConfigError(f"--engine {text}: {name} cannot be {value!r}: {error}") from None
    return spec if spec.name else spec._replace(name=f"{spec.url.host}:{spec.url.port}")


def _of_model(spec: EngineSpec, model: str, name: str, value: str) -> EngineSpec:
    settings = _MODEL_SETTINGS[name](spec.models.get(model, ModelSettings()), value)
    if settings.name in [each.name for other, each in spec.models.items() if each.name and other != model]:
        raise ValueError("another model of this engine is called so")
    return spec._replace(models={**spec.models, model: settings})


def _weight(value: str) -> float:
    weight = float(value)
    if not 0 < weight < 1e6:
        raise ValueError("a weight is above 0")
    return weight


def _key(spec: EngineSpec, value: str) -> EngineSpec:
    key = os.environ.get(value, "")
    if not key:
        raise ValueError("there is no such environment variable")
    return spec._replace(key=key)


_SETTINGS: dict[str, Callable[[EngineSpec, str], EngineSpec]] = {
    "name": lambda spec, value: spec._replace(name=value),
    "model": lambda spec, value: spec._replace(model=value),
    "alias": lambda spec, value: spec._replace(aliases=(*spec.aliases, value)),
    "weight": lambda spec, value: spec._replace(weight=_weight(value)),
    "priority": lambda spec, value: spec._replace(priority=int(value)),
    "key-env": _key,
    "events": lambda spec, value: spec._replace(events=value),
    "replay": lambda spec, value: spec._replace(replay=value),
    "kind": lambda spec, value: spec._replace(kind=EngineKind(value)),
}
_MODEL_SETTINGS: dict[str, Callable[[ModelSettings, str], ModelSettings]] = {
    "model": lambda settings, value: settings._replace(name=value),
    "alias": lambda settings, value: settings._replace(aliases=(*settings.aliases, value)),
    "weight": lambda settings, value: settings._replace(weight=_weight(value)),
    "priority": lambda settings, value: settings._replace(priority=int(value)),
}


def as_set(spec: EngineSpec, listed: Sequence[EngineModel]) -> dict[str, EngineModel]:
    models = {}
    for at, model in enumerate(listed):
        first = ModelSettings() if at else ModelSettings(spec.model, spec.aliases)
        own = spec.models.get(model.name) or spec.models.get(model.id) or ModelSettings()
        set_model = model._replace(
            name=own.name or first.name or model.name,
            aliases=(*first.aliases, *own.aliases),
            weight=spec.weight if own.weight is None else own.weight,
            priority=spec.priority if own.priority is None else own.priority,
        )
        models[set_model.name] = set_model
    return models


def not_listed(spec: EngineSpec, listed: Sequence[EngineModel]) -> list[str]:
    return [name for name in spec.models if not any(name in (model.name, model.id) for model in listed)]


class ForeignEngine:
    """Follows one engine. `number` is its place among all, by which the index and the ledger know it."""

    def __init__(self, number: int, spec: EngineSpec) -> None:
        self.number = number
        self.spec = spec
        self.http = EngineHttp(spec.url, spec.key)
        self._probes = EngineHttp(spec.url, spec.key)  # a connection of their own: requests may take up all others
        self.kind = spec.kind or EngineKind.OPENAI
        self.health = EngineHealth.STARTING
        self.reason = "it has not been asked yet"
        self.models: dict[str, EngineModel] = {}
        self.not_listed: list[str] = []  # models that its option names, and that it has not
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()  # requests: ok, refused, lost, broken
        self.lives = 0  # times that it became ready
        self._spared_until = 0.0
        self._listed_at = 0.0
        self._silent_looks = 0  # since it answered
        self._suspected = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def traits(self) -> KindTraits:
        return TRAITS[self.kind]

    @property
    def available(self) -> bool:
        return self.health is EngineHealth.READY and monotonic() >= self._spared_until

    @property
    def spared_seconds(self) -> float:
        return max(self._spared_until - monotonic(), 0.0)

    def spare(self, seconds: float | None) -> None:
        """Sends it nothing for a while, because it has refused a request."""
        wait = REFUSED_SECONDS if seconds is None else min(seconds, MOST_REFUSED_SECONDS)
        self._spared_until = monotonic() + wait

    def lost(self, reason: str) -> None:
        self._change(EngineHealth.DOWN, reason)
        self._suspected.set()

    def _change(self, health: EngineHealth, reason: str = "") -> None:
        if health is not self.health:
            level = logging.INFO if health is EngineHealth.READY else logging.WARNING
            told = f" ({self.kind}; {', '.join(self.models) or 'no models'})" if health is EngineHealth.READY else ""
            log.log(level, "engine %s is %s%s%s", self.name, health, told, f": {reason}" if reason else "")
            self.lives += health is EngineHealth.READY
        self.health, self.reason = health, reason

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": self.name,
            "kind": str(self.kind),
            "url": str(self.spec.url),
            "state": str(self.health),
        }
        told |= {"models": list(self.models), "priority": self.spec.priority, "weight": self.spec.weight}
        told |= {"in_flight": self.in_flight}
        own = {model.name: {"priority": model.priority, "weight": model.weight} for model in self.models.values()}
        told |= {"model_settings": own} if self.spec.models else {}
        told |= {"not_listed": self.not_listed} if self.not_listed else {}
        return told | ({"reason": self.reason} if self.reason else {})

    # -- watching ---------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Probes the engine, and lists its models if they may have changed. If it does not answer in time, the requests
        without any bytes are given up."""
        kept, received = self._probes.connected, self.http.received()
        try:
            answer = await _in_time(self._probe())
        except EngineLost as error:
            return self.lost(str(error))
        if answer is None:
            return self._silent(received, sure=kept)
        status, text = answer
        self._silent_looks = 0
        if status == 200 and self.models:
            return self._change(EngineHealth.READY)
        if status == 200:
            return self._change(EngineHealth.LOADING, "it lists no model")
        self._change(EngineHealth.LOADING, f"{self.traits.health} answers {status}: {_shown(text)}")

    async def _probe(self) -> tuple[int, bytes]:
        if self.health is not EngineHealth.READY or monotonic() - self._listed_at >= MODELS_SECONDS:
            await self._identify()
        return await self._get(self.traits.health)

    def _silent(self, received: Mapping[Any, int], sure: bool) -> None:
        self._silent_looks += 1
        reason = f"the engine at {self.spec.url} has not answered a probe for {PROBE_SECONDS:g} s"
        self.lost(reason)
        if sure or self._silent_looks >= SILENT_LOOKS:
            self.http.give_up_silent(received, reason)

    async def watch(self) -> None:
        pause = LOST_SECONDS
        while True:
            self._suspected.clear()
            await self.look()
            ready = self.health is EngineHealth.READY
            if ready:
                pause = LOST_SECONDS
                with suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_SECONDS):
                        await self._suspected.wait()
            await asyncio.sleep(0.0 if ready else pause)
            pause = pause if ready else min(2 * pause, 4 * WATCH_SECONDS)

    async def _identify(self) -> None:
        found: dict[str, Any] = {}
        for path in PROBES:
            status, body = await self._get(path)
            if status == 200:
                found[path] = _json(body)
        self.kind = self.spec.kind or kind_of(found)
        listed = models_of(found)
        self.models, missing = as_set(self.spec, listed), not_listed(self.spec, listed)
        if missing and listed and missing != self.not_listed:
            told = ", ".join(model.id for model in listed)
            log.warning("engine %s: its option names %s, which it does not list: %s", self.name, missing, told)
        self.not_listed = missing if listed else []
        self._listed_at = monotonic()

    async def _get(self, path: str) -> tuple[int, bytes]:
        answer = await self._probes.request("GET", path)
        return answer.status, await answer.read(PROBE_SECONDS)

    async def call(self, path: str, body: dict[str, Any], seconds: float = PROBE_SECONDS) -> Any:
        """Returns the JSON that the engine answers to a small request; raises EngineLost if it has none by then."""
        try:
            async with asyncio.timeout(seconds):
                answer = await self._probes.request("POST", path, msgspec.json.encode(body))
                given = await answer.read(seconds)
        except TimeoutError:
            raise EngineLost(f"{path} was not answered within {seconds:g} s") from None
        if answer.status != 200:
            raise EngineLost(f"{path} answers {answer.status}: {_shown(given)}")
        return _json(given)

    def close(self) -> None:
        self.http.close()
        self._probes.close()


async def _in_time(probe: Coroutine[Any, Any, tuple[int, bytes]]) -> tuple[int, bytes] | None:
    """Returns the answer to a probe; None if there is none in time."""
    task = asyncio.create_task(probe)
    try:
        for _ in range(PROBE_WAITS):
            await asyncio.wait({task}, timeout=PROBE_SECONDS / PROBE_WAITS)
            if task.done():
                return task.result()
        return None
    finally:
        task.cancel()


def _json(body: bytes) -> Any:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body)
    return body[: 2**16].decode("utf-8", "replace")


def _shown(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")
