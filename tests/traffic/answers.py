"""Reads answers of every dialect, streamed or not, as one form, and judges whether they are well-formed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jsonschema

from tests.traffic.asking import Ask


@dataclass
class Choice:
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each
    finish: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    def call(self, index: int, name: str | None, arguments: str | None) -> None:
        while len(self.calls) <= index:
            self.calls.append(["", ""])
        self.calls[index][0] += name or ""
        self.calls[index][1] += arguments or ""


class Usage(NamedTuple):
    prompt: int
    generated: int
    total: int


@dataclass
class Answer:
    """Holds what an answer says, however it was cut into pieces."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Usage | None = None
    ended: bool = False  # the dialect's last event has come
    ignored: list[str] = field(default_factory=list)  # what was asked for in vain

    def choice(self, index: int = 0) -> Choice:
        return self.choices.setdefault(index, Choice())

    @property
    def plain(self) -> Any:
        """Is what must be the same each time."""
        said = [(index, vars(choice)) for index, choice in sorted(self.choices.items())]
        return said, self.usage and (self.usage.prompt, self.usage.generated)


class Broken(Exception):
    """Says what is wrong with an answer."""


Json = dict[str, Any]


def read(ask: Ask, content: bytes) -> Answer:
    """Reads a body; raises Broken if it is none of this dialect."""
    answer = Answer(ended=not ask.stream)
    try:
        for event in events_of(ask, content):
            if event == "[DONE]":
                answer.ended = True
            elif event.get("error"):
                raise Broken(f"the answer has an error: {event['error']}")
            else:
                READERS[ask.dialect](answer, event)
                answer.ignored += _ignored(event)
    except (LookupError, TypeError, ValueError) as error:
        raise Broken(f"it cannot be read: {error!r} in {content[-600:]!r}") from error
    return answer


def events_of(ask: Ask, content: bytes) -> Iterator[Any]:
    if not ask.stream:
        yield json.loads(content)
        return
    for line in content.decode().splitlines():
        data = line if ask.dialect.startswith("ollama") else line.removeprefix("data: ")
        if data == "[DONE]":
            yield data
        elif data.startswith("{"):
            yield json.loads(data)


def _ignored(event: Json) -> list[str]:
    response = event.get("response")
    told = (response if isinstance(response, dict) else event).get("penstock")
    return list(told["ignored_fields"]) if told else []


def _read_chat(answer: Answer, event: Json) -> None:
    for each in event["choices"]:
        choice = answer.choice(each["index"])
        part = each.get("delta") or each.get("message") or {}
        choice.text += part.get("content") or ""
        for place, call in enumerate(part.get("tool_calls") or ()):
            choice.call(call.get("index", place), call["function"].get("name"), call["function"].get("arguments"))
        choice.logprobs += (each.get("logprobs") or {}).get("content") or ()
        choice.finish = each["finish_reason"] or choice.finish
    _read_openai_end(answer, event)


def _read_text(answer: Answer, event: Json) -> None:
    for each in event["choices"]:
        choice = answer.choice(each["index"])
        choice.text += each["text"]
        told = each.get("logprobs") or {"tokens": (), "token_logprobs": (), "top_logprobs": ()}
        choice.logprobs += zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        choice.finish = each["finish_reason"] or choice.finish
    _read_openai_end(answer, event)


def _read_openai_end(answer: Answer, event: Json) -> None:
    if event.get("usage"):
        usage = event["usage"]
        answer.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])


def _read_responses(answer: Answer, event: Json) -> None:
    if event["object" if "object" in event else "type"] == "response":
        response = event
    elif event["type"] in ("response.completed", "response.incomplete", "response.failed"):
        response = event["response"]
    elif event["type"] == "response.output_text.delta":
        answer.choice(-1).text += event["delta"]
        return
    else:
        return
    choice = answer.choice()
    for item in response["output"]:
        if item["type"] == "message":
            choice.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            choice.call(len(choice.calls), item["name"], item["arguments"])
    usage = response["usage"]
    answer.usage = Usage(usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
    choice.finish = (response["incomplete_details"] or {}).get("reason") or response["status"]
    streamed = answer.choices.pop(-1, Choice(choice.text)).text
    if streamed != choice.text:
        raise Broken(f"the events say {streamed!r}, the response says {choice.text!r}")
    answer.ended = True


def _read_messages(answer: Answer, event: Json) -> None:
    kind, choice = event["type"], answer.choice()
    if kind == "message":
        for block in event["content"]:
            _read_block(choice, block, whole=True)
        _read_message_end(answer, event, event["usage"])
    elif kind == "content_block_start":
        _read_block(choice, event["content_block"], whole=False)
    elif kind == "content_block_delta":
        delta = event["delta"]
        choice.text += delta.get("text", "")
        if "partial_json" in delta:
            choice.call(len(choice.calls) - 1, None, delta["partial_json"])
    elif kind == "message_delta":
        _read_message_end(answer, event["delta"], event["usage"])
    elif kind == "message_stop":
        for call in choice.calls:
            call[1] = json.dumps(json.loads(call[1] or "{}") if _json(call[1] or "{}") else {"INVALID_JSON": call[1]})
        answer.ended = True


def _read_block(choice: Choice, block: Json, *, whole: bool) -> None:
    if block["type"] == "text":
        choice.text += block["text"]
    elif block["type"] == "tool_use":
        choice.call(len(choice.calls), block["name"], json.dumps(block["input"]) if whole else "")


def _read_message_end(answer: Answer, end: Json, usage: Json) -> None:
    answer.choice().finish = end["stop_reason"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    answer.usage = Usage(prompt, usage["output_tokens"], prompt + usage["output_tokens"])


def _read_ollama(answer: Answer, event: Json) -> None:
    choice = answer.choice()
    choice.text += event["message"]["content"] if "message" in event else event["response"]
    for call in event.get("message", {}).get("tool_calls") or ():
        choice.call(len(choice.calls), call["function"]["name"], json.dumps(call["function"]["arguments"]))
    if event["done"]:
        choice.finish = event["done_reason"]
        prompt, generated = event["prompt_eval_count"], event["eval_count"]
        answer.usage = Usage(prompt, generated, prompt + generated)
        answer.ended = True


def _read_llamacpp(answer: Answer, event: Json) -> None:
    choice = answer.choice()
    choice.text += event["content"]
    choice.logprobs += event.get("completion_probabilities") or ()
    if event["stop"]:
        choice.finish = event["stop_type"]
        prompt, generated = event["tokens_evaluated"], event["tokens_predicted"]
        answer.usage = Usage(prompt, generated, prompt + generated)
        answer.ended = True


READERS: dict[str, Callable[[Answer, Json], None]] = {
    "chat": _read_chat,
    "text": _read_text,
    "responses": _read_responses,
    "messages": _read_messages,
    "ollama chat": _read_ollama,
    "ollama text": _read_ollama,
    "llama.cpp": _read_llamacpp,
}
LENGTH = {"length", "max_output_tokens", "max_tokens", "limit", "model_context_window_exceeded"}
NATURAL = {"stop", "completed", "end_turn", "stop_sequence", "eos", "word"}
CALLED = {"tool_calls", "tool_use"} | {"stop", "completed"}  # the last two: Ollama and responses
STOPPED = {"stop_sequence"}  # messages, where a stop string follows a call


def judge(ask: Ask, answer: Answer) -> Iterator[str]:
    """Yields what is wrong with an answer."""
    wish = ask.wish
    if answer.ignored and ask.ours:
        yield f"it ignores {answer.ignored}"
    if not answer.ended:
        yield "the last event is missing"
    if len(answer.choices) != wish.n:
        yield f"it has {len(answer.choices)} choices instead of {wish.n}"
    if answer.usage is None:
        yield "it has no usage"
        return
    prompt, generated, total = answer.usage
    if prompt < 1 or total != prompt + generated:
        yield f"the usage does not add up: {answer.usage}"
    limit = ask.limit
    if limit is not None and generated > limit * wish.n:
        yield f"it has {generated} tokens, more than the {limit} of each choice"
    for choice in answer.choices.values():
        yield from _judge_choice(ask, choice, kept=not answer.ignored)
    if wish.logprobs is not None and not wish.tools and not wish.stop:
        count = sum(len(choice.logprobs) for choice in answer.choices.values())
        stopped = sum(choice.finish not in LENGTH for choice in answer.choices.values())
        if not generated - stopped <= count <= generated:  # the token that stops a choice may have none
            yield f"it has {generated} tokens and the logprobs of {count}"


def _judge_choice(ask: Ask, choice: Choice, *, kept: bool) -> Iterator[str]:
    wish, names = ask.wish, {tool["name"] for tool in ask.wish.tools}
    natural = CALLED | (STOPPED if wish.stop else set()) if choice.calls else NATURAL
    if choice.finish not in LENGTH | natural:
        yield f"its finish reason is {choice.finish!r} with {len(choice.calls)} calls"
    if {name for name, _ in choice.calls} - names:
        yield f"it calls {choice.calls}, and the tools are {names}"
    whole = choice.finish not in LENGTH
    whole_calls = whole and not wish.stop  # a stop string may be in a call
    if wish.forced and whole_calls and not choice.calls:
        yield "it has no call, and one was required"
    for _, arguments in choice.calls if whole_calls else ():
        if not _json(arguments):
            yield f"the arguments of a call are no JSON: {arguments!r}"
    if found := next((stop for stop in wish.stop if stop in choice.text), None):
        yield f"the stop string {found!r} is in its text"
    if wish.schema is not None and whole and kept:
        try:
            jsonschema.validate(json.loads(choice.text), wish.schema)
        except (ValueError, jsonschema.ValidationError) as error:
            yield f"its text does not match the schema: {str(error)[:300]}; got {choice.text!r}"


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
