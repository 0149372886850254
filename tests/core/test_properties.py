"""The engine without a model: random arrivals, prefixes, aborts, pools and budgets against a backend that cannot be
fooled. Each request must answer as if it ran alone, and the invariants must hold after every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backend.fake import FakeBackend, continuation, gathered, next_token, pooled
from penstock.core import check
from penstock.engine.engine import Engine
from penstock.planning.memory_plan import all_states
from penstock.types import Aborted, Event, Finished, Limits, Request, SamplingParams, Tokens

VOCAB = 97  # small, so that stop tokens are met


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
    abort_at: int | None


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
        abort_at=draw(st.one_of(st.none(), st.none(), st.integers(0, 40))),
    )


World = tuple[Limits, int, list[Arrival]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_blocks = draw(st.integers(2, 40))
    max_rows = draw(st.integers(1, 8))
    limits = Limits(
        max_len=min(num_blocks * block_size, 100),
        max_rows=max_rows,
        step_tokens=draw(st.integers(max_rows, 64)),
        block_size=block_size,
        num_blocks=num_blocks,
        vocab=VOCAB,
        prefill_budget=draw(st.sampled_from([0, 1, 5, 20])),
        states=draw(st.sampled_from([0, 0, 1, 2, 3, 20])),
    )
    depth = draw(st.sampled_from([0, 1, 2]))
    return limits, depth, draw(st.lists(arrivals(limits.max_len), min_size=1, max_size=10))


def drive(limits: Limits, depth: int, requests: list[Arrival]) -> tuple[Engine, list[Answer]]:
    backend = FakeBackend(limits.vocab, limits.max_rows)
    backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
    engine = Engine(backend, limits, depth=depth)
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
                    )
                )
            if request.abort_at == step:
                engine.abort(id)
        for event in engine.step():
            note(answers[event.seq], event)
        check(engine._scheduler)
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


def alone(request: Arrival, stateful: bool) -> tuple[list[int], str]:
    if request.pooling:
        return [], "pooled"
    tokens = continuation(request.prompt, request.max_tokens, VOCAB, stateful)
    for count, token in enumerate(tokens, 1):
        if token in request.stop_ids:
            return tokens[:count], "stop"
    return tokens, "length"


def encoding(world: World) -> World:
    """The same, where embeddings are all there is and a prompt is computed in one step."""
    limits, depth, requests = world
    limits = limits._replace(encoder=True, max_len=min(limits.max_len, limits.step_tokens))
    kinds = ("mean", "last", "cls")
    return (
        limits,
        depth,
        [
            replace(each, prompt=each.prompt[: limits.max_len], max_tokens=0, score=False, pooling=kinds[each.at % 3])
            for each in requests
        ],
    )


def following(context: tuple[int, ...], stateful: bool) -> int:
    return (next_token(context, VOCAB) + (gathered(context) if stateful else 0)) % VOCAB


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_each_request_answers_as_if_alone(world: World) -> None:
    run_world(world)


@settings(max_examples=100, deadline=None)
@given(worlds().map(encoding))
def test_each_text_of_an_encoder_answers_as_if_alone(world: World) -> None:
    stats = run_world(world).stats()
    assert stats.cached_tokens == stats.blocks_cached == 0


def run_world(world: World) -> Engine:
    limits, depth, requests = world
    engine, answers = drive(limits, depth, requests)
    for request, answer in zip(requests, answers, strict=True):
        tokens, reason = alone(request, limits.states > 0)
        if isinstance(answer.end, Finished):
            assert answer.tokens == tokens
            assert answer.end.reason == reason
            assert answer.end.pooled == (pooled(request.prompt, request.pooling, VOCAB) if request.pooling else b"")
        else:
            assert isinstance(answer.end, Aborted), f"ended with {answer.end}"
            assert answer.tokens == tokens[: len(answer.tokens)]
        expected = [
            (request.prompt[i], -float(following(request.prompt[:i], limits.states > 0)))
            for i in range(1, len(request.prompt))
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
