"""A request that rules out all that it allows fails alone, with the reason; a grammar's end comes in spite of
min_tokens."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from penstock.engine.assemble import assemble
from penstock.engine.grammars.grammar import Grammars
from penstock.errors import InvalidRequest, NotFinite
from penstock.types import BANNED, Failed, Grammar, Request, SamplingParams
from tests.engine.guesses import RandomDrafting
from tests.engine.test_grammar import END, LIMITS, Babble, Bytes, answer, drain, engine

NO = Grammar("regex", "no")
LETTERS = Grammar("regex", "x([ab]{3}|no)")


def asked(id: int, grammar: Grammar | None, bad_words: tuple[str, ...] = (), **settings: object) -> Request:
    params = SamplingParams(temperature=0, grammar=grammar, **settings)  # type: ignore[arg-type]
    words = tuple(tuple(word.encode()) for word in bad_words)
    return Request(id, tuple(range(20)), params, 40, stop_ids=frozenset({END}), bad_words=words)


@pytest.mark.parametrize("ruled_out", [{"bad_words": ("n",)}, {"bad_words": ("no",)}, {"logit_bias": {110: BANNED}}])
def test_it_fails_with_the_reason_and_costs_nobody_the_prefix_cache(ruled_out: dict[str, object]) -> None:
    used = engine()
    used.add(asked(1, None))
    drain(used)
    cached = used.stats().blocks_cached
    assert cached
    used.add(asked(2, NO, logprobs=0, **ruled_out))
    (failed,) = [event for event in drain(used) if isinstance(event, Failed)]
    assert failed.code == InvalidRequest.code
    assert f"the grammar and {next(iter(ruled_out))} of this request exclude every token" in failed.message
    assert used.stats().blocks_cached == cached


def test_a_model_that_computes_nonsense_costs_everybody_the_prefix_cache() -> None:
    backend = Babble()
    used = engine(backend)
    used.add(asked(1, None))
    drain(used)
    assert used.stats().blocks_cached
    backend.fond = END, inf
    used.add(asked(2, None))
    (failed,) = [event for event in drain(used) if isinstance(event, Failed)]
    assert failed.code == NotFinite.code
    assert used.stats().blocks_cached == 0  # its blocks may be wrong


def test_allowed_tokens_may_be_ruled_out_too() -> None:
    used = engine()
    used.add(asked(1, None, bad_words=("a",), allowed_token_ids=(97,)))
    (failed,) = drain(used)
    assert isinstance(failed, Failed)
    assert failed.code == InvalidRequest.code
    assert "allowed_token_ids" in failed.message


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_grammar_ends_before_min_tokens_if_nothing_else_may_follow(logprobs: int | None) -> None:
    used = engine()
    used.add(asked(1, NO, min_tokens=9, logprobs=logprobs))
    assert answer(drain(used), 1) == ("no", "stop")


def test_a_draft_that_is_wrong_fails_no_request_behind_it() -> None:
    backend = Babble(ord("a"), 50.0)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    drafting = RandomDrafting(lambda _: b"xno", LIMITS.vocab, Random(1))
    drafting.lengths = lambda proposals, *_: [len(each.tokens) for each in proposals]  # type: ignore[method-assign]
    used = assemble(backend, LIMITS, drafting=drafting, grammars=Grammars(Bytes, LIMITS.vocab))
    used.add(asked(1, LETTERS, bad_words=("no",), logprobs=0))
    events = drain(used)
    assert answer(events, 1) == ("xaaa", "stop")
