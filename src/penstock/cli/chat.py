"""`penstock chat` runs a conversation in the terminal."""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.command import OptionGroup
from penstock.cli.terminal import note, obtain
from penstock.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.llm import LLM
    from penstock.types import SamplingParams

HELP = """\
/help            show this page
/reset           start a new conversation
/system TEXT     start a new conversation with this system message; without TEXT, with none
/exit            exit, as does Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ continues on the next."""


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
    obtain(model)

    from penstock.llm import LLM

    with LLM(model, max_rows=1, **engine) as llm:
        llm.check_answers()
        note(f"{model} is ready. Type /help for help, Ctrl-D to exit.")
        _load_history()
        _talk(ChatSession(llm, answer.sampling(llm), answer.system))


@dataclass
class ChatSession:
    """Holds the messages so far and the model that answers them."""

    llm: LLM
    params: SamplingParams
    system: str
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts anew, with the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> None:
        """Prints the answer as it comes. Ctrl-C stops it and keeps what has come. A message that is refused is
        dropped."""
        question = {"role": "user", "content": text}
        stream = self.llm.stream([*self.messages, question], self.params, lora_request=self.llm.adapter_names)
        with suppress(KeyboardInterrupt):
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
        print(flush=True)
        self.messages += [question, {"role": "assistant", "content": stream.completion.text}]


def _talk(session: ChatSession) -> None:
    """Reads lines and answers them until the user exits."""
    while True:
        try:
            line = _read_line()
            if line.startswith("/"):
                _run_chat_command(session, line)
            elif line.strip():
                session.ask(line)
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note("")
        except InvalidRequest as error:
            note(f"error: {error} [{error.code}]; /reset starts a new conversation")


def _read_line() -> str:
    line = input("> " if sys.stdin.isatty() else "")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if sys.stdin.isatty() else "")
    return line


def _run_chat_command(session: ChatSession, line: str) -> None:
    name, _, rest = line.partition(" ")
    match name:
        case "/help":
            note(HELP)
        case "/reset":
            session.reset()
        case "/system":
            session.system = rest.strip()
            session.reset()
        case "/exit" | "/quit":
            raise EOFError
        case _:
            note(f"there is no command {name}; /help lists the commands")


def _load_history() -> None:
    """Enables line editing and the history of earlier conversations, if readline is installed."""
    try:
        import readline
    except ImportError:
        return
    from penstock.store import home

    file = home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)

    def save() -> None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    atexit.register(save)
