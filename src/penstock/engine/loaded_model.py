"""Holds the parts of the loaded model that the engine itself computes or reports: heads and unknown config fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.feature import Feature
from penstock.engine.record import RequestRecord
from penstock.engine.refusals import refuse_wrong_kind
from penstock.engine.waiting import Need
from penstock.model.classifier import ClassifierHead, DenseHead


class LoadedModel(Feature):
    """Gives requests for labels the model's `classifier` head, and requests for embeddings its `dense` layer."""

    def __init__(
        self, classifier: ClassifierHead | None, dense: DenseHead | None, unknown_fields: tuple[str, ...]
    ) -> None:
        self._classifier = classifier
        self._dense = dense
        self._unknown_fields = unknown_fields

    def needs(self, record: RequestRecord) -> Sequence[Need]:
        request = record.request
        refuse_wrong_kind(request, self.engine.limits, self._classifier is not None)
        record.dense = self._dense if request.pooling else None
        record.classifier = self._classifier if request.pooling == "classify" else None
        return ()

    def replace_heads(self, classifier: ClassifierHead | None, dense: DenseHead | None) -> None:
        """Gives later requests the heads of new weights."""
        self._classifier, self._dense = classifier, dense

    def hello(self) -> Mapping[str, Any]:
        return {"unknown_fields": self._unknown_fields}
