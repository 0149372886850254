"""Reads weights that take the place of the loaded ones, for training loops that serve the model they train.

Files are checked, read and packed in a thread while steps run. Nothing changes before all of them are ready, and then
everything does between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from penstock.backend.base import Backend, WeightUpdate
from penstock.backend.quantize_at_load import quantized
from penstock.backend.weight_exchange import PackedWeight
from penstock.config import Config, available_memory
from penstock.engine.background_reader import Reader, Reading
from penstock.errors import PenstockError, WeightsError
from penstock.model.classifier import ClassifierHead, DenseHead
from penstock.model.load import CONFIG, Checkpoint, load_model, open_checkpoint
from penstock.model.mtp_head import beside
from penstock.model.spec import ModelSpec

MAX_VERSION = 256  # characters
NAMED = 4  # tensors that an error lists


class StoredTensor(NamedTuple):
    """Describes a tensor of the loaded model."""

    shape: tuple[int, ...]
    format: str


class ReadWeights(NamedTuple):
    """Holds weights that are ready to be exchanged."""

    update: WeightUpdate
    classifier: ClassifierHead | None
    dense: DenseHead | None


class WeightReader:
    """Reads weights for a loaded model. `open` opens a checkpoint as the loaded one was opened, and `loaded` is what
    the backend has packed of that."""

    def __init__(
        self,
        backend: Backend,
        checkpoint: Checkpoint,
        loaded: Sequence[PackedWeight],
        open: Callable[[Path], Checkpoint],
    ) -> None:
        self._backend = backend
        self._spec = checkpoint.spec
        self._tensors = stored_tensors(backend, checkpoint)
        self._heads = _kinds(checkpoint)
        self._loaded = loaded
        self._open = open
        self._reader = Reader("penstock-new-weights")

    def begin(self, path: Path) -> Reading[ReadWeights]:
        reading = Reading(lambda: self._read(path), WeightsError)
        self._reader.read(reading)
        return reading

    def close(self) -> None:
        self._reader.close()

    # -- in the thread -------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> ReadWeights:
        try:
            checkpoint = self._open(path)
            check_same_model(self._spec, checkpoint.spec)
            if self._heads != _kinds(checkpoint):
                raise WeightsError("one of the two has a classification head or an embedding layer, the other has not")
            check_same_tensors(self._tensors, stored_tensors(self._backend, checkpoint))
            self._check_memory(checkpoint)
            update = self._backend.begin_update(self._loaded)
            update.prepare(load_model(checkpoint, update.packer))
        except PenstockError as error:
            raise WeightsError(f"the weights at {str(path)[:200]} cannot be loaded: {error.message}") from error
        return ReadWeights(update, checkpoint.classifier, checkpoint.dense)

    def _check_memory(self, checkpoint: Checkpoint) -> None:
        tensors = checkpoint.tensors.values()
        needed = int(sum(self._backend.stored_as(tensor).bytes(tensor) for tensor in tensors))
        free = available_memory()
        if needed > free:
            raise WeightsError(
                f"until they are exchanged, old and new weights are in memory together: {needed / 1e9:.2f} GB are "
                f"needed and {free / 1e9:.2f} GB are free; restart with the new weights, or give the KV cache less"
            )


def stored_tensors(backend: Backend, checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns the shapes and formats of a checkpoint's tensors, by canonical name, without reading them."""
    return {
        name: StoredTensor(tensor.shape, backend.stored_as(tensor).kind) for name, tensor in checkpoint.tensors.items()
    }


def check_same_model(loaded: ModelSpec, new: ModelSpec) -> None:
    """Raises WeightsError, with the names of the differences, if the new weights belong to another model."""
    if loaded.arch != new.arch:
        raise WeightsError(f"they are of architecture {new.arch!r}; the loaded model is {loaded.arch!r}")
    names = [field.name for field in fields(loaded) if getattr(loaded, field.name) != getattr(new, field.name)]
    if names:
        raise WeightsError(f"their config differs from the loaded model's: {', '.join(names)}")


def check_same_tensors(loaded: Mapping[str, StoredTensor], new: Mapping[str, StoredTensor]) -> None:
    """Raises WeightsError, with their names, if tensors are missing, unknown, of another shape or stored in another
    format."""
    for what, names in (("missing", loaded.keys() - new.keys()), ("unknown", new.keys() - loaded.keys())):
        if names:
            raise WeightsError(f"{len(names)} tensors are {what}: {_listed(names)}")
    for name, one in loaded.items():
        other = new[name]
        if one.shape != other.shape:
            raise WeightsError(f"{name} has shape {other.shape}; the loaded one has {one.shape}")
        if one.format != other.format:
            raise WeightsError(f"{name} would be stored as {other.format}; the loaded one is {one.format}")


def _listed(names: Sequence[str] | set[str]) -> str:
    return ", ".join(sorted(names)[:NAMED]) + (" ..." if len(names) > NAMED else "")


def _kinds(checkpoint: Checkpoint) -> tuple[bool, bool]:
    return checkpoint.classifier is not None, checkpoint.dense is not None


def open_update(config: Config, loaded: Checkpoint, draft: Checkpoint | None, path: Path) -> Checkpoint:
    """Opens weights that are to take the place of a loaded model's, a folder or a GGUF file, as that was opened. A head
    keeps its own."""
    folder = loaded.path.is_dir()
    if path.is_dir() and not (path / CONFIG).exists() and len(files := list(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.is_dir() != folder:
        raise WeightsError(f"the loaded model is a {'folder' if folder else 'GGUF file'}, and this is not")
    found = open_checkpoint(path, config.config, config.strict_config, config.max_len)
    return quantized(beside(found, draft), config)
