"""Checks answers against the keywords of a JSON schema that a grammar cannot enforce, and tries again if they fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.errors import InvalidGrammar, Overloaded
from penstock.server.context.request_context import RequestContext
from penstock.system.runtime import large_stacks
from penstock.text import Delta
from penstock.text.grammar.json_schema import RewrittenSchema, check_enforced, rewrite
from penstock.text.grammar.schema_validator import first_problem
from penstock.types import Grammar, Request

TakeDelta = Callable[[int, Delta], None]  # is called with a choice and its new delta
Deltas = Callable[[TakeDelta], Coroutine[Any, Any, None]]  # answers, and returns after the last delta; leaving aborts

ATTEMPTS = 3
MAX_REPORTED = 64  # keywords
REWRITE_SECONDS = 10.0
STACK_BYTES = 2**30  # address space only
GREEDY_SEED = 0
RETRY_TEMPERATURE = 0.7  # at least: a greedy answer would be the same again

_workers = ThreadPoolExecutor(4, "schemas")


async def checked(
    context: RequestContext,
    request: Request,
    run: Callable[[Request], Deltas],
    new_id: Callable[[], int],
    reasoning: tuple[str, str] | None,
    take: TakeDelta,
) -> None:
    """Answers a request with a JSON schema. If the grammar cannot enforce all of it, a strict schema or server refuses
    the request. Otherwise the answer is checked at its end. An invalid answer is tried again, unless it is streamed;
    the violations of the last try are listed as ignored."""
    rewritten = await _rewritten(context, request)
    request = _with_grammar(request, rewritten)
    if not rewritten.unenforced:
        return await run(request)(take)
    for left in reversed(range(1 if context.streaming else ATTEMPTS)):
        attempt = _Attempt(rewritten, reasoning, partial(_report, context, request, rewritten.unenforced))
        attempt.last, attempt.take = not left, take if context.streaming else None
        await run(request)(attempt.add)
        if not attempt.failed or attempt.last:
            for choice, delta in attempt.kept:
                take(choice, delta)
            return
        request = _again(request, new_id())


class _Attempt:
    """Checks one answer at its end. Its deltas are kept, unless they are taken as they come."""

    last = True  # there is no further try, so violations are reported
    take: TakeDelta | None = None

    def __init__(
        self, rewritten: RewrittenSchema, reasoning: tuple[str, str] | None, report: Callable[[], None]
    ) -> None:
        self.kept: list[tuple[int, Delta]] = []
        self.failed = False
        self._rewritten = rewritten
        self._reasoning = reasoning
        self._report = report
        self._text = ""

    def add(self, choice: int, delta: Delta) -> None:
        self._text += delta.text
        self.failed = delta.finish == "stop" and not _passes(self._text, self._rewritten, self._reasoning)
        if self.failed and self.last:
            self._report()
        if self.take is not None:
            self.take(choice, delta)
        else:
            self.kept.append((choice, delta))


async def _rewritten(context: RequestContext, request: Request) -> RewrittenSchema:
    grammar = _grammar(request)
    try:
        rewritten = await _off_loop(grammar.text)
        if grammar.strict or not context.lenient:
            check_enforced(rewritten)
    except InvalidGrammar as error:
        raise InvalidGrammar(str(error), param=grammar.param or None) from error
    _report(context, request, rewritten.unchecked)
    return rewritten


async def _off_loop(text: str) -> RewrittenSchema:
    """Rewrites a schema in a thread whose stack is large enough for the library, which calls itself for every schema in
    a chain of them."""
    try:
        with large_stacks(STACK_BYTES):
            rewriting = asyncio.get_running_loop().run_in_executor(_workers, rewrite, text)
    except RuntimeError as error:
        raise Overloaded(
            f"the JSON schema cannot be read, for want of a thread with {STACK_BYTES >> 20} MB of addresses ({error}): "
            "try again, or raise the limits of the server's process"
        ) from error
    try:
        return await asyncio.wait_for(rewriting, REWRITE_SECONDS)
    except TimeoutError as error:
        raise InvalidGrammar(f"the JSON schema took more than {REWRITE_SECONDS:.0f} s to read: simplify it") from error


def _grammar(request: Request) -> Grammar:
    grammar = request.sampling.grammar
    assert grammar is not None
    return grammar


def _with_grammar(request: Request, rewritten: RewrittenSchema) -> Request:
    text = json.dumps({} if rewritten.schema is True else rewritten.schema)
    grammar = _grammar(request)._replace(kind="rewritten_json", text=text)
    return request._replace(sampling=dataclasses.replace(request.sampling, grammar=grammar))


def _again(request: Request, id: int) -> Request:
    """Returns the request for another answer: with another seed, and not greedy. Every greedy request gets the same
    seed, because its answers must repeat and its own seed may be random."""
    sampling = request.sampling
    temperature = max(sampling.temperature, RETRY_TEMPERATURE)
    seed = None if sampling.seed is None else (sampling.seed + 0x9E3779B9) % 2**63
    if sampling.temperature == 0:
        seed = GREEDY_SEED
    return request._replace(id=id, sampling=dataclasses.replace(sampling, seed=seed, temperature=temperature))


def _passes(text: str, rewritten: RewrittenSchema, reasoning: tuple[str, str] | None) -> bool:
    """Returns whether an answer, without the reasoning before it, matches its schema. One that a stop string cut is no
    JSON, and there is nothing to check."""
    if reasoning is not None:
        text = text.rpartition(reasoning[1])[2]
    try:
        value: Any = json.loads(text)
        return first_problem(value, rewritten.normal) is None
    except (ValueError, ArithmeticError, RecursionError):
        return True


def _report(context: RequestContext, request: Request, paths: tuple[str, ...]) -> None:
    for path in paths[:MAX_REPORTED]:
        context.notes.ignore(f"{_grammar(request).param}.{path}".removeprefix("."))
