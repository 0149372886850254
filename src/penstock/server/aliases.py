"""Penstock's metrics once more under the names that dashboards and routers for vLLM and llama.cpp ask for.

Only where the meaning is the same: a figure that is not there is better than one that means something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

RENAMED = {  # ours: theirs, by the name without _total
    "penstock_time_to_first_token_seconds": ["vllm:time_to_first_token_seconds"],
    "penstock_inter_token_seconds": ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
    "penstock_request_seconds": ["vllm:e2e_request_latency_seconds"],
    "penstock_prompt_tokens": ["vllm:prompt_tokens", "vllm:prefix_cache_queries", "llamacpp:prompt_tokens"],
    "penstock_cached_tokens": ["vllm:prefix_cache_hits"],
    "penstock_generated_tokens": ["vllm:generation_tokens", "llamacpp:tokens_predicted"],
    "penstock_preemptions": ["vllm:num_preemptions"],
    "penstock_requests_finished": ["vllm:request_success"],
    "penstock_steps": ["llamacpp:n_decode"],
}
LABELS = {"reason": "finished_reason"}


class Aliases:
    def __init__(self, sources: Iterable[Collector], model: str) -> None:
        self._sources = list(sources)
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                for name in RENAMED.get(metric.name, ()):
                    yield self._renamed(metric, name)
                if derive := DERIVED.get(metric.name):
                    yield from (self._gauge(name, metric, value) for name, value in derive(metric))

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        copy.samples = [
            sample._replace(name=name + sample.name.removeprefix(metric.name), labels=self._labelled(sample, name))
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        return copy

    def _gauge(self, name: str, metric: Metric, value: float) -> Metric:
        gauge = Metric(name, metric.documentation, "gauge")
        gauge.add_sample(name, self._labels if name.startswith("vllm:") else {}, value)
        return gauge

    def _labelled(self, sample: Sample, name: str) -> dict[str, str]:
        own = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        return self._labels | own if name.startswith("vllm:") else own


def by_state(metric: Metric) -> dict[str, float]:
    return {sample.labels["state"]: sample.value for sample in metric.samples}


def of_requests(metric: Metric) -> Iterator[tuple[str, float]]:
    states = by_state(metric)
    yield from (("vllm:num_requests_running", states["running"]), ("vllm:num_requests_waiting", states["waiting"]))
    yield from (("llamacpp:requests_processing", states["running"]), ("llamacpp:requests_deferred", states["waiting"]))


def of_blocks(metric: Metric) -> Iterator[tuple[str, float]]:
    """What is kept only in case it is asked for again counts as free, as it does there."""
    states = by_state(metric)
    share = states["used"] / max(sum(states.values()), 1)
    yield from (("vllm:kv_cache_usage_perc", share), ("vllm:gpu_cache_usage_perc", share))


DERIVED: dict[str, Callable[[Metric], Iterator[tuple[str, float]]]] = {
    "penstock_requests": of_requests,
    "penstock_kv_blocks": of_blocks,
}
