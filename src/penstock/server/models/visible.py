"""Says which models a request may know of: those that its API key may use, and derived ones of its owner.

Without a request, as on an administrator's routes, they are all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from penstock import store
from penstock.errors import ModelNotFound
from penstock.server.context.notes import MAX_NAME
from penstock.server.context.request_context import RequestContext
from penstock.server.models.entry import ModelEntry

if TYPE_CHECKING:
    from penstock.server.models.directory import ModelDirectory

MOST_NAMED = 10  # models in an error


def may_see(context: RequestContext | None, entry: ModelEntry) -> bool:
    return context is None or (may_use(context, entry.name) and context.caller.may_see(entry.source.derived))


def may_use(context: RequestContext | None, name: str) -> bool:
    """Returns whether the request's key may use a model; without keys, everybody may use all."""
    return context is None or context.caller.payer is None or context.caller.payer.may_use(name)


def visible_names(models: ModelDirectory, context: RequestContext | None) -> list[str]:
    own = [name for name, entry in models.listed() if may_see(context, entry)]
    foreign = [] if models.foreign is None else models.foreign.models()
    return list(dict.fromkeys([*own, *(model.name for model in foreign if may_use(context, model.name))]))


def unknown_model(models: ModelDirectory, context: RequestContext | None, name: str) -> ModelNotFound:
    """Returns the error for a name that no model has which the request may know of. It names those that there are."""
    here = f"this server serves {named(name, visible_names(models, context))}"
    plain = name.removesuffix(":latest")
    if (context is None or context.caller.payer is None) and plain in store.stored_names():
        return ModelNotFound(f"the model {plain!r} is in the store, but {here}: run `penstock serve {plain}`")
    return ModelNotFound(
        f"the model {name[:MAX_NAME]!r} does not exist here; {here}: ask for that, or start the server with --alias"
    )


def named(wanted: str, names: Sequence[str]) -> str:
    """Returns the names as an error lists them, those most like the wanted one first."""
    close = get_close_matches(wanted, names, n=3)
    shown = list(dict.fromkeys([*close, *names]))[:MOST_NAMED]
    more = f" and {len(names) - len(shown)} more, which GET /v1/models lists" if len(names) > len(shown) else ""
    return (", ".join(map(repr, shown)) or "no model that this request may use") + more
