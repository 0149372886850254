"""Opens what computes. `base` is the seam; each folder beside it is one way to do the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.base import Backend
from penstock.config import OPTIONS, QUANTIZATIONS, Config, Device, available_threads
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache

NVIDIA = Path("/dev/nvidiactl")  # exists where a driver is loaded


def resolve_defaults(config: Config, fp8: bool = False, whole: int = 0) -> Config:
    """Returns the config with its device named and with step sizes that suit the device, where none are given.

    `fp8`: the checkpoint's weights are FP8. `whole`: for a model that computes each prompt in one step, the tokens of
    its longest prompt; such a model keeps no KV between steps, so its KV is as exact as the device computes.
    """
    device = Device.parse(config.device)
    if device.kind == "auto":
        device = Device("cuda" if has_cuda() else "cpu" if has_native() else "ref")
        if device.kind == "ref":
            from penstock.backend.availability import warn_of_numpy

            warn_of_numpy()
        config = replace(config, device=device.kind)
    fp8_weights = fp8 or config.quantize == "fp8"
    defaults = {name: entry.defaults.of(device, fp8_weights) for name, entry in OPTIONS.items() if entry.defaults}
    return replace(
        config,
        max_rows=config.max_rows or defaults["max_rows"],
        step_tokens=config.step_tokens or max(defaults["step_tokens"], config.max_len or whole if whole else 0),
        prefill_budget=config.prefill_budget or defaults["prefill_budget"],
        kv="f32" if whole and (device.kind, config.kv) == ("cpu", "auto") else config.kv,
    )


def open_backend(config: Config, packed: Sequence[PackedCache | None] = (), kv_file: KvFile | None = None) -> Backend:
    """Returns the backend for a config that `resolve_defaults` has completed. On a CPU, weights of each program are
    read from its `packed` cache if they are there, and written to it if not, and the KV cache lies in the `kv_file`."""
    device = Device.parse(config.device)
    check_quantize(config)
    if device.kind == "cuda":
        return open_cuda(config, device)
    if device.kind == "cpu":
        if not has_native():
            from penstock.backend.availability import NO_NATIVE

            raise ConfigError(f"device cpu needs native code: {NO_NATIVE}")
        from penstock.backend.cpu import CpuBackend

        threads = config.threads or available_threads()
        return CpuBackend(threads=threads, kv=config.kv, packed=packed, kv_file=kv_file)
    if device.kind == "ref":
        from penstock.backend.ref import RefBackend

        if config.deterministic:
            raise ConfigError("the reference is not deterministic: NumPy's sums depend on shapes; use device cpu")
        return RefBackend(config.kv)
    raise ConfigError(f"device {config.device!r} is not decided yet: resolve_defaults comes first")


def check_quantize(config: Config) -> None:
    """Raises ConfigError if the config's device cannot compute with the weights that it asks for."""
    known = QUANTIZATIONS.get(Device.parse(config.device).kind, QUANTIZATIONS["cpu"])
    if config.quantize == "fp8" and "fp8" not in known:
        raise ConfigError("fp8 needs a GPU that multiplies it: on a CPU, q8_0 takes as little memory and is finer")
    if config.quantize and config.quantize not in known:
        raise ConfigError(f"weights can be quantized to {', '.join(known)}; got {config.quantize!r}")


def recoded_to(config: Config) -> str:
    """Returns the format that plain weights have when this config's backend gets them; empty: their own."""
    if config.quantize == "int4" and Device.parse(config.device).kind != "cuda":
        return "Q4_1"
    return config.quantize.upper() if config.quantize in ("q8_0", "q4_k") else ""


def has_cuda() -> bool:
    """Returns True if there is a GPU that torch and triton can use."""
    if not NVIDIA.exists() or find_spec("torch") is None or find_spec("triton") is None:
        return False
    from penstock.backend.availability import why_no_cuda

    return not why_no_cuda()


def has_native() -> bool:
    """Returns True if the native code of the CPU backend is there."""
    try:
        import penstock.backend.cpu  # noqa: F401
    except ImportError:
        return False
    return True


def open_cuda(config: Config, device: Device) -> Backend:
    """Returns the CUDA backend on the GPU with the device's index; raises ConfigError if that cannot be used."""
    if find_spec("torch") is None or find_spec("triton") is None:
        raise ConfigError(f"device {device} needs torch and triton: pip install 'penstock[cuda]'")
    from penstock.backend.cuda import CudaBackend
    from penstock.backend.cuda.keeper import open_arena

    return CudaBackend(
        config.step_tokens,
        config.max_rows,
        device=str(device),
        prefill_budget=config.prefill_budget,
        quantize="" if recoded_to(config) else config.quantize,
        kv=config.kv,
        deterministic=config.deterministic,
        arena=open_arena(str(device), config.descriptors),
    )
