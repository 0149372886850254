"""Stored responses and chats outlive their server with --keep-answers: read back by OpenAI's client, as they were, by
their owner alone."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from penstock.engine.assemble import assemble
from penstock.errors import StorageFailed
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Space
from penstock.server.access.guard import Rules
from penstock.server.batch.archive import Archive
from penstock.server.storage.lasting_answers import AnswerRecord, LastingAnswers
from penstock.server.storage.owned_store import OwnedStore
from penstock.service_levels import ServiceTerms
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
LIMITS = toys.LIMITS._replace(max_len=2048, num_blocks=1024)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Weather.", "parameters": CITY, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nAsk the sky.\n</think>\n\n"
RULES = Rules(terms=ServiceTerms(tenant_header="x-tenant"))


def server_in(folder: Path, *, lasting: bool = True, pace: float = 0) -> AbstractContextManager[Server]:
    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS, pace), LIMITS), "parrot")  # type: ignore[arg-type]
    return serving(client, toys.Hermes(), MODEL, space=Space(folder, answers=lasting), rules=RULES)


def hexed(said: str) -> str:
    return f"[={said.encode().hex()}]"


def respond(sdk: openai.OpenAI, said: str, **fields: Any) -> Any:
    return sdk.responses.create(model=MODEL, input=hexed(said), **fields)


def chat(sdk: openai.OpenAI, said: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": hexed(said)}]
    return sdk.chat.completions.create(model=MODEL, messages=messages, store=True, **fields)


def rows(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "archive.db")) as db:
        return list(db.execute("SELECT kind, id FROM answers ORDER BY number"))


def test_a_conversation_goes_on_with_the_next_server(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        first = respond(sdk, "one", metadata={"topic": "counting"})
        events = list(sdk.responses.create(model=MODEL, input="and?", previous_response_id=first.id, stream=True))
        second = events[-1].response  # type: ignore[union-attr]
        items = sdk.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in items] == [hexed("one"), "one", "and?"]  # type: ignore[union-attr]
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        assert sdk.responses.retrieve(first.id) == first
        assert sdk.responses.input_items.list(second.id, order="asc").data == items
        third = sdk.responses.create(model=MODEL, input="go on", previous_response_id=second.id)
        assert len(sdk.responses.input_items.list(third.id).data) == 5


def test_answers_of_every_kind_are_read_back_as_they_were(tmp_path: Path) -> None:
    logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    explain = {"extra_headers": {"x-penstock-explain": "1"}}
    tool = {"type": "function", "function": WEATHER}
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        responses = [
            respond(sdk, THOUGHT + CALL, tools=[{"type": "function", **WEATHER}]),
            respond(sdk, "scored", **logprobs),
            respond(sdk, "explained", **explain),
            respond(sdk, "cut short", max_output_tokens=3),
        ]
        chats = [
            chat(sdk, THOUGHT + CALL, tools=[tool], n=2, metadata={"kind": "call"}),
            chat(sdk, "scored", logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True}, **explain),
        ]
        kept = [sdk.chat.completions.retrieve(each.id) for each in chats]
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        assert [sdk.responses.retrieve(each.id) for each in responses] == responses
        assert list(sdk.chat.completions.list()) == kept
        assert [each.id for each in sdk.chat.completions.list(metadata={"kind": "call"})] == [chats[0].id]


def test_what_is_changed_or_deleted_stays_so_in_its_place(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        ids = [chat(sdk, said).id for said in ("a", "b", "c")]
        sdk.chat.completions.update(ids[0], metadata={"state": "changed"})
        sdk.chat.completions.delete(ids[1])
        gone = respond(sdk, "gone")
        sdk.responses.delete(gone.id)
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        left = list(sdk.chat.completions.list())
        assert [(each.id, each.to_dict()["metadata"]) for each in left] == [
            (ids[0], {"state": "changed"}),
            (ids[2], {}),
        ]
        ids.append(chat(sdk, "d").id)
        assert [each.id for each in sdk.chat.completions.list()] == [ids[0], *ids[2:]]
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(gone.id)


def test_owners_stay_apart_also_under_the_same_name(tmp_path: Path) -> None:
    def of(server: Server, name: str) -> openai.OpenAI:
        return server.sdk().with_options(default_headers={"x-tenant": name})

    with server_in(tmp_path) as server:
        for name in ("alice", "mallory"):
            assert chat(of(server, name), name, extra_body={"request_id": "chosen"}).id == "chatcmpl-chosen"
        mine = respond(of(server, "alice"), "secret")
    with server_in(tmp_path) as server:
        for name in ("alice", "mallory"):
            (found,) = of(server, name).chat.completions.list().data
            assert found.choices[0].message.content == name
        assert of(server, "alice").responses.retrieve(mine.id) == mine
        for other in (of(server, "mallory"), server.sdk()):
            with pytest.raises(openai.NotFoundError):
                other.responses.retrieve(mine.id)
        of(server, "mallory").chat.completions.delete("chatcmpl-chosen")
    with server_in(tmp_path) as server:
        assert [each.id for each in of(server, "alice").chat.completions.list()] == ["chatcmpl-chosen"]
        assert of(server, "mallory").chat.completions.list().data == []


def test_nothing_is_on_disk_unless_the_server_is_told_to(tmp_path: Path) -> None:
    with server_in(tmp_path, lasting=False) as server:
        id = respond(server.sdk(), "private").id
        assert server.sdk().responses.retrieve(id).id == id
        chat(server.sdk(), "private")
    assert list(tmp_path.iterdir()) == []
    with server_in(tmp_path, lasting=False) as server:
        with pytest.raises(openai.NotFoundError, match="before this server started"):
            server.sdk().responses.retrieve(id)
        with pytest.raises(openai.BadRequestError, match="--keep-answers"):
            respond(server.sdk(), "more", previous_response_id=id)


def test_what_a_request_does_not_store_is_not_on_disk(tmp_path: Path) -> None:
    with server_in(tmp_path) as server:
        respond(server.sdk(), "private", store=False)
        kept = respond(server.sdk(), "kept")
    assert rows(tmp_path) == [("response", kept.id)]
    assert stat.S_IMODE((tmp_path / "archive.db").stat().st_mode) == 0o600


def test_a_response_in_the_background_is_kept_when_it_ends_or_is_cut_off(tmp_path: Path) -> None:
    with server_in(tmp_path, pace=0.05) as server:
        sdk = server.sdk()
        done = respond(sdk, "done", background=True)
        server.until(lambda: sdk.responses.retrieve(done.id).status == "completed")
        endless = sdk.responses.create(model=MODEL, input="[*ab]", background=True, stream=True)
        running = next(iter(endless)).response  # type: ignore[union-attr]
        assert next(event for event in endless if event.type == "response.output_text.delta").delta == "a"
        assert rows(tmp_path) == [("response", done.id), ("response", running.id)]
    with server_in(tmp_path) as server:
        sdk = server.sdk()
        assert sdk.responses.retrieve(done.id).output_text == "done"
        cut = sdk.responses.retrieve(running.id)
        assert (cut.status, cut.output_text[:2]) == ("cancelled", "ab")
        with pytest.raises(openai.BadRequestError, match="can be streamed again"):
            list(sdk.responses.retrieve(running.id, stream=True))


def test_a_killed_server_has_kept_what_it_answered(smollm2: Path, tmp_path: Path) -> None:
    with served(smollm2, tmp_path) as (process, sdk):
        first = sdk.responses.create(model="small", input="The sea is", max_output_tokens=4)
        wait_until(lambda: rows(tmp_path) == [("response", first.id)])
        process.kill()
        process.wait()
    with served(smollm2, tmp_path) as (_, sdk):
        assert sdk.responses.retrieve(first.id) == first
        items = sdk.responses.create(model="small", input="and", previous_response_id=first.id, max_output_tokens=2)
        assert len(sdk.responses.input_items.list(items.id).data) == 3


def test_a_response_in_the_background_of_a_killed_server_has_failed(smollm2: Path, tmp_path: Path) -> None:
    with served(smollm2, tmp_path) as (process, sdk):
        long: Any = {"model": "small", "input": "Count to a hundred.", "max_output_tokens": 200}
        begun = sdk.responses.create(**long, background=True)
        process.kill()
        process.wait()
    with served(smollm2, tmp_path) as (_, sdk):
        found = sdk.responses.retrieve(begun.id)
        assert (found.status, found.background) == ("failed", True)
        assert found.error is not None
        assert found.error.code == "server_error"
        assert "was killed while it generated this response" in found.error.message


def test_a_folder_that_another_server_uses_is_refused_at_the_start(smollm2: Path, tmp_path: Path) -> None:
    with served(smollm2, tmp_path):
        second = subprocess.run(command(smollm2, tmp_path), stderr=subprocess.PIPE, text=True, timeout=60)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1] == (
        f"error: another server keeps its files, batches and answers in {tmp_path}: "
        "give this one its own folder with --data [storage_failed]"
    )


def command(model: Path, folder: Path) -> list[str]:
    options = ["--port", "0", "--name", "small", "--max-len", "256", "--data", str(folder), "--keep-answers"]
    return [sys.executable, "-m", "penstock", "serve", str(model), *options]


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """Runs the real server on a folder."""
    process = subprocess.Popen(command(model, folder), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[3]
        yield process, openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- the store alone ----------------------------------------------------------------------------------------------


class Note:
    """Is an answer of nothing but its name."""

    running, size = False, 1

    def __init__(self, id: str, tenant: str | None = None) -> None:
        self.id, self.tenant = id, tenant

    def record(self) -> AnswerRecord:
        return AnswerRecord(self.id, self.tenant, b"{}")


def read_note(record: AnswerRecord) -> Note:
    msgspec.json.decode(record.body, type=dict)
    return Note(record.id, record.tenant)


def run_store(archive: Archive, work: Callable[[OwnedStore[Note]], None], most: int = 3) -> list[str]:
    """Opens a store on an archive, does `work` with it, and returns what it had at the beginning."""

    async def scenario() -> list[str]:
        store = OwnedStore("note", most, lasting=LastingAnswers(archive, "note", Note.record, read_note))
        await store.open()
        found = [note.id for note in store.of(None)]
        work(store)
        await store.close()
        await archive.close()
        return found

    return asyncio.run(scenario())


def test_what_gives_way_in_memory_is_gone_from_disk(tmp_path: Path) -> None:
    def fill(store: OwnedStore[Note]) -> None:
        for id in "abcd":
            store.put(Note(id))
        store.get("b", None)
        store.put(Note("e"))

    assert run_store(Archive(Space(tmp_path), ""), fill) == []
    assert [id for _, id in rows(tmp_path)] == ["b", "d", "e"]
    assert run_store(Archive(Space(tmp_path), ""), lambda _: None, most=2) == ["d", "e"]
    assert [id for _, id in rows(tmp_path)] == ["d", "e"]


def test_one_owner_drops_no_answers_of_another_from_disk(tmp_path: Path) -> None:
    def fill(store: OwnedStore[Note]) -> None:
        store.put(Note("mine"))
        for at in range(10):
            store.put(Note(str(at), "mallory"))

    run_store(Archive(Space(tmp_path), ""), fill)
    assert [id for _, id in rows(tmp_path)] == ["mine", "7", "8", "9"]


def test_an_answer_that_cannot_be_read_is_told_and_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_store(Archive(Space(tmp_path), ""), lambda store: [store.put(Note(id)) for id in "abc"] and None)
    with closing(sqlite3.connect(tmp_path / "archive.db")) as db, db:
        db.execute("UPDATE answers SET body = 'no JSON' WHERE id = 'b'")
    with caplog.at_level(logging.WARNING):
        assert run_store(Archive(Space(tmp_path), ""), lambda _: None) == ["a", "c"]
    assert "1 stored answers cannot be read, the first being b (JSON is malformed" in caplog.text


def test_a_disk_that_fails_is_told_once_and_memory_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(Space(tmp_path), "")

    def fill(store: OwnedStore[Note]) -> None:
        archive.do = refuse  # type: ignore[method-assign, assignment]
        for id in "abc":
            store.put(Note(id))
        assert store.get("a", None).id == "a"

    async def refuse(*_: Any) -> None:
        raise StorageFailed("the disk is full")

    with caplog.at_level(logging.WARNING):
        run_store(archive, fill)
    assert caplog.messages == ["stored answers are kept in memory alone: the disk is full"]
