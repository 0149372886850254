"""Updates the weights of a server's models, and brings a model that is loaded again to those that it had."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, WeightsError
from penstock.ipc.client import EngineClient
from penstock.server.models.entry import ModelEntry
from penstock.server.request_context import RequestContext
from penstock.types import WeightState

if TYPE_CHECKING:
    from penstock.server.models.pool import ModelPool

log = logging.getLogger(__name__)


async def client_of(pool: ModelPool, context: RequestContext, model: str | None) -> EngineClient:
    """Returns the engine of a model, which is loaded for it; without a name it is that of the default one."""
    served = await pool.use(model, context)
    served.check_model(model, context)
    return served.client


async def update_weights(
    pool: ModelPool, context: RequestContext, model: str | None, path: str, version: str, *, recompute: bool
) -> WeightState:
    """Puts other weights in place of a model's. Old and new ones are in memory together for a while, which the budget
    of all models must have room for."""
    client = await client_of(pool, context, model)
    entry = pool.get(context.model)
    taken, budget = sum(each.bytes for each in pool.entries), pool.settings.budget.bytes
    if taken + entry.source.bytes > budget:
        raise WeightsError(
            f"the models that are loaded take {taken / 1e9:.2f} GB, and an update of {entry.name} would take "
            f"{entry.source.bytes / 1e9:.2f} GB more while it lasts; all together may take {budget / 1e9:.2f} GB: "
            "raise --memory, or unload a model"
        )
    return await client.update_weights(path, version, recompute=recompute)


async def restore_weights(entry: ModelEntry, client: EngineClient) -> None:
    """Gives an engine that has just started the weights, and the pause, that its model had before it was unloaded."""
    kept = entry.kept_weights
    if kept.updates:
        try:
            await client.update_weights(kept.path, kept.version)
        except PenstockError as error:
            log.warning("%s has its first weights again: %s", entry.name, error)
    if kept.paused:
        await client.pause()
