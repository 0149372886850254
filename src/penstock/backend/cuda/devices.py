"""Finds the GPUs that torch can use, and reads their properties."""

from __future__ import annotations

import torch

from penstock.backend.cuda.device_properties import (
    INTERPRETER,
    LEAST_SHARED_MEMORY,
    SHARED_MEMORY,
    DeviceProperties,
)
from penstock.errors import ConfigError


def gpu_count() -> int:
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


def device_properties(device: torch.device) -> DeviceProperties:
    """Returns the properties of a GPU, or of Triton's interpreter for device "cpu"."""
    if device.type != "cuda":
        return INTERPRETER
    found = torch.cuda.get_device_properties(device)
    capability = found.major, found.minor
    known = SHARED_MEMORY.get(capability, LEAST_SHARED_MEMORY)
    kilohertz, bits = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return DeviceProperties(
        name=found.name,
        capability=capability,
        sm_count=found.multi_processor_count,
        shared_memory=getattr(found, "shared_memory_per_block_optin", known),
        l2_bytes=getattr(found, "L2_cache_size", 0),
        bandwidth=2e3 * kilohertz * bits / 8,  # memory transfers twice in each cycle of its clock
    )
