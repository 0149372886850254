"""Finds the GPUs that torch can use."""

from __future__ import annotations

import torch

from penstock.errors import ConfigError


def gpu_count() -> int:
    """Returns how many GPUs torch can use."""
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def checked_device(name: str) -> torch.device:
    """Returns torch's device of "cuda", "cuda:N" or "cpu"; raises ConfigError for a GPU that is not there."""
    device, count = torch.device(name), gpu_count()
    if device.type != "cuda":
        return device
    if not count:
        raise ConfigError("torch finds no CUDA device: use --device cpu, or look at `nvidia-smi`")
    index = device.index or 0
    if index >= count:
        known = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"there is no device cuda:{index}: torch finds {known}; choose one of them with --device")
    return torch.device("cuda", index)
