"""Serves POST /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.chat.logprobs import PromptLogprobs, finite_logprob, prompt_entries, spelled_id
from penstock.server.chat.stop_reason import stop_reason
from penstock.server.chat.stream import all_deltas
from penstock.server.context.request_context import RequestContext
from penstock.server.generation.adapter_fields import choose_adapters
from penstock.server.generation.beams import beam_deltas, check_beams
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.fields import (
    NO_EFFECT,
    CompletionHead,
    CompletionUsage,
    GenerationFields,
    TokenTally,
    check_prompt_logprobs,
    fitting,
    new_head,
    read_fields,
    sampling,
    shown_special,
    truncate,
)
from penstock.server.generation.prompts import EncodedPrompt, encode_prompts, separate
from penstock.server.http.bodies import unsupported
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import ChunkTemplate, encode, reply
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text import Delta, Tokenizer
from penstock.text.infill import infill_of, infill_prompt
from penstock.types import Request, TokenLogprob

MAX_CHOICES = 1024
DEFAULT_TOKENS = 16  # OpenAI's
utf8_decoder = codecs.getincrementaldecoder("utf-8")


class CompletionBody(GenerationFields):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None

    @property
    def choices(self) -> int:
        """Returns how many are generated for each prompt; the best n of them are returned."""
        return self.best_of or self.n or 1

    @property
    def selective(self) -> bool:
        return self.choices > (self.n or 1)


async def completions(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_fields(served, http, context, CompletionBody, NO_EFFECT)
    served.check_model(body.model, context)
    choose_adapters(served, context, body.adapters, body.lora)
    _check(body)
    scores = body.logprobs if body.echo else None
    if body.prompt_logprobs is not None:
        scores = max(scores or 0, body.prompt_logprobs)
    logprobs = 0 if body.selective and body.logprobs is None else body.logprobs
    params = sampling(served, body, max_tokens=body.max_tokens, logprobs=logprobs, prompt_logprobs=scores)
    if body.suffix:
        prompts, ends = await _infill(served, body, body.suffix)
        params = [replace(each, stop_token_ids=(*each.stop_token_ids, *ends)) for each in params]
    else:
        encoded = await encode_prompts(served, _prompts(body), bos=body.add_special_tokens is not False)
        prompts = [_truncated(served, context, body, each) for each in encoded]
    usual = None if body.unlimited else DEFAULT_TOKENS
    asked = [(ids, fitting(served, ids, each) if body.n_predict else each) for ids, _ in prompts for each in params]
    requests = [served.request(context, ids, each, "prompt", usual) for ids, each in asked]
    for ids, _ in prompts:
        served.check_ids(ids, "prompt")
    texts = [prompt.text for prompt in prompts for _ in params]
    writer = CompletionWriter(served, context, requests, texts, body)
    shown = shown_special(served, body)
    if body.use_beam_search:
        check_beams(context, body, params[0])
        running = beam_deltas(served, context, requests, body, continuing=True, shown=shown)
    else:
        running = all_deltas(served, context, requests, shown)
    return await reply(http, context, writer, running, streaming=bool(body.stream))


# -- reading ------------------------------------------------------------------------------------------------------


def _check(body: CompletionBody) -> None:
    check_prompt_logprobs(body)
    if body.choices < (body.n or 1):
        raise InvalidRequest(f"best_of must be at least n, which is {body.n}; got {body.best_of}", param="best_of")
    if body.selective and body.stream:
        raise InvalidRequest(
            "best_of above n cannot be streamed, because the best choices are known at the end: leave stream out",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1 unless echo is true; got 0", param="max_tokens")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompts = separate(body.prompt, "prompt")
    if len(prompts) > 1 and len(prompts) * body.choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {body.choices} choices each are more than {MAX_CHOICES}: send fewer at once",
            param="prompt",
        )
    return prompts


async def _infill(served: ServedModel, body: CompletionBody, after: str) -> tuple[list[EncodedPrompt], tuple[int, ...]]:
    """Returns prompts for the text between each prompt and the suffix, and the tokens that end that text."""
    tokenizer, infill = served.text.tokenizer, infill_of(served.text.tokenizer)
    texts = [prompt for prompt in _prompts(body) if isinstance(prompt, str)]
    if infill is None or not texts:
        raise unsupported("suffix", after)
    if body.echo or body.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "suffix cannot be combined with echo or truncate_prompt_tokens: leave them out", param="suffix"
        )
    size = sum(map(len, texts)) + len(after) * len(texts)
    ids = await off_loop(size, lambda: [infill_prompt(tokenizer, infill, text, after) for text in texts])
    return [EncodedPrompt(each, text) for each, text in zip(ids, texts, strict=True)], infill.ends


def _truncated(
    served: ServedModel, context: RequestContext, body: CompletionBody, prompt: EncodedPrompt
) -> EncodedPrompt:
    """Returns the prompt as truncate_prompt_tokens leaves it. A prompt that was cut is echoed as its tokens decode."""
    usual = 1 if body.unlimited else DEFAULT_TOKENS
    max_tokens = usual if body.max_tokens is None else body.max_tokens
    ids = truncate(served, context, body, list(prompt.ids), max_tokens)
    return prompt if len(ids) == len(prompt.ids) else EncodedPrompt(ids, None)


# -- answering ----------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def extend(self, more: CompletionLogprobs) -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class CompletionChoice(msgspec.Struct):
    index: int
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # at the end
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # in the first


class TextCompletion(CompletionHead, kw_only=True):
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    penstock: AnswerReport | UnsetType = UNSET


COMPLETIONS = Operation(CompletionBody, NO_EFFECT, TextCompletion, TextCompletion)


class BestChoices:
    """Chooses the likeliest of each prompt's choices."""

    def __init__(self, count: int, body: CompletionBody) -> None:
        self._of_each, self._returned = body.choices, body.n or 1
        self._logprobs: list[list[float]] = [[] for _ in range(count)]
        self._beams = bool(body.use_beam_search)  # they come in the order of their scores

    def add(self, choice: int, delta: Delta) -> None:
        self._logprobs[choice] += [scored.logprob for scored in delta.logprobs]

    def chosen(self) -> list[int]:
        """Returns the choices whose tokens are likeliest on average, the best first, for each prompt."""
        starts = range(0, len(self._logprobs), self._of_each)
        prompts = [range(start, start + self._of_each) for start in starts]
        return [
            each
            for choices in prompts
            for each in sorted(choices, key=self._likelihood, reverse=True)[: self._returned]
        ]

    def _likelihood(self, choice: int) -> float:
        if self._beams:
            return -choice
        return sum(self._logprobs[choice]) / max(len(self._logprobs[choice]), 1)


class CompletionWriter:
    def __init__(
        self,
        served: ServedModel,
        context: RequestContext,
        requests: Sequence[Request],
        texts: Sequence[str | None],
        body: CompletionBody,
    ) -> None:
        self._head = new_head("cmpl", served.name, body.service_tier, body.request_id)
        self._requests = requests
        self._tokenizer = served.text.tokenizer
        self._prompt_logprobs = body.prompt_logprobs
        self._prompts = [request.prompt if body.return_token_ids else UNSET for request in requests]
        self._tally = TokenTally(requests, body.choices)
        self._explanation = Explanation(served, context, requests)
        self._scored = body.logprobs is not None
        self._usage = None if body.wants_usage else UNSET
        self._templates: dict[int, ChunkTemplate] = {}
        self._begun: set[int] = set()  # choices of which token ids were streamed
        self._best = BestChoices(len(requests), body) if body.selective else None
        self._choices = [CompletionChoice(index, logprobs=self._no_logprobs()) for index in range(len(requests))]
        self._transcripts = [
            Transcript(served.text.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)) for _ in requests
        ]
        if body.echo:
            for transcript, request, text in zip(self._transcripts, requests, texts, strict=True):
                transcript.echo(request.prompt, text)

    def collect(self, choice: int, delta: Delta) -> None:
        self._tally.add(choice, delta)
        if self._best is not None:
            self._best.add(choice, delta)
        answer, added = self._choices[choice], self._choice(choice, delta)
        answer.text += added.text
        if delta.finish:
            answer.finish_reason, answer.stop_reason = delta.finish, added.stop_reason
            self._explanation.end(choice, delta)
        if self._prompt_logprobs is not None:
            self._add_scores(answer, delta)
        if answer.logprobs is not None and added.logprobs is not None:
            answer.logprobs.extend(added.logprobs)
        if added.token_ids is not UNSET:
            answer.token_ids = [*(answer.token_ids or ()), *added.token_ids]
            answer.prompt_token_ids = self._prompts[choice]

    def result(self) -> TextCompletion:
        best = range(len(self._choices)) if self._best is None else self._best.chosen()
        choices = [msgspec.structs.replace(self._choices[each], index=index) for index, each in enumerate(best)]
        return self._completion(choices, self._tally.usage(), self._explanation.report(best))

    def chunks(self, choice: int, delta: Delta) -> Iterable[bytes]:
        self._tally.add(choice, delta)
        if self._scored or delta.finish or self._prompts[choice]:
            return self._detailed_chunks(choice, delta)
        text = self._transcripts[choice].text(delta)
        return (self._template(choice)(text),) if text else ()

    def _detailed_chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        added = self._choice(choice, delta)
        if delta.finish:
            self._explanation.end(choice, delta)
        if choice not in self._begun:
            self._begun.add(choice)
            added.prompt_token_ids = self._prompts[choice]
        if added.text or added.finish_reason or added.token_ids or (added.logprobs and added.logprobs.tokens):
            report = UNSET if self._usage is None else self._explanation.report()
            yield encode(self._completion([added], self._usage, report))

    def final_chunks(self) -> Iterator[bytes]:
        if self._usage is None:
            yield encode(self._completion([], self._tally.usage(), self._explanation.report()))

    def _template(self, choice: int) -> ChunkTemplate:
        if choice not in self._templates:
            self._templates[choice] = ChunkTemplate(
                lambda text: self._completion([CompletionChoice(choice, text)], self._usage)
            )
        return self._templates[choice]

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: CompletionUsage | UnsetType | None,
        report: AnswerReport | UnsetType = UNSET,
    ) -> TextCompletion:
        return TextCompletion(**self._head, object="text_completion", choices=choices, usage=usage, penstock=report)

    def _choice(self, choice: int, delta: Delta) -> CompletionChoice:
        transcript = self._transcripts[choice]
        logprobs = transcript.logprobs(delta) if self._scored else None
        ids = list(delta.tokens) if self._prompts[choice] else UNSET
        added = CompletionChoice(choice, transcript.text(delta), logprobs, delta.finish, token_ids=ids)
        if delta.finish:
            added.stop_reason = stop_reason(self._requests[choice], delta)
        return added

    def _add_scores(self, answer: CompletionChoice, delta: Delta) -> None:
        """Adds the scores of the prompt's tokens, with the requested number of alternatives."""
        scores = [each._replace(top=each.top[: self._prompt_logprobs]) for each in delta.scores]
        answer.prompt_logprobs = [*(answer.prompt_logprobs or [None]), *prompt_entries(self._tokenizer, scores)]

    def _no_logprobs(self) -> CompletionLogprobs | None:
        return CompletionLogprobs() if self._scored else None


class Transcript:
    """Builds one choice's text, after the prompt if that is echoed, and finds where in the text each token starts."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._spell = spelled_id if as_ids else tokenizer.token_text
        self._echo = ""
        self._first: Sequence[int] = ()  # the prompt's first token: nothing precedes it, so it lacks a score
        self._decoder = utf8_decoder("replace")
        self._at = 0

    def echo(self, prompt: Sequence[int], text: str | None) -> None:
        """Echoes the prompt. One that came as text may have got a BOS or a space in front: these start before the
        text does."""
        spelled = self._tokenizer.decode(prompt, special=True, continuing=True)
        self._echo = spelled if text is None else text
        self._at = len(self._echo) - len(spelled)
        self._first = prompt[:1]

    def text(self, delta: Delta) -> str:
        text, self._echo = self._echo + delta.text, ""
        return text

    def logprobs(self, delta: Delta) -> CompletionLogprobs:
        entries = CompletionLogprobs()
        for token in self._first:
            self._append(entries, token, None, None, shown=True)
        self._first = ()
        for score in delta.scores:
            self._append(entries, score.token, finite_logprob(score.logprob), self._top(score), shown=True)
        for scored in delta.logprobs:
            shown = scored.token not in self._tokenizer.special_ids
            self._append(entries, scored.token, finite_logprob(scored.logprob), self._top(scored), shown)
        return entries

    def _append(
        self, entries: CompletionLogprobs, token: int, logprob: float | None, top: dict[str, float] | None, shown: bool
    ) -> None:
        entries.tokens.append(self._spell(token))
        entries.token_logprobs.append(logprob)
        entries.top_logprobs.append(top)
        entries.text_offset.append(max(self._at, 0))
        if shown:
            self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Returns the likeliest tokens and the chosen one; of two that are spelled alike, the likelier."""
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self._spell(token), finite_logprob(logprob))
        return top
