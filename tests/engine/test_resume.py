"""An answer that is cut at any token and resumed by another engine is the answer without the cut: the same tokens,
logprobs, scores and end, however it is sampled, constrained and drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend, continuation
from penstock.core import check
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Grammars
from penstock.errors import InvalidRequest
from penstock.ipc import wire
from penstock.ipc.request_journal import RequestJournal
from penstock.model.load import load_model
from penstock.types import (
    Event,
    Failed,
    Finished,
    Grammar,
    Limits,
    Request,
    SamplerChain,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from penstock.types.messages import Add
from tests.engine.guesses import RandomDrafting
from tests.engine.test_grammar import END, JSON, Babble, Bytes
from tests.engine.test_grammar import LIMITS as BABBLE_LIMITS
from tests.engine.test_speculation import CHECKPOINT, GRAMMARS, LIMITS, PROMPT, STEERED

Open = Callable[..., Engine]


class Answer(NamedTuple):
    """Holds what an engine has said to a request, with what a client must keep to have it resumed."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    end: tuple[Any, ...] = ()
    forced: int = 0
    mus: tuple[float | None, ...] = ()  # after each token

    def plus(self, event: Event) -> Answer:
        if isinstance(event, Tokens):
            return self._replace(
                tokens=self.tokens + event.tokens,
                logprobs=self.logprobs + event.logprobs,
                scores=self.scores + event.scores,
                mus=self.mus + (event.mirostat_mu,) * len(event.tokens),
            )
        assert isinstance(event, Finished), event
        assert event.report is not None
        return self._replace(end=event[1:4], forced=event.report.forced)

    def cut(self, tokens: int, scores: int) -> Answer:
        """Returns what came before the cut. Scores come before the first token."""
        scores = len(self.scores) if tokens else scores
        before = self.tokens[:tokens], self.logprobs[:tokens], self.scores[:scores]
        return Answer(*before, mus=self.mus[:tokens])

    def joined(self, rest: Answer) -> Answer:
        pairs = zip(self, rest, strict=True)
        tokens, logprobs, scores, end, _, mus = (before + after for before, after in pairs)
        return Answer(tokens, logprobs, scores, end, rest.forced, mus)


def resumed(request: Request, before: Answer) -> Request:
    """Returns the request for the rest of an answer, as it comes out of the wire."""
    journal = RequestJournal(request)
    journal.note(Tokens(request.id, before.tokens, (), before.scores, 0, before.mus[-1] if before.mus else None))
    request = journal.so_far()
    arrived = wire.decode_message(wire.encode_message(Add(request)))
    assert arrived == Add(request)
    return arrived.request


def answers(engine: Engine, asked: Sequence[Request]) -> dict[int, Answer]:
    for request in asked:
        engine.add(request)
    said = {request.id: Answer() for request in asked}
    while not engine.idle:
        for event in engine.step():
            said[event.seq] = said[event.seq].plus(event)
        check(engine.scheduler)
    assert engine.stats().blocks_used == 0
    return said


def check_cuts(open: Open, vocab: int, asked: list[Request], rounds: int, depth: int = 0) -> None:
    """Cuts all answers at random places, in one engine after another, with drafts and without."""
    whole = answers(open(depth=depth), asked)
    random = Random(len(asked))
    for number in range(rounds):
        before = {id: said.cut(*_place(random, said)) for id, said in whole.items()}
        drafting = RandomDrafting(lambda request: whole[request.id].tokens, vocab, random) if number % 2 else None
        second = open(depth=depth, drafting=drafting)
        after = answers(second, [resumed(request, before[request.id]) for request in asked])
        for request in asked:
            joined = before[request.id].joined(after[request.id])
            assert joined[:-1] == whole[request.id][:-1], (request, len(before[request.id].tokens))


def _place(random: Random, said: Answer) -> tuple[int, int]:
    tokens = random.choice([random.randint(0, len(said.tokens)), random.randint(0, 3), len(said.tokens)])
    return min(tokens, len(said.tokens)), random.randint(0, len(said.scores))


# -- sampling -----------------------------------------------------------------------------------------------------


def computing(depth: int = 0, drafting: Any = None) -> Engine:
    backend = CpuBackend(1)
    backend.load(load_model(CHECKPOINT, backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS, depth=depth, drafting=drafting)


def steered() -> list[Request]:
    kinds = [*STEERED, {"chain": SamplerChain(mirostat=1)}, {"chain": SamplerChain(xtc_probability=0.5), "top_k": 9}]
    kinds += [{"prompt_logprobs": 1}, {"prompt_logprobs": 2, "logprobs": 2, "temperature": 0.0}]
    return [
        Request(
            id,
            (*PROMPT, *range(3, 3 + id % 31)),
            SamplingParams(**{"seed": id} | params),
            24,
            stop_ids=frozenset({id % 11 + 20}) if id % 2 else frozenset(),
            bad_words=((id % 13 + 3, id % 5 + 3),) if id % 3 else (),
            prediction=(5, 9, 3) if id % 4 else (),
        )
        for id, params in enumerate(kinds * 2, 1)
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_however_answers_are_sampled(depth: int) -> None:
    check_cuts(computing, LIMITS.vocab, steered(), rounds=6, depth=depth)


# -- constraints --------------------------------------------------------------------------------------------------


def babbling(depth: int = 0, drafting: Any = None) -> Engine:
    backend = Babble()
    backend.reserve_kv(BABBLE_LIMITS.num_blocks, BABBLE_LIMITS.block_size)
    grammars = Grammars(Bytes, BABBLE_LIMITS.vocab)
    return assemble(backend, BABBLE_LIMITS, depth=depth, drafting=drafting, grammars=grammars)


def constrained() -> list[Request]:
    settings: list[dict[str, Any]] = [
        {},
        {"logprobs": 1},
        {"temperature": 0.0, "min_tokens": 9},
        {"frequency_penalty": 1.0, "max_tokens": 7},
    ]
    asked = []
    for id, (grammar, params) in enumerate([(grammar, params) for grammar in GRAMMARS for params in settings], 1):
        params = {name: value for name, value in params.items() if not (name == "logprobs" and grammar.thinking)}
        sampling = SamplingParams(**{"seed": id, "grammar": grammar} | params)
        most = params.get("max_tokens", 120)
        asked.append(Request(id, tuple(range(id % 5 + 1)), sampling, most, stop_ids=frozenset({END})))
    return asked


@pytest.mark.parametrize("depth", [0, 1])
def test_however_answers_are_constrained(depth: int) -> None:
    check_cuts(babbling, BABBLE_LIMITS.vocab, constrained(), rounds=6, depth=depth)


def test_a_cut_within_forced_tokens_is_followed_by_the_rest_of_them() -> None:
    asked = Request(1, (1,), SamplingParams(grammar=Grammar("lark", 'start: "ab" "cdefgh"')), 20, frozenset({END}))
    whole = answers(babbling(), [asked])[1]
    for cut in range(len(whole.tokens) + 1):
        again = babbling()
        before = whole.cut(cut, 0)
        rest = answers(again, [resumed(asked, before)])[1]
        assert before.joined(rest)[:-1] == whole[:-1]
        assert sum(again.stats().step_sizes) <= 2


def test_tokens_that_the_grammar_never_forced_are_refused() -> None:
    engine = babbling()
    engine.add(Request(1, (1,), SamplingParams(grammar=JSON), 50, frozenset({END}), generated=tuple(b'{"nope')))
    (failed,) = [event for _ in range(200) for event in engine.step()]
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_grammar"


# -- the core -----------------------------------------------------------------------------------------------------

FAKE = Limits(max_len=64, max_rows=3, step_tokens=8, block_size=4, num_blocks=24, vocab=100)


def fake(**changed: Any) -> Engine:
    backend = FakeBackend(FAKE.vocab)
    backend.reserve_kv(FAKE.num_blocks, FAKE.block_size)
    return assemble(backend, FAKE, **changed)


@pytest.mark.usefixtures("overcommitted")
def test_resumed_answers_survive_preemption_and_share_prefixes() -> None:
    prompts = [(1, 2, 3, 4, 5, 6, 7, 8, id % 3) for id in range(12)]
    asked = [
        Request(
            id,
            prompt,
            SamplingParams(temperature=0.0),
            40,
            generated=tuple(continuation(prompt, 3 * id, FAKE.vocab)),
        )
        for id, prompt in enumerate(prompts)
    ]
    engine = fake(depth=1)
    said = answers(engine, asked)
    for request in asked:
        assert request.generated + said[request.id].tokens == tuple(continuation(request.prompt, 40, FAKE.vocab))
        assert said[request.id].end == ("length", None, b"")
    assert engine.stats().cached_tokens > 0
    assert engine.stats().generated_tokens == sum(40 - len(request.generated) for request in asked)


def test_more_than_the_answer_may_have_ends_it() -> None:
    prompt = (1, 2)
    request = Request(1, prompt, SamplingParams(temperature=0.0), 5, generated=tuple(continuation(prompt, 5, 100)))
    assert answers(fake(), [request])[1] == Answer(end=("length", None, b""))


def test_generated_ids_that_no_token_has_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="from 0 to 99"):
        fake().add(Request(1, (1,), SamplingParams(), 5, generated=(100,)))


# -- loops --------------------------------------------------------------------------------------------------------

LOOPING = Limits(max_len=4096, max_rows=4, step_tokens=64, block_size=16, num_blocks=1024, vocab=1)  # all is token 0
GREEDY = SamplingParams(temperature=0.0, seed=1)


def looping(depth: int = 0, drafting: Any = None) -> Engine:
    backend = FakeBackend(LOOPING.vocab)
    backend.reserve_kv(LOOPING.num_blocks, LOOPING.block_size)
    return assemble(backend, LOOPING, depth=depth, drafting=drafting)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_loop_ends_where_it_would_without_the_cut(depth: int) -> None:
    asked = [Request(id, (0,) * id, GREEDY, 1500) for id in (1, 2, 3)]
    assert {len(said.tokens) for said in answers(looping(depth), asked).values()} == {1024}
    check_cuts(looping, LOOPING.vocab, asked, rounds=4, depth=depth)


@pytest.mark.parametrize(
    "params", [{"loop_guard": False}, {"ignore_eos": True}, {"min_tokens": 1090}, {"temperature": 0.5}]
)
def test_a_request_may_want_its_loop(params: dict[str, Any]) -> None:
    asked = Request(1, (0,), SamplingParams(**{"temperature": 0.0, "seed": 1} | params), 1100)
    assert len(answers(looping(), [asked])[1].tokens) == 1100
