"""Reads the options of `LLM`: the engine's (`penstock.config`), and vLLM's for compatibility."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

from penstock.backend.devices import quantizations
from penstock.config import log_to_stderr
from penstock.config.speculative import speculation_in
from penstock.errors import InvalidRequest
from penstock.service_levels import NO_TARGETS, Targets

RENAMED = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_rows",
    "max_num_batched_tokens": "step_tokens",
    "max_loras": "max_adapters",
}
KV_FORMATS = {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto", "half": "auto"}
ANY: tuple[object, ...] = ()

# vLLM's options without effect, with their harmless values: others are listed in a warning.
NO_EFFECT: dict[str, tuple[object, ...]] = {
    "convert": ANY,
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": ANY,
    "disable_log_requests": ANY,
    "disable_log_stats": ANY,
    "enable_chunked_prefill": (True,),
    "enable_prefix_caching": (True,),
    "enforce_eager": ANY,
    "generation_config": ("auto",),
    "load_format": ("auto",),
    "pipeline_parallel_size": (1,),
    "runner": ANY,
    "served_model_name": ANY,
    "task": ANY,
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": ANY,  # code in models is never run
    "dtype": ("auto",),
    "enable_expert_parallel": (False,),
    "enable_lora": ANY,  # adapters are always enabled, with any rank
    "max_cpu_loras": ANY,
    "max_lora_rank": ANY,
}
IGNORED = """
    additional_config allowed_local_media_path async_scheduling attention_backend attention_config calculate_kv_scales
    code_revision compilation_config config_format cpu_offload_gb cuda_graph_sizes disable_cascade_attn
    disable_sliding_window distributed_executor_backend download_dir enable_prompt_embeds enable_sleep_mode
    gpu_memory_utilization guided_decoding_backend hf_config_path hf_overrides hf_token ignore_patterns
    kv_cache_memory_bytes kv_transfer_config limit_mm_per_prompt logits_processors logprobs_mode
    max_logprobs max_num_partial_prefills max_seq_len_to_capture mm_processor_cache_gb
    mm_processor_kwargs model_impl num_gpu_blocks_override num_lookahead_slots num_scheduler_steps pooler_config
    preemption_mode prefix_caching_hash_algo quantization reasoning_parser revision rope_scaling rope_theta
    scheduling_policy skip_tokenizer_init speculative_model structured_outputs_config swap_space
    tokenizer tokenizer_revision use_tqdm_on_load worker_cls
""".split()  # noqa: SIM905


class LLMOptions(NamedTuple):
    """Holds the parsed options of `LLM`."""

    engine: dict[str, Any]  # arguments of `configure`
    seed: int | None = None  # source of the requests' seeds
    sampling: Mapping[str, Any] = {}  # override the model's defaults
    targets: Targets = NO_TARGETS  # default targets of requests


def read_options(given: Mapping[str, Any], warn: Callable[[str], None] = log_to_stderr) -> LLMOptions:
    """Translates vLLM's options, where None means the default; `warn` gets one line about ignored ones. Unknown options
    are left to `configure`, which refuses them.
    """
    engine: dict[str, Any] = {}
    ignored = []
    options = {name: value for name, value in given.items() if value is not None}
    seed, sampling = options.pop("seed", None), options.pop("override_generation_config", {})
    targets = check_targets(options.pop("targets", NO_TARGETS))
    for name, value in options.items():
        if name in NO_EFFECT or name in IGNORED:
            if name == "quantization" and value in quantizations():
                engine["quantize"] = value
            elif name in IGNORED or (NO_EFFECT[name] and value not in NO_EFFECT[name]):
                ignored.append(name)
        elif name == "adapters":
            engine["adapter"] = tuple(adapter_text(adapter, place) for adapter, place in value.items())
        elif name == "speculative_config":
            engine.update(speculation_in(value, warn))
        elif name == "kv_cache_dtype":
            engine["kv"] = KV_FORMATS.get(value, value)
        else:
            engine[RENAMED.get(name, name)] = value
    if ignored:
        warn(f"warning: options of vLLM without effect here: {', '.join(sorted(ignored))}")
    return LLMOptions(engine, seed, sampling, targets)


def adapter_text(name: str, place: Any) -> str:
    """Converts an entry of `adapters`, {name: path} or {name: (path, scale)}, to the engine's notation."""
    path, scale = place if isinstance(place, tuple) else (place, 1.0)
    return f"{name}={path}:{scale!r}"


def check_targets(given: Any) -> Targets:
    if isinstance(given, Targets):
        times = [time for time in given if time is not None]
        if all(isinstance(time, int | float) and 0 < time < inf for time in times):
            return given
    message = "targets are penstock.Targets(ttft=..., itl=...), each in seconds, above 0, or None"
    raise InvalidRequest(f"{message}; got {given!r:.100}", param="targets")
