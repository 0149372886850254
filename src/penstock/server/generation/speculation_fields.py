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
    """Limits how many tokens a step drafts for a request to what its field `speculation` says. Without it, another
    dialect's field counts, which `other` has by its name. A limit has no effect where the server drafts nothing."""
    param, wanted = ("speculation", wish) if wish is not None else other
    if wanted is None or wanted == "auto":
        return
    context.service.speculation = 0 if wanted == "off" else wanted
    if context.service.speculation and not served.draft_tokens:
        ignore_unsupported(context, param, wanted)
