"""What others wrote reaches a terminal as text, and a stderr that cannot be written stops nothing."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from penstock.cli.framework import markdown
from penstock.cli.terminal import note, print_filled, print_json, print_piece, print_table
from penstock.config import LOG_FORMAT, log_to_stderr
from penstock.server.telemetry.access_log import JsonFormatter, TextFormatter
from penstock.system.printing import escaped, escaped_json, stripped
from tests.cli.conftest import write_reciter

HOSTILE = "name\x1b]0;title\x07\x1b[2J\x9b31m\x7f\r\x00[/bold]"
WAIT = 60.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def harmless(printed: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in printed)


def test_escaped_and_stripped() -> None:
    assert escaped("a\x1b[0m\n\té\x9b") == "a\\x1b[0m\n\té\\x9b"
    assert stripped("a\x1b[0m\n\té\x9b") == "a[0m\n\té"
    assert json.loads(escaped_json(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_names_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log_format: str
) -> None:
    from rich.table import Table

    monkeypatch.setenv(LOG_FORMAT, log_format)
    table = Table("name", box=None)
    table.add_row(HOSTILE)
    print_table(table)
    print_filled(HOSTILE, "name")
    print_json({"name": HOSTILE})
    note(f"loading {HOSTILE}")
    log_to_stderr(f"serving {HOSTILE}")
    printed = capsys.readouterr()
    assert harmless(printed.out)
    assert harmless(printed.err)
    assert printed.out.count("\\x1b[2J") + printed.out.count("\\u001b[2J") == 3
    assert "[/bold]" in printed.out  # no markup of Rich's


def test_logs_are_escaped() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("penstock", logging.ERROR, "", 1, "%s", (HOSTILE,), sys.exc_info())
    record.fields, record.detail = {"model": HOSTILE, "c1": "\x9b"}, HOSTILE
    for formatter in (TextFormatter(), JsonFormatter()):
        assert harmless(formatter.format(record))


def test_answers_on_a_terminal_have_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    for piece in ("hel", "lo\x1b", "[2J\x9b5n\n"):  # a sequence may begin in one piece and end in the next
        print_piece(piece)
    assert shown.getvalue() == "hello[2J5n\n"


def test_answers_in_a_pipe_are_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_piece(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


def test_rendered_answers_have_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(markdown, "_rendered", lambda text: drawn.append(text) or text)
    monkeypatch.setattr(markdown, "without_echo", lambda: closing(io.StringIO()))
    markdown.print_answer(["a\x1b", "]0;t\x07\n\nb\x9b2J"])
    assert drawn
    assert all(harmless(text) for text in drawn)


# -- a stderr that is full --------------------------------------------------------------------------------------------

full_stderr = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock", *map(str, words)]
        return subprocess.run(command, stderr=full, stdout=subprocess.PIPE, text=True, timeout=WAIT, check=False)


@full_stderr
def test_an_error_is_told_on_stdout() -> None:
    done = run("show", "/no/such/model")
    assert done.returncode == 1
    assert done.stdout.startswith("error: ")
    assert "[model_not_found]" in done.stdout


@full_stderr
def test_a_command_that_only_notes_succeeds(tmp_path: Path) -> None:
    done = run("keys", "add", "alice", "--file", tmp_path / "keys.json")
    assert done.returncode == 0
    assert done.stdout.startswith("sk-penstock-")


@full_stderr
def test_a_server_goes_on(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    model = write_reciter(tmp_path / "reciter", endless=False)
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--name", "it", "--port", str(port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stderr=full, env={**os.environ, "PENSTOCK_HOME": str(tmp_path)})
    try:
        deadline = time.monotonic() + WAIT
        while True:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "waited in vain"
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        for _ in range(2):
            assert httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/no/such/route").status_code == 404
    finally:
        process.terminate()
        process.wait(WAIT)
    assert process.returncode in (0, -15)
