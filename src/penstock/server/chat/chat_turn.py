"""One answer in a chat, for dialects in which a request has one: the same prompt, stops and parser in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from penstock.server.chat.stream import Deltas, deltas
from penstock.server.chat.tools import ToolUse, held
from penstock.server.request_context import notes
from penstock.server.served_model import Served, off_loop
from penstock.text import ChatPrompt, Delta, Text
from penstock.text.parse import AnswerParser, AnswerPart, Content
from penstock.types import Grammar, Request, SamplingParams, Thinking

NO_TOOLS = ToolUse([])


class Turn(NamedTuple):
    request: Request
    running: Deltas
    parser: AnswerParser | None = None  # none where an answer is content alone

    def parts(self, delta: Delta) -> list[AnswerPart]:
        if self.parser is None:
            return [Content(delta.text)] if delta.text else []
        return self.parser.push(delta.text) + (self.parser.finish() if delta.finish else [])

    @property
    def calls(self) -> int:
        return 0 if self.parser is None else self.parser.calls


async def prompt_of(served: Served, messages: Sequence[dict[str, Any]], use: ToolUse, **fields: Any) -> ChatPrompt:
    served.check_answers()
    size = sum(len(message["content"] or "") for message in messages)
    return await off_loop(size, lambda: served.text.chat_prompt(messages, tools=use.tools, **fields))


def begin(
    served: Served,
    prompt: ChatPrompt,
    use: ToolUse,
    sampling: SamplingParams,
    most: int | None,
    param: str = "messages",
    budget: int | None = None,
) -> Turn:
    """`most` tokens are answered with, or what the context has room for; `budget` of them may be thought with. `param`
    is the field the prompt came in."""
    text = served.text
    sampling = after_thinking(text, prompt, held(text, use, sampling), budget)
    request = served.request(prompt.tokens, sampling, param, most)
    shown = text.special_in(text.format.markers(use.calling))
    return Turn(request, deltas(served, request, shown=shown), use.parser(text.format, prompt.opened))


def after_thinking(
    text: Text, prompt: ChatPrompt, sampling: SamplingParams, budget: int | None = None
) -> SamplingParams:
    """A grammar holds from where the model has thought, and a budget up to there: where the prompt began that, or one
    token of the answer can. A budget for thoughts that cannot be told from the rest is not kept, and that is told."""
    grammar = sampling.grammar or (None if budget is None else Grammar("free", ""))
    if grammar is None:
        return sampling
    around = _thinking(text, prompt, budget)
    if around is None:
        if budget is not None:
            notes().ignore("thinking.budget_tokens")
        return sampling
    return replace(sampling, grammar=grammar._replace(thinking=around))


def _thinking(text: Text, prompt: ChatPrompt, budget: int | None) -> Thinking | None:
    if text.format.reasoning is None:
        return None
    opens, closes = (text.tokenizer.encode(marker, special=True) for marker in text.format.reasoning)
    if not prompt.opened and len(opens) > 1:
        return None
    return Thinking(tuple(closes), -1 if prompt.opened else opens[0], budget)


def thinking(served: Served, wanted: bool | None) -> dict[str, Any] | None:
    """What tells the template to think or not; None where the model cannot do as is wanted."""
    text = served.text
    if text.takes("enable_thinking") and wanted is not None:
        return {"enable_thinking": wanted}
    thinks = not text.format.plain(calling=False)
    return {} if wanted is None or wanted == thinks else None


def call_input(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as an object; None for those that were cut off or are not well formed."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
