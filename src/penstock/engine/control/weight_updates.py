"""Replaces the weights of a running engine by others, between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.engine.background_reader import Reading
from penstock.engine.control.sleeping import Sleeping
from penstock.engine.control.weight_reader import MAX_VERSION, ReadWeights, WeightReader
from penstock.engine.feature import Feature
from penstock.engine.loaded_model import LoadedModel
from penstock.engine.waiting import PATIENCE
from penstock.errors import PenstockError, WeightsError
from penstock.types import Event, Failed, WeightState
from penstock.types.messages import DescribeWeights, UpdateWeights


class WeightUpdates(Feature):
    """Reads weights in a thread while steps continue, and exchanges them when all are ready. Without a `reader` it
    refuses updates."""

    answers = (UpdateWeights, DescribeWeights)

    def __init__(self, reader: WeightReader | None) -> None:
        self._reader = reader
        self._update: tuple[UpdateWeights, Reading[ReadWeights]] | None = None  # whose weights are being read

    @property
    def busy(self) -> bool:
        return self._update is not None

    @property
    def slow(self) -> bool:
        return self._update is not None

    def before_plan(self) -> None:
        """Exchanges weights that were read. If there is nothing to compute, it waits a little for them."""
        if self._update is None:
            return
        message, reading = self._update
        if not self.engine.computing:
            reading.wait(PATIENCE)
        if reading.ready:
            self._update = None
            self._exchange(message, reading)

    def answer(self, message: Any) -> Sequence[Event]:
        if isinstance(message, UpdateWeights):
            self._begin(message)
            return ()
        return [self.engine.weight_state(message.id)]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _begin(self, message: UpdateWeights) -> None:
        if self._reader is None:
            raise WeightsError("this engine has no weights that could be updated")
        if self._update is not None:
            raise WeightsError("weights are being updated already: wait for that answer, and send this again")
        if len(message.version) > MAX_VERSION:
            raise WeightsError(f"a weight version has at most {MAX_VERSION} characters; got {len(message.version)}")
        self.engine.find(Sleeping).wake()
        self._update = message, self._reader.begin(Path(message.path).expanduser())

    def _exchange(self, message: UpdateWeights, reading: Reading[ReadWeights]) -> None:
        engine = self.engine
        engine.pipeline.drain()
        try:
            update, classifier, dense = reading.result()
        except PenstockError as error:
            engine.emit([Failed(message.id, error.code, error.message)])
            return
        engine.find(LoadedModel).replace_heads(classifier, dense)
        engine.find(Sleeping).wake()  # it may sleep again since the weights were asked for
        update.exchange()
        self._change_version(message)
        engine.emit([engine.weight_state(message.id)])

    def _change_version(self, message: UpdateWeights) -> None:
        """Notes which weights are loaded now, and drops the KV that the old weights computed."""
        engine = self.engine
        updates = message.number or engine.weights.updates + 1
        version = message.version or str(updates)
        engine.weights = WeightState(0, version, message.path, updates)
        for feature in engine.features:
            feature.weights_changed()
        sequences = engine.scheduler.sequences
        for id, sequence in sequences.items():
            engine.records[id].change_weights(sequence, engine.weights, message.recompute)
        salts = {id: engine.records[id].salt(engine.weights) for id in sequences}
        engine.scheduler.change_salts(salts, message.recompute)
