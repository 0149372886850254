"""Exports the metrics of Triton, whose protocol this is."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    DerivedSample,
    MetricNames,
    by_state,
    finished_counts,
    total,
)


def names(model: str) -> MetricNames:
    derived = {
        "penstock_requests": of_requests,
        "penstock_requests_finished": of_finished,
        "penstock_request_seconds": of_duration,
        "penstock_request_queue_seconds": of_queue,
        "penstock_steps": of_steps,
    }
    return MetricNames({}, derived, {"model": model, "version": "1"})


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_pending_request_count", by_state(metric)["waiting"])


def of_finished(metric: Metric) -> Iterator[DerivedSample]:
    counts = finished_counts(metric)
    yield DerivedSample("nv_inference_request_success", counts.done, "unknown")
    yield DerivedSample("nv_inference_count", counts.done, "unknown")
    yield DerivedSample("nv_inference_request_failure", counts.errors, "unknown", ("reason", "BACKEND"))
    yield DerivedSample("nv_inference_request_failure", counts.aborts, "unknown", ("reason", "CANCELED"))


def of_duration(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_request_duration_us", total(metric) * 1e6, "unknown")


def of_queue(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_queue_duration_us", total(metric) * 1e6, "unknown")


def of_steps(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_exec_count", metric.samples[0].value, "unknown")
