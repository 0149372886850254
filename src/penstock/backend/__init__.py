"""Whatever computes. `base` is the seam; each folder beside it is one way to do the work."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from penstock.backend.base import Backend
from penstock.config import DEVICES, OPTIONS, QUANTIZATIONS, Config, available_threads
from penstock.errors import ConfigError

NVIDIA = Path("/dev/nvidiactl")  # there where a driver is


def settle(config: Config, float8: bool = False, whole: int = 0) -> Config:
    """The device named, and steps of the sizes that suit it, and weights that are `float8` or become it, where none are
    given. `whole`: tokens of the longest prompt of a model that takes prompts in one step; it keeps no KV, so what it
    has for the step is as exact as the device computes."""
    device = config.device
    if device == "auto":
        device = "cuda" if has_cuda() else "cpu"
    fp8_weights = float8 or config.quantize == "fp8"
    defaults = {name: entry.defaults.of(device, fp8_weights) for name, entry in OPTIONS.items() if entry.defaults}
    return replace(
        config,
        device=device,
        max_rows=config.max_rows or defaults["max_rows"],
        step_tokens=config.step_tokens or max(defaults["step_tokens"], config.max_len or whole if whole else 0),
        prefill_budget=config.prefill_budget or defaults["prefill_budget"],
        kv="f32" if whole and (device, config.kv) == ("cpu", "auto") else config.kv,
    )


def open_backend(config: Config) -> Backend:
    """What computes for this config, which is settled."""
    device = config.device
    check_quantize(config)
    if device == "cuda":
        return open_cuda(config)
    if device == "cpu":
        from penstock.backend.cpu import CpuBackend

        return CpuBackend(threads=config.threads or available_threads(), kv=config.kv)
    if device == "ref":
        from penstock.backend.ref import RefBackend

        if config.kv not in ("auto", "f32"):
            raise ConfigError(f"the reference keeps its KV cache as f32; got {config.kv!r}")
        return RefBackend()
    raise ConfigError(f"unknown device {device!r}: use one of {', '.join(DEVICES)}")


def check_quantize(config: Config) -> None:
    known = QUANTIZATIONS.get(config.device, QUANTIZATIONS["cpu"])
    if config.quantize == "fp8" and "fp8" not in known:
        raise ConfigError("fp8 needs a GPU, whose units multiply it: on a CPU q8_0 takes as little memory and is finer")
    if config.quantize and config.quantize not in known:
        raise ConfigError(f"weights can be quantized to {', '.join(known)}; got {config.quantize!r}")


def recoded_to(config: Config) -> str:
    """The format that plain weights have when this config's backend gets them; empty: their own."""
    if config.quantize == "int4" and config.device != "cuda":
        return "Q4_1"
    return config.quantize.upper() if config.quantize in ("q8_0", "q4_k") else ""


def has_cuda() -> bool:
    """Whether a GPU and what it needs are there, and work together."""
    if not NVIDIA.exists() or find_spec("torch") is None or find_spec("triton") is None:
        return False
    from penstock.backend.availability import cuda_trouble

    return not cuda_trouble()


def open_cuda(config: Config) -> Backend:
    if find_spec("torch") is None or find_spec("triton") is None:
        raise ConfigError("device cuda needs torch and triton: pip install 'penstock[cuda]'")
    from penstock.backend.cuda import CudaBackend

    return CudaBackend(
        config.step_tokens,
        config.max_rows,
        prefill_budget=config.prefill_budget,
        quantize="" if recoded_to(config) else config.quantize,
        kv=config.kv,
    )
