"""Exports Prometheus metrics of each replica of a fleet, as its gateway sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.ipc.client import EngineClient
from penstock.ipc.placement import FleetFigures, ReplicaFigures

READY = "ready"
LABELS = ("model", "replica")

GAUGES: tuple[tuple[str, str, Callable[[ReplicaFigures], float]], ...] = (
    ("up", "1 while the replica is ready and gets requests", lambda each: each.state == READY),
    ("queued_tokens", "Uncached prompt tokens that the replica has to compute", lambda each: each.queued_tokens),
    ("kv_tokens", "Tokens of the KV cache that the replica's requests need", lambda each: each.kv_tokens),
)
COUNTERS: tuple[tuple[str, str, Callable[[ReplicaFigures], float]], ...] = (
    ("restarts", "Engine processes of the replica after its first", lambda each: each.restarts),
    ("connections_lost", "Connections to the replica that were lost", lambda each: each.lost),
    ("routed_requests", "Requests that the replica was sent", lambda each: each.routed),
    ("resumed_requests", "Requests that the replica has taken over from another", lambda each: each.resumed),
    (
        "promised_tokens",
        "Prompt tokens that the router expected in the replica's cache, of requests that it has answered",
        lambda each: each.promised,
    ),
    ("reused_tokens", "Prompt tokens that the replica has reused, of the same requests", lambda each: each.told),
    (
        "pulled_tokens",
        "Prompt tokens read from another replica",
        lambda each: each.stats.peers.pulled_tokens,
    ),
    ("generated_tokens", "Tokens that the engine process has generated", lambda each: each.stats.generated_tokens),
)
STATES: tuple[tuple[str, str, Callable[[ReplicaFigures], Mapping[str, float]]], ...] = (
    (
        "requests",
        "Requests in the replica's engine",
        lambda each: {"running": each.stats.running, "waiting": each.stats.waiting},
    ),
    (
        "kv_blocks",
        "Blocks of the replica's KV cache",
        lambda each: {
            "free": each.stats.blocks_free,
            "used": each.stats.blocks_used,
            "cached": each.stats.blocks_cached,
        },
    ),
    ("state", "1 for the state that the replica is in", lambda each: {each.state: 1}),
)
DECISIONS = (
    ("pulls", "KV blocks of a prompt that one replica asked another for, by what came of it"),
    ("splits", "Decisions whether another replica computes a prompt (split) or not, by reason"),
    (
        "turns",
        "Requests by how they came to a replica: at_once, or after they waited for one to have room (waited); or that "
        "they did not: their deadline passed (expired), or their client left (left)",
    ),
)
WHOLE: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, str, Callable[[FleetFigures], float]], ...]
WHOLE = (
    (GaugeMetricFamily, "waiting_requests", "Requests that wait until a replica has room", lambda all: all.waiting),
    (
        CounterMetricFamily,
        "waited_seconds",
        "Seconds that requests have waited for that",
        lambda all: all.waited_seconds,
    ),
)
REASONS: tuple[tuple[str, str, Callable[[ReplicaFigures], Mapping[str, float]]], ...] = (
    ("deaths", "Engine processes that died, by how: crashed or killed", lambda each: each.deaths),
    (
        "pull_failures",
        "Pulls that did not bring all blocks, by reason",
        lambda each: dict(each.stats.peers.failures),
    ),
    (
        "refused",
        "Attempts to use the replica that failed: not_joined (no connection) or unsuited (another model)",
        lambda each: each.refused,
    ),
)


class FleetCollector:
    """Reports on every replica of every loaded model that has several."""

    def __init__(self, engines: Callable[[], Iterable[tuple[str, EngineClient]]]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        found = [(model, each) for model, client in self._engines() for each in client.replica_figures]
        if not found:
            return
        yield from self._decisions()
        for name, help, value_of in GAUGES:
            gauge = GaugeMetricFamily(f"penstock_replica_{name}", help, labels=LABELS)
            for model, each in found:
                gauge.add_metric([model, each.name], value_of(each))
            yield gauge
        for name, help, value_of in COUNTERS:
            counter = CounterMetricFamily(f"penstock_replica_{name}", help, labels=LABELS)
            for model, each in found:
                counter.add_metric([model, each.name], value_of(each))
            yield counter
        for name, help, values_of in STATES:
            states = GaugeMetricFamily(f"penstock_replica_{name}", help, labels=[*LABELS, "state"])
            for model, each in found:
                for state, value in values_of(each).items():
                    states.add_metric([model, each.name, state], value)
            yield states
        for name, help, values_of in REASONS:
            reasons = CounterMetricFamily(f"penstock_replica_{name}", help, labels=[*LABELS, "reason"])
            for model, each in found:
                for reason, value in values_of(each).items():
                    reasons.add_metric([model, each.name, reason], value)
            yield reasons

    def _decisions(self) -> Iterator[Metric]:
        """Yields the other decisions of all models' gateways, and their waiting requests."""
        for family, name, help, value_of in WHOLE:
            whole = family(f"penstock_fleet_{name}", help, labels=["model"])
            for model, client in self._engines():
                if (figures := client.fleet_figures) is not None:
                    whole.add_metric([model], value_of(figures))
            yield whole
        sizes = GaugeMetricFamily(
            "penstock_fleet_replicas", "Replicas that are wanted, and their bounds", labels=["model", "bound"]
        )
        for model, client in self._engines():
            if (figures := client.fleet_figures) is not None and (scale := figures.scale) is not None:
                for bound in ("wanted", "least", "most"):
                    sizes.add_metric([model, bound], getattr(scale, bound))
        yield sizes
        for kind, help in DECISIONS:
            counter = CounterMetricFamily(f"penstock_fleet_{kind}", help, labels=["model", "reason"])
            for model, client in self._engines():
                decisions = {} if (figures := client.fleet_figures) is None else figures.decisions
                for reason, count in decisions.get(kind, {}).items():
                    counter.add_metric([model, reason], count)
            yield counter
