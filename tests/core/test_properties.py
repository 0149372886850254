"""Drives the engine without a model: random arrivals, prefixes, aborts, pools, windows, budgets and orders against a
backend that cannot be fooled. Each request must answer as if it ran alone, and the invariants must hold after every
step."""

from __future__ import annotations

from collections.abc import Sequence as Line
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.fake import FakeBackend, continuation, gathered, next_token, pooled
from penstock.core import Policy, Sequence, StandardPolicy, check
from penstock.core.policy import Room, StepBudget
from penstock.core.step_cost import CostModel
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.planning.memory_plan import all_states
from penstock.types import (
    NO_CLAIM,
    Aborted,
    Claim,
    DraftCounts,
    Event,
    Finished,
    Limits,
    Request,
    SamplingParams,
    Tokens,
    blocks_for,
)
from tests.engine.guesses import RandomDrafting
from tests.examples import examples

VOCAB = 97  # small, so that stop tokens are met
WINDOWS = ((0,), (0,), (0, 5), (0, 8, 8), (0, 0, 3, 17), (4,), (6, 1))


@dataclass(frozen=True)
class Arrival:
    at: int  # the step before which it comes
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    priority: int
    salt: str
    score: bool
    penalty: float
    pooling: str
    background: bool
    abort_at: int | None
    speculation: int | None = None
    claim: Claim = NO_CLAIM


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    end: Event | None = None


@st.composite
def arrivals(draw: st.DrawFn, max_len: int) -> Arrival:
    shared = draw(st.sampled_from([(), (1, 2, 3), tuple(range(20)), tuple(range(50)), (5,) * 33]))
    others = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
    own = draw(st.one_of(others, st.sampled_from([list(range(20, 32)), list(range(20, 40)), [5] * 3, [4]])))
    prompt = (*shared, *own)[: max_len - 1]
    pooling = draw(st.sampled_from(["", "", "", "mean", "last"]))
    return Arrival(
        at=draw(st.integers(0, 12)),
        prompt=prompt,
        max_tokens=0 if pooling else draw(st.integers(0, min(40, max_len - len(prompt)))),
        stop_ids=frozenset(draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))),
        priority=draw(st.sampled_from([0, 0, 0, 1])),
        salt=draw(st.sampled_from(["", "", "tenant"])),
        score=not pooling and draw(st.sampled_from([False, False, False, True])),
        penalty=draw(st.sampled_from([0.0, 0.0, 0.5])),
        pooling=pooling,
        background=draw(st.sampled_from([False, False, True])),
        abort_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
        speculation=draw(st.sampled_from([None, None, 0, 3])),
        claim=draw(st.sampled_from([NO_CLAIM, NO_CLAIM, Claim("one"), Claim("two", 3.0)])),
    )


World = tuple[Limits, int, list[Arrival]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    windows = draw(st.sampled_from(WINDOWS))
    num_blocks = draw(st.integers(blocks_for(2, windows, block_size), 40 * len(windows)))
    max_rows = draw(st.integers(1, 8))
    limits = Limits(
        max_len=max(n for n in range(2, 101) if blocks_for(n, windows, block_size) <= num_blocks),
        max_rows=max_rows,
        step_tokens=draw(st.integers(max_rows, 64)),
        block_size=block_size,
        num_blocks=num_blocks,
        vocab=VOCAB,
        prefill_budget=draw(st.sampled_from([0, 1, 5, 20])),
        states=draw(st.sampled_from([0, 0, 1, 2, 3, 20])),
        windows=windows,
        host_places=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 30])),
        host_states=draw(st.sampled_from([0, 1, 2, 10])),
    )
    depth = draw(st.sampled_from([0, 1, 2]))
    requests = draw(st.lists(arrivals(limits.max_len), min_size=1, max_size=10))
    if windows[0]:  # the fake pools what layers see that see everything
        requests = [replace(request, pooling="") for request in requests]
    return limits, depth, requests


class Shuffles(StandardPolicy):
    """Orders sequences at random, gives turns at random for some steps, takes any of those allowed as a victim, and
    lets sequences start that will find too few blocks."""

    def __init__(self, limits: Limits, random: Random) -> None:
        super().__init__(limits)
        self.steps = 60
        self._random = Random(random.randrange(2**32))  # draws too often for Hypothesis to choose each number
        self._places: dict[int, int] = {}

    def budget(self, running: Line[Sequence], heads: Line[Sequence]) -> StepBudget:
        self.steps -= 1
        return super().budget(running, heads)

    def order(self, seq: Sequence) -> tuple[int, int]:
        return (self._places.setdefault(seq.standing.arrival, self._random.randrange(8)), seq.standing.arrival)

    def turn(self, seq: Sequence) -> Any:
        return self._random.randrange(8) if self.steps > 0 else super().turn(seq)

    def victim(self, behind: Line[Sequence], places: int = 0) -> Sequence:
        return self._random.choice(behind)

    def fits(self, seq: Sequence, room: Room, running: Line[Sequence]) -> bool:
        return not running or room.available >= room.needed + room.reserved + (len(running) + 1) * room.groups

    def displaced(self, seq: Sequence, running: Line[Sequence], places: int = 0) -> Sequence | None:
        return self._random.choice([None, *running]) if self.steps > 0 else super().displaced(seq, running)


class Unmeasured(CostModel):
    """Never knows what prompts cost, so that every copy to and from the host is made that is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts.FEW = 10**9  # type: ignore[misc]


def drive(
    limits: Limits,
    depth: int,
    requests: list[Arrival],
    policy: Policy | None = None,
    drafting: RandomDrafting | None = None,
) -> tuple[Engine, list[Answer]]:
    backend = FakeBackend(limits.vocab, limits.max_rows, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
    engine = assemble(backend, limits, depth=depth, policy=policy, drafting=drafting, costs=Unmeasured())
    answers = [Answer() for _ in requests]
    work = sum(len(r.prompt) + r.max_tokens for r in requests)
    step = 0
    while step <= 40 or not engine.idle:
        for id, request in enumerate(requests):
            if request.at == step:
                engine.add(
                    Request(
                        id,
                        request.prompt,
                        SamplingParams(
                            temperature=0,
                            presence_penalty=request.penalty,
                            prompt_logprobs=0 if request.score else None,
                        ),
                        request.max_tokens,
                        request.stop_ids,
                        request.priority,
                        request.salt,
                        request.pooling,
                        background=request.background,
                        speculation=request.speculation,
                        claim=request.claim,
                    )
                )
            if request.abort_at == step:
                engine.abort(id)
        for event in engine.step():
            note(answers[event.seq], event)
        check(engine.scheduler)
        step += 1
        assert step < 60 + 20 * work, "no end in sight: the scheduler is going round in circles"
    return engine, answers


def note(answer: Answer, event: Event) -> None:
    assert answer.end is None, f"{event} after {answer.end}"
    if isinstance(event, Tokens):
        answer.tokens += event.tokens
        answer.scores += [(score.token, score.logprob) for score in event.scores]
    else:
        answer.end = event


def alone(request: Arrival, limits: Limits) -> tuple[list[int], str]:
    if request.pooling:
        return [], "pooled"
    tokens = continuation(request.prompt, request.max_tokens, VOCAB, limits.states > 0, limits.windows)
    for count, token in enumerate(tokens, 1):
        if token in request.stop_ids:
            return tokens[:count], "stop"
    return tokens, "length"


def encoding(world: World) -> World:
    """Returns the world of an encoder: all requests want embeddings, and a prompt is computed in one step."""
    limits, depth, requests = world
    max_len = min(limits.max_len, limits.step_tokens)
    num_blocks = max(limits.num_blocks, blocks_for(max_len, limits.windows, limits.block_size, max_len))
    limits = limits._replace(encoder=True, max_len=max_len, num_blocks=num_blocks)
    kinds = ("mean", "last", "cls")
    return (
        limits,
        depth,
        [
            replace(each, prompt=each.prompt[: limits.max_len], max_tokens=0, score=False, pooling=kinds[each.at % 3])
            for each in requests
        ],
    )


def following(context: tuple[int, ...], limits: Limits) -> int:
    return (next_token(context, VOCAB, limits.windows) + (gathered(context) if limits.states else 0)) % VOCAB


@settings(max_examples=examples(400))
@given(worlds())
def test_each_request_answers_as_if_alone(world: World) -> None:
    run_world(world)


@settings(max_examples=examples(100))
@given(worlds(), st.randoms(use_true_random=False))
def test_each_request_answers_as_if_alone_while_the_order_changes(world: World, random: Random) -> None:
    run_world(world, Shuffles(world[0], random))


@settings(max_examples=examples(100))
@given(worlds().filter(lambda world: not world[0].windows[0]).map(encoding))
def test_each_text_of_an_encoder_answers_as_if_alone(world: World) -> None:
    stats = run_world(world).stats()
    assert stats.cached_tokens == stats.blocks_cached == 0


@settings(max_examples=examples(300))
@given(worlds(), st.randoms(use_true_random=False))
def test_each_request_answers_as_if_alone_whatever_is_drafted(world: World, random: Random) -> None:
    limits, _, requests = world
    drafting = RandomDrafting(lambda request: beyond(request, limits), VOCAB, random)
    stats = run_world(world, Shuffles(limits, random), drafting).stats()
    drafts = stats.drafts or (DraftCounts("context"),)
    assert [counts.source for counts in drafts] == ["context"]
    assert 0 <= drafts[0].accepted <= drafts[0].drafted
    assert any(request.speculation != 0 for request in requests) or not drafts[0].drafted


def beyond(request: Request, limits: Limits) -> list[int]:
    """Returns how a request goes on, and how it would go on behind its end."""
    return continuation(request.prompt, request.max_tokens + 9, VOCAB, limits.states > 0, limits.windows)


def run_world(world: World, policy: Policy | None = None, drafting: RandomDrafting | None = None) -> Engine:
    limits, depth, requests = world
    engine, answers = drive(limits, depth, requests, policy, drafting)
    for request, answer in zip(requests, answers, strict=True):
        tokens, reason = alone(request, limits)
        if isinstance(answer.end, Finished):
            assert answer.tokens == tokens
            assert answer.end.reason == reason
            assert answer.end.pooled == (pooled(request.prompt, request.pooling, VOCAB) if request.pooling else b"")
        else:
            assert isinstance(answer.end, Aborted), f"ended with {answer.end}"
            assert answer.tokens == tokens[: len(answer.tokens)]
        expected = [
            (request.prompt[i], -float(following(request.prompt[:i], limits))) for i in range(1, len(request.prompt))
        ]
        if request.score and isinstance(answer.end, Finished):
            assert answer.scores == expected
        elif not request.score:
            assert not answer.scores
    stats = engine.stats()
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == limits.num_blocks
    assert stats.running == stats.waiting == 0
    return engine
