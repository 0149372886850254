"""Exports Penstock's metrics again under the names that dashboards and routers of other engines read.

Each engine's names are a set of their own, which can be left out. Only metrics with the same meaning are exported: a
missing figure is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from time import monotonic, time
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TOKENS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 10**6)

SETS = {  # and their prefixes
    "vllm": "vllm:",
    "llamacpp": "llamacpp:",
    "sglang": "sglang:",
    "tgi": "tgi_",
    "nv": "nv_",
    "dynamo": "dynamo_",
}
DEFAULT_SETS = ("vllm", "llamacpp")

RENAMED = {  # ours: theirs, by the name without _total
    "penstock_time_to_first_token_seconds": [
        "vllm:time_to_first_token_seconds",
        "sglang:time_to_first_token_seconds",
        "dynamo_frontend_time_to_first_token_seconds",
    ],
    "penstock_inter_token_seconds": [
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
        "dynamo_frontend_inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
    ],
    "penstock_request_token_seconds": [
        "vllm:request_time_per_output_token_seconds",
        "tgi_request_mean_time_per_token_duration",
    ],
    "penstock_request_seconds": [
        "vllm:e2e_request_latency_seconds",
        "sglang:e2e_request_latency_seconds",
        "dynamo_frontend_request_duration_seconds",
        "tgi_request_duration",
    ],
    "penstock_request_queue_seconds": [
        "vllm:request_queue_time_seconds",
        "sglang:queue_time_seconds",
        "tgi_request_queue_duration",
    ],
    "penstock_request_prefill_seconds": ["vllm:request_prefill_time_seconds"],
    "penstock_request_decode_seconds": ["vllm:request_decode_time_seconds"],
    "penstock_request_prompt_tokens": [
        "vllm:request_prompt_tokens",
        "tgi_request_input_length",
        "dynamo_frontend_input_sequence_tokens",
    ],
    "penstock_request_generated_tokens": [
        "vllm:request_generation_tokens",
        "tgi_request_generated_tokens",
        "dynamo_frontend_output_sequence_tokens",
    ],
    "penstock_request_max_tokens": [
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_max_tokens",
        "tgi_request_max_new_tokens",
    ],
    "penstock_step_tokens": ["vllm:iteration_tokens_total"],
    "penstock_prompt_tokens": [
        "vllm:prompt_tokens",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "llamacpp:prompt_tokens",
        "sglang:prompt_tokens",
    ],
    "penstock_cached_tokens": [
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits",
        "vllm:prompt_tokens_cached",
        "sglang:cached_tokens",
    ],
    "penstock_generated_tokens": [
        "vllm:generation_tokens",
        "llamacpp:tokens_predicted",
        "sglang:generation_tokens",
        "dynamo_frontend_output_tokens",
    ],
    "penstock_preemptions": ["vllm:num_preemptions"],
    "penstock_requests_finished": ["vllm:request_success"],
    "penstock_steps": ["llamacpp:n_decode"],
    "penstock_model_info": ["vllm:cache_config_info"],
}
BUCKETS = {  # only those of our buckets that theirs have
    "penstock_time_to_first_token_seconds": FIRST_TOKEN,
    "penstock_inter_token_seconds": INTER_TOKEN,
    "penstock_request_token_seconds": INTER_TOKEN,
    "penstock_request_seconds": REQUEST,
    "penstock_request_queue_seconds": REQUEST,
    "penstock_request_prefill_seconds": REQUEST,
    "penstock_request_decode_seconds": REQUEST,
}
LABELS = {"reason": "finished_reason", "blocks": "num_gpu_blocks"}


class DerivedSample(NamedTuple):
    """Is a figure of another engine that is computed from one of our metrics."""

    name: str
    value: float
    kind: str = "gauge"  # unknown: a counter whose name does not end in _total
    label: tuple[str, str] | None = None  # of its own, beside its set's
    model: str = ""  # the one that it is about, if it says so


class CompatMetrics:
    """Collects the chosen `sets` of names from the collectors of our own metrics."""

    def __init__(self, sources: Iterable[Collector], model: str, sets: Collection[str] = DEFAULT_SETS) -> None:
        self._sources = list(sources)
        self._prefixes = tuple(SETS[name] for name in sets)
        self._labels = {
            "vllm:": {"model_name": model, "engine": "0"},
            "sglang:": {"model_name": model},
            "nv_": {"model": model, "version": "1"},
            "dynamo_": {"model": model},
        }
        self._throughput = Throughput()

    def collect(self) -> Iterator[Metric]:
        metrics = [metric for source in self._sources for metric in source.collect()]
        if "vllm:".startswith(self._prefixes):
            yield from lora_info({metric.name: metric for metric in metrics})
        for metric in metrics:
            for name in RENAMED.get(metric.name, ()):
                if name.startswith(self._prefixes):
                    yield self._renamed(metric, name)
            yield from self._derived(metric)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        copy.samples = [
            sample._replace(name=name + sample.name.removeprefix(metric.name), labels=self._labelled(sample, name))
            for sample in metric.samples
            if not sample.name.endswith("_created") and _kept(sample, BUCKETS.get(metric.name))
        ]
        return copy

    def _derived(self, metric: Metric) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        derive = DERIVED.get(metric.name)
        samples = [*derive(metric)] if derive else []
        if metric.name == "penstock_generated_tokens":
            rate = self._throughput.since_last(metric.samples[0].value)
            samples.append(DerivedSample("sglang:gen_throughput", rate))
        for name, value, kind, label, model in samples:
            if name.startswith(self._prefixes):
                made = found.setdefault(name, Metric(name.removesuffix("_total"), metric.documentation, kind))
                own = ({} if label is None else {label[0]: label[1]}) | ({"model": model} if model else {})
                made.add_sample(name, self._shared_labels(name) | own, value)
        return found.values()

    def _labelled(self, sample: Sample, name: str) -> dict[str, str]:
        own = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        return self._shared_labels(name) | own

    def _shared_labels(self, name: str) -> dict[str, str]:
        return next((labels for prefix, labels in self._labels.items() if name.startswith(prefix)), {})


class Throughput:
    """Measures tokens per second from one scrape to the next."""

    def __init__(self) -> None:
        self._at, self._count = monotonic(), 0.0

    def since_last(self, count: float) -> float:
        now, made = monotonic(), max(count - self._count, 0.0)  # a restarted engine counts from 0
        seconds, self._at, self._count = now - self._at, now, count
        return made / seconds if seconds > 0 else 0.0


def _kept(sample: Sample, bounds: Collection[float] | None) -> bool:
    bound = float(sample.labels.get("le", "inf"))
    return bounds is None or bound == inf or bound in bounds


def by_state(metric: Metric) -> dict[str, float]:
    return {sample.labels["state"]: sample.value for sample in metric.samples}


def lora_info(metrics: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yields vLLM's metric about adapters: their names are its labels, and its value is the time."""
    slots = metrics["penstock_adapter_slots"].samples[0].value
    if not slots:  # no model is loaded
        return
    labels = {"max_lora": str(int(slots))}
    for state in ("running", "waiting"):
        named = metrics["penstock_adapter_requests"].samples
        names = [sample.labels["adapter"] for sample in named if sample.labels["state"] == state and sample.value]
        labels[f"{state}_lora_adapters"] = ",".join(names)
    info = Metric("vllm:lora_requests_info", "Adapters that requests use and wait for", "gauge")
    info.add_sample(info.name, labels, time())
    yield info


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    for name in ("vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs"):
        yield DerivedSample(name, states["running"])
    for name in ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs"):
        yield DerivedSample(name, states["waiting"])
    yield DerivedSample("vllm:num_requests_swapped", 0)
    yield DerivedSample("tgi_batch_current_size", states["running"])
    yield DerivedSample("tgi_queue_size", states["waiting"])
    yield DerivedSample("nv_inference_pending_request_count", states["waiting"])
    yield DerivedSample("dynamo_frontend_inflight_requests", states["running"] + states["waiting"])
    yield DerivedSample("dynamo_frontend_queued_requests", states["waiting"])


def of_blocks(metric: Metric) -> Iterator[DerivedSample]:
    """Counts cached blocks that no request uses as free, as vLLM and SGLang do."""
    states = by_state(metric)
    share = states["used"] / max(sum(states.values()), 1)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"):
        yield DerivedSample(name, share)
    yield DerivedSample("dynamo_component_kvstats_gpu_cache_usage_percent", share)  # from 0 to 1, as theirs
    yield DerivedSample("dynamo_component_kvstats_active_blocks", states["used"])
    yield DerivedSample("dynamo_component_kvstats_total_blocks", sum(states.values()))


def of_prefill(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("llamacpp:prompt_seconds_total", total(metric), "counter")


def of_decode(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("llamacpp:tokens_predicted_seconds_total", total(metric), "counter")


def of_finished(metric: Metric) -> Iterator[DerivedSample]:
    """Counts a request as failed if it ended in an error or its client left."""
    ends = {sample.labels["reason"]: sample.value for sample in metric.samples if sample.name.endswith("_total")}
    failed = {reason: ends.pop(reason, 0.0) for reason in FAILURES}
    done = sum(ends.values())
    yield DerivedSample("sglang:num_requests_total", done, "counter")
    yield DerivedSample("tgi_request_count", done + sum(failed.values()), "unknown")
    yield DerivedSample("tgi_request_success", done, "unknown")
    yield DerivedSample("tgi_request_failure", failed["error"], "unknown", ("err", "generation"))
    yield DerivedSample("nv_inference_request_success", done, "unknown")
    yield DerivedSample("nv_inference_count", done, "unknown")
    yield DerivedSample("dynamo_frontend_requests_total", done, "counter", ("status", "success"))
    yield DerivedSample("dynamo_frontend_requests_total", sum(failed.values()), "counter", ("status", "error"))
    for reason, label in FAILURES.items():
        yield DerivedSample("nv_inference_request_failure", failed[reason], "unknown", ("reason", label))


def of_duration(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_request_duration_us", total(metric) * 1e6, "unknown")


def of_queue(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_queue_duration_us", total(metric) * 1e6, "unknown")


def of_steps(metric: Metric) -> Iterator[DerivedSample]:
    yield DerivedSample("nv_inference_exec_count", metric.samples[0].value, "unknown")


def of_drafts(metric: Metric) -> Iterator[DerivedSample]:
    """Adds up all sources, which vLLM does not tell apart."""
    yield DerivedSample(SPEC_DECODE[metric.name], sum(sample.value for sample in metric.samples), "counter")


def of_replicas(metric: Metric) -> Iterator[DerivedSample]:
    """Tells Dynamo's figures of each worker: a replica's name is the worker's id."""
    if metric.name == "penstock_replica_resumed_requests":
        resumed: dict[str, float] = {}
        for sample in metric.samples:
            resumed[sample.labels["model"]] = resumed.get(sample.labels["model"], 0.0) + sample.value
        kind = "migration_type", "ongoing_request"
        for model, count in resumed.items():
            yield DerivedSample("dynamo_frontend_model_migration_total", count, "counter", kind, model)
        return
    name = WORKER[metric.name]
    for sample in metric.samples:
        if sample.labels.get("state", "used") == "used":
            worker = "worker_id", sample.labels["replica"]
            yield DerivedSample(name, sample.value, "gauge", worker, sample.labels["model"])


def total(metric: Metric) -> float:
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


SPEC_DECODE = {  # ours: vLLM's
    "penstock_drafts": "vllm:spec_decode_num_drafts_total",
    "penstock_drafted_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "penstock_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
WORKER = {  # ours: Dynamo's
    "penstock_replica_queued_tokens": "dynamo_frontend_worker_active_prefill_tokens",
    "penstock_replica_kv_blocks": "dynamo_frontend_worker_active_decode_blocks",
}
FAILURES = {"error": "BACKEND", "abort": "CANCELED"}  # and Triton's reasons
DERIVED: dict[str, Callable[[Metric], Iterator[DerivedSample]]] = {
    "penstock_requests": of_requests,
    "penstock_kv_blocks": of_blocks,
    "penstock_request_prefill_seconds": of_prefill,
    "penstock_request_decode_seconds": of_decode,
    "penstock_requests_finished": of_finished,
    "penstock_request_seconds": of_duration,
    "penstock_request_queue_seconds": of_queue,
    "penstock_steps": of_steps,
    **dict.fromkeys(SPEC_DECODE, of_drafts),
    **dict.fromkeys([*WORKER, "penstock_replica_resumed_requests"], of_replicas),
}
