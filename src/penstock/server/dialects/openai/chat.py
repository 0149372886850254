"""Serves POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.chat_turn import ChatTurn, TurnOptions, begin_turn, render_prompt
from penstock.server.chat.logprobs import PromptLogprobs, TokenEntry, prompt_entries, token_entries
from penstock.server.chat.stop_reason import stop_reason
from penstock.server.chat.template_fields import (
    ThinkingWish,
    read_template_kwargs,
    read_verbosity,
    read_wish,
    switch_thinking,
    think_with_effort,
    thinking_budget,
)
from penstock.server.chat.tools import (
    FunctionTool,
    ToolUse,
    read_tools,
)
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.openai.chat_answer import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    VerboseReport,
    add_part,
    chat_delta,
)
from penstock.server.dialects.openai.metadata import read_metadata
from penstock.server.generation.adapter_fields import choose_adapters
from penstock.server.generation.beams import beam_deltas, check_beams
from penstock.server.generation.chat_prompt import PromptFields, render_chat
from penstock.server.generation.explain import Explanation
from penstock.server.generation.fields import (
    NO_EFFECT,
    CompletionUsage,
    GenerationFields,
    TokenTally,
    check_prompt_logprobs,
    drawn_as_llamacpp,
    fitting,
    new_head,
    read_fields,
    sampling,
    shown_special,
    truncate,
)
from penstock.server.generation.messages import MESSAGE_NO_EFFECT, ChatMessage, read_messages
from penstock.server.generation.prediction import Prediction, draft_prediction
from penstock.server.generation.timings import Stopwatch, Timings
from penstock.server.http.bodies import NoEffect
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import ChunkTemplate, encode, reply
from penstock.server.models.served_model import ServedModel
from penstock.text import ChatPrompt, Delta, Text, Tokenizer
from penstock.text.parse import AnswerPart, CallEnded, Content, Reasoning

CHAT_NO_EFFECT: NoEffect = {name: values for name, values in NO_EFFECT.items() if name not in ("metadata", "store")} | {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}


class ChatBody(GenerationFields):
    messages: list[Annotated[dict[str, Any], read_as(ChatMessage, no_effect=MESSAGE_NO_EFFECT)]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Annotated[dict[str, Any], read_as(FunctionTool)]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer begins with the last message, if that is an assistant's
    include_reasoning: bool | None = None  # left out: true
    timings_per_token: bool | None = None  # asks for llama.cpp's timings
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Meta(ge=1)] | None = None  # tokens
    thinking: ThinkingWish | None = None
    reasoning: ThinkingWish | None = None
    prediction: Prediction | None = None  # text that the client expects in the answer: it is drafted
    verbose: bool | None = None  # asks for the rendered prompt, in llama.cpp's __verbose
    store: bool | None = None  # the answer can be retrieved later, see stored_chats.py
    metadata: Any = None  # stored with the answer


class ChatStyle(NamedTuple):
    """Lists the differences between OpenAI's route and llama.cpp's unversioned one."""

    any_name: bool = False  # the server has one model, and a request may call it anything
    own_seeds: bool = False  # a seed gives the same text as in llama.cpp
    fits: bool = False  # max_tokens beyond the context is cut, not refused
    opening: str | None = ""  # the content of a stream's first chunk
    timed: bool = False  # answers have timings


OPENAI_STYLE = ChatStyle()
LLAMACPP_STYLE = ChatStyle(any_name=True, own_seeds=True, fits=True, opening=None, timed=True)


async def chat_completions(
    served: ServedModel,
    http: HttpRequest,
    context: RequestContext,
    style: ChatStyle,
    keep: Callable[[ChatBody, ChatCompletion], None],
) -> Response:
    """Answers a chat. `keep` is called with a request that asks to be stored, and its answer, when that has ended."""
    body = await read_fields(served, http, context, ChatBody, CHAT_NO_EFFECT)
    if body.store:
        read_metadata(body.metadata)
    if not style.any_name:
        served.check_model(body.model, context)
    choose_adapters(served, context, body.adapters, body.lora)
    served.check_answers()
    check_prompt_logprobs(body)
    scored = {"logprobs": _wanted_logprobs(body), "prompt_logprobs": body.prompt_logprobs}
    params = sampling(served, body, max_tokens=_max_tokens(body), **scored)
    params = drawn_as_llamacpp(params) if style.own_seeds and body.seed is not None else params
    messages = read_messages(context, body.messages)
    use = read_tools(context, body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.prediction is not None:
        await draft_prediction(served, context, body.prediction)
    prompt = await _prompt(served, context, body, messages, use)
    if body.truncate_prompt_tokens is not None:
        prompt = prompt._replace(tokens=truncate(served, context, body, prompt.tokens, params[0].max_tokens))
    params = [fitting(served, prompt.tokens, each) for each in params] if style.fits or body.n_predict else params
    shown = shown_special(served, body)
    param, budget = thinking_budget(body.thinking, body.reasoning, body.thinking_budget)
    options = TurnOptions(thinking_budget=budget, budget_param=param, shown=shown)
    turn = begin_turn(served, context, prompt, use, params, options)
    if body.use_beam_search:
        check_beams(context, body, turn.request.sampling)
        turn.deltas = beam_deltas(served, context, turn.requests, body, shown=shown)
    writer = ChatWriter(served, context, turn, body, style)
    writer.on_end = partial(keep, body) if body.store else None
    return await reply(http, context, writer, turn.deltas, streaming=bool(body.stream))


async def _prompt(
    served: ServedModel, context: RequestContext, body: ChatBody, messages: list[dict[str, Any]], use: ToolUse
) -> ChatPrompt:
    kwargs = _template_fields(served.text, context, body)
    given = PromptFields(
        template=body.chat_template,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=body.add_special_tokens,
    )
    if given.usual:
        return await render_prompt(served, messages, use, **kwargs)
    return await render_chat(served, context, messages, given, kwargs | {"tools": use.tools})


# -- reading ------------------------------------------------------------------------------------------------------


def _template_fields(text: Text, context: RequestContext, body: ChatBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        fields |= think_with_effort(context, text, body.reasoning_effort, "reasoning_effort")
    if body.enable_thinking is not None:
        fields |= switch_thinking(context, text, body.enable_thinking, "enable_thinking", body.enable_thinking)
    for param, wish in (("thinking", body.thinking), ("reasoning", body.reasoning)):
        fields |= {} if wish is None else read_wish(context, text, wish, param)
    if body.verbosity is not None:
        fields |= read_verbosity(context, text, body.verbosity, "verbosity")
    if body.chat_template_kwargs:
        fields |= read_template_kwargs(context, text, body.chat_template_kwargs)
    return fields


def _max_tokens(body: ChatBody) -> int | None:
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens are two names of one limit, but their values differ: send one",
            param="max_tokens",
        )
    if 0 in given:
        raise InvalidRequest("max_tokens must be at least 1; got 0", param="max_tokens")
    return next(iter(given), None)


def _wanted_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise InvalidRequest(f"top_logprobs must be between 0 and 20; got {body.top_logprobs}", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


# -- answering ----------------------------------------------------------------------------------------------------


CHAT_COMPLETIONS = Operation(ChatBody, CHAT_NO_EFFECT, ChatCompletion, ChatCompletionChunk)


class AnswerTokens:
    """Writes the logprobs and the ids of an answer's tokens and its prompt's."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], body: ChatBody) -> None:
        self._tokenizer = tokenizer
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self.scored = bool(body.logprobs)
        self.prompt_ids = prompt if body.return_token_ids else UNSET
        self.prompt_logprobs: PromptLogprobs | UnsetType = UNSET if body.prompt_logprobs is None else [None]

    def entries(self, delta: Delta) -> list[TokenEntry]:
        return token_entries(self._tokenizer, delta, as_ids=self._as_ids) if self.scored else []

    def logprobs(self, entries: list[TokenEntry]) -> ChatLogprobs | None:
        return ChatLogprobs(entries) if self.scored else None

    def ids(self, delta: Delta) -> list[int] | UnsetType:
        return UNSET if self.prompt_ids is UNSET else list(delta.tokens)

    def score_prompt(self, delta: Delta) -> None:
        """Adds the logprobs of the prompt's tokens, which come with the first choice."""
        if self.prompt_logprobs is not UNSET:
            self.prompt_logprobs += prompt_entries(self._tokenizer, delta.scores)


class ChatWriter:
    def __init__(
        self, served: ServedModel, context: RequestContext, turn: ChatTurn, body: ChatBody, style: ChatStyle
    ) -> None:
        echo = _last_answer(body) if body.echo else ""
        self._opening = echo or style.opening  # the content of the first chunk
        self._stopwatches = [Stopwatch(each) for each in turn.requests] if style.timed or body.timings_per_token else []
        self._timed_chunks = bool(body.timings_per_token)
        self._tokens = AnswerTokens(served.text.tokenizer, turn.request.prompt, body)
        self._verbose = VerboseReport(_spelled_prompt(served, turn)) if body.verbose else UNSET
        self._head = new_head("chatcmpl", served.name, body.service_tier, body.request_id)
        self._reasons = body.include_reasoning is not False
        self._turn = turn
        self._tally = TokenTally(turn.requests, body.choices)
        self._explanation = Explanation(served, context, turn.requests)
        self._plain = not (body.logprobs or self._timed_chunks or body.return_token_ids)  # chunks have only text
        self._usage = None if body.wants_usage else UNSET
        self._choices = [
            ChatChoice(index, AssistantMessage(echo), self._tokens.logprobs([])) for index in range(len(turn.requests))
        ]
        self._templates: dict[int, ChunkTemplate] = {}  # choices with a first chunk
        self.on_end: Callable[[ChatCompletion], None] | None = None  # is called with the whole answer, streamed or not

    def collect(self, choice: int, delta: Delta) -> None:
        self._count(choice, delta)
        self._add(choice, delta, self._parts(choice, delta))
        if delta.finish:
            self._explanation.end(choice, delta)

    def _add(self, choice: int, delta: Delta, parts: Sequence[AnswerPart]) -> None:
        answer = self._choices[choice]
        for part in parts:
            add_part(answer.message, part)
        if choice == 0:
            self._tokens.score_prompt(delta)
        if delta.finish:
            answer.finish_reason = self._finish(choice, delta)
            answer.stop_reason = stop_reason(self._turn.requests[choice], delta)
        if answer.logprobs is not None:
            answer.logprobs.content += self._tokens.entries(delta)
        if self._tokens.prompt_ids is not UNSET:
            answer.token_ids = [*(answer.token_ids or ()), *delta.tokens]

    def result(self) -> ChatCompletion:
        answer = self._whole()
        if self.on_end is not None:
            self.on_end(answer)
        return answer

    def _whole(self) -> ChatCompletion:
        for choice in self._choices:
            if choice.message.tool_calls and not choice.message.content:
                choice.message.content = None
        return ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=self._choices,
            usage=self._final_usage(),
            prompt_logprobs=self._tokens.prompt_logprobs,
            prompt_token_ids=self._tokens.prompt_ids,
            timings=self._timings(0),
            verbose=self._verbose,
            penstock=self._explanation.report(),
        )

    def chunks(self, choice: int, delta: Delta) -> Iterable[bytes]:
        self._count(choice, delta)
        if self._plain and choice in self._templates and not delta.finish and self.on_end is None:
            return [
                self._part_chunk(choice, part) for part in self._parts(choice, delta) if type(part) is not CallEnded
            ]
        return self._all_chunks(choice, delta)

    def _all_chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        if choice not in self._templates:
            first = self._chunk(ChatChunkChoice(choice, ChatDelta("assistant", self._opening)))
            first.prompt_token_ids = self._tokens.prompt_ids
            yield encode(first)
            self._templates[choice] = ChunkTemplate(
                lambda text: self._chunk(ChatChunkChoice(choice, ChatDelta(content=text)))
            )
        parts = self._parts(choice, delta)
        if self.on_end is not None:
            self._add(choice, delta, parts)
        if self._plain:
            yield from (self._part_chunk(choice, part) for part in parts if type(part) is not CallEnded)
        else:
            yield from self._detailed_chunks(choice, delta, parts)
        if delta.finish:
            self._explanation.end(choice, delta)
            ending = stop_reason(self._turn.requests[choice], delta)
            chunk = self._chunk(ChatChunkChoice(choice, ChatDelta(), None, self._finish(choice, delta), ending))
            if self._usage is UNSET:
                chunk.penstock = self._explanation.report()
                chunk.timings = self._timings(choice)
            yield encode(chunk)

    def final_chunks(self) -> Iterator[bytes]:
        if self.on_end is not None:
            self.on_end(self._whole())
        if self._usage is None:
            final: dict[str, Any] = {"usage": self._final_usage(), "penstock": self._explanation.report()}
            final["timings"] = self._timings(0)
            yield encode(ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=[], **final))

    def _part_chunk(self, choice: int, part: AnswerPart) -> bytes:
        if type(part) is Content:
            return self._templates[choice](part.text)
        return encode(self._chunk(ChatChunkChoice(choice, chat_delta(part) or ChatDelta())))

    def _detailed_chunks(self, choice: int, delta: Delta, parts: Sequence[AnswerPart]) -> Iterator[bytes]:
        """Yields a chunk for each part. The first one has the delta's tokens: they may be markers, which are in no
        part."""
        entries, ids = self._tokens.entries(delta), self._tokens.ids(delta)
        deltas = [added for part in parts if (added := chat_delta(part))]
        for each in deltas or ([ChatDelta(content="")] if entries or ids else []):
            chunk = self._chunk(ChatChunkChoice(choice, each, self._tokens.logprobs(entries), token_ids=ids))
            chunk.timings = self._timings(choice) if self._timed_chunks else UNSET
            yield encode(chunk)
            entries, ids = [], ids and []

    def _parts(self, choice: int, delta: Delta) -> list[AnswerPart]:
        """Returns the parts that a delta adds to its choice, without unwanted reasoning."""
        parts = self._turn.parts(delta, choice)
        return parts if self._reasons else [part for part in parts if not isinstance(part, Reasoning)]

    def _count(self, choice: int, delta: Delta) -> None:
        self._tally.add(choice, delta)
        if self._stopwatches:
            self._stopwatches[choice].add(delta)

    def _timings(self, choice: int) -> Timings | UnsetType:
        return self._stopwatches[choice].timings() if self._stopwatches else UNSET

    def _finish(self, choice: int, delta: Delta) -> str | None:
        return "tool_calls" if delta.finish == "stop" and self._turn.calls(choice) else delta.finish

    def _final_usage(self) -> CompletionUsage:
        usage = self._tally.usage()
        usage.completion_tokens_details = self._tally.details(self._turn.reasoning_tokens)
        return usage

    def _chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=[choice], usage=self._usage)


def _spelled_prompt(served: ServedModel, turn: ChatTurn) -> str:
    return served.text.tokenizer.decode(turn.request.prompt, special=True, continuing=True)


def _last_answer(body: ChatBody) -> str:
    """Returns the text of the last message, if that is an assistant's."""
    content = body.messages[-1].get("content") if body.messages[-1].get("role") == "assistant" else None
    return content if isinstance(content, str) else ""
