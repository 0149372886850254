"""Follows one answer as a client does, through all engines that give it, and knows what it must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.ipc.request_journal import RequestJournal
from penstock.server.access.expected_wait import ExpectedRequest
from penstock.text import TextStream, read_step
from penstock.text.parse import AnswerParser, AnswerPart, Arguments, CallStarted, Content, Reasoning
from penstock.text.tool_formats import AnswerFormat
from penstock.types import Aborted, Event, Failed, Finished, Report, Request, TokenLogprob, Tokens
from tests.everything.features import CLOSE, END, HERMES, OPEN, TOOLS
from tests.everything.recipe import Ask


class Vocabulary:
    """Has a token for each byte, and three that carry structure."""

    vocab_size = 259
    bos_id = None
    eos_ids = frozenset({END})
    special_ids = frozenset({END, OPEN, CLOSE})
    prefix_space = False

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < END else {END: b"<end>", OPEN: b"<think>", CLOSE: b"</think>"}.get(id, b"")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


VOCABULARY: Any = Vocabulary()


class Era(NamedTuple):
    """Says which weights compute an answer from somewhere on. If it is `mixed`, they see KV of older ones."""

    tokens: int  # of the answer that came before
    scored: int  # likewise of the prompt's scores
    weights: int
    mu: float | None = None  # what mirostat had learned by then
    mixed: bool = False


@dataclass
class Answer:
    """Holds all that was answered."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    mus: list[float | None] = field(default_factory=list)  # after each token
    end: Event | None = None

    def note(self, event: Event) -> None:
        assert self.end is None, f"{event} after {self.end}"
        if isinstance(event, Tokens):
            self.tokens += event.tokens
            self.logprobs += event.logprobs
            self.scores += event.scores
            self.mus += [event.mirostat_mu] * len(event.tokens)
        else:
            self.end = event

    @property
    def ending(self) -> tuple[Any, ...]:
        """Returns what an answer ends with, which its tokens do not tell."""
        if not isinstance(self.end, Finished):
            return (self.end,)
        loop = 0 if self.end.report is None else self.end.report.loop
        return self.end.reason, self.end.stop_token, self.end.pooled, loop


class Client(Answer):
    """Has sent one request of an ask and follows its answer. A client that has been `left` wants nothing more."""

    def __init__(self, ask: Ask, request: Request, engine: tuple[str, ...], stop: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.ask, self.request, self.engine = ask, request, engine
        self.journal = RequestJournal(request)
        self.tokens = list(request.generated)
        self.mus = [request.mirostat_mu] * len(request.generated)
        self.stop = stop
        self.stream = self.new_stream()
        self.stream.push(request.generated)
        self.parts: list[AnswerPart] = []
        self.parser = new_parser()
        self.text = ""
        self.reports: list[Report] = []
        self.lived: set[str] = set()  # moments
        self.eras: list[Era] = []
        self.arrived = -1  # step
        self.left = self.aborted = self.leaving = self.handed_over = self.adopted = False
        self.registering: set[int] = set()  # messages by which engines register its own adapter
        self.outlived_adapter = False
        self.expected: ExpectedRequest | None = None  # the forecast of its admission

    @property
    def live(self) -> bool:
        return self.arrived >= 0 and self.end is None

    @property
    def served(self) -> bool:
        """Returns whether anything was answered."""
        return len(self.tokens) > len(self.request.generated) or bool(self.scores) or isinstance(self.end, Finished)

    @property
    def reason(self) -> str:
        return self.end.reason if isinstance(self.end, Finished) else ""

    @property
    def loop(self) -> int:
        return self.reports[-1].loop if self.reports else 0

    def new_stream(self) -> TextStream:
        return TextStream(VOCABULARY, self.stop)

    def begin_era(self, weights: int, tokens: int, scored: int, mu: float | None, mixed: bool) -> None:
        """Notes that other weights, or another engine, compute the rest. Eras of which nothing was delivered, perhaps
        because the engine died first, are forgotten."""
        era = Era(tokens, scored, weights, mu, mixed)
        while self.eras and self.eras[-1][:2] >= era[:2]:
            self.eras.pop()
        self.eras.append(era)

    def take(self, events: list[Event]) -> None:
        """Takes what an engine's step has answered."""
        for event in events:
            self.note(event)
            if isinstance(event, Tokens):
                self.journal.note(event)
            elif isinstance(event, Finished | Aborted) and event.report is not None:
                self.reports.append(event.report)
        if isinstance(events[-1], Failed | Aborted) or self.left:
            return
        delta = read_step(self.stream, events)
        self.text += delta.text
        self.parts += self.parser.push(delta.text)
        self.left = delta.stop is not None
        if self.left or isinstance(events[-1], Finished):
            self.parts += self.parser.finish()

    def check_text(self) -> None:
        """Raises AssertionError if what was read step by step is not what is read of the whole answer at once."""
        tokens = self.tokens[len(self.request.generated) :]
        if self.left or isinstance(self.end, Finished):
            stream = self.new_stream()
            stream.push(self.request.generated)
            told: list[Event] = [Tokens(0, tuple(tokens))] if tokens else []
            delta = read_step(stream, [*told, self.end if isinstance(self.end, Finished) else Finished(0, "length")])
            assert self.text == delta.text, f"the text is {self.text!r}; all tokens at once are {delta.text!r}"
        if isinstance(self.end, Finished) and "tools" in self.ask.features:
            parser = new_parser()
            assert joined(self.parts) == joined([*parser.push(self.text), *parser.finish()])


def new_parser() -> AnswerParser:
    return AnswerParser(AnswerFormat(HERMES), TOOLS, forced=True, new_id=lambda: "id")


def joined(parts: list[AnswerPart]) -> list[tuple[str, str]]:
    """Returns parts with neighbours of one kind put together."""
    found: list[tuple[str, str]] = []
    for part in parts:
        kind = type(part).__name__ if isinstance(part, Content | Reasoning) else f"{type(part).__name__} {part.index}"
        text = (
            part.text if isinstance(part, Content | Arguments) else part.name if isinstance(part, CallStarted) else ""
        )
        if found and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return found
