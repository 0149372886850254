"""Begins one turn of a chat, in every dialect: a request for each choice of answer, and the parsers of the answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.chat.schema_check import Deltas
from penstock.server.chat.stream import Complete, deltas, together
from penstock.server.chat.tools import ToolUse, constrain_to_tools
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ignore_unsupported
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text import ChatPrompt, Delta, Text
from penstock.text.chat import continue_last
from penstock.text.parse import AnswerParser, AnswerPart, Content
from penstock.types import Grammar, Request, SamplingParams, Thinking

NO_TOOLS = ToolUse([])


class ChatTurn:
    """Holds the choices of one turn. A parser is None if the answer is plain content."""

    __slots__ = ("_parsers", "deltas", "reasoning_tokens", "requests")

    def __init__(self, requests: Sequence[Request], deltas: Deltas, parsers: Sequence[AnswerParser | None]) -> None:
        self.requests = requests
        self.deltas = deltas
        self.reasoning_tokens = 0  # all choices together, as far as `parts` has seen them
        self._parsers = parsers

    @property
    def request(self) -> Request:
        """Returns the first choice's request: the only one in most dialects."""
        return self.requests[0]

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    def parts(self, delta: Delta, choice: int = 0) -> list[AnswerPart]:
        parser = self._parsers[choice]
        if parser is None:
            return [Content(delta.text)] if delta.text else []
        reasoning = parser.reasoning
        parts = parser.push(delta.text) + (parser.finish() if delta.finish else [])
        if reasoning or parser.reasoning:
            self.reasoning_tokens += len(delta.tokens)
        return parts

    def calls(self, choice: int = 0) -> int:
        parser = self._parsers[choice]
        return 0 if parser is None else parser.calls


class TurnOptions(NamedTuple):
    param: str = "messages"  # the field that the prompt came in
    max_tokens: int | None = None  # None: limited by the context only
    thinking_budget: int | None = None  # tokens
    budget_param: str = "thinking.budget_tokens"  # the field that the budget came in
    shown: Collection[int] = frozenset()  # special tokens that are returned as text
    continuing: bool = False  # the answer continues a message that was begun


async def render_prompt(
    served: ServedModel, messages: Sequence[dict[str, Any]], use: ToolUse, **fields: Any
) -> ChatPrompt:
    """Returns the prompt for the next answer. If the template takes system messages only at the beginning, later ones
    become the user's."""
    served.check_answers()
    size = sum(len(message["content"] or "") for message in messages)

    def render() -> ChatPrompt:
        try:
            return served.text.chat_prompt(messages, tools=use.tools, **fields)
        except InvalidRequest:
            if all(message["role"] != "system" for message in messages[1:]):
                raise
            return served.text.chat_prompt(late_system_as_user(messages), tools=use.tools, **fields)

    return await off_loop(size, render, served.text.chat_template.process)


async def render_continued(
    served: ServedModel, messages: Sequence[dict[str, Any]], use: ToolUse, **fields: Any
) -> ChatPrompt:
    """Returns the prompt up to the end of the last message, which the answer continues."""
    served.check_answers()
    text, content = served.text, messages[-1]["content"] or ""
    if messages[-1].get("tool_calls") or not content.strip():
        raise InvalidRequest(
            "the last message is the assistant's, but it has no text that could be continued: send text in it, or a "
            "message of the user after it",
            param="messages",
        )
    size = sum(len(message["content"] or "") for message in messages)

    def render() -> ChatPrompt:
        whole = text.render_chat(messages, tools=use.tools, add_generation_prompt=False, **fields)
        prompt = continue_last(whole, content)
        return ChatPrompt(text.encode_prompt(prompt), text.format.opened(prompt))

    return await off_loop(size, render, served.text.chat_template.process)


def late_system_as_user(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with system messages after the first as the user's. Neighbouring messages of the user become
    one, because many templates want users and assistants to take turns."""
    changed: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        late = index > 0 and message["role"] == "system"
        own = message | {"role": "user"} if late else message
        if own["role"] == "user" and changed and changed[-1]["role"] == "user":
            changed[-1] = changed[-1] | {"content": f"{changed[-1]['content']}\n\n{own['content']}"}
        else:
            changed.append(own)
    return changed


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
    constrained = [constrain_to_tools(context, text, use, each) if use.calling else each for each in sampling]
    if budget is not None or any(each.grammar is not None for each in constrained):
        constrained = [after_thinking(text, prompt, each, budget) for each in constrained]
    if budget is not None and not _has_thinking(constrained[0]):
        ignore_unsupported(context, options.budget_param, budget)
    requests = [served.request(context, prompt.tokens, each, options.param, options.max_tokens) for each in constrained]
    shown = text.special_in(text.format.markers(use.calling)) | frozenset(options.shown)
    parsers = [use.parser(text.format, prompt.opened) for _ in requests]
    running = [
        deltas(
            served,
            context,
            request,
            choice,
            continuing=options.continuing,
            shown=shown,
            complete=_complete(text, use, parser),
        )
        for choice, (request, parser) in enumerate(zip(requests, parsers, strict=True))
    ]
    return ChatTurn(requests, together(running), parsers)


def _complete(text: Text, use: ToolUse, parser: AnswerParser | None) -> Complete | None:
    """Returns a check that the parser needs no further text; None if it may need all."""
    may_end = use.calling or text.format.tool_format.content[1]
    return (lambda: parser.ended) if parser is not None and may_end else None


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


def call_input(arguments: str) -> dict[str, Any] | None:
    """Returns a call's arguments as an object; None if they were cut off or are not valid JSON."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
