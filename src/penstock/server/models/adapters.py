"""Registers the adapters (LoRA) of a server's models, and finds those that a request's name for its model stands for.

An adapter belongs to one model. It outlives the engine: a model that is loaded again has the adapters that it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import store
from penstock.config import AdapterOption
from penstock.errors import AdapterError, AdapterNotFound, PenstockError
from penstock.ipc.client import EngineClient
from penstock.model.adapter_files import adapter_bytes, missing_text, tensors_of
from penstock.server.context.request_context import RequestContext
from penstock.server.models.entry import ModelEntry
from penstock.server.models.served_model import UNLISTED, ServedModel
from penstock.types import AdapterInfo, AdapterUse
from penstock.types.messages import RegisterAdapter, UnregisterAdapter

if TYPE_CHECKING:
    from penstock.server.models.pool import ModelPool

log = logging.getLogger(__name__)


# -- of one request -------------------------------------------------------------------------------------------------


async def adapted(entry: ModelEntry, served: ServedModel, name: str | None) -> ServedModel:
    """Returns the loaded model with the adapters that a request's name for it stands for."""
    uses: list[AdapterUse] = []
    if served.derived is not None and served.derived.adapters:
        uses += await _registered(served.client, served.derived.adapters)
    if name and name != entry.name and (adapter := entry.adapter_named(name)):
        uses.append(AdapterUse(adapter))
        served = served._replace(name=name.removesuffix(":latest"))
    return served._replace(adapters=tuple(uses)) if uses else served


async def _registered(client: EngineClient, paths: Iterable[str]) -> list[AdapterUse]:
    """Returns the adapters of a derived model, registered. A file that has changed is another adapter."""
    uses = []
    for path in paths:
        name = _name_of(Path(path))
        if name not in client.adapters:
            await client.ask(RegisterAdapter(name, path))
        uses.append(AdapterUse(name))
    return uses


def _name_of(path: Path) -> str:
    """Returns the name under which an adapter that only a derived model names is registered."""
    try:
        about = tensors_of(path).stat()
    except OSError:
        raise AdapterError(missing_text(path)) from None
    state = blake2b(repr((str(path), about.st_mtime_ns, about.st_size)).encode(), digest_size=16)
    return f"{UNLISTED}{state.hexdigest()}"


# -- of a model -----------------------------------------------------------------------------------------------------


async def register(
    pool: ModelPool, context: RequestContext, model: str | None, option: AdapterOption, *, replace: bool = False
) -> AdapterInfo:
    """Gives an adapter to a model, which is loaded for it; without a name it is the default one. Raises if the adapter
    does not fit, or if the name is in use and the adapter is not to be replaced."""
    path = pool.settings.paths.check(option.path)
    if not _exists(path):
        raise AdapterNotFound(
            f"there is no adapter at {option.path[:200]!r}: give a folder that PEFT saved, or a GGUF file"
        )
    served = await pool.use(model, context)
    served.check_model(model, context)
    entry = pool.models.get(context.notes.model)
    if any(option.name == each.name for each in pool.models.entries) or store.derived_model(option.name) is not None:
        raise AdapterError(f"{option.name!r} is the name of a model: take another", param="lora_name")
    owner = next((each for each in pool.models.entries if option.name in each.adapters), None)
    if owner is not None and not (replace and owner is entry):
        raise AdapterError(
            f"the adapter {option.name!r} of {owner.name!r} is loaded already: set load_inplace to replace it, unload "
            "it first, or take another name",
            param="lora_name",
        )
    await pool.make_room_for_adapter(entry, adapter_bytes(path))
    message = RegisterAdapter(option.name, str(path), option.scale, replace=replace)
    return (await served.client.ask(message)).adapters[0]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero in it
        return False


async def unregister(pool: ModelPool, name: str, model: str | None = None) -> None:
    """Takes an adapter from its model; requests that have begun keep it. Raises AdapterNotFound if there is none."""
    entries = pool.models.entries if model is None else [pool.models.get(model)]
    entry = next((each for each in entries if name in each.adapters), None)
    if entry is None:
        known = [adapter.name for each in entries for adapter in each.listed_adapters]
        raise AdapterNotFound(f"no adapter is loaded as {name!r}; loaded: {', '.join(known[:8]) or 'none'}")
    if entry.loading is not None:
        await asyncio.wait({entry.loading})
    entry.adapter_scales.pop(name, None)
    if entry.served is not None:
        await entry.served.client.ask(UnregisterAdapter(name))
    entry.kept_adapters.pop(name, None)


def kept(entry: ModelEntry) -> dict[str, AdapterOption]:
    """Returns the adapters that a model has when it is loaded again."""
    return {each.name: AdapterOption(each.name, each.path, each.scale) for each in entry.listed_adapters}


async def restore(entry: ModelEntry, client: EngineClient) -> None:
    """Gives an engine that has just started the adapters that its model has. One that no longer fits is left out."""
    for name in [name for name in client.adapters if name not in entry.kept_adapters]:
        await client.ask(UnregisterAdapter(name))
    for option in entry.kept_adapters.values():
        known = client.adapters.get(option.name)
        if known is not None and (known.path, known.scale) == (option.path, option.scale):
            continue
        try:
            await client.ask(RegisterAdapter(*option, replace=True))
        except PenstockError as error:
            log.warning("the adapter %r of %s is left out: %s", option.name, entry.name, error)
