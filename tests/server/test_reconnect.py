"""Clients that lose their connection and come back: what they have read before and after is the stream that nobody
cut, in every dialect, and what is kept for them has limits."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from penstock.errors import Gone
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.server.streams.buffer import ByteBudget, EventBuffer
from penstock.server.streams.kept import KeepLimits
from tests.server import toys
from tests.server.conftest import Server, serving
from tests.server.test_restart import ENDLESS, MODEL, SAID, STREAMS, plain, uncounted

RESUME = {"x-penstock-resume": "on"}
CHAT = "/v1/chat/completions"
SAY = {"model": MODEL, "messages": [{"role": "user", "content": f"[{SAID}]"}], "stream": True}


@contextmanager
def keeping(rules: Rules | None = None, **limits: float) -> Iterator[Server]:
    """Serves a parrot that keeps streams within these limits."""
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=rules or Rules(), keep=KeepLimits(**limits)) as server:
        yield server


class CutClient:
    """Reads a stream whose connection is cut again and again, at any byte. What was not read wholly is read again."""

    def __init__(self, server: Server, path: str, body: dict[str, Any], key: str = "") -> None:
        self.server = server
        self.read = b""  # whole events
        self.cuts = 0
        self._headers = {"x-api-key": key} if key else {}
        self._first = ("POST", path, body)
        self.id = ""
        self._end = b"\n\n"

    def go_on(self, cut: int | None) -> int:
        """Reads on, until so many more bytes came or to the end; returns the status."""
        method, path, body = self._first if not self.id else ("GET", f"/v1/streams/{self.id}", None)
        with self.server.http.stream(method, path, json=body, headers=self.headers()) as answer:
            if answer.status_code != 200:
                return answer.status_code
            self.id = answer.headers["x-penstock-stream"]
            self._end = b"\n" if "ndjson" in answer.headers["content-type"] else b"\n\n"
            data = b""
            for part in answer.iter_raw():
                data += part
                if cut is not None and len(data) > cut:
                    self.cuts += 1
                    data = data[: data.rfind(self._end, 0, cut) + len(self._end)] if self._end in data[:cut] else b""
                    break
        self.read += data
        return 200

    def headers(self) -> dict[str, str]:
        ids = re.findall(rb"^id: (.*)$", self.read, re.MULTILINE)
        if ids:
            return {**RESUME, **self._headers, "last-event-id": ids[-1].decode()}
        if self._end == b"\n" and self.read:  # lines have no ids: they are counted
            return {**RESUME, **self._headers, "last-event-id": str(self.read.count(b"\n") - 1)}
        return {**RESUME, **self._headers}

    def uncut(self) -> bytes:
        """Returns the whole stream, from its first event on."""
        return self.server.http.get(f"/v1/streams/{self.id}", headers=self._headers).content


def events_of(data: bytes) -> list[Any]:
    lines = [line.removeprefix("data:").strip() for line in data.decode().splitlines()]
    events = [plain(json.loads(line)) for line in lines if line.startswith("{")]
    return sorted(events, key=lambda event: [choice["index"] for choice in event.get("choices") or ()])


def test_a_stream_of_any_dialect_that_is_cut_anywhere_is_whole(slow_parrot: Any) -> None:
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        list(pool.map(partial(check_cuts, slow_parrot), STREAMS))


def check_cuts(server: Server, name: str) -> None:
    path, fields = STREAMS[name]
    body = {"model": MODEL, "stream": True, **fields}
    plainly = server.http.post(path, json=body)
    assert "x-penstock-stream" not in plainly.headers
    assert "\nid: " not in plainly.text
    draw = random.Random(name)
    client = CutClient(server, path, body)
    while client.cuts < 4:
        client.go_on(draw.randrange(8000))
    client.go_on(None)
    assert client.read == client.uncut(), name
    assert uncounted(events_of(client.read)) == uncounted(events_of(plainly.content)), name
    numbers = re.findall(rb"^id: (\w+):(\d+)$", client.read, re.MULTILINE)
    assert [int(number) for _, number in numbers] == list(range(len(numbers)))
    assert {id.decode() for id, _ in numbers} == (set() if path.startswith("/api/") else {client.id})


def test_the_engine_dies_while_no_client_is_there(parrot_process: Any) -> None:
    server = parrot_process
    alone = server.http.post(CHAT, json=SAY).content
    clients = [CutClient(server, CHAT, SAY) for _ in range(4)]
    for client in clients:
        client.go_on(3000)
    os.kill(server.client.hello.pid, signal.SIGKILL)
    server.until(lambda: server.client.restarts == 1 and server.client.state == "ready")
    for client in clients:
        client.go_on(None)
        assert events_of(client.read) == events_of(alone)


# -- clients ---------------------------------------------------------------------------------------------------------


def test_the_openai_sdk_reads_on(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    stream = sdk.chat.completions.create(**SAY, extra_headers=RESUME)
    first = [next(stream) for _ in range(20)]
    id = stream.response.headers["x-penstock-stream"]
    stream.close()
    rest = sdk.get(
        f"/streams/{id}",
        cast_to=ChatCompletionChunk,
        stream=True,
        stream_cls=openai.Stream[ChatCompletionChunk],
        options={"params": {"starting_after": len(first) - 1}},
    )
    chunks = [*first, *rest]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_response_that_is_not_in_the_background_is_read_on_by_its_own_id(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    stream = sdk.responses.create(model=MODEL, input=f"[{SAID}]", stream=True, extra_headers=RESUME)
    first = [next(stream) for _ in range(20)]
    stream.close()
    id = first[0].response.id
    rest = list(sdk.responses.retrieve(id, stream=True, starting_after=19))
    assert [event.sequence_number for event in (*first, *rest)] == list(range(20 + len(rest)))
    assert rest[-1].response.output_text == sdk.responses.retrieve(id).output_text == SAID
    sdk.responses.delete(id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(id, stream=True)
    assert slow_parrot.get(f"/v1/streams/{id}").status_code == 410


def test_a_response_in_the_background_is_read_on_by_the_last_event_id(slow_parrot: Any) -> None:
    body = {"model": MODEL, "input": "[hello]", "stream": True, "background": True}
    whole = slow_parrot.http.post("/v1/responses", json=body).content
    id, number = re.findall(rb"^id: (\w+):(\d+)$", whole, re.MULTILINE)[4]
    url = f"/v1/responses/{id.decode()}?stream=true&starting_after=1"
    rest = slow_parrot.http.get(url, headers={"last-event-id": f"{id.decode()}:{number.decode()}"}).content
    assert whole.endswith(rest)
    assert rest.startswith(b"id: " + id + b":5\n")
    wrong = slow_parrot.http.get(url, headers={"last-event-id": "stream_1:1"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "last-event-id")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_client_that_reconnects_by_itself(slow_parrot: Any, method: str) -> None:
    """An EventSource asks again for the same address, others send the same POST again, both with the id of the last
    event, until the status is 204."""
    first = CutClient(slow_parrot, CHAT, SAY)
    first.go_on(0)
    url, body = (f"/v1/streams/{first.id}", None) if method == "GET" else (CHAT, SAY)
    read, headers = b"", dict(RESUME)
    if method == "POST":
        headers["last-event-id"] = f"{first.id}:0"
        read = first.uncut().partition(b"\n\n")[0] + b"\n\n"
    for cut in (2000, 100, 5000, None, None):
        with slow_parrot.http.stream(method, url, json=body, headers=headers) as answer:
            if answer.status_code == 204:
                break
            data = b""
            for part in answer.iter_raw():
                data += part
                if cut is not None and len(data) > cut:
                    break
            read += data[: data.rfind(b"\n\n") + 2]
        headers["last-event-id"] = re.findall(rb"^id: (.*)$", read, re.MULTILINE)[-1].decode()
    assert answer.status_code == 204
    assert read == first.uncut()


def test_two_readers_are_both_served(slow_parrot: Any) -> None:
    first = CutClient(slow_parrot, CHAT, SAY)
    first.go_on(1000)
    others = [CutClient(slow_parrot, CHAT, SAY) for _ in range(2)]
    for other in others:
        other.id = first.id
    threads = [threading.Thread(target=other.go_on, args=[None]) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert others[0].read == others[1].read == first.uncut()


def test_wrong_ids_are_told_apart(slow_parrot: Any) -> None:
    client = CutClient(slow_parrot, CHAT, SAY)
    client.go_on(None)
    url = f"/v1/streams/{client.id}"
    for given, told in (("x", "number of an event"), ("stream_other:3", "number of an event"), ("999999", "no event")):
        answer = slow_parrot.http.get(url, headers={"last-event-id": given})
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
    assert slow_parrot.get(f"{url}?starting_after=-1").status_code == 400
    missing = slow_parrot.http.post(CHAT, json=SAY, headers=RESUME | {"last-event-id": "stream_0:3"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    ignored = slow_parrot.http.post(CHAT, json=SAY, headers={"last-event-id": "stream_0:3"})
    assert ignored.status_code == 200


# -- limits ----------------------------------------------------------------------------------------------------------


def metric(server: Server, name: str) -> float:
    return float(re.findall(rf"^{re.escape(name)} (.*)$", server.get("/metrics").text, re.MULTILINE)[0])


def counted(server: Server, event: str) -> float:
    return metric(server, f'penstock_kept_stream_events_total{{event="{event}"}}')


def test_a_stream_that_nobody_comes_back_for_ends() -> None:
    with keeping(seconds=1) as server:
        client = CutClient(server, CHAT, ENDLESS | {"stream": True})
        client.go_on(2000)
        assert client.go_on(2000) == 200
        server.until(lambda: metric(server, 'penstock_kept_streams{read="false"}') == 1)
        server.until_idle()
        answer = server.get(f"/v1/streams/{client.id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "gone")
        assert "nobody read it for 1 s" in answer.json()["error"]["message"]
        assert [counted(server, event) for event in ("kept", "resumed", "expired")] == [1, 1, 1]
        assert metric(server, "penstock_kept_stream_bytes") == 0
        assert server.client.stats.blocks_used == 0


def test_keeping_can_be_turned_off() -> None:
    with keeping(seconds=0) as server:
        with server.http.stream("POST", CHAT, json=ENDLESS | {"stream": True}, headers=RESUME) as answer:
            assert "x-penstock-stream" not in answer.headers
            next(answer.iter_raw())
        server.until_idle()


def test_a_client_that_leaves_before_the_first_event_is_not_waited_for(slow_parrot: Any) -> None:
    kept, unsent = (counted(slow_parrot, event) for event in ("kept", "unsent"))
    long = {"model": MODEL, "messages": [{"role": "user", "content": f"{'x' * 20000}[*abc]"}], "stream": True}
    with closing(HTTPConnection(slow_parrot.url.removeprefix("http://"))) as connection:
        connection.request("POST", CHAT, json.dumps(long), RESUME)
        slow_parrot.until(lambda: counted(slow_parrot, "kept") == kept + 1)
    slow_parrot.until(lambda: counted(slow_parrot, "unsent") == unsent + 1)
    slow_parrot.until_idle()


def test_a_refused_request_is_refused_as_ever(slow_parrot: Any) -> None:
    body = SAY | {"max_tokens": 10**9}
    plainly, kept_one = (slow_parrot.http.post(CHAT, json=body, headers=headers) for headers in ({}, RESUME))
    assert (plainly.status_code, plainly.content) == (kept_one.status_code, kept_one.content)
    assert "x-penstock-stream" not in kept_one.headers


def test_a_full_buffer_waits_for_the_client_that_comes_back() -> None:
    with keeping(stream=4000) as server:
        alone = server.http.post(CHAT, json=SAY).content
        client = CutClient(server, CHAT, SAY)
        client.go_on(1000)
        server.until(lambda: metric(server, "penstock_kept_stream_bytes") > 3500)
        server.until_idle()  # the engine has computed all of it
        assert metric(server, "penstock_kept_stream_bytes") <= 4000
        client.go_on(None)
        assert events_of(client.read) == events_of(alone)
        missed = server.get(f"/v1/streams/{client.id}")
        assert missed.status_code == 410
        assert "events 0 to " in missed.json()["error"]["message"]
        first = int(re.findall(r"read on after event (\d+)", missed.json()["error"]["message"])[0])
        rest = server.get(f"/v1/streams/{client.id}?starting_after={first}")
        assert client.read.endswith(rest.content)
        assert server.get(f"/v1/streams/{client.id}?starting_after={first - 1}").status_code == 410


def test_memory_is_bounded_in_total_and_the_largest_tenant_pays(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secrets = {name: new_key() for name in ("greedy", "modest")}
    with changing(file) as keys:
        fields = {"created": now(), "monitor": True}
        keys += [Key(name=name, sha256=digest(key.encode()), **fields) for name, key in secrets.items()]
    with keeping(Rules(keys=file), total=45_000) as server:
        server.http.headers["x-api-key"] = secrets["greedy"]
        say = SAY | {"messages": [{"role": "user", "content": f"[{SAID[:40]}]"}]}
        modest = CutClient(server, CHAT, say, secrets["modest"])
        modest.go_on(None)
        greedy = [CutClient(server, CHAT, say, secrets["greedy"]) for _ in range(4)]
        for client in greedy:
            client.go_on(None)
            assert metric(server, "penstock_kept_stream_bytes") <= 45_000
        assert counted(server, "evicted") > 0
        assert modest.read == modest.uncut()
        answers = [server.get(f"/v1/streams/{client.id}") for client in greedy]
        assert (answers[0].status_code, answers[-1].status_code) == (410, 200)
        assert "memory" in answers[0].json()["error"]["message"]


def test_a_stream_is_its_keys_own_and_counts_among_what_the_key_has_in_flight(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    secrets = {name: new_key() for name in ("one", "other")}
    with changing(file) as keys:
        keys += [
            Key(name=name, sha256=digest(key.encode()), created=now(), concurrent=1) for name, key in secrets.items()
        ]
    with keeping(Rules(keys=file)) as server:
        client = CutClient(server, CHAT, ENDLESS | {"stream": True}, secrets["one"])
        client.go_on(2000)
        own, foreign = ({"x-api-key": secrets[name]} for name in ("one", "other"))
        url = f"/v1/streams/{client.id}"
        for method in ("GET", "DELETE"):
            answer = server.http.request(method, url, headers=foreign)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert server.http.post(CHAT, json=SAY, headers=own).status_code == 429
        assert server.http.post(CHAT, json=SAY, headers=foreign).status_code == 200
        assert client.go_on(2000) == 200
        deleted = server.http.delete(url, headers=own)
        assert deleted.json() == {"id": client.id, "object": "stream", "deleted": True}
        server.until_idle()
        server.until(lambda: server.http.post(CHAT, json=SAY, headers=own).status_code == 200)
        assert server.http.get(url, headers=own).status_code == 410
        assert server.http.get(url, headers=foreign).status_code == 404


def test_an_end_that_comes_early_is_told_to_readers_and_to_those_that_come_later(slow_parrot: Any) -> None:
    cut, reading = (CutClient(slow_parrot, CHAT, ENDLESS | {"stream": True}) for _ in range(2))
    cut.go_on(2000)
    thread = threading.Thread(target=reading.go_on, args=[None])
    thread.start()
    slow_parrot.until(lambda: slow_parrot.client.in_flight == 2 and reading.id != "")
    assert slow_parrot.http.delete(f"/v1/streams/{reading.id}").status_code == 200
    thread.join()
    assert b'"code":"gone"' in reading.read.splitlines()[-2]
    slow_parrot.client.end_answers("the server is stopping")
    cut.go_on(None)
    *_, id, data = cut.read.strip().splitlines()
    assert id.startswith(b"id: ")
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "server_stopping"
    slow_parrot.until_idle()


# -- the buffer ------------------------------------------------------------------------------------------------------


def test_readers_of_a_full_buffer_get_every_event_once() -> None:
    async def run(seed: int) -> None:
        draw = random.Random(seed)
        budget = ByteBudget(draw.choice([50, 200]))
        buffer = EventBuffer(100, budget)
        events = [bytes(draw.randrange(1, 120)) for _ in range(60)]

        async def write() -> None:
            for event in events:
                await buffer.add(event)
                assert budget.used == buffer.bytes <= max(100, len(event))
            buffer.end()

        async def read(after: int) -> list[bytes]:
            got = []
            async for event in buffer.follow(after):
                got.append(event)
                for _ in range(draw.randrange(3)):
                    await asyncio.sleep(0)
            return got

        readers = [asyncio.create_task(read(-1)) for _ in range(3)]
        await asyncio.sleep(0)
        writer = asyncio.create_task(write())
        assert await asyncio.gather(*readers) == [events] * 3
        await writer
        with pytest.raises(Gone, match="no longer kept"):
            await read(-1)
        assert await read(len(events) - 2) == events[-1:]
        buffer.clear()
        buffer.append(b"late")
        assert budget.used == 0

    for seed in range(20):
        asyncio.run(run(seed))
