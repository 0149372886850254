"""Quantizes plain weights while they are loaded, if the device has kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.backend import recoded_to
from penstock.backend.device import DeviceKind
from penstock.backend.devices import device_kind
from penstock.config import Config, available_threads
from penstock.model.load import Checkpoint
from penstock.model.quantize_choice import Precision, choose, precision_of, quantized_when_read
from penstock.model.roles import MLA
from penstock.model.split_heads import split_kv_b
from penstock.model.tensor import PLAIN, Format, Tensor


def log_warning(note: str) -> None:
    import logging  # takes longer than packing most models

    logging.getLogger(__name__).warning(note)


def may_quantize(tensor: Tensor, kind: DeviceKind) -> bool:
    return precision_of(tensor) is not Precision.PLAIN and (kind.quantizes_heads or tensor.role not in MLA)


def quantized(checkpoint: Checkpoint, config: Config, note: Callable[[str], None] = log_warning) -> Checkpoint:
    """Returns the checkpoint with weights that are quantized as they are packed.

    The config's defaults are resolved. `note` gets a line for each difference from the request. The backend itself
    quantizes to formats of its own.
    """
    to = recoded_to(config)
    if not to:
        return checkpoint
    kind = device_kind(config.device)
    stored = with_split_kv_b(checkpoint) if kind.quantizes_heads else checkpoint.tensors
    changing = {name: tensor for name, tensor in stored.items() if may_quantize(tensor, kind)}
    formats, notes = choose(changing, to)
    threads = config.threads or available_threads()
    for each in notes:
        note(each)

    def encode(tensor: Tensor, format: Format) -> Tensor:
        from penstock.backend.cpu.quantize import quantize

        return quantize(tensor, format, threads)

    tensors = {
        name: quantized_when_read(tensor, formats[name], encode) if name in formats else tensor
        for name, tensor in stored.items()
    }
    return replace(checkpoint, tensors=tensors)


def with_split_kv_b(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the tensors with each plain kv_b of MLA split; a quantized one is split as it is packed."""
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.format.name in PLAIN}
    others = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in plain}
    return split_kv_b(plain, checkpoint.spec) | others
