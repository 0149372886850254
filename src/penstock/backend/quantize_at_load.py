"""Plain weights that are quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.backend import recoded_to
from penstock.config import Config, Device, available_threads
from penstock.model.families.mla import apart
from penstock.model.load import Checkpoint
from penstock.model.recode import HEADS, choose, recoded
from penstock.model.tensor import PLAIN, Format, Tensor


def warn(note: str) -> None:
    import logging  # takes longer than packing most models

    logging.getLogger(__name__).warning(note)


def quantized(checkpoint: Checkpoint, config: Config, tell: Callable[[str], None] = warn) -> Checkpoint:
    """Returns the checkpoint as this config will have it loaded: weights take their formats as they are packed. `tell`
    is told what is not as was asked for."""
    to = recoded_to(config)
    if not to:
        return checkpoint
    stored = checkpoint.tensors if Device.parse(config.device).kind == "cuda" else with_heads_apart(checkpoint)
    formats, notes = choose({name: tensor for name, tensor in stored.items() if can_be(name, config)}, to)
    threads = config.threads or available_threads()
    for note in notes:
        tell(note)

    def encode(tensor: Tensor, format: Format) -> Tensor:
        from penstock.backend.cpu.quantize import quantize

        return quantize(tensor, format, threads)

    tensors = {
        name: recoded(tensor, formats[name], encode) if name in formats else tensor for name, tensor in stored.items()
    }
    return replace(checkpoint, tensors=tensors)


def with_heads_apart(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Of latent attention, as far as it is plain."""
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.format.name in PLAIN}
    coded = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in plain}
    return apart(plain, checkpoint.spec) | coded


def can_be(name: str, config: Config) -> bool:
    """GPUs hold the matrices of each head in 16 bits whatever they come in."""
    return Device.parse(config.device).kind != "cuda" or name.rpartition(".")[2] not in HEADS
