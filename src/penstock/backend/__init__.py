"""Opens the backend that computes. `base` is the seam; each folder with a `device.py` is a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backend.devices import device_kind, in_order, parse_device
from penstock.config import AUTO, Config
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.backend.base import Backend
    from penstock.backend.blocks.kv_file import KvFile
    from penstock.backend.packed_cache import PackedCache


def resolve_defaults(config: Config, fp8: bool = False, whole: int = 0) -> Config:
    """Returns the config with its device named and with step sizes that suit the device, where none are given.

    `fp8`: the checkpoint's weights are FP8. `whole`: for a model that computes each prompt in one step, the tokens of
    its longest prompt; such a model keeps no KV between steps, so its KV is as exact as the device computes.
    """
    if config.device == AUTO:
        config = replace(config, device=next(kind.name for kind in in_order() if kind.is_available()))
    kind = device_kind(config.device)
    defaults = {**kind.defaults, **(kind.fp8_defaults if fp8 or config.quantize == "fp8" else {})}
    return replace(
        config,
        max_rows=config.max_rows or defaults["max_rows"],
        step_tokens=config.step_tokens or max(defaults["step_tokens"], config.max_len or whole if whole else 0),
        prefill_budget=config.prefill_budget or defaults["prefill_budget"],
        kv=kind.exact_kv if whole and config.kv == AUTO else config.kv,
    )


def open_backend(config: Config, packed: Sequence[PackedCache | None] = (), kv_file: KvFile | None = None) -> Backend:
    """Returns the backend for a config that `resolve_defaults` has completed.

    A device that caches weights reads each program's from its `packed` file, or writes them to it. The KV cache lies in
    the `kv_file` if the device can map one.
    """
    check_quantize(config)
    device = parse_device(config.device)
    return device.kind.open(config, device, packed, kv_file)


def check_quantize(config: Config) -> None:
    known = device_kind(config.device).quantizations
    if config.quantize == "fp8" and "fp8" not in known:
        raise ConfigError("fp8 needs a GPU that multiplies it: on a CPU, q8_0 takes as little memory and is finer")
    if config.quantize and config.quantize not in known:
        raise ConfigError(f"weights can be quantized to {', '.join(known)}; got {config.quantize!r}")


def recoded_to(config: Config) -> str:
    """Returns the format that plain weights have when this config's backend gets them; empty: their own."""
    return device_kind(config.device).quantizations.get(config.quantize, "")
