"""What a made model adds to a request for it: a system prompt, messages, a template and parameters to begin from. What
the request says itself comes first."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock import store
from penstock.errors import InvalidRequest
from penstock.server.ollama.fields import Generation, read_messages
from penstock.server.served_model import Served
from penstock.store import DerivedModel
from penstock.text.ollama_template import OllamaTemplate

Messages = list[dict[str, Any]]
G = TypeVar("G", bound=Generation)


def resolve(served: Served, name: str) -> tuple[Served, DerivedModel]:
    """The served model as `name` means it, and the settings that come with the name."""
    name = name.removesuffix(":latest")
    made = made_for(served, name)
    if made is None:
        served.check_model(name)
        return served, DerivedModel(name=name)
    if not serves(served, made):
        raise InvalidRequest(
            f"model {name!r} is made of {made.base or 'a file'}, and this server serves {served.name!r}: "
            f"run `penstock serve {name}`",
            param="model",
        )
    return with_template(served._replace(name=name), made.template), made


def made_for(served: Served, name: str) -> DerivedModel | None:
    """The made model of a name. What is served comes first, unless it is that."""
    made = store.derived_model(name)
    return None if made is None or (name == served.name and not serves(served, made)) else made


def serves(served: Served, made: DerivedModel) -> bool:
    """Whether a made model is the served one under another name."""
    if made.base and made.base == served.name:
        return True
    return served.path is not None and store.derived_path(made) == served.path


def with_template(served: Served, template: str) -> Served:
    if not template:
        return served
    return served._replace(text=served.text.with_template(OllamaTemplate(template)))


def with_options(made: DerivedModel, asked: G) -> G:
    return msgspec.structs.replace(asked, options=made.parameters | (asked.options or {}))


def continued(made: DerivedModel, system: str, said: Messages) -> Messages:
    """The chat that a made model's messages begin, under the system prompt that `said` begins with, or `system`."""
    begun = read_messages(made.messages)
    if said[0]["role"] == "system":
        return [said[0], *begun, *said[1:]]
    return [{"role": "system", "content": system}, *begun, *said] if system else [*begun, *said]
