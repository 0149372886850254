"""Conversations in the terminal: commands that change them, and answers that are rendered."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.framework.markdown import split_blocks

Penstock = Callable[..., tuple[int, str, str]]
RECITED = "abcdefghijklménopqrstuvwxyz"


def talk(penstock: Penstock, model: Path, *lines: str) -> tuple[list[str], str]:
    """Returns the lines that were answered, and what was told beside them."""
    code, out, err = penstock("chat", model, "--device", "ref", stdin="\n".join(lines).encode())
    assert code == 0
    return out.splitlines(), err


def test_the_sampling_is_changed_and_shown(penstock: Penstock, reciter: Path) -> None:
    answers, told = talk(
        penstock, reciter, "/set max_tokens 3", "Go", "/set", "/set heat 1", "/set top-k x", "/set top_k -5"
    )
    assert answers == ["abc"]
    assert "max_tokens 3\n(the answer was cut off after 3 tokens)\ntemperature" in told
    assert "there is no setting heat; these can be set: temperature, top_p" in told
    assert "error: top_k takes a number; got 'x'\n" in told
    assert "error: top_k must be between 0 and" in told


def test_messages_are_taken_back_saved_and_loaded(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/system Be kind.",
        "One",
        "Two",
        "/undo",
        "/retry",
        f"/save {file}",
        "/reset",
        "/undo",
        f"/load {file}",
        "Three",
    ]
    answers, told = talk(penstock, reciter, *lines, f"/save {file}")
    assert answers == [RECITED] * 4
    assert "there is no message to remove" in told
    saved = json.loads(file.read_text())["messages"]
    assert [each["content"] for each in saved if each["role"] != "assistant"] == ["Be kind.", "One", "Three"]


def test_what_changes_the_conversation_is_told(penstock: Penstock, reciter: Path) -> None:
    lines = [
        "/retry",
        "/system Be kind.",
        "One",
        "/undo",
        "/sett",
        "/set seed 7",
        "/set temperature 0",
        "Two",
        "/retry",
    ]
    answers, told = talk(penstock, reciter, *lines, "/set seed", "/reset")
    assert answers == [RECITED] * 3
    for line in (
        "there is no message to answer again",
        "a new conversation begins, with the system message 'Be kind.'",
        "taken back: 'One'",
        "there is no command /sett; did you mean /set?",
        "at temperature 0 the answer stays the same; /set temperature 0.7 changes it",
        "seed 8",
    ):
        assert f"{line}\n" in told


def test_files_that_cannot_be_used_are_told(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"messages": [1]}')
    odd = [f"/load {tmp_path}/odd.json", f"/load {tmp_path}/none.json", f"/save {tmp_path}", "/save", "/load", "Go"]
    answers, told = talk(penstock, reciter, *odd)
    assert answers == [RECITED]
    assert f"error: {tmp_path}/odd.json holds no conversation that /save has written\n" in told
    assert f"error: [Errno 2] No such file or directory: '{tmp_path}/none.json'\n" in told
    assert "Is a directory" in told
    assert "/save takes the name of a file" in told


def test_a_conversation_that_begins_with_an_answer_has_no_message_to_take_back(
    penstock: Penstock, reciter: Path, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [{"role": "assistant", "content": "Hello"}]}))
    _, told = talk(penstock, reciter, f"/load {file}", "/undo", "/retry")
    assert "there is no message to remove" in told
    assert "there is no message to answer again" in told


def test_another_model_goes_on(penstock: Penstock, reciter: Path, babbler: Path) -> None:
    lines = ["One", "/model nowhere", "Two", f"/model {babbler}", "/set max_tokens 4", "Three", "/model", "/dance"]
    answers, told = talk(penstock, reciter, *lines)
    assert answers == [RECITED, RECITED, "abcd"]
    assert "no model is called 'nowhere'" in told
    assert f"{babbler} is ready" in told
    assert "there is no command /dance" in told


def test_flags_and_what_was_set_hold_for_another_model(penstock: Penstock, reciter: Path, babbler: Path) -> None:
    lines = ["/set top_k 7", "/set temperature -1", f"/model {babbler}", "Go", "/set", "/set max_tokens 2", "Go"]
    code, out, told = penstock(
        "chat", reciter, "--device", "ref", "--max-tokens", 3, "--seed", 5, stdin="\n".join(lines).encode()
    )
    assert (code, out.splitlines()) == (0, ["abc", "ab"])
    assert "error: temperature must be" in told
    shown = told.partition(f"{babbler} is ready")[2]
    for line in ("top_k 7", "max_tokens 3", "seed 5", "temperature 0.7"):
        assert f"{line}\n" in shown


def test_a_message_may_have_several_lines(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(penstock, reciter, '"""', "One", "", "/undo", '"""', "Two\\", "lines", f"/save {file}")
    saved = json.loads(file.read_text())["messages"]
    assert [each["content"] for each in saved[::2]] == ["One\n\n/undo", "Two\nlines"]


def test_blocks_end_at_blank_lines_but_not_in_code_and_lists() -> None:
    text = "A\n\n```py\nx\n\ny\n```\n\n- one\n\n- two\n\nB"
    assert split_blocks(text) == (["A\n\n", "```py\nx\n\ny\n```\n\n- one\n\n- two\n\n"], "B")


@given(st.text(alphabet="ab`~-1 \n", max_size=40))
def test_no_text_is_lost_between_blocks(text: str) -> None:
    done, rest = split_blocks(text)
    assert "".join(done) + rest == text


def test_markdown_is_rendered_on_a_terminal() -> None:
    pieces = ["**bo", "ld**\n\n```py\nx = 1\n```\n\n- it", "em"]
    program = f"from penstock.cli.framework.markdown import print_answer; print_answer({pieces})"
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60"}
    subprocess.run([sys.executable, "-c", program], stdout=inner, env=environment, timeout=60, check=True)
    os.close(inner)
    shown = os.read(outer, 100_000).decode()
    os.close(outer)
    assert "\x1b[1mbold\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "x = 1" in plain
    assert "• item" in plain
    assert "**" not in plain.split("x = 1")[1]


def test_what_is_typed_during_an_answer_is_read_after_it_and_not_shown_in_it(tmp_path: Path) -> None:
    program = """if True:
        import pathlib, time
        from penstock.cli.framework.markdown import print_answer
        def pieces():
            yield "begun"
            while not pathlib.Path("typed").exists():
                time.sleep(0.01)
            yield " and ended"
        print_answer(pieces())
        print("read:", input())"""
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60"}
    words = [sys.executable, "-c", program]
    running = subprocess.Popen(words, stdin=inner, stdout=inner, env=environment, cwd=tmp_path)
    os.close(inner)
    shown = ""
    while "begun" not in shown:
        shown += os.read(outer, 100_000).decode()
    os.write(outer, b"next question\n")
    (tmp_path / "typed").touch()
    with suppress(OSError):  # when the program has ended
        while more := os.read(outer, 100_000).decode():
            shown += more
    assert running.wait(60) == 0
    os.close(outer)
    answer, _, rest = shown.rpartition("begun and ended")
    assert "begun" in answer
    assert "question" not in answer
    assert "read: next question" in rest
