"""Exports the metrics of NVIDIA Dynamo, for its dashboards."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    DerivedSample,
    MetricNames,
    by_state,
    finished_counts,
    used_share,
)

RENAMED = {
    "penstock_time_to_first_token_seconds": ["dynamo_frontend_time_to_first_token_seconds"],
    "penstock_inter_token_seconds": ["dynamo_frontend_inter_token_latency_seconds"],
    "penstock_request_seconds": ["dynamo_frontend_request_duration_seconds"],
    "penstock_request_prompt_tokens": ["dynamo_frontend_input_sequence_tokens"],
    "penstock_request_generated_tokens": ["dynamo_frontend_output_sequence_tokens"],
    "penstock_generated_tokens": ["dynamo_frontend_output_tokens"],
}

WORKER = {  # ours: Dynamo's, for each worker
    "penstock_replica_queued_tokens": "dynamo_frontend_worker_active_prefill_tokens",
    "penstock_replica_kv_blocks": "dynamo_frontend_worker_active_decode_blocks",
}


def names(model: str) -> MetricNames:
    derived = {
        "penstock_requests": of_requests,
        "penstock_kv_blocks": of_blocks,
        "penstock_requests_finished": of_finished,
        "penstock_replica_resumed_requests": of_resumed,
        **dict.fromkeys(WORKER, of_workers),
    }
    return MetricNames(RENAMED, derived, {"model": model})


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample("dynamo_frontend_inflight_requests", states["running"] + states["waiting"])
    yield DerivedSample("dynamo_frontend_queued_requests", states["waiting"])


def of_blocks(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample(
        "dynamo_component_kvstats_gpu_cache_usage_percent", used_share(metric)
    )  # from 0 to 1, as theirs
    yield DerivedSample("dynamo_component_kvstats_active_blocks", states["used"])
    yield DerivedSample("dynamo_component_kvstats_total_blocks", sum(states.values()))


def of_finished(metric: Metric) -> Iterator[DerivedSample]:
    counts, name = finished_counts(metric), "dynamo_frontend_requests_total"
    yield DerivedSample(name, counts.done, "counter", ("status", "success"))
    yield DerivedSample(name, counts.errors + counts.aborts, "counter", ("status", "error"))


def of_resumed(metric: Metric) -> Iterator[DerivedSample]:
    resumed: dict[str, float] = {}
    for sample in metric.samples:
        resumed[sample.labels["model"]] = resumed.get(sample.labels["model"], 0.0) + sample.value
    kind = "migration_type", "ongoing_request"
    for model, count in resumed.items():
        yield DerivedSample("dynamo_frontend_model_migration_total", count, "counter", kind, model)


def of_workers(metric: Metric) -> Iterator[DerivedSample]:
    """Yields Dynamo's figures of each worker: a replica's name is the worker's id."""
    for sample in metric.samples:
        if sample.labels.get("state", "used") == "used":
            worker = "worker_id", sample.labels["replica"]
            yield DerivedSample(WORKER[metric.name], sample.value, "gauge", worker, sample.labels["model"])
