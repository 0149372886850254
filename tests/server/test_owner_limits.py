"""No owner crowds out another: what has one limit for all is divided among those who want it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server import Space
from penstock.server.access.guard import Rules
from penstock.server.access.in_flight import owner_limit
from penstock.server.batch import records
from penstock.service_levels import ServiceTerms
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
RULES = Rules(terms=ServiceTerms(tenant_header="x-tenant"))
ENDLESS: Any = {"model": MODEL, "input": "[*x]", "background": True, "max_output_tokens": 10_000}


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Server]:
    """Has room for four files, and for 4000 bytes."""
    space = Space(tmp_path, total_bytes=4000, files=4)
    with serving(
        InProcessClient(toys.open_slow_parrot, "parrot"), toys.ToyText(), MODEL, space=space, rules=RULES
    ) as server:
        yield server


def client(server: Server, tenant: str) -> openai.OpenAI:
    return server.sdk().with_options(default_headers={"x-tenant": tenant})


def upload(sdk: openai.OpenAI, size: int = 1) -> str:
    return sdk.files.create(file=b"x" * size, purpose="batch").id


@pytest.mark.parametrize(
    ("owner", "limit", "others", "most"),
    [(None, 4, 0, 4), ("a", 4, 0, 2), ("a", 4, 2, 1), ("a", 4, 3, 1), ("a", 4, 4, 0), ("a", 1, 0, 1)],
)
def test_an_owner_may_have_half_of_what_others_leave(owner: str | None, limit: int, others: int, most: int) -> None:
    assert owner_limit(owner, limit, others) == most


def test_files_of_one_owner_leave_room_for_those_of_others(proxied: Server) -> None:
    alice, mallory = client(proxied, "alice"), client(proxied, "mallory")
    first = upload(mallory)
    upload(mallory)
    with pytest.raises(openai.BadRequestError, match="you would have 3 files; the limit is 2") as full:
        upload(mallory)
    assert full.value.code == "storage_full"
    upload(alice)
    with pytest.raises(openai.BadRequestError, match="the limit is 1"):
        upload(alice)
    mallory.files.delete(first)
    upload(alice)


def test_bytes_of_one_owner_leave_room_for_those_of_others(proxied: Server) -> None:
    alice, mallory = client(proxied, "alice"), client(proxied, "mallory")
    upload(mallory, 2000)
    with pytest.raises(openai.BadRequestError, match="your files would have 2001 bytes; the limit is 2000"):
        upload(mallory)
    upload(alice, 1000)
    with pytest.raises(openai.BadRequestError, match="your files would have 1001 bytes; the limit is 1000"):
        upload(alice)


def test_responses_in_the_background_leave_places_for_those_of_others(
    proxied: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.server.dialects.responses.endpoints.MAX_BACKGROUND", 3)
    alice, mallory = client(proxied, "alice"), client(proxied, "mallory")
    theirs = [mallory.responses.create(**ENDLESS) for _ in range(2)]
    with pytest.raises(openai.InternalServerError, match="2 background responses in flight"):
        mallory.responses.create(**ENDLESS)
    mine = alice.responses.create(**ENDLESS)
    for sdk, begun in ((mallory, theirs[0]), (mallory, theirs[1]), (alice, mine)):
        sdk.responses.cancel(begun.id)
    alice.responses.delete(alice.responses.create(**ENDLESS).id)


def test_batches_of_one_owner_leave_places_for_those_of_others(
    proxied: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_OPEN", 2)
    line = (
        b'{"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"model": "%s", "input": "[*x]",'
        b' "max_output_tokens": 10000}}' % MODEL.encode()
    )

    def start(sdk: openai.OpenAI) -> str:
        file = sdk.files.create(file=line, purpose="batch").id
        return sdk.batches.create(input_file_id=file, endpoint="/v1/responses", completion_window="24h").id

    alice, mallory = client(proxied, "alice"), client(proxied, "mallory")
    theirs = start(mallory)
    with pytest.raises(openai.BadRequestError, match="1 batches are in progress") as full:
        mallory.batches.create(
            input_file_id=mallory.batches.retrieve(theirs).input_file_id,
            endpoint="/v1/responses",
            completion_window="24h",
        )
    assert full.value.code == "too_many_batches"
    mine = start(alice)
    alice.batches.cancel(mine)
    mallory.batches.cancel(theirs)


def test_an_owner_of_many_batches_loses_its_own_oldest(proxied: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_KEPT", 3)

    def run(sdk: openai.OpenAI) -> str:
        file = sdk.files.create(file=b"", purpose="batch").id
        batch = sdk.batches.create(input_file_id=file, endpoint="/v1/responses", completion_window="24h").id
        proxied.until(lambda: sdk.batches.retrieve(batch).status == "failed")
        sdk.files.delete(file)
        return batch

    alice, mallory = client(proxied, "alice"), client(proxied, "mallory")
    mine = run(alice)
    theirs = [run(mallory) for _ in range(5)]
    assert [each.id for each in alice.batches.list()] == [mine]
    assert [each.id for each in mallory.batches.list()] == theirs[:-3:-1]
