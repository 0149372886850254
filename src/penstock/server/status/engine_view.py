"""Serves GET /engine: the state of the engines and the timing of recent requests, for the page at /.

It shows no content of requests. A key sees its own requests, and one made with --admin sees all. A tenant named by a
trusted proxy sees its own; without keys and tenants, everyone sees all. The engines' figures are the same for everyone,
like /metrics.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.ipc.client import EngineClient
from penstock.ipc.placement import ReplicaFigures
from penstock.server.context.request_context import RequestContext
from penstock.server.http.sse import json_response
from penstock.server.models.entry import ModelEntry
from penstock.server.models.pool import ModelPool
from penstock.server.models.visible import may_see
from penstock.server.services import Endpoints, Services
from penstock.server.status.endpoints import state_of
from penstock.server.telemetry.metrics import RequestTimer, sum_stats
from penstock.types import Stats


class LiveRequest(msgspec.Struct, kw_only=True):
    """Describes a request that is not answered yet."""

    id: str
    model: str
    key: str | UnsetType = UNSET
    phase: str
    seconds: float  # since it began
    first_token: float | None  # seconds from its beginning; None: there is none yet
    prompt_tokens: int
    cached_tokens: int | None  # None: not known before the first token
    generated_tokens: int
    max_tokens: int
    route: str | UnsetType = UNSET


class EngineView(Endpoints):
    """Serves the view."""

    def __init__(self, services: Services) -> None:
        self._recent = services.recent

    async def show(self, pool: ModelPool, _: Request, context: RequestContext) -> Response:
        pool.models.refresh()
        clients = [client for _, client in pool.models.clients()]
        stats = sum_stats([client.stats for client in clients])
        seen = (
            None if context.caller.payer is not None and context.caller.payer.admin else context.caller.tenant or None
        )
        medians = self._recent.medians()
        told: dict[str, Any] = {"version": __version__, "time": time(), "stats": _figures(stats)}
        told["latency"] = medians._asdict()
        told["models"] = [_model(entry) for entry in pool.models.entries if may_see(context, entry)]
        timers = [timer for timer in pool.metrics.open if seen is None or timer.context.caller.tenant == seen]
        told["requests"] = [_live(timer) for timer in timers]
        told["ended"] = self._recent.of(seen)
        figures = [each for client in clients for each in client.replica_figures]
        told["replicas"] = [_replica(each) for each in sorted(figures, key=lambda each: each.name)]
        told["engines"] = [] if pool.foreign is None else pool.foreign.engines()
        return json_response(told)


def _live(timer: RequestTimer) -> LiveRequest:
    context, request, generated = timer.context, timer.request, timer.generated
    return LiveRequest(
        id=context.id,
        model=context.notes.model,
        key=context.caller.owner_name or UNSET,
        phase=timer.phase,
        seconds=round(perf_counter() - timer.began, 6),
        first_token=round(timer.first - timer.began, 6) if generated else None,
        prompt_tokens=len(request.prompt),
        cached_tokens=timer.cached if generated else None,
        generated_tokens=generated,
        max_tokens=request.max_tokens,
        route=context.notes.route or UNSET,
    )


def _model(entry: ModelEntry) -> dict[str, Any]:
    client: EngineClient | None = entry.served.client if entry.served else None
    told = state_of(entry) | {"steps": [] if client is None else list(client.recent_steps)}
    if client is not None and client.hello is not None:
        limits = client.hello.limits
        told |= {"max_len": limits.max_len, "max_rows": limits.max_rows, "step_tokens": limits.step_tokens}
        told |= {"block_size": limits.block_size, "blocks": limits.num_blocks}
    return told


def _blocks(stats: Stats) -> dict[str, int]:
    return {"used": stats.blocks_used, "cached": stats.blocks_cached, "free": stats.blocks_free}


def _figures(stats: Stats) -> dict[str, Any]:
    names = ("running", "waiting", "steps", "busy_seconds", "prompt_tokens", "cached_tokens", "generated_tokens")
    told: dict[str, Any] = {name: getattr(stats, name) for name in (*names, "computed_tokens", "preemptions")}
    told |= {"kv_blocks": _blocks(stats), "reused_tokens": dict(stats.reused)}
    told |= {"host_blocks": stats.host_blocks, "host_places": stats.host_places, "disk_blocks": stats.disk.blocks}
    drafted, accepted = (sum(getattr(each, name) for each in stats.drafts) for name in ("drafted", "accepted"))
    return told | {"drafted_tokens": drafted, "accepted_tokens": accepted}


def _replica(each: ReplicaFigures) -> dict[str, Any]:
    told: dict[str, Any] = {"name": each.name, "state": each.state, "queued_tokens": each.queued_tokens}
    told |= {"running": each.stats.running, "waiting": each.stats.waiting, "kv_blocks": _blocks(each.stats)}
    told |= {"generated_tokens": each.stats.generated_tokens, "routed_requests": each.routed}
    return told | {"promised_tokens": each.promised, "reused_tokens": each.told, "restarts": each.restarts}
