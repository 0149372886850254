"""Applies the settings of derived models, which a Modelfile makes of another model: a system prompt, messages, a
template and parameters. What a request says itself takes precedence."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock import store
from penstock.errors import InvalidRequest
from penstock.server.models.derived import serves
from penstock.server.ollama.fields import OllamaFields, read_messages
from penstock.server.request_context import RequestContext
from penstock.server.served_model import ServedModel
from penstock.store import DerivedModel
from penstock.text.ollama_template import OllamaTemplate

Messages = list[dict[str, Any]]
G = TypeVar("G", bound=OllamaFields)


def resolve(served: ServedModel, context: RequestContext, name: str) -> tuple[ServedModel, DerivedModel]:
    """Returns the served model under this name, and the settings that come with the name."""
    name = name.removesuffix(":latest")
    derived = derived_for(served, name)
    if derived is None:
        served.check_model(name, context)
        return served, DerivedModel(name=name)
    if not serves(served.name, served.path, derived):
        raise InvalidRequest(
            f"model {name!r} is derived from {derived.base or 'a file'}, which this server does not serve: "
            f"run `penstock serve {name}`",
            param="model",
        )
    return with_template(served._replace(name=name), derived.template), derived


def derived_for(served: ServedModel, name: str) -> DerivedModel | None:
    """Returns the derived model of this name. If the served model has the name, it counts only if it is the same."""
    derived = store.derived_model(name)
    if derived is None or (name == served.name and not serves(served.name, served.path, derived)):
        return None
    return derived


def with_template(served: ServedModel, template: str) -> ServedModel:
    if not template:
        return served
    return served._replace(text=served.text.with_template(OllamaTemplate(template)))


def with_options(derived: DerivedModel, body: G) -> G:
    return msgspec.structs.replace(body, options=derived.parameters | (body.options or {}))


def with_derived_messages(context: RequestContext, derived: DerivedModel, system: str, messages: Messages) -> Messages:
    """Returns the chat that begins with a derived model's messages, under the system prompt that `messages` begin with,
    or else under `system`."""
    begun = read_messages(context, derived.messages)
    if messages[0]["role"] == "system":
        return [messages[0], *begun, *messages[1:]]
    return [{"role": "system", "content": system}, *begun, *messages] if system else [*begun, *messages]
