"""Exports SGLang's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    Derive,
    DerivedSample,
    MetricNames,
    by_state,
    finished_counts,
    used_share,
)

RENAMED = {
    "penstock_time_to_first_token_seconds": ["sglang:time_to_first_token_seconds"],
    "penstock_inter_token_seconds": ["sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"],
    "penstock_request_seconds": ["sglang:e2e_request_latency_seconds"],
    "penstock_request_queue_seconds": ["sglang:queue_time_seconds"],
    "penstock_prompt_tokens": ["sglang:prompt_tokens"],
    "penstock_cached_tokens": ["sglang:cached_tokens"],
    "penstock_generated_tokens": ["sglang:generation_tokens"],
}


def names(model: str) -> MetricNames:
    derived: dict[str, Derive] = {
        "penstock_requests": of_requests,
        "penstock_kv_blocks": of_blocks,
        "penstock_requests_finished": of_finished,
        "penstock_generated_tokens": Throughput(),
    }
    return MetricNames(RENAMED, derived, {"model_name": model})


class Throughput:
    """Measures tokens per second from one scrape to the next."""

    def __init__(self) -> None:
        self._at, self._count = monotonic(), 0.0

    def __call__(self, metric: Metric) -> Iterator[DerivedSample]:
        count = metric.samples[0].value
        now, made = monotonic(), max(count - self._count, 0.0)  # a restarted engine counts from 0
        seconds, self._at, self._count = now - self._at, now, count
        yield DerivedSample("sglang:gen_throughput", made / seconds if seconds > 0 else 0.0)


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample("sglang:num_running_reqs", states["running"])
    yield DerivedSample("sglang:num_queue_reqs", states["waiting"])


def of_blocks(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("sglang:token_usage", used_share(metric))


def of_finished(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("sglang:num_requests_total", finished_counts(metric).done, "counter")
