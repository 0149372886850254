"""Plain weights that are quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.backend import recoded_to
from penstock.config import Config, available_threads
from penstock.model.load import Checkpoint
from penstock.model.recode import choose, recoded
from penstock.model.tensor import Format, Tensor


def warn(note: str) -> None:
    import logging  # takes longer than packing most models

    logging.getLogger(__name__).warning(note)


def quantized(checkpoint: Checkpoint, config: Config, tell: Callable[[str], None] = warn) -> Checkpoint:
    """As this config, settled, will have it loaded: weights take their formats as they are packed. `tell` hears what
    is not as was asked for."""
    to = recoded_to(config)
    if not to:
        return checkpoint
    formats, notes = choose(checkpoint.tensors, to)
    threads = config.threads or available_threads()
    for note in notes:
        tell(note)

    def encode(tensor: Tensor, format: Format) -> Tensor:
        from penstock.backend.cpu.quantize import quantize

        return quantize(tensor, format, threads)

    tensors = {
        name: recoded(tensor, formats[name], encode) if name in formats else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors)
