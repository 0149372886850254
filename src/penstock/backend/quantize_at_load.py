"""Quantizes plain weights while they are loaded, and says which ones a device can quantize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.backend import recoded_to
from penstock.config import Config, Device, available_threads
from penstock.model.load import Checkpoint
from penstock.model.quantize_choice import Precision, choose, precision_of, quantized_when_read
from penstock.model.roles import MLA, Role
from penstock.model.split_heads import split_kv_b
from penstock.model.tensor import PLAIN, Format, Tensor

WITHOUT_KERNEL: dict[tuple[str, str], frozenset[Role]] = {  # roles that stay plain because a device has no kernel
    ("cuda", "q8_0"): MLA,
    ("cuda", "q4_k"): MLA,
    ("cuda", "int4"): MLA,
    ("cuda", "fp8"): MLA,
}


def log_warning(note: str) -> None:
    """Logs a note as a warning."""
    import logging  # takes longer than packing most models

    logging.getLogger(__name__).warning(note)


def may_quantize(tensor: Tensor, quantize: str, device: str) -> bool:
    """Returns whether `--quantize` changes the format of this tensor on this device, if it is plain."""
    unsupported = WITHOUT_KERNEL.get((device, quantize), frozenset())
    return precision_of(tensor) is not Precision.PLAIN and tensor.role not in unsupported


def quantized(checkpoint: Checkpoint, config: Config, note: Callable[[str], None] = log_warning) -> Checkpoint:
    """Returns the checkpoint with weights that are quantized as they are packed.

    The config's defaults are resolved. `note` is told where the result differs from what was asked for. Formats that
    the backend itself quantizes to are left to it.
    """
    to = recoded_to(config)
    if not to:
        return checkpoint
    device = Device.parse(config.device).kind
    stored = checkpoint.tensors if device == "cuda" else with_split_kv_b(checkpoint)
    changing = {name: tensor for name, tensor in stored.items() if may_quantize(tensor, config.quantize, device)}
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
