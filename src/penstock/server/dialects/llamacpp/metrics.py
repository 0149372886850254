"""Exports the metrics of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    DerivedSample,
    MetricNames,
    by_state,
    total,
)

RENAMED = {
    "penstock_prompt_tokens": ["llamacpp:prompt_tokens"],
    "penstock_generated_tokens": ["llamacpp:tokens_predicted"],
    "penstock_steps": ["llamacpp:n_decode"],
}


def names(_: str) -> MetricNames:
    derived = {
        "penstock_requests": of_requests,
        "penstock_request_prefill_seconds": of_prefill,
        "penstock_request_decode_seconds": of_decode,
    }
    return MetricNames(RENAMED, derived)


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample("llamacpp:requests_processing", states["running"])
    yield DerivedSample("llamacpp:requests_deferred", states["waiting"])


def of_prefill(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("llamacpp:prompt_seconds_total", total(metric), "counter")


def of_decode(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("llamacpp:tokens_predicted_seconds_total", total(metric), "counter")
