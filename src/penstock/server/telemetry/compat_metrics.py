"""Exports Penstock's metrics again under the names that dashboards and routers for vLLM and llama.cpp read.

Only metrics with the same meaning are exported: a missing figure is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf

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

RENAMED = {  # ours: theirs, by the name without _total
    "penstock_time_to_first_token_seconds": ["vllm:time_to_first_token_seconds"],
    "penstock_inter_token_seconds": ["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"],
    "penstock_request_token_seconds": ["vllm:request_time_per_output_token_seconds"],
    "penstock_request_seconds": ["vllm:e2e_request_latency_seconds"],
    "penstock_request_queue_seconds": ["vllm:request_queue_time_seconds"],
    "penstock_request_prefill_seconds": ["vllm:request_prefill_time_seconds"],
    "penstock_request_decode_seconds": ["vllm:request_decode_time_seconds"],
    "penstock_request_prompt_tokens": ["vllm:request_prompt_tokens"],
    "penstock_request_generated_tokens": ["vllm:request_generation_tokens"],
    "penstock_request_max_tokens": ["vllm:request_max_num_generation_tokens", "vllm:request_params_max_tokens"],
    "penstock_step_tokens": ["vllm:iteration_tokens_total"],
    "penstock_prompt_tokens": [
        "vllm:prompt_tokens",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "llamacpp:prompt_tokens",
    ],
    "penstock_cached_tokens": ["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "vllm:prompt_tokens_cached"],
    "penstock_generated_tokens": ["vllm:generation_tokens", "llamacpp:tokens_predicted"],
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


class CompatMetrics:
    def __init__(self, sources: Iterable[Collector], model: str) -> None:
        self._sources = list(sources)
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            for metric in source.collect():
                for name in RENAMED.get(metric.name, ()):
                    yield self._renamed(metric, name)
                if derive := DERIVED.get(metric.name):
                    yield from (self._derived(name, metric, value) for name, value in derive(metric))

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        copy.samples = [
            sample._replace(name=name + sample.name.removeprefix(metric.name), labels=self._labelled(sample, name))
            for sample in metric.samples
            if not sample.name.endswith("_created") and _kept(sample, BUCKETS.get(metric.name))
        ]
        return copy

    def _derived(self, name: str, metric: Metric, value: float) -> Metric:
        kind = "counter" if name.endswith("_total") else "gauge"
        derived = Metric(name.removesuffix("_total"), metric.documentation, kind)
        derived.add_sample(name, self._labels if name.startswith("vllm:") else {}, value)
        return derived

    def _labelled(self, sample: Sample, name: str) -> dict[str, str]:
        own = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        return self._labels | own if name.startswith("vllm:") else own


def _kept(sample: Sample, bounds: Collection[float] | None) -> bool:
    bound = float(sample.labels.get("le", "inf"))
    return bounds is None or bound == inf or bound in bounds


def by_state(metric: Metric) -> dict[str, float]:
    return {sample.labels["state"]: sample.value for sample in metric.samples}


def of_requests(metric: Metric) -> Iterator[tuple[str, float]]:
    states = by_state(metric)
    yield from (("vllm:num_requests_running", states["running"]), ("vllm:num_requests_waiting", states["waiting"]))
    yield "vllm:num_requests_swapped", 0
    yield from (("llamacpp:requests_processing", states["running"]), ("llamacpp:requests_deferred", states["waiting"]))


def of_blocks(metric: Metric) -> Iterator[tuple[str, float]]:
    """Counts cached blocks that no request uses as free, as vLLM does."""
    states = by_state(metric)
    share = states["used"] / max(sum(states.values()), 1)
    yield from (("vllm:kv_cache_usage_perc", share), ("vllm:gpu_cache_usage_perc", share))


def of_prefill(metric: Metric) -> Iterator[tuple[str, float]]:
    yield "llamacpp:prompt_seconds_total", total(metric)


def of_decode(metric: Metric) -> Iterator[tuple[str, float]]:
    yield "llamacpp:tokens_predicted_seconds_total", total(metric)


def total(metric: Metric) -> float:
    return next(sample.value for sample in metric.samples if sample.name.endswith("_sum"))


DERIVED: dict[str, Callable[[Metric], Iterator[tuple[str, float]]]] = {
    "penstock_requests": of_requests,
    "penstock_kv_blocks": of_blocks,
    "penstock_request_prefill_seconds": of_prefill,
    "penstock_request_decode_seconds": of_decode,
}
