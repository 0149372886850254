"""Makes engine requests from the arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest
from penstock.llm.engine_options import check_targets
from penstock.llm.pending import PendingChoice, PendingOutput
from penstock.service_levels import NO_TARGETS, Targets
from penstock.text import (
    ChatTemplate,
    Text,
    TextStream,
    check_answers,
    embedding_request,
    make_request,
    new_seed,
    seed_of_choice,
)
from penstock.text.chat import continue_last
from penstock.text.embedding import pooling_of
from penstock.text.pairs import PairPrompts, classify_request
from penstock.text.tools import MessageDict
from penstock.types import NO_CLAIM, AdapterUse, Limits, SamplingParams

PromptLike = str | Sequence[int] | Mapping[str, Any]


class Prompt(NamedTuple):
    """Holds a prompt's tokens, and its text if given as text."""

    tokens: list[int]
    text: str | None = None
    continuing: bool = True  # the answer continues a text, and keeps its leading space


class ChatOptions(NamedTuple):
    """Selects how a chat becomes a prompt."""

    template: str | None = None  # overrides the model's own
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = {}  # template variables


class RequestMaker:
    """Makes requests for one model. `next_id` numbers them; with a `seed`, it determines the seeds of requests without
    one, in order of creation. `targets` are the defaults of requests.
    """

    def __init__(
        self,
        text: Text,
        limits: Limits,
        next_id: Callable[[], int],
        seed: int | None = None,
        targets: Targets = NO_TARGETS,
    ) -> None:
        self.text = text
        self.limits = limits
        self.next_id = next_id
        self._targets = targets
        self._new_seed = new_seed if seed is None else partial(random.Random(seed).getrandbits, 63)

    def prompt(self, given: Any, encode: Callable[[str], list[int]] | None = None) -> Prompt:
        """Reads a text, a list of token ids, or one of vLLM's prompt dictionaries."""
        if isinstance(given, Mapping):
            given = given.get("prompt_token_ids", given.get("prompt"))
        try:
            if isinstance(given, str):
                return Prompt((encode or self.text.encode_prompt)(given), given)
            return Prompt(self._checked([index(token) for token in given]))
        except TypeError as error:
            raise InvalidRequest(
                f"a prompt is a text, a list of token ids, or a dictionary with one of them as prompt or "
                f"prompt_token_ids: {error}",
                param="prompt",
            ) from error

    def _checked(self, tokens: list[int]) -> list[int]:
        """Checks a user's token ids; raises InvalidRequest for one outside the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.limits.vocab:
            raise InvalidRequest(f"prompt token ids must be from 0 to {self.limits.vocab - 1}", param="prompt")
        return tokens

    def chat_prompt(self, messages: Sequence[MessageDict], options: ChatOptions) -> Prompt:
        self.check_answers()
        check_messages(messages)
        text = self.text
        if options.template is not None:
            text = text.with_template(ChatTemplate({"default": options.template}, text.tokenizer.names))
        continues = options.continue_final_message
        if continues and options.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt=False", param="continue_final_message"
            )
        rendered = text.render_chat(
            [with_plain_content(message) for message in messages],
            add_generation_prompt=options.add_generation_prompt,
            tools=options.tools,
            **options.variables,
        )
        if continues:
            rendered = continue_last(rendered, str(with_plain_content(messages[-1])["content"] or ""))
        return Prompt(text.encode_prompt(rendered), rendered, continuing=continues)

    def generation(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        id: str = "",
        adapters: Sequence[AdapterUse] = (),
        targets: Targets = NO_TARGETS,
    ) -> PendingOutput:
        """Makes the choices of a prompt, each with its own seed. As in vLLM, an answer ends at the context's end, even
        before max_tokens.
        """
        self.check_answers()
        params = self.text.sampling() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params takes penstock.SamplingParams(...), a list with one for each prompt, or None; "
                f"got {params!r:.100}",
                param="sampling_params",
            )
        tokens = prompt.tokens[-(params.truncate_prompt_tokens or 0) :]
        room = max(self.limits.max_len - len(tokens), 1)
        most = None if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._new_seed() if params.seed is None else params.seed
        ttft, itl = check_targets(targets).over(self._targets)
        claim = NO_CLAIM._replace(ttft=ttft, itl=itl)
        count = params.best_of or params.n
        scored = 0 if params.logprobs is None and count > params.n else params.logprobs
        choices = []
        for choice in range(count):
            sampling = replace(params, seed=seed_of_choice(seed, choice), logprobs=scored, max_tokens=most)
            request = make_request(self.next_id(), tokens, sampling, self.text.tokenizer, self.limits.max_len)
            request = request._replace(adapters=tuple(adapters), claim=claim)
            choices.append(PendingChoice(request, self._stream(params, continuing=prompt.continuing)))
        return PendingOutput(id or str(choices[0].request.id), prompt.text, params, self.text.tokenizer, choices)

    def pooling(
        self, given: Any, pooling: str | None, truncate: int | None = None, adapters: Sequence[AdapterUse] = ()
    ) -> PendingOutput:
        kind, prompt = pooling_of(pooling, self.limits), self.prompt(given, self.text.encode_whole)
        tokens = prompt.tokens[:truncate]
        request = embedding_request(self.next_id(), tokens, self.limits.max_len, kind, param="prompt")
        request = request._replace(adapters=tuple(adapters))
        choice = PendingChoice(request, TextStream(self.text.tokenizer))
        return PendingOutput(str(request.id), prompt.text, request.sampling, self.text.tokenizer, [choice])

    def classification(self, tokens: list[int], text: str | None = None) -> PendingOutput:
        request = classify_request(self.next_id(), tokens, self.limits, "prompt")
        choice = PendingChoice(request, TextStream(self.text.tokenizer))
        return PendingOutput(str(request.id), text, request.sampling, self.text.tokenizer, [choice])

    def pair_prompts(self) -> PairPrompts:
        template = self.text.pair_template
        if template is None and self.limits.generates:
            raise InvalidRequest("this reranker comes without a template for pairs: it cannot score", param="model")
        return PairPrompts(self.text.tokenizer, template, self.limits)

    def check_answers(self) -> None:
        check_answers(self.limits)

    def _stream(self, params: SamplingParams, *, continuing: bool) -> TextStream:
        shown = () if params.skip_special_tokens else self.text.tokenizer.special_ids
        return TextStream(
            self.text.tokenizer,
            params.stop,
            continuing=continuing,
            shown=shown,
            include_stop=params.include_stop_str_in_output,
        )


def prompt_list(prompts: Any) -> Sequence[Any]:
    if isinstance(prompts, str | Mapping) or not hasattr(prompts, "__len__"):
        return [prompts]
    one = len(prompts) > 0 and not isinstance(prompts[0], str | Mapping | Sequence)
    return [prompts] if one else prompts


def conversation_list(messages: Any) -> Sequence[Sequence[MessageDict]]:
    several = isinstance(messages, Sequence) and messages and isinstance(messages[0], Sequence)
    return messages if several and not isinstance(messages[0], str) else [messages]


def check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequest(
            f'a conversation is a list of messages such as {{"role": "user", "content": "Hello"}}; '
            f"got {messages!r:.100}",
            param="messages",
        )


def params_list(params: Any, count: int) -> Sequence[SamplingParams | None]:
    if not isinstance(params, list | tuple):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"there are {count} prompts and {len(params)} sampling parameters: give one for all, or one for each",
            param="sampling_params",
        )
    return params


def with_plain_content(message: MessageDict) -> MessageDict:
    content = message.get("content")
    if not isinstance(content, list):
        return {"content": None, **message}
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidRequest(f"a message's content can be text only; got {part!r:.100}", param="messages")
    return {**message, "content": "".join(str(part["text"]) for part in content)}
