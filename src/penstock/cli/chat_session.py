"""Holds a conversation in the terminal, and its commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.framework.command import help_width
from penstock.cli.framework.markdown import print_answer
from penstock.cli.terminal import note, note_ending
from penstock.errors import InvalidRequest, PenstockError

if TYPE_CHECKING:
    from penstock.cli.framework.options import AnswerOptions
    from penstock.llm import LLM

HELP = {
    "/help": "show this page",
    "/reset": "start a new conversation",
    "/system TEXT": "start a new conversation with this system message; without TEXT, with the model's own, if any",
    "/set NAME VALUE": "change the sampling, such as /set temperature 0.2; without a name, show it",
    "/retry": "answer the last message again",
    "/undo": "take the last message and its answer back",
    "/save FILE": "write the conversation to a file; /load FILE continues it",
    "/model MODEL": "continue with another model; without a name, show the current one",
    "/exit": "exit, as does Ctrl-D",
}
KEYS = 'Ctrl-C stops an answer. A line that ends in \\ continues on the next, and so does all between two lines of """.'
SETTABLE = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty")
SHOWN = 40  # characters of a removed message
Message = dict[str, str]


@dataclass
class ChatSession:
    """Holds the messages and their model. `options` come from the command line and /set, and apply to every model of
    the conversation. `open` starts another model's engine.
    """

    model: str
    llm: LLM
    options: AnswerOptions
    open: Callable[[str], LLM]
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = self.options.sampling(self.llm)
        self.system = self.options.system
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> None:
        """Prints the answer as it arrives. Ctrl-C stops it and keeps the text so far. A refused message is dropped."""
        try:
            self._answer(text)
        except InvalidRequest as error:
            note(f"error: {error} [{error.code}]; /reset starts a new conversation")

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        stream = self.llm.stream([*self.messages, question], self.params, lora_request=self.llm.adapter_names)
        with suppress(KeyboardInterrupt):
            print_answer(stream)
            note_ending(stream.completion)
        self.messages += [question, {"role": "assistant", "content": stream.completion.text}]

    def run(self, line: str) -> None:
        """Runs a command; raises EOFError to end the conversation."""
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _show_help(),
            "/reset": lambda _: self._begin_again(),
            "/clear": lambda _: self._begin_again(),
            "/system": self._change_system,
            "/set": self._set,
            "/retry": lambda _: self._retry(),
            "/undo": lambda _: self._undo(),
            "/save": self._save,
            "/load": self._load,
            "/model": self._change_model,
        }
        if name in ("/exit", "/quit", "/bye"):
            raise EOFError
        if name not in commands:
            near = get_close_matches(name, commands, n=1)
            return note(f"there is no command {name}; {f'did you mean {near[0]}?' if near else '/help lists them'}")
        try:
            commands[name](rest.strip())
        except (InvalidRequest, OSError) as error:
            note(f"error: {error}")

    def _begin_again(self) -> None:
        self.reset()
        note("a new conversation begins" + (f", with the system message {self.system!r}" if self.system else ""))

    def _change_system(self, text: str) -> None:
        self.system = text
        self._begin_again()

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if name and name not in SETTABLE:
            note(f"there is no setting {name}; these can be set: {', '.join(SETTABLE)}")
            return
        if value.strip():
            self._change(**{name: _number(name, value.strip())})
        for each in (name,) if name else SETTABLE:
            note(f"{each} {getattr(self.params, each)}")

    def _change(self, **values: Any) -> None:
        """Changes the sampling; raises InvalidRequest, without a change, if a value is not allowed."""
        options = self.options._replace(**values)
        self.options, self.params = options, options.sampling(self.llm)

    def _undo(self) -> None:
        if (taken := self._take_back()) is None:
            return note("there is no message to remove")
        note(f"taken back: {taken if len(taken) <= SHOWN else taken[:SHOWN] + '...'!r}")

    def _take_back(self) -> str | None:
        """Removes the last message and its answer; returns the message, or None if there is none."""
        # a loaded conversation may end otherwise
        if [each["role"] for each in self.messages[-2:]] != ["user", "assistant"]:
            return None
        asked, self.messages = self.messages[-2]["content"], self.messages[:-2]
        return asked

    def _retry(self) -> None:
        """Regenerates the last answer. A fixed seed is incremented, because the same seed would repeat the answer."""
        if (asked := self._take_back()) is None:
            return note("there is no message to answer again")
        if self.params.temperature == 0.0:
            note("at temperature 0 the answer stays the same; /set temperature 0.7 changes it")
        if self.params.seed is not None:
            self._change(seed=self.params.seed + 1)
        self.answer(asked)

    def _save(self, path: str) -> None:
        if not path:
            return note("/save takes the name of a file")
        saved = {"model": self.model, "system": self.system, "messages": self.messages}
        Path(path).expanduser().write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        note(f"{len(self.messages)} messages are in {path}")

    def _load(self, path: str) -> None:
        if not path:
            return note("/load takes the name of a file")
        text = Path(path).expanduser().read_bytes()
        try:
            saved = json.loads(text)
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in saved["messages"]]
        except (ValueError, KeyError, TypeError):
            return note(f"error: {path} holds no conversation that /save has written")
        self.system, self.messages = str(saved.get("system", "")), messages
        note(f"the conversation continues with {len(messages)} messages of {saved.get('model', 'another model')}")

    def _change_model(self, model: str) -> None:
        """Continues with another model and the same options. If it fails to start, the previous one stays."""
        if not model:
            return note(self.model)
        try:
            llm = self.open(model)
        except (PenstockError, OSError) as error:
            return note(f"error: {error}; {self.model} goes on")
        self.llm.close()
        self.llm, self.model, self.params = llm, model, self.options.sampling(llm)
        note(f"{model} is ready")


def _show_help() -> None:
    from textwrap import fill

    width, column = help_width(), 19
    note(
        "\n".join(
            fill(text, width, initial_indent=f"{name:<{column}}", subsequent_indent=" " * column)
            for name, text in HELP.items()
        )
    )
    note(fill(KEYS, width))


def _number(name: str, text: str) -> Any:
    try:
        return int(text) if name in ("top_k", "max_tokens", "seed") else float(text)
    except ValueError:
        raise InvalidRequest(f"{name} takes a number; got {text!r}", param=name) from None
