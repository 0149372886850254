"""Describes to Prometheus the KV blocks that engines read from each other."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.types import PeerCounts


def peer_metrics(counts: PeerCounts) -> Iterator[Metric]:
    for name, help, value in (
        ("pulls", "Requests for which KV blocks were read from another engine", counts.pulls),
        ("pulled_blocks", "KV blocks read from other engines", counts.pulled_blocks),
        ("pulled_tokens", "Tokens of those blocks", counts.pulled_tokens),
        ("pull_seconds", "Time spent on reading them", counts.pull_seconds),
        ("offers", "Prompts of which KV blocks were offered to other engines", counts.offers),
        ("offered_blocks", "KV blocks offered to other engines", counts.offered_blocks),
        ("offered_blocks_read", "Offered KV blocks that other engines have read", counts.read_blocks),
    ):
        yield CounterMetricFamily(f"penstock_peer_{name}", help, value)
    for name, help, label, kinds in (
        (
            "pull_failures",
            "Pulls of which something had to be computed after all, by reason",
            "reason",
            counts.failures,
        ),
        ("offer_refusals", "Readers of offers that were refused, by reason", "reason", counts.refusals),
        ("carried", "Pulls, by what carried the blocks", "carrier", counts.carriers),
        ("carrier_fallbacks", "Carriers that could not be used, so the next was tried", "carrier", counts.passed_over),
    ):
        metric = CounterMetricFamily(f"penstock_peer_{name}", help, labels=[label])
        for kind, count in kinds:
            metric.add_metric([kind], count)
        yield metric
    yield GaugeMetricFamily("penstock_peer_leased_blocks", "KV blocks that offers keep now", counts.leased_blocks)
