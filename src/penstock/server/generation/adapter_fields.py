"""Reads the fields by which requests name adapters (LoRA), for every dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.config import AdapterOption
from penstock.errors import AdapterNotFound, InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.models.served_model import ServedModel
from penstock.types import AdapterInfo, AdapterUse

MAX_ADAPTERS = 16  # on one request

Scale = Annotated[float, Meta(ge=-1000, le=1000)]


class NamedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Names an adapter, and a factor for its update on top of the scale that it was loaded with."""

    name: str
    scale: Scale = 1.0


class NumberedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """Names an adapter by its place in llama.cpp's GET /lora-adapters."""

    id: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    scale: Scale


NamedAdapters = Annotated[list[NamedAdapter], Meta(max_length=MAX_ADAPTERS)]
NumberedAdapters = Annotated[list[NumberedAdapter], Meta(max_length=MAX_ADAPTERS)]


def choose_adapters(
    served: ServedModel,
    context: RequestContext,
    named: Sequence[NamedAdapter] | None,
    numbered: Sequence[NumberedAdapter] | None,
) -> None:
    """Applies the fields `adapters` and `lora`: the request uses these adapters and those of its model's name. An empty
    list asks for no more adapters; without both fields the server's choice stays."""
    if named is None and numbered is None:
        return
    uses = [AdapterUse(each.name, each.scale) for each in named or ()]
    uses += numbered_uses(served.listed_adapters, numbered or ())
    context.service.adapters = with_uses(served, uses, "lora" if named is None else "adapters")


def with_uses(served: ServedModel, uses: Sequence[AdapterUse], param: str) -> tuple[AdapterUse, ...]:
    """Adds adapters to the ones of the model's name; raises if one is unknown or named twice."""
    for use in uses:
        if use.name not in served.client.adapters:
            known = ", ".join(info.name for info in served.listed_adapters[:8]) or "none"
            raise AdapterNotFound(f"{param}: no adapter is loaded as {use.name[:128]!r}; loaded: {known}")
    together = (*served.adapters, *uses)
    names = [use.name for use in together]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequest(f"{param}: the adapter {twice[0]!r} is named twice: name it once", param=param)
    return together


def numbered_uses(
    adapters: Sequence[AdapterInfo | AdapterOption], given: Sequence[NumberedAdapter]
) -> list[AdapterUse]:
    for each in given:
        if each.id >= len(adapters):
            raise AdapterNotFound(f"there is no adapter {each.id}: GET /lora-adapters lists {len(adapters)}")
    return [AdapterUse(adapters[each.id].name, each.scale) for each in given]
