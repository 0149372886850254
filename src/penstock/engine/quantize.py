"""Plain weights that are quantized while they are loaded."""

from __future__ import annotations

from dataclasses import replace

from penstock.backend import recoded_to
from penstock.config import Config, available_threads
from penstock.model.load import Checkpoint
from penstock.model.recode import Choice, Recoded, choose, outline
from penstock.model.tensor import Format, Tensor


def quantized(checkpoint: Checkpoint, config: Config) -> Checkpoint:
    """As this config, settled, will have it loaded. Weights take their format as they are packed."""
    formats, notes = _choice(checkpoint, config)
    if notes:
        import logging  # takes longer than packing most models

        for note in notes:
            logging.getLogger(__name__).warning(note)
    if not formats:
        return checkpoint
    threads = config.threads or available_threads()

    def encode(tensor: Tensor, format: Format) -> Tensor:
        from penstock.backend.cpu.quantize import quantize

        return quantize(tensor, format, threads)

    return replace(checkpoint, tensors=Recoded(checkpoint.tensors, formats, encode))


def foreseen(checkpoint: Checkpoint, config: Config) -> dict[str, Tensor]:
    """The tensors that would be loaded, for planning: those that change have no bytes yet."""
    formats, _ = _choice(checkpoint, config)
    return {
        name: outline(tensor, formats[name]) if name in formats else tensor
        for name, tensor in checkpoint.tensors.items()
    }


def _choice(checkpoint: Checkpoint, config: Config) -> Choice:
    to = recoded_to(config)
    return choose(checkpoint.tensors, to) if to else Choice({}, ())
