"""The command as a process: pipes, signals, a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.store import DerivedModel, save_derived

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and terminals")

RECITED = "abcdefghijklménopqrstuvwxyz"
COMMAND = [sys.executable, "-m", "penstock"]


def start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_an_interrupted_run_leaves_quietly(babbler: Path) -> None:
    running = start("run", babbler, "Go", "--device", "ref")
    assert running.stdout
    assert running.stdout.read(3) == b"abc"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize("imported", ["penstock.cli.app", "penstock.cli.run"])
def test_an_interrupt_during_an_import_is_no_error(imported: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"""if True:
        import os, signal, sys
        class Interrupt:
            def find_spec(self, name, path, target=None):
                if name == "{imported}":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupt())"""
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [*COMMAND, "run", "Go"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, timeout=60
    )
    assert ended.returncode == 130
    assert ended.stderr.strip() == b""


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        (">&-", "run RECITER Go --device ref"),
        ("<&-", "run RECITER Go --device ref"),
        ("2>&-", "run RECITER Go --device ref --max-tokens 2"),
        ("<&-", "chat RECITER --device ref"),
        ("<&- >&- 2>&-", "run RECITER Go --device ref"),
        (">&-", "--help"),
    ],
)
def test_a_closed_stream_is_as_good_as_an_empty_one(closed: str, words: str, reciter: Path) -> None:
    command = shlex.join([*COMMAND, *words.replace("RECITER", str(reciter)).split()])
    ended = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, timeout=60, text=True)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk")
@pytest.mark.parametrize("words", ["--help", "--version", "list"])
def test_output_to_a_full_disk_is_an_error_of_one_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # the text is written when the command ends
        command = [*COMMAND, *words.split()]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, text=True, env=buffered)
    assert ended.returncode == 1
    assert ended.stderr == "error: [Errno 28] No space left on device [os_error]\n"


def test_a_pipe_that_no_one_reads(babbler: Path) -> None:
    running = start("run", babbler, "Go", "--device", "ref")
    assert running.stdin
    assert running.stdout
    running.stdin.close()
    running.stdin = None
    assert running.stdout.read(3) == b"abc"
    running.stdout.close()
    running.stdout = None
    _, err = running.communicate()
    assert running.returncode == 141
    assert err == b""


def test_what_is_piped_in_comes_before_the_prompt(reciter: Path, tmp_path: Path) -> None:
    def prompt_tokens(**options: Any) -> int:
        words = [*COMMAND, "run", str(reciter), "Go", "--device", "ref", "--json"]
        done = subprocess.run(words, capture_output=True, timeout=60, check=True, **options)
        return int(json.loads(done.stdout)["prompt_tokens"])

    alone = prompt_tokens(stdin=subprocess.DEVNULL)
    assert prompt_tokens(input=b"") == alone
    assert prompt_tokens(input=b"Look:\n") == alone + len("Look:\n\n")
    (tmp_path / "text").write_bytes(b"Look:")
    with (tmp_path / "text").open("rb") as file:
        assert prompt_tokens(stdin=file) == alone + len("Look:\n\n")
        assert prompt_tokens(stdin=file) == alone  # somebody has read from it: it is a loop's or a script's


def test_a_pipe_that_stays_open_is_not_waited_for(reciter: Path) -> None:
    running = start("run", reciter, "Go", "--device", "ref")
    assert running.wait(60) == 0
    assert running.stdout
    assert running.stderr
    assert running.stdout.read().decode() == f"{RECITED}\n"
    assert b"stdin is a pipe that had nothing for 3 s: it is not read" in running.stderr.read()


def shown_in_60_columns(*words: object, **environment: str) -> list[str]:
    """The lines that a command prints on a narrow terminal."""
    import pty
    import termios

    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (24, 60))
    given = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"} | environment
    running = subprocess.Popen([*COMMAND, *map(str, words)], stdout=inner, stderr=subprocess.DEVNULL, env=given)
    os.close(inner)
    text = b""
    with contextlib.suppress(OSError):  # the terminal's end, once nobody writes to it
        while select.select([outer], [], [], 60)[0] and (piece := os.read(outer, 10**5)):
            text += piece
    os.close(outer)
    assert running.wait(60) == 0
    return text.decode().splitlines()


@pytest.mark.parametrize("words", [["help"], ["serve", "--help"]])
def test_help_fits_a_narrow_terminal(words: list[str]) -> None:
    shown = shown_in_60_columns(*words)
    lines = [line for line in shown if not line.lstrip().startswith(("penstock", "curl", "-d"))]
    assert len(lines) > 20
    assert [line for line in lines[1:] if len(line) > 60] == []


def test_what_commands_print_fits_a_narrow_terminal(reciter: Path) -> None:
    save_derived(DerivedModel(name="a-model-with-a-rather-long-name", base="", path=str(reciter)))
    shown = {
        "plan": shown_in_60_columns("plan", reciter, "--device", "ref"),
        "list": shown_in_60_columns("list"),
        "known": shown_in_60_columns("list", "--all"),
        "config": shown_in_60_columns("config", "run", PENSTOCK_SYSTEM="You are a patient teacher. " * 5),
    }
    for lines in shown.values():
        assert [line for line in lines if len(line.rstrip()) > 60] == []
    assert any(line.startswith("llama3.1:70b ") for line in shown["known"])  # names are whole
    assert any(line.startswith("temperature ") for line in shown["config"])
    assert "".join(line[-30:].strip() for line in shown["list"]).count(reciter.name)


def test_a_long_row_is_one_line_in_a_pipe(reciter: Path) -> None:
    system = "You are a patient teacher. " * 40
    done = subprocess.run(
        [*COMMAND, "config", "run"],
        env=os.environ | {"PENSTOCK_SYSTEM": system, "COLUMNS": "60"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("system ")]
    assert system.strip() in row
    assert row.rstrip().endswith("the variable PENSTOCK_SYSTEM")


def test_a_chat_from_a_pipe(reciter: Path) -> None:
    lines = b"Hello\n/dance\n/system Be brief.\n/help\nmore \\\nand more\n"
    out, err = start("chat", reciter, "--device", "ref").communicate(lines)
    assert out.decode() == f"{RECITED}\n{RECITED}\n"
    assert b"there is no command /dance" in err
    assert b"start a new conversation" in err


def test_a_chat_that_grows_too_long_says_so_and_goes_on(reciter: Path) -> None:
    talking = start("chat", reciter, "--device", "ref", "--max-len", 64)
    out, err = talking.communicate(b"Hello\nHello\n/reset\nHello\n")
    assert talking.returncode == 0
    assert out.decode() == f"{RECITED}\n{RECITED}\n"
    assert err.count(b"[context_length_exceeded]; /reset starts a new conversation") == 1


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, *words: object) -> None:
        import pty

        pid, self.fd = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [*COMMAND, *map(str, words)])
        self.pid = pid
        self.seen = ""

    def until(self, text: str, *, patience: float = 60) -> bool:
        """Whether `text` came; it is then behind us."""
        while text not in self.seen:
            if not select.select([self.fd], [], [], patience)[0]:
                return False
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.seen.partition(text)[2]
        return True

    def interrupt(self, shown: str = "> ") -> None:
        """Ctrl-C up to the next prompt, or to what else it has shown; Python's readline misses one that comes just
        before it starts to wait."""
        for _ in range(20):
            self.type("\x03")
            if self.until(shown, patience=1):
                return
        raise AssertionError(f"no {shown!r} after Ctrl-C; since the last one: {self.seen!r}")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.fd)
        return code


def test_a_chat_at_a_terminal(babbler: Path, own_store: Path) -> None:
    chat = Terminal("chat", babbler, "--device", "ref")
    assert chat.until("> ")
    chat.type("half a question")
    assert chat.until("question")  # it is being edited: from here on Ctrl-C is the line editor's
    chat.interrupt()
    chat.type("Hello\n")
    assert chat.until(RECITED * 2)
    chat.interrupt()
    chat.type("/help\n")
    assert chat.until("Ctrl-C stops an answer")
    assert chat.until("> ")
    chat.type("\x1b[A\x1b[A\n")  # two lines up: Hello again
    assert chat.until(RECITED)
    chat.interrupt()
    chat.type("\x04")
    assert chat.end() == 0
    assert "Hello" in (own_store / "chat_history").read_text()


def test_lines_that_are_pasted_together_are_one_message(
    reciter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = tmp_path / "talk.json"
    chat = Terminal("chat", reciter, "--device", "ref")
    assert chat.until("\x1b[?2004h")  # asks the terminal to say where what is pasted begins and ends
    assert chat.until("> ")
    chat.type("\x1b[200~def two():\r    return 2\x1b[201~\r")
    assert chat.until(RECITED)
    assert chat.until("> ")
    chat.type(f"/save {file}\n/exit\n")
    assert chat.until("2 messages are in")
    assert chat.end() == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "def two():\n    return 2"


def test_ctrl_c_at_the_prompt_says_how_to_leave(reciter: Path) -> None:
    chat = Terminal("chat", reciter, "--device", "ref")
    assert chat.until("> ")
    chat.type("half")
    assert chat.until("half")
    chat.interrupt("Ctrl-D or /exit ends the conversation")
    assert chat.until("> ")
    chat.type("\x04")
    assert chat.end() == 0


def test_a_second_conversation_knows_what_was_typed_in_the_first(reciter: Path) -> None:
    for typed in ("A question\n", "\x1b[A\x1b[A\n"):  # the second: two lines up
        chat = Terminal("chat", reciter, "--device", "ref")
        assert chat.until("> ")
        chat.type(typed)
        assert chat.until("A question")
        assert chat.until(RECITED)
        assert chat.until("> ")
        chat.type("/exit\n")
        assert chat.end() == 0


def test_a_model_without_a_prompt_at_a_terminal_is_a_conversation(reciter: Path) -> None:
    chat = Terminal("run", reciter, "--device", "ref")
    assert chat.until("is ready. Type /help for help")
    assert chat.until("> ")
    chat.type("Hello\n")
    assert chat.until(RECITED)
    chat.type("/exit\n")
    assert chat.end() == 0
    refused = Terminal("run", reciter, "--json")
    assert refused.until("--raw and --json are for one answer: give a prompt too")
    assert refused.end() == 2


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize("forked", [False, True])
def test_a_signal_to_all_processes_of_a_server_lets_answers_end(
    babbler: Path, forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    server = start("serve", babbler, "--port", 0)
    assert server.stderr
    lines: list[str] = []
    while not (found := re.search(r"on (http://\S+) \(engine process \d+\)", lines[-1] if lines else "")):
        lines.append(server.stderr.readline().decode())
        assert lines[-1], lines
    generate = f"{found[1]}/api/generate"
    body: dict[str, Any] = {"model": babbler.name, "prompt": "Go", "raw": True, "options": {"num_predict": 2000}}
    if forked:  # the second engine of a server is
        httpx.post(generate, json={"model": babbler.name, "keep_alive": 0}, timeout=60).raise_for_status()
    with httpx.stream("POST", generate, json=body, timeout=60) as answer:
        events = answer.iter_lines()
        next(events)
        for pid in [server.pid, *descendants(server.pid)]:
            os.kill(pid, signal.SIGTERM)
        last = json.loads(list(events)[-1])
    assert last["eval_count"] == 2000
    _, told = server.communicate(timeout=60)
    assert b"the engine process" not in told  # it would say how that ended
    assert b"Traceback" not in told
    assert server.returncode == 0
    assert not list(temporary.iterdir())
