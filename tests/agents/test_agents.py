"""Coding agents, unmodified, read and edit a file: the model's part is played, everything else is real."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from tests.agents.conftest import Workplace
from tests.agents.scripted import Messages, Script, call, results
from tests.server.conftest import Server

pytestmark = pytest.mark.agents

Play = Callable[[Script], Server]
TASK = "Change colour to color in notes.txt."
DONE = "It says color now."


def turn(messages: Messages, calls: list[str]) -> str:
    """The next call that the tools have not answered yet, and at last a sentence."""
    done = len(results(messages))
    return calls[done] if done < len(calls) else DONE


def check_edited(place: Workplace, printed: str) -> None:
    assert DONE in printed
    assert place.file.read_text() == "The color is red.\n"


def test_claude_code_reads_and_edits_a_file(workplace: Workplace, play: Play) -> None:
    path = str(workplace.file)
    edit = call("Edit", file_path=path, old_string="colour", new_string="color")
    seen: list[Any] = []

    def script(messages: Messages, names: list[str]) -> str:
        seen.append(results(messages))
        return (
            turn(messages, ["I will read it.\n" + call("Read", file_path=path), edit]) if "Read" in names else "Title"
        )

    server = play(script)
    check_edited(workplace, workplace.launch("claude", server, "-p", TASK, "--permission-mode", "acceptEdits"))
    assert "The colour is red." in seen[-1][0]


EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def test_codex_reads_and_edits_a_file(workplace: Workplace, play: Play) -> None:
    path = shlex.quote(str(workplace.file))
    calls = [call("exec_command", cmd=f"cat {path}"), call("exec_command", cmd=f"sed -i s/colour/color/ {path}")]
    seen: list[Any] = []

    def script(messages: Messages, _: list[str]) -> str:
        seen.append(results(messages))
        return turn(messages, calls)

    check_edited(workplace, workplace.launch("codex", play(script), *EXEC, TASK))
    assert "The colour is red." in seen[-1][0]


def test_codex_calls_custom_tools_and_those_of_a_namespace(workplace: Workplace, play: Play) -> None:
    """Codex sends its newest tools, among the input, to a model whose name it knows."""
    path = shlex.quote(str(workplace.file))
    code = "const done = await tools.exec_command({{cmd: `{}`}}); text(done.output)"
    calls = [
        call("exec", input=code.format(f"cat {path}")),
        call("clock__sleep", duration_ms=1),
        call("exec", input=code.format(f"sed -i s/colour/color/ {path}")),
    ]
    seen: list[Any] = []

    def script(messages: Messages, _: list[str]) -> str:
        seen.append(results(messages))
        return turn(messages, calls)

    check_edited(workplace, workplace.launch("codex", play(script), "-m", "gpt-6.1-sol", *EXEC, TASK))
    read, slept, _ = seen[-1]
    assert "The colour is red." in read
    assert "unsupported" not in slept
