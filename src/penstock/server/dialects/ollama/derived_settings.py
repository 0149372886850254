"""Applies the options of derived models, which are written as Ollama's are. Templates and messages are applied for all
dialects (server/models/derived.py)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.ollama.fields import OllamaFields
from penstock.server.models.served_model import ServedModel
from penstock.store import DerivedModel
from penstock.text.ollama_template import OllamaTemplate

G = TypeVar("G", bound=OllamaFields)


def settings_of(served: ServedModel, context: RequestContext, name: str) -> DerivedModel:
    """Returns the settings that come with a model's name; raises if the model does not have it."""
    if served.derived is not None:
        return served.derived
    served.check_model(name.removesuffix(":latest"), context)
    return DerivedModel(name=name)


def with_template(served: ServedModel, template: str) -> ServedModel:
    if not template:
        return served
    return served._replace(text=served.text.with_template(OllamaTemplate(template)))


def with_options(derived: DerivedModel, body: G) -> G:
    return msgspec.structs.replace(body, options=derived.parameters | (body.options or {}))
