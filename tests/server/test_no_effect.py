"""Every field that is accepted without effect, of every route and of the objects within bodies: its values that change
nothing are dropped in silence, any other is listed as ignored, and refused by a strict server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.http import openapi
from penstock.server.http.bodies import ANY_VALUE, ContentValues, NoEffect, read_object
from penstock.server.routes import all_routes

OTHER = {"another": "value"}
NOBODY = cast(Any, None)


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


def tables() -> Iterator[tuple[str, NoEffect]]:
    """The tables of bodies, by a route that reads them, and of objects within them."""
    for route in all_routes(NOBODY, NOBODY):
        yield route.path, route.operation.no_effect or {}
    for name, nested in openapi._nested.items():
        yield name, nested.no_effect


TABLES = list(tables())
CASES = {(id(table), field): (table, field) for _, table in TABLES for field in table}
NAMES = {(id(table), field): f"{where}:{field}" for where, table in TABLES for field in table}


def read(table: NoEffect, field: str, value: Any, lenient: bool) -> set[str]:
    context = RequestContext(lenient=lenient)
    read_object(context, {field: value}, Nothing, table)
    return context.notes.ignored


@pytest.mark.parametrize("case", CASES, ids=NAMES.__getitem__)
def test_a_field_without_effect_is_listed_where_it_asks_for_more(case: Any) -> None:
    table, field = CASES[case]
    accepted = table[field]
    for value in (None, *((OTHER,) if accepted is ANY_VALUE else accepted)):
        assert read(table, field, value, lenient=False) == set()
    if accepted is ANY_VALUE:
        return
    with pytest.raises(InvalidRequest, match=field):
        read(table, field, OTHER, lenient=False)
    if isinstance(accepted, ContentValues):
        with pytest.raises(InvalidRequest, match=field):
            read(table, field, OTHER, lenient=True)
    else:
        assert read(table, field, OTHER, lenient=True) == {field}


def test_all_dialects_have_such_fields() -> None:
    assert len(CASES) > 100
