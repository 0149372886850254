"""Begins one turn of a chat, in every dialect: a request for each choice of answer, and the parsers of the answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from penstock.server.chat.stream import Deltas, deltas, together
from penstock.server.chat.tools import ToolUse, constrain_to_tools
from penstock.server.request_context import RequestContext
from penstock.server.served_model import ServedModel, off_loop
from penstock.text import ChatPrompt, Delta, Text
from penstock.text.parse import AnswerParser, AnswerPart, Content
from penstock.types import Grammar, Request, SamplingParams, Thinking

NO_TOOLS = ToolUse([])


class ChatTurn:
    """Holds the choices of one turn. A parser is None if the answer is content alone."""

    def __init__(self, requests: Sequence[Request], deltas: Deltas, parsers: Sequence[AnswerParser | None]) -> None:
        self.requests = requests
        self.deltas = deltas
        self.reasoning_tokens = 0  # of all choices, as far as `parts` has seen them
        self._parsers = parsers

    @property
    def request(self) -> Request:
        """Returns the first choice's request: the only one in most dialects."""
        return self.requests[0]

    def parts(self, delta: Delta, choice: int = 0) -> list[AnswerPart]:
        """Returns what a delta adds to its choice."""
        parser = self._parsers[choice]
        if parser is None:
            return [Content(delta.text)] if delta.text else []
        reasoning = parser.reasoning
        parts = parser.push(delta.text) + (parser.finish() if delta.finish else [])
        if reasoning or parser.reasoning:
            self.reasoning_tokens += len(delta.tokens)
        return parts

    def calls(self, choice: int = 0) -> int:
        """Returns how many tools the choice has called so far."""
        parser = self._parsers[choice]
        return 0 if parser is None else parser.calls


class TurnOptions(NamedTuple):
    param: str = "messages"  # the field that the prompt came in
    max_tokens: int | None = None  # of an answer; None: as many as the context has room for
    thinking_budget: int | None = None  # tokens
    shown: Collection[int] = frozenset()  # special tokens that are returned as text


async def render_prompt(
    served: ServedModel, messages: Sequence[dict[str, Any]], use: ToolUse, **fields: Any
) -> ChatPrompt:
    served.check_answers()
    size = sum(len(message["content"] or "") for message in messages)
    return await off_loop(size, lambda: served.text.chat_prompt(messages, tools=use.tools, **fields))


def begin_turn(
    served: ServedModel,
    context: RequestContext,
    prompt: ChatPrompt,
    use: ToolUse,
    sampling: Sequence[SamplingParams],
    options: TurnOptions = TurnOptions(),  # noqa: B008
) -> ChatTurn:
    """Returns the turn with one choice for each of `sampling`. Nothing runs before its deltas are read."""
    text, budget = served.text, options.thinking_budget
    constrained = [
        after_thinking(text, prompt, constrain_to_tools(context, text, use, each), budget) for each in sampling
    ]
    if budget is not None and not _has_thinking(constrained[0]):
        context.ignore("thinking.budget_tokens")
    requests = [served.request(context, prompt.tokens, each, options.param, options.max_tokens) for each in constrained]
    shown = text.special_in(text.format.markers(use.calling)) | frozenset(options.shown)
    parsers = [use.parser(text.format, prompt.opened) for _ in requests]
    running = [
        deltas(served, context, request, choice, shown=shown, ended=_ended(parser))
        for choice, (request, parser) in enumerate(zip(requests, parsers, strict=True))
    ]
    return ChatTurn(requests, together(running), parsers)


def _ended(parser: AnswerParser | None) -> Callable[[], bool] | None:
    return None if parser is None else lambda: parser.ended


def after_thinking(
    text: Text, prompt: ChatPrompt, sampling: SamplingParams, budget: int | None = None
) -> SamplingParams:
    """Returns sampling whose grammar applies from the end of the model's thinking, and whose thinking is limited to
    `budget` tokens. That needs a prompt that opened the thinking, or one token that opens it in the answer; otherwise
    the sampling is returned unchanged."""
    grammar = sampling.grammar or (None if budget is None else Grammar("free", ""))
    thinking = None if grammar is None else _thinking(text, prompt, budget)
    if grammar is None or thinking is None:
        return sampling
    return replace(sampling, grammar=grammar._replace(thinking=thinking))


def _has_thinking(sampling: SamplingParams) -> bool:
    return sampling.grammar is not None and sampling.grammar.thinking is not None


def _thinking(text: Text, prompt: ChatPrompt, budget: int | None) -> Thinking | None:
    if text.format.reasoning is None:
        return None
    opens, closes = (text.tokenizer.encode(marker, special=True) for marker in text.format.reasoning)
    if not prompt.opened and len(opens) > 1:
        return None
    return Thinking(tuple(closes), -1 if prompt.opened else opens[0], budget)


def thinking_fields(served: ServedModel, wanted: bool | None) -> dict[str, Any] | None:
    """Returns the template's fields that turn thinking on or off; None if the model cannot do what is wanted."""
    text = served.text
    if text.takes("enable_thinking") and wanted is not None:
        return {"enable_thinking": wanted}
    thinks = not text.format.plain(calling=False)
    return {} if wanted is None or wanted == thinks else None


def call_input(arguments: str) -> dict[str, Any] | None:
    """Returns a call's arguments as an object; None if they were cut off or are not valid JSON."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
