"""Holds the parts of the loaded model that the engine itself computes or reports: heads and unknown config fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.feature import Feature
from penstock.engine.request_record import RequestRecord
from penstock.engine.waiting import Need
from penstock.errors import InvalidRequest
from penstock.model.classifier import ClassifierHead, DenseHead
from penstock.types import Limits, Request


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
        self._classifier, self._dense = classifier, dense

    def hello(self) -> Mapping[str, Any]:
        return {"unknown_fields": self._unknown_fields}


def refuse_wrong_kind(request: Request, limits: Limits, classifies: bool) -> None:
    """Raises InvalidRequest for a request that asks for something else than the model makes."""
    if not (limits.generates or request.pooling):
        raise InvalidRequest("this model makes embeddings and no text: ask for an embedding", param="model")
    if request.pooling == "classify" and not classifies:
        raise InvalidRequest("this model has no classification head: ask for an embedding", param="model")
