"""Updates the weights of a server's models, and brings a model that is loaded again to those that it had."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, WeightsError
from penstock.ipc.client import EngineClient
from penstock.server.context.request_context import RequestContext
from penstock.server.models.entry import ModelEntry
from penstock.types import WeightState
from penstock.types.messages import Pause, UpdateWeights

if TYPE_CHECKING:
    from penstock.server.models.pool import ModelPool

log = logging.getLogger(__name__)


async def client_of(pool: ModelPool, context: RequestContext, model: str | None) -> EngineClient:
    """Loads a model, the default one without a name, and returns its engine."""
    served = await pool.use(model, context)
    served.check_model(model, context)
    return served.client


async def update_weights(
    pool: ModelPool, context: RequestContext, model: str | None, path: str, version: str, *, recompute: bool
) -> WeightState:
    """Replaces a model's weights. Old and new ones are in memory together for a while, which the budget
    of all models must have room for."""
    place = pool.settings.paths.check(path)
    client = await client_of(pool, context, model)
    needed = await asyncio.to_thread(_file_bytes, place)
    taken, budget = sum(each.bytes for each in pool.models.entries), pool.settings.budget.bytes
    if taken + needed > budget:
        raise WeightsError(
            f"the models that are loaded take {taken / 1e9:.2f} GB, and the new weights would take {needed / 1e9:.2f} "
            f"GB more until they are exchanged; all together may take {budget / 1e9:.2f} GB: raise --memory, or unload "
            "a model"
        )
    return await client.ask(UpdateWeights(str(place), version, recompute))


def _file_bytes(place: Path) -> int:
    """Returns the size of the weight files at a path; 0 if there are none, which the engine reports."""
    try:
        files = [*place.glob("*.safetensors"), *place.glob("*.gguf")] if place.is_dir() else [place]
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError):  # missing, too long, or with a zero in it
        return 0


async def restore_weights(entry: ModelEntry, client: EngineClient) -> None:
    """Gives an engine that has just started the weights, and the pause, that its model had before it was unloaded."""
    kept = entry.kept_weights
    if kept.updates:
        try:
            await client.ask(UpdateWeights(kept.path, kept.version))
        except PenstockError as error:
            log.warning("%s has its first weights again: %s", entry.name, error)
    if kept.paused:
        await client.ask(Pause())
