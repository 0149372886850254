"""/v1/batches, with the official SDK as the judge: what it reads of them while they run, when they are cancelled, and
after the server was killed."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.request_stream import EventReader
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server import Space
from penstock.server.batch import lines, records, run
from penstock.server.batch.lines import entries
from penstock.server.dialects.openai import batches as openai_batches
from penstock.types import Event, Request
from tests.server import toys
from tests.server.conftest import WAIT

MODEL = "toy/parrot"
CHAT = "/v1/chat/completions"
WINDOW: Any = "24h"


def line(id: str, say: str = "", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"[{say or id}]"}], **fields}
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in lines)


def begin(sdk: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=WINDOW, **fields)


def ended(sdk: openai.OpenAI, id: str) -> Any:
    return watched(sdk, id, lambda batch: batch.status in records.ENDED)


def watched(sdk: openai.OpenAI, id: str, met: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + WAIT
    while not met(batch := sdk.batches.retrieve(id)):
        assert time.monotonic() < deadline, f"waited in vain: {batch}"
        time.sleep(0.03)
    return batch


def results(sdk: openai.OpenAI, id: str | None) -> list[dict[str, Any]]:
    return [] if id is None else [json.loads(text) for text in sdk.files.content(id).text.splitlines()]


def counts(batch: Any) -> tuple[int, int, int]:
    return batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


def test_a_thousand_lines(parrot: Any) -> None:
    """On the way the counts only grow; at the end every line has its answer, in the input's order."""
    sdk = parrot.sdk()
    batch = begin(sdk, jsonl(*[line(f"n{number}") for number in range(1000)]), metadata={"for": "a test"})
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHAT, "24h")
    assert batch.metadata == {"for": "a test"}
    assert batch.expires_at == batch.created_at + 86_400
    seen = [counts(batch)]
    with pytest.raises(openai.BadRequestError, match=f"read by the batch '{batch.id}'"):
        sdk.files.delete(batch.input_file_id)

    def met(batch: Any) -> bool:
        seen.append(counts(batch))
        return batch.status in records.ENDED

    batch = watched(sdk, batch.id, met)
    assert batch.status == "completed"
    assert counts(batch) == (1000, 1000, 0)
    assert seen == sorted(seen)
    assert any(0 < completed < 1000 for _, completed, _ in seen)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.cancelling_at, batch.failed_at, batch.expired_at, batch.errors) == (None, None, None, None)
    assert batch.error_file_id is None
    output = results(sdk, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"n{number}" for number in range(1000)]
    assert len({each["id"] for each in output} | {each["response"]["request_id"] for each in output}) == 2000
    for each in output:
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        assert each["response"]["body"]["choices"][0]["message"]["content"] == each["custom_id"]
    used = [each["response"]["body"]["usage"] for each in output]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in used)
    file = sdk.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert sdk.files.delete(batch.input_file_id).deleted


WRONG: list[tuple[Any, str | None, str, str | None]] = [  # line, custom_id, code, param
    (b'{"custom_id": "cut\n', None, "invalid_json_line", None),
    (b"[1, 2]\n", None, "invalid_json_line", None),
    (b"\xff\xfe\n", None, "invalid_json_line", None),
    (b"[" * 50_000 + b"\n", None, "invalid_json_line", None),
    (line("good"), "good", "duplicate_custom_id", "custom_id"),
    ({k: v for k, v in line("x").items() if k != "custom_id"}, None, "missing_required_parameter", "custom_id"),
    (line(""), "", "invalid_custom_id", "custom_id"),
    (line("long" * 200), None, "invalid_custom_id", "custom_id"),
    (line("other", url="/v1/completions"), "other", "invalid_url", "url"),
    (line("outside", url="/v1/files"), "outside", "invalid_url", "url"),
    (line("get") | {"method": "GET"}, "get", "invalid_method", "method"),
    (line("extra") | {"colour": "red"}, "extra", "unknown_parameter", "colour"),
    (line("bodyless") | {"body": "text"}, "bodyless", "invalid_type", "body"),
    (line("streamed", stream=True), "streamed", "unsupported_parameter", "body.stream"),
]
REFUSED: list[tuple[Any, int, str, str | None]] = [  # line, status, code, param
    (line("model", model="gpt-4o"), 404, "model_not_found", None),
    (line("field", colour="red"), 400, "unknown_parameter", "colour"),
    (line("value", temperature="hot"), 400, "invalid_type", "temperature"),
    (line("range", temperature=200), 400, "invalid_request", "temperature"),
    (line("context", max_tokens=100_000), 400, "context_length_exceeded", "max_tokens"),
]


def test_wrong_lines_are_told_one_by_one_and_the_others_run(strict_parrot: Any) -> None:
    sdk = strict_parrot.sdk()
    wrong = [each[0] for each in WRONG] + [each[0] for each in REFUSED]
    content = b"\xef\xbb\xbf" + jsonl(line("good"), b"\n", *wrong, b"  \r\n") + json.dumps(line("last")).encode()
    batch = ended(sdk, begin(sdk, content).id)
    assert batch.status == "completed"
    assert counts(batch) == (len(wrong) + 2, 2, len(wrong))
    assert [each["custom_id"] for each in results(sdk, batch.output_file_id)] == ["good", "last"]
    errors = results(sdk, batch.error_file_id)
    for number, (each, (_, id, code, param)) in enumerate(zip(errors[: len(WRONG)], WRONG, strict=True), 3):
        assert each["custom_id"] == id
        assert each["response"] is None
        assert (each["error"]["code"], each["error"]["param"], each["error"]["line"]) == (code, param, number)
    for each, (sent, status, code, param) in zip(errors[len(WRONG) :], REFUSED, strict=True):
        assert (each["custom_id"], each["error"]) == (sent["custom_id"], None)
        error = each["response"]["body"]["error"]
        assert (each["response"]["status_code"], error["code"], error["param"]) == (status, code, param)


def test_a_line_too_long_is_told_and_the_next_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 300)
    path = tmp_path / "in"
    path.write_bytes(jsonl(line("a"), line("b", "b" * 1000), line("c")))
    found = list(entries(path, CHAT))
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (2, None), (3, "c")]
    assert [json.loads(each.fault)["error"]["code"] for each in found if each.fault] == ["request_too_large"]
    assert json.loads(lines.body_of(path, found[2].start, found[2].size)) == line("c")["body"]


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"{}\n" * 12, "too_many_tasks")]
)
def test_a_file_that_cannot_be_a_batch_fails_it(
    parrot: Any, monkeypatch: pytest.MonkeyPatch, content: bytes, code: str
) -> None:
    monkeypatch.setattr("penstock.server.batch.run.MAX_LINES", 10)
    batch = ended(parrot.sdk(), begin(parrot.sdk(), content).id)
    assert batch.status == "failed"
    assert batch.failed_at >= batch.created_at
    assert [error.code for error in batch.errors.data] == [code]


def test_completions_are_batched_too(parrot: Any) -> None:
    sdk = parrot.sdk()
    asked = {"custom_id": "one", "method": "POST", "url": "/v1/completions"}
    batch = begin(sdk, jsonl(asked | {"body": {"model": MODEL, "prompt": "[hello]"}}), endpoint="/v1/completions")
    (answer,) = results(sdk, ended(sdk, batch.id).output_file_id)
    assert answer["response"]["body"]["choices"][0]["text"] == "hello"


def test_what_a_batch_is_made_of_is_checked(strict_parrot: Any) -> None:
    sdk = strict_parrot.sdk()
    good = sdk.files.create(file=jsonl(line("x")), purpose="batch").id
    other = sdk.files.create(file=jsonl(line("x")), purpose="user_data").id
    fields = {"input_file_id": good, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"completion_window": "48h"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": other}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"colour": "red"}, "colour"),
    ):
        refused = strict_parrot.post("/v1/batches", **fields | change)
        assert refused.status_code == 400, change
        assert refused.json()["error"]["param"] == param
    for ask in (sdk.batches.retrieve, sdk.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="no batch 'batch_none'"):
            ask("batch_none")


def test_batches_are_listed_in_pages_and_their_files_expire(parrot: Any) -> None:
    sdk = parrot.sdk()
    expiry: Any = {"anchor": "created_at", "seconds": 7200}
    ids = [begin(sdk, jsonl(line("x")), output_expires_after=expiry).id for _ in range(3)]
    assert [batch.id for batch in sdk.batches.list(limit=2)][:3] == ids[::-1]
    page = sdk.batches.list(limit=1, after=ids[2])
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[1]], True)
    output = sdk.files.retrieve(ended(sdk, ids[0]).output_file_id)
    assert output.expires_at == output.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="completed and can no longer be cancelled"):
        sdk.batches.cancel(ids[0])


def test_a_batch_is_cancelled_in_the_middle(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    batch = begin(sdk, jsonl(*[line(f"n{number}") for number in range(8)], *[line(f"e{n}", "*abc") for n in range(40)]))
    watched(sdk, batch.id, lambda batch: batch.request_counts.completed == 8)
    cancelled = sdk.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    batch = ended(sdk, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    assert counts(batch) == (48, 8, 40)
    assert {each["custom_id"] for each in results(sdk, batch.output_file_id)} == {f"n{number}" for number in range(8)}
    errors = results(sdk, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == [f"e{number}" for number in range(40)]
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    slow_parrot.until_idle()
    assert sdk.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_ends_with_its_window(slow_parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_batches, "WINDOW_SECONDS", 2)
    sdk = slow_parrot.sdk()
    batch = ended(sdk, begin(sdk, jsonl(line("done"), *[line(f"e{number}", "*abc") for number in range(20)])).id)
    assert batch.status == "expired"
    assert batch.expired_at >= batch.expires_at
    done = [each["custom_id"] for each in results(sdk, batch.output_file_id)]
    assert set(done) <= {"done"}  # which a busy machine may not have come to
    assert counts(batch) == (21, len(done), 21 - len(done))
    assert {each["error"]["code"] for each in results(sdk, batch.error_file_id)} == {"batch_expired"}
    slow_parrot.until_idle()


def test_clients_go_first_and_batches_take_turns(slow_parrot: Any) -> None:
    """A batch has half of the rows at most, however many choices its lines ask for; a batch that comes later is not
    left waiting for the one before it."""
    sdk = slow_parrot.sdk()
    most: list[int] = []
    greedy = begin(sdk, jsonl(*[line(f"n{number}", "*abc", n=5, max_tokens=100) for number in range(100)]))
    slow_parrot.until(lambda: slow_parrot.client.stats.running == toys.LIMITS.max_rows // 2)
    for _ in range(5):
        answer = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "[at once]"}])
        assert answer.choices[0].message.content == "at once"
        most.append(slow_parrot.client.stats.running)
    assert max(most) <= toys.LIMITS.max_rows // 2
    modest = ended(sdk, begin(sdk, jsonl(*[line(f"m{number}") for number in range(5)])).id)
    assert counts(modest) == (5, 5, 0)
    assert sdk.batches.retrieve(greedy.id).status == "in_progress"
    sdk.batches.cancel(greedy.id)
    assert ended(sdk, greedy.id).status == "cancelled"


class Recorder(InProcessClient):
    """Keeps the requests that reach the engine, in the order in which each got its first token."""

    def __init__(self) -> None:
        super().__init__(toys.open_slow_parrot, "parrot")
        self.begun: list[Request] = []

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        def watch(events: list[Event]) -> bool | None:
            if request not in self.begun:
                self.begun.append(request)
            return read(events)

        return super().run(request, watch)


def test_answers_of_clients_do_not_wait_behind_a_batch(serve: Any, toy_text: Any) -> None:
    """Its lines are background requests: a client's request overtakes all that wait, and none of them begins before
    it, although half of the rows are free."""
    client = Recorder()
    with serve(client, toy_text, MODEL) as server:
        sdk = server.sdk()
        batch = begin(sdk, jsonl(*[line(f"n{number}", "*abc", n=5) for number in range(20)]))
        half = toys.LIMITS.max_rows // 2
        server.until(
            lambda: client.stats.running == half and client.stats.waiting >= half and len(client.begun) == half
        )
        for _ in range(3):
            answer = sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "[at once]"}])
            assert answer.choices[0].message.content == "at once"
        assert [request.background for request in client.begun] == [True] * half + [False] * 3
        assert client.stats.waiting >= half
        sdk.batches.cancel(batch.id)
        assert ended(sdk, batch.id).status == "cancelled"


def test_lines_outlive_an_engine_that_dies(parrot_process: Any) -> None:
    """What they say is what those of an undisturbed batch do."""
    sdk, client = parrot_process.sdk(), parrot_process.client
    asked = jsonl(*[line(f"n{number}", f"{number}, hello " * 20, seed=number) for number in range(30)])

    def said(batch: Any) -> list[tuple[str, Any]]:
        assert counts(batch) == (30, 30, 0)
        return [(each["custom_id"], each["response"]["body"]["choices"]) for each in results(sdk, batch.output_file_id)]

    undisturbed = said(ended(sdk, begin(sdk, asked).id))
    assert undisturbed[7][1][0]["message"]["content"] == "7, hello " * 20
    batch = begin(sdk, asked)
    parrot_process.until(lambda: client.stats.running > 0)
    assert client.in_flight > 0, "the kill must hit lines"
    os.kill(client.hello.pid, 9)
    assert said(ended(sdk, batch.id)) == undisturbed
    parrot_process.until(lambda: client.restarts == 1)


def test_the_async_sdk(parrot: Any) -> None:
    async def scenario() -> None:
        async with parrot.async_sdk() as sdk:
            file = await sdk.files.create(file=("in.jsonl", jsonl(line("one"), line("two"))), purpose="batch")
            batch = await sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while (batch := await sdk.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0.01)
            content = await sdk.files.content(batch.output_file_id)
            assert [json.loads(text)["custom_id"] for text in content.text.splitlines()] == ["one", "two"]
            assert file.id in {each.id async for each in sdk.files.list(limit=1)}
            assert batch.id in {each.id async for each in sdk.batches.list()}
            assert (await sdk.files.delete(file.id)).deleted

    asyncio.run(scenario())


# -- from one life to the next ------------------------------------------------------------------------------------

SLOW = 0.05  # seconds a step: an answer of 200 tokens takes ten seconds, so a server is killed before all are done

SERVE = """
import sys
from pathlib import Path
import toys
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, serve
from penstock.server.access.guard import Rules

pace, space = float(sys.argv[2]), Space(Path(sys.argv[1]))
client = InProcessClient(lambda: toys.open_paced_parrot(pace))
rules = Rules(keys=Path(sys.argv[3]) if sys.argv[3:] else None)
serve(toys.pool_of(client, toys.ToyText(), "toy/parrot"), "127.0.0.1", 0, Setup(space=space, rules=rules))
"""


@contextmanager
def server_process(folder: Path, pace: float, *keys: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose steps take `pace` seconds."""
    path = os.pathsep.join([str(Path(toys.__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder), str(pace), *map(str, keys)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stderr is not None
        yield process, process.stderr.readline().split()[3]
    finally:
        process.kill()
        process.communicate()


def done_lines(folder: Path, id: str) -> set[str]:
    db = sqlite3.connect(folder / "archive.db")
    try:
        sql = "SELECT custom_id FROM lines WHERE batch = ? AND state = ?"
        return {custom for (custom,) in db.execute(sql, (id, records.COMPLETED))}
    finally:
        db.close()


def test_a_killed_server_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """What was done is not run again, and what was half uploaded is swept away."""
    wanted = [f"n{number}" for number in range(60)]
    lines = [line(id, id if number < 30 else id * 60) for number, id in enumerate(wanted)]
    with server_process(tmp_path, SLOW) as (process, url):
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT)
        id = begin(sdk, jsonl(b"not JSON\n", *lines)).id
        told = watched(sdk, id, lambda batch: batch.request_counts.completed > 20).request_counts.completed
        process.kill()
    done = done_lines(tmp_path, id)
    assert told <= len(done) < len(wanted)
    (tmp_path / "files" / "file-cut.part").write_bytes(b"an upload that was cut")
    with server_process(tmp_path, 0.0) as (_, url):
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT)
        assert sdk.batches.retrieve(id).request_counts.completed >= len(done)
        batch = ended(sdk, id)
        assert batch.status == "completed"
        assert counts(batch) == (61, 60, 1)
        assert [each["custom_id"] for each in results(sdk, batch.output_file_id)] == wanted
        assert [each["error"]["line"] for each in results(sdk, batch.error_file_id)] == [1]
        assert len(list((tmp_path / "files").iterdir())) == 3
        run = f'penstock_requests_finished_total{{reason="stop"}} {len(wanted) - len(done)}.0'
        assert run in httpx.get(f"{url}/metrics").text


def test_a_batch_that_a_restarted_server_resumes_is_charged_to_its_key(tmp_path: Path) -> None:
    """What the first server generated is charged there, and the rest here: the key's name is kept with the batch."""
    file, secret, other = tmp_path / "keys.json", new_key(), new_key()
    with changing(file) as keys:
        keys += [
            Key(name=name, sha256=digest(each.encode()), created=now(), monitor=name == "other")
            for name, each in (("maker", secret), ("other", other))
        ]
    said = "on and on " * 20
    with server_process(tmp_path / "data", SLOW, file) as (process, url):
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=WAIT)
        id = begin(sdk, jsonl(*[line(f"n{number}", "on" if number < 4 else said) for number in range(30)])).id
        watched(sdk, id, lambda batch: batch.request_counts.completed > 0)
        process.kill()
    done = done_lines(tmp_path / "data", id)
    assert done <= {f"n{number}" for number in range(4)}
    with server_process(tmp_path / "data", 0.0, file) as (_, url):
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=WAIT)
        assert counts(ended(sdk, id)) == (30, 30, 0)
        text = httpx.get(f"{url}/metrics", headers={"x-api-key": other}).text
        generated = 26 * (len(said) + 1) + (4 - len(done)) * 3
        assert f'penstock_key_tokens_total{{key="maker",kind="generated"}} {generated}.0' in text
        assert 'penstock_key_tokens_total{key="other",kind="generated"} 0.0' in text


def test_an_archive_of_an_older_server_is_upgraded(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    """Its batches have no owner: they are resumed all the same, and charged to nobody."""
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        id = begin(server.sdk(), jsonl(line("one"), line("two"))).id
        assert ended(server.sdk(), id).status == "completed"
    with sqlite3.connect(tmp_path / "archive.db") as db:
        assert records.ownership(db, id).owner
        batch = records.get(db, id)
        batch.request_counts, batch.output_file_id, batch.status = records.RequestCounts(), None, "validating"
        records.save(db, batch)
        db.executescript(
            "ALTER TABLE batches DROP COLUMN owner; ALTER TABLE batches DROP COLUMN payer;"
            "ALTER TABLE batches DROP COLUMN tenant;"
            "ALTER TABLE batches RENAME COLUMN record TO told; ALTER TABLE files DROP COLUMN tenant;"
            "DROP TABLE answers;"
            "PRAGMA user_version = 1;"
        )
    db.close()
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        assert counts(ended(server.sdk(), id)) == (2, 2, 0)
        assert ended(server.sdk(), begin(server.sdk(), jsonl(line("three"))).id).status == "completed"
    with sqlite3.connect(tmp_path / "archive.db") as db:
        assert records.ownership(db, id) == records.Ownership()
        assert db.execute("PRAGMA user_version").fetchone() == (5,)
        assert db.execute("SELECT count(*) FROM answers").fetchone() == (0,)
    db.close()


def test_a_batch_goes_over_to_a_server_that_waits_for_the_folder(
    serve: Any, toy_text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RETRY_SECONDS", 0.05)
    with ExitStack() as second:
        with serve(InProcessClient(toys.open_slow_parrot), toy_text, MODEL, space=Space(tmp_path)) as first:
            id = begin(first.sdk(), jsonl(*[line(f"n{number}", "on and on " * 10) for number in range(40)])).id
            sdk = second.enter_context(
                serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path))
            ).sdk()
        batch = ended(sdk, id)
        assert counts(batch) == (40, 40, 0)
        assert len(results(sdk, batch.output_file_id)) == 40


def test_what_a_server_left_half_done_is_ended_by_the_next(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    """Killed while a batch was being read, cancelled, or its files were written."""
    ids = {}
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        for status in ("validating", "cancelling", "finalizing"):
            ids[status] = begin(server.sdk(), jsonl(line("one"), line("two"))).id
            assert ended(server.sdk(), ids[status]).status == "completed"
    with sqlite3.connect(tmp_path / "archive.db") as db:
        for status, id in ids.items():
            batch = records.get(db, id)
            batch.request_counts = records.RequestCounts(2, 1, 0)
            batch.output_file_id = batch.completed_at = None
            batch.to(status) if status != "validating" else setattr(batch, "status", status)
            records.save(db, batch)
            answered = lines.encode_answer("one", 200, "req", b"{}")
            db.execute("INSERT INTO lines VALUES (?, 1, 0, 0, 'one', 1, ?)", (id, answered))
            if status == "cancelling":
                db.execute("INSERT INTO lines VALUES (?, 2, 0, 0, 'two', 0, NULL)", (id,))
    db.close()
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        sdk = server.sdk()
        again, cancelled, written = (ended(sdk, ids[status]) for status in ("validating", "cancelling", "finalizing"))
        assert (again.status, cancelled.status, written.status) == ("completed", "cancelled", "completed")
        assert [each["custom_id"] for each in results(sdk, again.output_file_id)] == ["one", "two"]
        assert counts(again) == (2, 2, 0)
        assert counts(cancelled) == (2, 1, 1)
        assert [each["custom_id"] for each in results(sdk, cancelled.error_file_id)] == ["two"]
        assert [each["custom_id"] for each in results(sdk, written.output_file_id)] == ["one"]
