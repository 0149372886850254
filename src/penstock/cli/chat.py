"""Implements `penstock chat`, a conversation in the terminal."""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from typing import Annotated

from penstock.cli.chat_session import ChatSession
from penstock.cli.fitting import MemoryAdvisor, with_stored_quantize
from penstock.cli.framework import options
from penstock.cli.framework.command import OptionGroup
from penstock.cli.terminal import note, obtain
from penstock.system.files import make_private_file, make_private_folder

QUOTES = '"' * 3


def chat(
    model: options.ModelRef = options.DEFAULT_MODEL,
    *,
    answer: Annotated[options.AnswerOptions, OptionGroup()],
    engine: options.OneSequenceSettings,
) -> None:
    """Have a conversation with a model; type /help for its commands.

    penstock chat
    penstock chat ./model.gguf --system "You are a patient teacher."
    """
    from penstock.llm import LLM

    def open(model: str) -> LLM:
        path = obtain(model, MemoryAdvisor(engine | {"max_rows": 1}))
        llm = LLM(model, max_rows=1, **with_stored_quantize(path, engine))
        llm.check_answers()
        return llm

    llm = open(model)
    session = ChatSession(model, llm, answer, open)
    try:
        note(f"{model} is ready. Type /help for help, Ctrl-D to exit.")
        _edit_lines()
        _talk(session)
    finally:
        session.llm.close()


def _talk(session: ChatSession) -> None:
    while True:
        try:
            line = _read_line()
            if line.startswith("/"):
                session.run(line)
            elif line.strip():
                session.answer(line)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /exit ends the conversation)")


def _read_line() -> str:
    """Reads a message: one line, lines that end in a backslash, or everything between two lines of three quotes."""
    first, following = ("> ", "… ") if sys.stdin.isatty() else ("", "")
    line = input(first)
    if line.strip() == QUOTES:
        lines = []
        while (line := input(following)).strip() != QUOTES:
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(following)
    return line


def _edit_lines() -> None:
    """Enables line editing and the history of earlier conversations, if readline is installed. A multi-line paste is
    one message, although Python disables that.
    """
    try:
        import readline
    except ImportError:
        return
    from penstock.store import home

    if "libedit" not in (readline.__doc__ or ""):  # libedit lacks the variable
        readline.parse_and_bind("set enable-bracketed-paste on")
    file = home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)

    def save() -> None:
        with suppress(OSError):
            make_private_folder(file.parent)
            make_private_file(file)
            readline.write_history_file(file)

    atexit.register(save)
