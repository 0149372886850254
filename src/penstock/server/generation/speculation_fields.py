"""Reads the fields by which requests say what may be drafted for their answers, for every dialect."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ignore_unsupported
from penstock.server.models.served_model import ServedModel

DraftLimit = Annotated[int, Meta(ge=0, le=2**31 - 1)]
SpeculationWish = DraftLimit | Literal["auto", "off"]


def limit_drafts(
    served: ServedModel,
    context: RequestContext,
    wish: SpeculationWish | None,
    other: tuple[str, int | None] = ("", None),
) -> None:
    """Limits the drafted tokens per step and request to the field `speculation`. Without it, another dialect's field
    counts: `other` has the value and the field's name. A limit has no effect if the server does not draft."""
    param, wanted = ("speculation", wish) if wish is not None else other
    if wanted is None or wanted == "auto":
        return
    context.service.speculation = 0 if wanted == "off" else wanted
    if context.service.speculation and not served.draft_tokens:
        ignore_unsupported(context, param, wanted)
