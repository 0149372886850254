"""Answers with drafts are the answers without, token for token and logprob for logprob, however they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.backend.cpu import CpuBackend
from penstock.config import Config
from penstock.core import check
from penstock.engine.assemble import MOST_DRAFTED, assemble
from penstock.engine.build import build_engine
from penstock.engine.drafts.speculation import Drafters
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Grammars
from penstock.model.load import load_model, open_checkpoint
from penstock.types import (
    DryPenalty,
    Event,
    Finished,
    Grammar,
    Limits,
    Report,
    Request,
    SamplerChain,
    SamplingParams,
    Thinking,
    Tokens,
)
from tests.engine.guesses import RandomDrafting
from tests.engine.test_grammar import CLOSE, DATE, END, JSON, OPEN, Babble, Bytes
from tests.engine.test_grammar import LIMITS as BABBLE_LIMITS

CHECKPOINT = open_checkpoint(Path(__file__).parents[1] / "models" / "goldens" / "llama3")
LIMITS = Limits(max_len=64, max_rows=8, step_tokens=48, block_size=4, num_blocks=128, vocab=CHECKPOINT.spec.vocab)
PROMPT = (5, 9, 3, 7, 5, 2)
COUNT = 40
STEERED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 0, "top_p": 0.8},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "penalty_window": 6},
    {"temperature": 0.0, "dry": DryPenalty(multiplier=2.0, allowed_length=1)},
    {"logit_bias": {3: 2.0, 4: -5.0}},
    {"min_tokens": 20},
    {"allowed_token_ids": (3, 5, 7, 11, 13)},
    {"chain": SamplerChain(top_n_sigma=1.5)},
    {"chain": SamplerChain(mersenne=True), "logprobs": 1},
    {"chain": SamplerChain(mirostat=2)},
]


def engine(drafting: Drafters[Any] | None = None, draft_tokens: int = MOST_DRAFTED) -> Engine:
    backend = CpuBackend(1)
    backend.load(load_model(CHECKPOINT, backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS, drafting=drafting, draft_tokens=draft_tokens)


def requests() -> list[Request]:
    return [
        Request(
            id,
            (*PROMPT, id % 7 + 1),
            SamplingParams(**{"seed": id} | params),
            COUNT,
            stop_ids=frozenset({id % 11 + 20}) if id % 2 else frozenset(),
            bad_words=((id % 13 + 3, id % 5 + 3),) if id % 3 else (),
        )
        for id, params in enumerate(STEERED * 2)
    ]


def run(engine: Engine, asked: Sequence[Request]) -> tuple[dict[int, list[Any]], dict[int, Report]]:
    """Returns the tokens and logprobs of each answer, with how it ended, and their reports."""
    for request in asked:
        engine.add(request)
    said: dict[int, list[Any]] = {request.id: [] for request in asked}
    reports = {}
    while not engine.idle:
        for event in engine.step():
            said[event.seq] += told(event)
            if isinstance(event, Finished):
                assert event.report is not None
                reports[event.seq] = event.report
        check(engine.scheduler)
    return said, reports


def told(event: Event) -> list[Any]:
    if isinstance(event, Tokens):
        return [*event.tokens, *event.logprobs]
    assert isinstance(event, Finished), event
    return [event.reason, event.stop_token]


def sorted_out(said: list[Any]) -> tuple[list[Any], ...]:
    """Returns tokens, logprobs and the end: these come in other groups if several tokens come at once."""
    return tuple([each for each in said if isinstance(each, kind)] for kind in (int, tuple, str))


def test_however_answers_are_sampled() -> None:
    plain, _ = run(engine(), requests())
    known = {request.id: [each for each in plain[request.id] if isinstance(each, int)] for request in requests()}
    drafting = RandomDrafting(lambda request: known[request.id], LIMITS.vocab, Random(3))
    drafted, reports = run(engine(drafting), requests())
    for id in plain:
        assert sorted_out(drafted[id]) == sorted_out(plain[id]), STEERED[id % len(STEERED)]
    accepted = [sum(counts.accepted for counts in report.drafts) for report in reports.values()]
    assert [id for id, count in zip(reports, accepted, strict=True) if not count] == [
        id for id in reports if "mirostat=2" in str(STEERED[id % len(STEERED)])
    ], "all but mirostat's next choice can be drafted"


def test_a_request_drafts_no_more_than_it_says() -> None:
    asked = [request._replace(speculation=id % 3) for id, request in enumerate(requests())]
    plain, _ = run(engine(), asked)
    known = {id: [each for each in said if isinstance(each, int)] for id, said in plain.items()}
    longest: dict[int, int] = {}

    class Counting(RandomDrafting):
        def lengths(self, proposals: Sequence[Any], rows: int, tokens: int, budget: int) -> list[int]:
            return [len(proposal.tokens) for proposal in proposals]

    limited = engine(Counting(lambda request: known[request.id], LIMITS.vocab, Random(4)))
    planned = limited.scheduler.plan

    def plan() -> Any:
        made = planned()
        for row in made.rows:
            longest[row.seq] = max(longest.get(row.seq, 0), len(row.draft))
        return made

    limited.scheduler.plan = plan  # type: ignore[method-assign]
    drafted, _ = run(limited, asked)
    assert {id: sorted_out(said) for id, said in drafted.items()} == {
        id: sorted_out(said) for id, said in plain.items()
    }
    assert all(longest[request.id] <= (request.speculation or 0) for request in asked)
    assert set(longest.values()) == {0, 1, 2}


# -- structured output --------------------------------------------------------------------------------------------

GRAMMARS = [
    JSON,
    DATE,
    Grammar("regex", "[a-z ]{60,}"),
    Grammar("regex", "e(abc)+d", triggers=("e",)),
    Grammar("regex", "x[0-9]+", trigger_patterns=("[q-z](x)",)),
    Grammar("json", JSON.text, thinking=Thinking((CLOSE,), opens=OPEN)),
    Grammar("regex", "[a-f]{9}", thinking=Thinking((CLOSE,), budget=7)),
    Grammar("free", "", thinking=Thinking((CLOSE,), budget=12)),
]


def constrained(logprobs: int | None) -> list[Request]:
    return [
        Request(
            id,
            tuple(range(id % 5 + 1)),
            SamplingParams(seed=id, grammar=grammar, logprobs=None if grammar.thinking else logprobs),
            120,
            stop_ids=frozenset({END}),
        )
        for id, grammar in enumerate(GRAMMARS * 3)
    ]


def babbling(drafting: Drafters[Any] | None = None) -> Engine:
    backend = Babble()
    backend.reserve_kv(BABBLE_LIMITS.num_blocks, BABBLE_LIMITS.block_size)
    return assemble(backend, BABBLE_LIMITS, drafting=drafting, grammars=Grammars(Bytes, BABBLE_LIMITS.vocab))


@pytest.mark.parametrize("logprobs", [None, 1])
def test_however_answers_are_constrained(logprobs: int | None) -> None:
    plain, _ = run(babbling(), constrained(logprobs))
    known = {id: [each for each in said if isinstance(each, int)] for id, said in plain.items()}
    drafting = RandomDrafting(lambda request: known[request.id], BABBLE_LIMITS.vocab, Random(6))
    drafted, reports = run(babbling(drafting), constrained(logprobs))
    for id in plain:
        assert sorted_out(drafted[id]) == sorted_out(plain[id]), GRAMMARS[id % len(GRAMMARS)]
    for kind in range(len(GRAMMARS)):
        same = [sum(counts.accepted for counts in reports[id].drafts) for id in reports if id % len(GRAMMARS) == kind]
        assert sum(same) > 0, GRAMMARS[kind]


@pytest.mark.parametrize(
    ("speculation", "tokens"), [("auto", MOST_DRAFTED), ("off", 0), ("4", 4), ("1000", MOST_DRAFTED)]
)
def test_an_engine_drafts_as_its_config_says(speculation: str, tokens: int) -> None:
    settings = {"max_len": 64, "max_rows": 2, "step_tokens": 64}
    built = build_engine(Config(model="m", device="ref", speculation=speculation, **settings), CHECKPOINT)
    assert built.hello().get("draft_tokens", 0) == tokens
    built.close()


@pytest.mark.parametrize(("mine", "yours", "most"), [(64, None, 64), (2, None, 2), (2, 8, 2), (8, 2, 2), (64, 0, 0)])
def test_neither_engine_nor_request_drafts_more_than_its_limit(mine: int, yours: int | None, most: int) -> None:
    asked = Request(1, PROMPT, SamplingParams(temperature=0.0), COUNT)
    plain, _ = run(engine(), [asked])
    right = sorted_out(plain[1])[0]
    limited = engine(RandomDrafting(lambda _: right, LIMITS.vocab, Random(1)), mine)
    said, reports = run(limited, [asked._replace(speculation=yours)])
    assert sorted_out(said[1]) == sorted_out(plain[1])
    drafts = reports[1].drafts
    assert sum(each.drafted for each in drafts) <= most * sum(each.drafts for each in drafts)
    assert bool(drafts) == (most > 0)
