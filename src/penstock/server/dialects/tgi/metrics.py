"""Exports the metrics of Text Generation Inference."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    DerivedSample,
    MetricNames,
    by_state,
    finished_counts,
)

RENAMED = {
    "penstock_request_token_seconds": ["tgi_request_mean_time_per_token_duration"],
    "penstock_request_seconds": ["tgi_request_duration"],
    "penstock_request_queue_seconds": ["tgi_request_queue_duration"],
    "penstock_request_prompt_tokens": ["tgi_request_input_length"],
    "penstock_request_generated_tokens": ["tgi_request_generated_tokens"],
    "penstock_request_max_tokens": ["tgi_request_max_new_tokens"],
}


def names(_: str) -> MetricNames:
    return MetricNames(RENAMED, {"penstock_requests": of_requests, "penstock_requests_finished": of_finished})


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample("tgi_batch_current_size", states["running"])
    yield DerivedSample("tgi_queue_size", states["waiting"])


def of_finished(metric: Metric) -> Iterator[DerivedSample]:
    counts = finished_counts(metric)
    yield DerivedSample("tgi_request_count", sum(counts), "unknown")
    yield DerivedSample("tgi_request_success", counts.done, "unknown")
    yield DerivedSample("tgi_request_failure", counts.errors, "unknown", ("err", "generation"))
