"""Resolves a derived model to the model of the server that it is made from, and applies its settings: a system prompt,
messages, a template and parameters. The request's own fields take precedence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock import store
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.modelfile import read_messages
from penstock.server.models.entry import ModelEntry
from penstock.server.models.served_model import ServedModel
from penstock.store import DerivedModel
from penstock.text.sampling_defaults import defaults_in_modelfile
from penstock.text.text import with_modelfile


def serves(name: str, path: Path | None, derived: DerivedModel) -> bool:
    """Returns whether a derived model is the model of this name and path under another name."""
    if derived.base and derived.base == name:
        return True
    return path is not None and store.derived_path(derived) == path


def base_of(entries: Iterable[ModelEntry], derived: DerivedModel) -> ModelEntry | None:
    """Returns which of the models a derived one is under another name; None: there is none."""
    return next((entry for entry in entries if serves(entry.name, entry.source.path, derived)), None)


def derive(served: ServedModel, derived: DerivedModel) -> ServedModel:
    messages = read_messages(RequestContext(), derived.messages)
    sampling = defaults_in_modelfile(derived.parameters)
    text = with_modelfile(served.text, derived.system, derived.template, messages, sampling)
    return served._replace(name=derived.name, text=text, derived=derived)
