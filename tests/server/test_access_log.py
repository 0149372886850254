"""Every request is one line in the log, with what operators need and nothing that users wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.server.telemetry.access_log import JsonFormatter, LogSettings, TextFormatter, set_up_logging
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
SECRET = "[whisper]"


class Lines(logging.Handler):
    """Keeps the records of the access log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def take(self, server: Server, count: int = 1) -> list[dict[str, Any]]:
        """The last lines as JSON, once there are so many: a line comes after its answer."""
        server.until(lambda: len(self.records) >= count)
        lines = [json.loads(JsonFormatter().format(record)) for record in self.records]
        texts = [TextFormatter().format(record) for record in self.records]
        assert "whisper" not in f"{lines}{texts}"
        self.records.clear()
        return lines


@pytest.fixture
def log() -> Iterator[Lines]:
    logger, lines = logging.getLogger("penstock.access"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def parrot() -> Iterator[Server]:
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL) as server:
        yield server


def test_a_request_is_a_line(parrot: Server, log: Lines) -> None:
    answer = parrot.post("/v1/completions", model=MODEL, prompt=SECRET, n=2)
    (line,) = log.take(parrot)
    assert (line["level"], line["message"], line["status"]) == ("info", "POST /v1/completions", 200)
    assert (line["prompt_tokens"], line["generated_tokens"], line["finish"]) == (9, 16, "stop")
    assert (line["model"], line["cached_tokens"], "reused_from" in line) == (MODEL, 0, False)
    assert 0 <= line["queue_seconds"] < line["ttft_seconds"] <= line["seconds"]
    assert line["id"] == answer.headers["x-request-id"]
    assert 0 < line["seconds"] < 10
    assert "key" not in line
    parrot.post("/v1/completions", model=MODEL, prompt=[SECRET, "[other]"], stream=True)
    (line,) = log.take(parrot)
    assert (line["prompt_tokens"], line["generated_tokens"]) == (9 + 7, 8 + 6)


def test_a_line_tells_what_was_reused(parrot: Server, log: Lines) -> None:
    for _ in range(2):
        parrot.post("/v1/completions", model=MODEL, prompt=SECRET * 5, n=2)
    first, again = log.take(parrot, 2)
    assert (first["prompt_tokens"], first["cached_tokens"]) == (45, 0)
    assert (again["prompt_tokens"], again["cached_tokens"], again["reused_from"]) == (45, 32, "device:32")


def test_a_refusal_for_load_is_a_warning_and_says_why(tmp_path: Path, log: Lines) -> None:
    secret = new_key()
    with changing(tmp_path / "keys.json") as keys:
        keys.append(Key(name="ci", sha256=digest(secret.encode()), created=now(), requests_per_minute=1))
    rules = Rules(keys=tmp_path / "keys.json")
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules) as server:
        for fields in ({"temperature": 9e9}, {}):
            body, headers = {"model": MODEL, "prompt": SECRET, **fields}, {"authorization": f"Bearer {secret}"}
            server.http.post("/v1/completions", json=body, headers=headers)
        wrong, refused = log.take(server, 2)
    assert (wrong["level"], wrong["status"], "reason" in wrong) == ("info", 400, False)
    assert (refused["level"], refused["status"], refused["error"]) == ("warning", 429, "rate_limit_exceeded")
    assert "ci" in refused["reason"]


def test_prompts_are_logged_only_if_asked(log: Lines) -> None:
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, log=LogSettings(prompts=True)) as server:
        server.post("/v1/completions", model=MODEL, prompt="[hello]")
        (line,) = log.take(server)
    assert json.loads(line["body"])["prompt"] == "[hello]"


def test_levels(parrot: Server, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    parrot.get("/health")
    parrot.get("/v1/models/other")
    parrot.post("/v1/completions", model=MODEL, prompt=SECRET, temperature=-1)
    lines = log.take(parrot, 3)
    assert [(line["level"], line["status"], line.get("error")) for line in lines[::2]] == [
        ("debug", 200, None),
        ("info", 400, "invalid_request"),
    ]
    monkeypatch.setattr(toys.ToyText, "sampling", None)
    parrot.post("/v1/completions", model=MODEL, prompt=SECRET)
    (line,) = log.take(parrot)
    assert (line["level"], line["status"], line["error"]) == ("error", 500, "internal_error")


def test_a_client_that_leaves_before_its_stream_begins_is_no_error(log: Lines) -> None:
    client = InProcessClient(lambda: toys.open_paced_parrot(0.02, step_tokens=16), "parrot")
    with serving(client, toys.ToyText(), MODEL) as server:
        with closing(HTTPConnection(server.url.removeprefix("http://"))) as connection:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "x" * 20000, "stream": True}))
            server.until(lambda: client.stats.running > 0)
        (line,) = log.take(server)
        assert (line["level"], line["status"], line["finish"]) == ("info", 499, "abort")
        server.until_idle()


def test_a_line_has_the_name_of_the_key(tmp_path: Path, log: Lines) -> None:
    secret = new_key()
    with changing(tmp_path / "keys.json") as keys:
        keys.append(Key(name="ci", sha256=digest(secret.encode()), created=now()))
    rules = Rules(keys=tmp_path / "keys.json")
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules) as server:
        body = {"model": MODEL, "prompt": SECRET}
        server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {secret}"})
        server.http.post("/v1/completions", json=body)
        allowed, refused = log.take(server, 2)
    assert (allowed["status"], allowed["key"]) == (200, "ci")
    assert (refused["status"], refused.get("key")) == (401, None)
    assert secret not in f"{allowed}{refused}"


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("penstock.access", logging.INFO, "", 0, message, (), None)
    made.created, made.fields = 0.5, fields
    return made


def test_formats() -> None:
    written = TextFormatter().format(record("GET /a\nforged", status=200, reason='a "b"\nforged'))
    assert written == '1970-01-01T00:00:00.500Z info GET /a?forged status=200 reason="a \\"b\\"\\nforged"'
    assert json.loads(JsonFormatter().format(record("GET /a\nb", status=200))) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "logger": "penstock.access",
        "message": "GET /a\nb",
        "status": 200,
    }


def test_the_stacks_of_a_process_follow_its_line() -> None:
    died = record("it died")
    assert TextFormatter().format(died) == "1970-01-01T00:00:00.500Z info it died"
    died.detail = "Thread 1\n  main\n"
    assert TextFormatter().format(died) == "1970-01-01T00:00:00.500Z info it died\nThread 1\n  main"
    assert json.loads(JsonFormatter().format(died))["detail"] == "Thread 1\n  main"


@pytest.fixture
def loggers() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("penstock")
    handlers, level = root.handlers[:], root.level
    root.handlers = []  # so that none of them is closed
    yield
    root.handlers = handlers
    root.setLevel(level)
    ours.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("level", "logged"),
    [("debug", "dwe"), ("info", "we"), ("warning", "we"), ("error", "e")],
)
@pytest.mark.usefixtures("loggers")
def test_a_level_is_the_least_that_is_logged(capsys: pytest.CaptureFixture[str], level: str, logged: str) -> None:
    set_up_logging(LogSettings(level, "json"))
    ours = logging.getLogger("penstock.ipc")
    ours.debug("d")
    ours.warning("w")
    ours.error("e")
    logging.getLogger("uvicorn").info("i")
    assert "".join(json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()) == logged


@pytest.mark.parametrize(("level", "format"), [("loud", "text"), ("info", "xml")])
def test_what_cannot_be_logged_is_refused(level: str, format: str) -> None:
    with pytest.raises(ConfigError, match="unknown log"):
        set_up_logging(LogSettings(level, format))
