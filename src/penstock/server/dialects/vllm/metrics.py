"""Exports vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import time

from prometheus_client.metrics_core import Metric

from penstock.server.telemetry.compat_metrics import (
    DerivedSample,
    MetricNames,
    by_state,
    used_share,
)

RENAMED = {
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
    "penstock_prompt_tokens": ["vllm:prompt_tokens", "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"],
    "penstock_cached_tokens": ["vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "vllm:prompt_tokens_cached"],
    "penstock_generated_tokens": ["vllm:generation_tokens"],
    "penstock_preemptions": ["vllm:num_preemptions"],
    "penstock_requests_finished": ["vllm:request_success"],
    "penstock_model_info": ["vllm:cache_config_info"],
}

SPEC_DECODE = {  # ours: vLLM's
    "penstock_drafts": "vllm:spec_decode_num_drafts_total",
    "penstock_drafted_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "penstock_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


def names(model: str) -> MetricNames:
    derived = {
        "penstock_requests": of_requests,
        "penstock_kv_blocks": of_blocks,
        **dict.fromkeys(SPEC_DECODE, of_drafts),
    }
    return MetricNames(RENAMED, derived, {"model_name": model, "engine": "0"}, lora_info)


def of_requests(metric: Metric) -> Iterator[DerivedSample]:
    states = by_state(metric)
    yield DerivedSample("vllm:num_requests_running", states["running"])
    yield DerivedSample("vllm:num_requests_waiting", states["waiting"])
    yield DerivedSample("vllm:num_requests_swapped", 0)


def of_blocks(metric: Metric) -> Iterator[DerivedSample]:
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        yield DerivedSample(name, used_share(metric))


def of_drafts(metric: Metric) -> Iterator[DerivedSample]:
    """Adds up all sources of drafts: vLLM has one figure for them."""
    yield DerivedSample(SPEC_DECODE[metric.name], sum(sample.value for sample in metric.samples), "counter")


def lora_info(metrics: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yields vLLM's metric about adapters: their names are its labels, and its value is the time."""
    slots = metrics["penstock_adapter_slots"].samples[0].value
    if not slots:  # no model is loaded
        return
    labels = {"max_lora": str(int(slots))}
    for state in ("running", "waiting"):
        named = metrics["penstock_adapter_requests"].samples
        found = [sample.labels["adapter"] for sample in named if sample.labels["state"] == state and sample.value]
        labels[f"{state}_lora_adapters"] = ",".join(found)
    info = Metric("vllm:lora_requests_info", "Adapters that requests use and wait for", "gauge")
    info.add_sample(info.name, labels, time())
    yield info
