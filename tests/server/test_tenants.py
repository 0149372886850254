"""Tenants are keys, or what a trusted proxy names: what one of them stores does not exist for another, and what it has
going counts as its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock import store
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import changing
from penstock.server.access.guard import Rules
from penstock.server.batch.run import expected_tokens
from penstock.service_levels import ServiceTerms
from tests.server import toys
from tests.server.conftest import Server, serving
from tests.server.test_keys import ENDLESS, HELLO, MODEL, Locked

LINE = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL, "messages": HELLO}}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    with changing(file):
        pass
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file)) as server:
        yield Locked(server, file)


def upload(sdk: openai.OpenAI, *lines: Any) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    return sdk.files.create(file=("in.jsonl", content), purpose="batch").id


def start_batch(sdk: openai.OpenAI, file: str) -> str:
    return sdk.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h").id


def assert_hidden(theirs: openai.OpenAI, file: str, output: str, batch: str) -> None:
    """Asserts that somebody's files and batch do not exist for another."""
    for id in (file, output):
        for attempt in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError):
                attempt(id)
    for attempt in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            attempt(batch)
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        start_batch(theirs, file)


def test_files_and_batches_are_their_keys_own(locked: Locked) -> None:
    mine, theirs = locked.openai(locked.key("alice")), locked.openai(locked.key("mallory"))
    file = upload(mine, LINE)
    batch = start_batch(mine, file)
    locked.server.until(lambda: mine.batches.retrieve(batch).status == "completed")
    output = mine.batches.retrieve(batch).output_file_id
    assert output is not None
    assert b"hello" in mine.files.content(output).read()
    assert_hidden(theirs, file, output, batch)
    assert theirs.files.list().data == []
    assert theirs.batches.list().data == []
    with pytest.raises(openai.BadRequestError, match="after"):
        theirs.files.list(after=file)
    assert {each.id for each in mine.files.list().data} >= {file, output}
    assert [each.id for each in mine.batches.list().data] == [batch]


def test_responses_are_their_keys_own(locked: Locked) -> None:
    mine, theirs = locked.openai(locked.key("alice")), locked.openai(locked.key("mallory"))
    secret = mine.responses.create(model=MODEL, input="[secret]")
    assert mine.responses.retrieve(secret.id).output_text == "secret"
    for attempt in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            attempt(secret.id)
    with pytest.raises(openai.NotFoundError):
        theirs.responses.input_items.list(secret.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        theirs.responses.create(model=MODEL, input="[what?]", previous_response_id=secret.id)
    assert mine.responses.create(model=MODEL, input="x", previous_response_id=secret.id).id


def test_a_response_in_the_background_counts_as_in_flight(locked: Locked) -> None:
    key = locked.key("alice", concurrent=1)
    sdk = locked.openai(key)
    begun = sdk.responses.create(model=MODEL, input="[*x]", background=True, max_output_tokens=10_000)
    assert locked.ask(key).status_code == 429
    assert sdk.responses.retrieve(begun.id).status in ("queued", "in_progress")
    # To cancel is a request, too; it is not one that is computed, so it may be sent while another runs.
    locked.key("alice", concurrent=2)
    locked.server.http.post(f"/v1/responses/{begun.id}/cancel", headers={"x-api-key": locked.key("alice")})
    locked.server.until(lambda: locked.ask(locked.key("alice", concurrent=1)).status_code == 200)


def test_lines_of_a_batch_wait_for_their_keys_tokens(locked: Locked) -> None:
    """They take hundreds of tokens, of which the key has as many a minute: most of them wait, and there is no debt."""
    key = locked.key("saver", tokens_per_minute=600)
    sdk = locked.openai(key)
    body = {"model": MODEL, "messages": ENDLESS, "max_tokens": 200}
    batch = start_batch(sdk, upload(sdk, *(LINE | {"custom_id": str(at), "body": body} for at in range(10))))
    locked.server.until(lambda: sdk.batches.retrieve(batch).request_counts.completed >= 1)
    time.sleep(0.5)
    answer = locked.server.http.get("/v1/models", headers={"x-api-key": key})
    assert sdk.batches.retrieve(batch).request_counts.completed <= 3
    used = locked.metric('penstock_key_tokens_total{key="saver",kind="generated"}')
    assert 200 <= used <= 600
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 0
    sdk.batches.cancel(batch)


def test_what_a_line_is_expected_to_take() -> None:
    assert expected_tokens(b'{"max_tokens": 7}') == 4 + 7
    assert expected_tokens(b'{"max_output_tokens": 7, "max_tokens": null}') == 11 + 7
    assert expected_tokens(b'{"max_tokens": "many"}') == 5 + 256
    assert expected_tokens(b"no json") == 0


def test_derived_models_are_their_keys_own(locked: Locked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    mine, theirs = locked.key("alice", admin=True), locked.key("mallory", admin=True)
    locked.ollama(mine).create(model="pirate", from_=MODEL, system="[arr]")
    assert store.derived_model("pirate").key == "alice"  # type: ignore[union-attr]

    def ask(key: str, **fields: Any) -> httpx.Response:
        return locked.server.http.post("/api/chat", json={"stream": False, **fields}, headers={"x-api-key": key})

    assert ask(mine, model="pirate", messages=HELLO).json()["message"]["content"] == "arr"
    assert ask(theirs, model="pirate", messages=HELLO).status_code == 404
    for path in ("/api/show", "/api/copy"):
        body = {"model": "pirate"} if path == "/api/show" else {"source": "pirate", "destination": "mine"}
        assert locked.server.http.post(path, json=body, headers={"x-api-key": theirs}).status_code == 404
    assert locked.server.http.get("/v1/models/pirate", headers={"x-api-key": theirs}).status_code == 404
    deleted = locked.server.http.request(
        "DELETE", "/api/delete", json={"model": "pirate"}, headers={"x-api-key": theirs}
    )
    assert deleted.status_code == 404
    listed = {key: locked.server.http.get("/api/tags", headers={"x-api-key": key}).text for key in (mine, theirs)}
    assert "pirate" in listed[mine]
    assert "pirate" not in listed[theirs]
    taken = locked.server.http.post(
        "/api/create", json={"model": "pirate", "from": MODEL}, headers={"x-api-key": theirs}
    )
    assert taken.status_code == 400
    assert "taken" in taken.text
    granted = locked.key("guest", models=(MODEL, "pirate"))
    assert ask(granted, model="pirate", messages=HELLO).status_code == 200


# -- behind a trusted proxy ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxied() -> Iterator[Server]:
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(terms=ServiceTerms(tenant_header="x-tenant"))) as server:
        yield server


def named(server: Server, tenant: str) -> openai.OpenAI:
    """Returns a client of the tenant, or of one that the proxy does not name."""
    return server.sdk().with_options(default_headers={"x-tenant": tenant} if tenant else {})


OTHERS = ["mallory", ""]


@pytest.mark.parametrize("other", OTHERS)
def test_files_and_batches_are_their_tenants_own(proxied: Server, other: str) -> None:
    mine, theirs = named(proxied, f"alice-{other}"), named(proxied, other)
    batch = start_batch(mine, file := upload(mine, LINE))
    proxied.until(lambda: mine.batches.retrieve(batch).status == "completed")
    output = mine.batches.retrieve(batch).output_file_id
    assert output is not None
    assert {each.id for each in mine.files.list().data} == {file, output}
    assert [each.id for each in mine.batches.list().data] == [batch]
    assert_hidden(theirs, file, output, batch)
    assert not {file, output, batch} & {each.id for each in (*theirs.files.list(), *theirs.batches.list())}


@pytest.mark.parametrize("other", OTHERS)
def test_responses_and_kept_streams_are_their_tenants_own(proxied: Server, other: str) -> None:
    mine, theirs = named(proxied, "alice"), named(proxied, other)
    secret = mine.responses.create(model=MODEL, input="[secret]")
    assert mine.responses.retrieve(secret.id).output_text == "secret"
    for attempt in (theirs.responses.retrieve, theirs.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(secret.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        theirs.responses.create(model=MODEL, input="[what?]", previous_response_id=secret.id)
    headers = {"x-tenant": "alice", "x-penstock-resume": "on"}
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    stream = proxied.http.post("/v1/chat/completions", json=body, headers=headers).headers["x-penstock-stream"]
    at = f"/v1/streams/{stream}"
    other_headers = {"x-tenant": other} if other else {}
    assert proxied.http.get(at, headers=other_headers).status_code == 404
    assert proxied.http.delete(at, headers=other_headers).status_code == 404
    assert proxied.http.get(at, headers=headers).status_code == 200


@pytest.mark.parametrize(("maker", "other"), [("alice", "mallory"), ("alice", ""), ("", "mallory")])
def test_derived_models_are_their_tenants_own(
    proxied: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str, other: str
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    mine, theirs = ({"x-tenant": name} if name else {} for name in (maker, other))
    made = proxied.http.post("/api/create", json={"model": "pirate", "from": MODEL, "system": "[arr]"}, headers=mine)
    assert made.status_code == 200
    chat = {"model": "pirate", "messages": HELLO, "stream": False}
    assert proxied.http.post("/api/chat", json=chat, headers=mine).status_code == 200
    assert proxied.http.post("/api/chat", json=chat, headers=theirs).status_code == 404
    assert proxied.http.get("/v1/models/pirate", headers=theirs).status_code == 404
    assert "pirate" in proxied.http.get("/api/tags", headers=mine).text
    assert "pirate" not in proxied.http.get("/api/tags", headers=theirs).text
    deleted = proxied.http.request("DELETE", "/api/delete", json={"model": "pirate"}, headers=theirs)
    assert deleted.status_code == 404
