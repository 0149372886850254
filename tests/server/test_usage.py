"""Usage and cost by key, model and day: what servers write, and what `penstock usage` shows."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import run_command
from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access import usage
from penstock.server.access.guard import Rules
from penstock.server.access.usage import KeyUsage, Price, UsageRecord, by_key_and_model, parse_price, read_usage
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
PROMPT = len("user:[hello]\nassistant:")


def serve_once(file: Path, record: Path, secret: str, **fields: Any) -> None:
    """Runs a server for one request, as a key's owner sends it."""
    rules, kept = Rules(keys=file), UsageRecord(record, {MODEL: Price(1.0, 100.0, 0.0)})
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules, usage=kept) as server:
        given = {"model": MODEL, "messages": [{"role": "user", "content": "[hello]"}]} | fields
        assert server.http.post("/v1/chat/completions", json=given, headers={"x-api-key": secret}).status_code == 200


def test_usage_survives_restarts_and_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, record, secret = tmp_path / "keys.json", tmp_path / "usage.sqlite", new_key()
    with changing(file) as keys:
        keys.append(Key(name="alice", sha256=digest(secret.encode()), created=now()))
    serve_once(file, record, secret)
    serve_once(file, record, secret, stream=True)
    serve_once(file, record, secret, n=3)  # the prompt counts once, answers do not
    (row,) = read_usage(record, "alice")
    assert row[:6] == ("alice", MODEL, 3, 3 * PROMPT, 0, 5 * 6)
    assert row.cost == pytest.approx((3 * PROMPT + 5 * 6 * 100) / 1e6)
    assert run_command("usage", ["--file", str(record), "--key", "alice", "--since", "1d", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["usage"]
    assert (told["key"], told["model"], told["requests"], told["generated_tokens"]) == ("alice", MODEL, 3, 30)
    assert told["cost"] == round(row.cost, 6)
    assert run_command("usage", ["--file", str(record), "--days"]) == 0
    shown = capsys.readouterr().out
    assert row.day in shown
    assert "alice" in shown
    assert run_command("usage", ["--file", str(record), "--key", "bob", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"usage": []}


def test_requests_without_keys_are_recorded_together(tmp_path: Path, parrot: Server) -> None:
    record = UsageRecord(tmp_path / "usage.sqlite")
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, usage=record) as server:
        server.post("/api/embed", model=MODEL, input="abc")
        server.post("/v1/messages", model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "[hello]"}])
    (row,) = read_usage(tmp_path / "usage.sqlite")
    assert row[:6] == ("", MODEL, 2, 3 + PROMPT, 0, 3)


def put(path: Path, *rows: tuple[str, str, int]) -> None:
    UsageRecord(path)
    with sqlite3.connect(path) as database:
        for day, key, tokens in rows:
            database.execute("INSERT INTO usage VALUES (?, ?, 'm', 1, ?, 0, 0, 0.5)", (day, key, tokens))


def day(ago: int) -> str:
    return (datetime.now(UTC).date() - timedelta(days=ago)).isoformat()


def test_rows_are_chosen_by_key_and_day(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    put(path, (day(3), "a", 1), (day(1), "a", 2), (day(1), "b", 4))
    assert [row.prompt for row in read_usage(path, "a")] == [1, 2]
    assert [row.prompt for row in read_usage(path, since=datetime.now(UTC).date() - timedelta(days=2))] == [2, 4]
    assert by_key_and_model(read_usage(path)) == [
        KeyUsage("a", "m", 2, 3, 0, 0, 1.0),
        KeyUsage("b", "m", 1, 4, 0, 0, 0.5),
    ]
    assert read_usage(tmp_path / "nothing") == []


def test_a_day_with_too_many_rows_is_kept_until_it_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MOST_ROWS", 3)
    path = tmp_path / "usage.sqlite"
    put(path, (day(1), "old", 1), *((day(0), f"key {number}", 1) for number in range(5)))
    record = UsageRecord(path)
    add(record, 7)
    record.flush()
    assert [row.key for row in read_usage(path)] == ["a", *(f"key {number}" for number in range(5))]


def add(record: UsageRecord, tokens: int) -> None:
    record._hold((day(0), "a", "m"), KeyUsage("a", "m", 1, tokens))


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.sqlite"
    put(path, (day(500), "a", 1), (day(3), "a", 2), (day(2), "a", 3), (day(1), "a", 4))
    monkeypatch.setattr(usage, "MOST_ROWS", 3)
    record = UsageRecord(path)
    add(record, 5)
    record.flush()
    assert [row.prompt for row in read_usage(path)] == [3, 4, 5]


def test_what_cannot_be_written_is_kept_and_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.sqlite"
    record = UsageRecord(path)
    add(record, 5)
    monkeypatch.setattr(usage, "BUSY_SECONDS", 0.0)
    with sqlite3.connect(path) as other:
        other.execute("BEGIN EXCLUSIVE")
        record.flush()
        add(record, 6)
    record.flush()
    assert [row.prompt for row in read_usage(path)] == [11]


def test_two_servers_add_to_one_record(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    records = [UsageRecord(path), UsageRecord(path)]
    for record in records:
        add(record, 5)
        record.flush()
    assert [row[:4] for row in read_usage(path)] == [("a", "m", 2, 10)]


def test_prices_are_for_a_million_tokens() -> None:
    assert parse_price("org/m=v1=1,2") == ("org/m=v1", Price(1.0, 2.0, 1.0))
    _, price = parse_price("m=1,2,0.1")
    assert price.cost(1_000_000, 500_000, 1_000_000) == pytest.approx(0.5 + 0.05 + 2.0)
    for wrong in ("m", "m=1", "m=a,b", "=1,2", "m=1,2,3,4", "m=-1,2", "m=nan,1"):
        with pytest.raises(ConfigError, match="MODEL=IN,OUT"):
            parse_price(wrong)


def test_a_record_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    with pytest.raises(ConfigError, match="--usage"):
        UsageRecord(tmp_path / "file")
    with pytest.raises(ConfigError, match="--usage"):
        UsageRecord(tmp_path / "file" / "below")


def test_the_file_the_metrics_and_the_answers_agree(tmp_path: Path) -> None:
    """A repeated prompt counts once per HTTP request, and a refused request counts nothing."""
    file, path, secret = tmp_path / "keys.json", tmp_path / "usage.sqlite", new_key()
    with changing(file) as keys:
        keys.append(Key(name="alice", sha256=digest(secret.encode()), created=now(), monitor=True))
    headers, told = {"x-api-key": secret}, {"prompt": 0, "generated": 0}

    def ask(**fields: Any) -> None:
        answer = server.http.post("/v1/completions", json={"model": MODEL} | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        told["prompt"] += answer.json()["usage"]["prompt_tokens"]
        told["generated"] += answer.json()["usage"]["completion_tokens"]

    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file), usage=UsageRecord(path)) as server:
        ask(prompt="[hello]")
        ask(prompt="[hello]")  # its KV is reused
        ask(prompt="[hello]", n=3)
        ask(prompt="[hello]", n=2, best_of=4)
        ask(prompt=["[hello]", "[hello, too]"])
        ask(prompt="[hello]", stop="l")
        refused = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * 600}, headers=headers)
        assert refused.status_code == 400
        late = {"model": MODEL, "prompt": "[late]", "grammar": 'root ::= "late"'}  # the toy has no grammars
        assert server.http.post("/v1/completions", json=late, headers=headers).status_code == 400
        with server.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "[*ab]", "stream": True}, headers=headers
        ) as left:
            next(left.iter_bytes())
        server.until_idle()
        lines = server.http.get("/metrics", headers=headers).text.splitlines()
        counted = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    (row,) = read_usage(path, "alice")
    assert row.requests == 7
    for kind, recorded in (("prompt", row.prompt), ("generated", row.generated)):
        assert float(counted[f'penstock_key_tokens_total{{key="alice",kind="{kind}"}}']) == recorded
    assert row.prompt == told["prompt"] + len("[*ab]")
