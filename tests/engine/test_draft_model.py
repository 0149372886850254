"""A draft model drafts over the target's KV blocks, and answers stay what they are without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.backend.base import Batch, Bitmasks, Ticket
from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend, continuation
from penstock.core import check
from penstock.core.drafting.depths import DepthPlan, DraftDepths
from penstock.core.drafting.lengths import Proposal
from penstock.engine.assemble import assemble
from penstock.engine.drafts.draft_model import DraftModel
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Grammars
from penstock.model.load import load_model, open_checkpoint
from penstock.types import Aborted, DraftCounts, Finished, Limits, Request, SamplingParams, StepResult, Tokens
from tests.engine.test_grammar import Babble, Bytes
from tests.engine.test_speculation import (
    BABBLE_LIMITS,
    CHECKPOINT,
    STEERED,
    babbling,
    constrained,
    requests,
    run,
    sorted_out,
)
from tests.engine.test_speculation import LIMITS as GOLDEN_LIMITS
from tests.engine.test_speculation import engine as golden_engine

VOCAB = 1000
LIMITS = Limits(max_len=160, max_rows=6, step_tokens=48, block_size=4, num_blocks=64, vocab=VOCAB)
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"


class RandomDepths(DraftDepths):
    """Chooses random depths."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def choose(self, chances: Sequence[Sequence[float]], *_: Any) -> DepthPlan:
        return DepthPlan([self._random.randint(0, len(chance)) for chance in chances], self._random.choice((0.0, 0.3)))


class RandomLengths(Drafting):
    """Has steps verify random lengths of what is proposed."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        lengths = []
        for proposal in proposals:
            lengths.append(self._random.randint(0, min(len(proposal.tokens), budget)))
            budget -= lengths[-1]
        return lengths


class FixedDepths(DraftDepths):
    """Takes every draft step for one of 0.05 s."""

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        super().observe(rows, tokens, 0.05)


class FixedCosts(Drafting):
    """Takes every step for one of a second, and a tenth more for each drafted token."""

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        super().observe(rows, tokens, 1 + 0.1 * (tokens - rows))


class OftenRight(FakeBackend):
    """Has a program 1 that answers what program 0 does in the given share of all cases, if its KV is right."""

    def __init__(self, share: float, windows: Sequence[int] = (0,)) -> None:
        super().__init__(VOCAB, windows=windows)
        self._share, self._random = share, Random(5)
        self.drafted = self.right = self.prompt_tokens = 0
        self.load(None, 1)  # type: ignore[arg-type]

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        result = super()._compute(batch, masks)
        if not batch.program:
            return result
        self.prompt_tokens += len(batch.tokens) - len(batch.slots)
        rows = []
        for slot, row in zip(batch.slots, result.rows, strict=True):
            right = self._random.random() < self._share
            self.drafted += len(row.tokens)
            self.right += right and len(row.tokens)
            rows.append(row._replace(tokens=tuple((token - right) % VOCAB for token in row.tokens)))
            self._programs[1]._last[slot] = rows[-1].tokens[-1] if row.tokens else -1
        return StepResult(result.step, tuple(rows))


def fake_engine(
    limits: Limits, share: float = 0.8, random: Random | None = None, depth: int = 0
) -> tuple[Engine, OftenRight]:
    """Returns an engine that drafts what pays with fixed costs or, if `random` is given, at random. It has `depth`
    steps in flight."""
    backend = OftenRight(share, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    depths, drafting = (RandomDepths(random), RandomLengths(random)) if random else (FixedDepths(), FixedCosts())
    model = DraftModel(backend, limits, limits.max_len, depths=depths, group=limits.windows.index(0), depth=depth)
    return assemble(backend, limits, depth=depth, drafting=drafting, draft_model=model), backend


def prompts(random: Random, count: int) -> list[list[int]]:
    """Returns prompts of which many share a beginning."""
    shared = [random.randrange(VOCAB) for _ in range(40)]
    return [
        shared[: random.choice((0, 10, 24, 40))] + [random.randrange(VOCAB) for _ in range(random.randint(1, 30))]
        for _ in range(count)
    ]


def answer_all(engine: Engine, random: Random, windows: Sequence[int]) -> None:
    """Asks for many answers at once, of which some stop and some are aborted, and checks each."""
    asked = {}
    for id, prompt in enumerate(prompts(random, 40)):
        count = random.randint(1, 60)
        right = continuation(prompt, count, VOCAB, windows=windows)
        stops = frozenset({random.choice(right)}) if random.random() < 0.3 else frozenset[int]()
        asked[id] = Request(id, tuple(prompt), SamplingParams(temperature=0.0), count, stop_ids=stops)
    waiting, said, ended = list(asked.values()), {id: list[int]() for id in asked}, dict[int, Any]()
    aborted = set(random.sample(sorted(asked), 6))
    while waiting or not engine.idle:
        for _ in range(min(random.randint(0, 4), len(waiting))):
            engine.add(waiting.pop(0))
        for event in engine.step():
            if isinstance(event, Tokens):
                said[event.seq] += event.tokens
                if event.seq in aborted and len(said[event.seq]) > 5:
                    engine.abort(event.seq)
            else:
                ended[event.seq] = event
        check(engine.scheduler)
    assert ended.keys() == asked.keys()
    for id, request in asked.items():
        right = continuation(request.prompt, request.max_tokens, VOCAB, windows=windows)
        stop = next((at + 1 for at, token in enumerate(right) if token in request.stop_ids), len(right))
        if isinstance(ended[id], Aborted):
            assert said[id] == right[: len(said[id])]
        else:
            assert isinstance(ended[id], Finished)
            assert said[id] == right[:stop]


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize(
    ("num_blocks", "windows", "depth"),
    [(44, (0,), 0), (44, (6, 0), 0), (200, (6, 0), 0), (200, (0,), 0), (44, (0,), 1)],
)
def test_answers_stay_under_preemption_sharing_stops_and_aborts(
    num_blocks: int, windows: tuple[int, ...], depth: int
) -> None:
    random = Random(num_blocks)
    limits = LIMITS._replace(num_blocks=num_blocks * len(windows), windows=windows)
    engine, backend = fake_engine(limits, random=random, depth=depth)
    answer_all(engine, random, windows)
    counts = {each.source: each for each in engine.stats().drafts}
    assert counts["model"].drafted > 100
    if windows == (0,):  # the draft model has none, so it cannot be right for a target with some
        assert backend.right > 0.75 * backend.drafted
        assert counts["model"].accepted > counts["model"].drafted / 3


def ask(engine: Engine, id: int, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the answer to a prompt."""
    engine.add(Request(id, tuple(prompt), SamplingParams(temperature=0.0), count))
    events = []
    while not engine.idle:
        events += engine.step()
        check(engine.scheduler)
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def model_counts(engine: Engine) -> DraftCounts:
    """Returns what the draft model has drafted."""
    return next((each for each in engine.stats().drafts if each.source == "model"), DraftCounts("model"))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_that_is_right_saves_steps(depth: int) -> None:
    engine, _ = fake_engine(LIMITS, share=1.0, depth=depth)
    assert ask(engine, 1, range(20), 100) == continuation(range(20), 100, VOCAB)
    counts = model_counts(engine)
    assert counts.accepted == counts.drafted > 60
    assert engine.stats().steps < 50


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_that_is_wrong_is_hardly_asked(depth: int) -> None:
    engine, backend = fake_engine(LIMITS._replace(max_len=600, num_blocks=300), share=0.0, depth=depth)
    assert ask(engine, 1, range(20), 300) == continuation(range(20), 300, VOCAB)
    first = backend.drafted
    assert ask(engine, 2, range(30), 500) == continuation(range(30), 500, VOCAB)
    assert 0 < backend.drafted - first < 60
    assert 10 < first < 60 + 20 * depth


def test_a_shared_prefix_is_computed_once_for_all_who_share_it() -> None:
    engine, backend = fake_engine(LIMITS._replace(num_blocks=200), share=1.0)
    prompt = list(range(60))
    ask(engine, 1, prompt, 30)
    first = backend.prompt_tokens
    ask(engine, 2, [*prompt, 7], 30)
    assert first >= 56
    assert backend.prompt_tokens - first < 20
    assert model_counts(engine).accepted == model_counts(engine).drafted


def test_a_long_prompt_is_computed_in_chunks() -> None:
    limits = LIMITS._replace(num_blocks=200, step_tokens=16)
    engine, backend = fake_engine(limits, share=1.0)
    longest = 0
    launch = backend.launch

    def launched(batch: Batch) -> Ticket:
        nonlocal longest
        longest = max(longest, len(batch.tokens))
        return launch(batch)

    backend.launch = launched  # type: ignore[method-assign]
    assert ask(engine, 1, range(100), 50) == continuation(range(100), 50, VOCAB)
    assert longest <= 16
    assert model_counts(engine).accepted > 20


def test_the_draft_models_own_context_ends_its_drafts() -> None:
    backend = OftenRight(1.0)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    model = DraftModel(backend, LIMITS, 64, depths=FixedDepths())
    engine = assemble(backend, LIMITS, drafting=FixedCosts(), draft_model=model)
    positions: list[int] = []
    compute = backend._compute

    def computed(batch: Batch, masks: Bitmasks | None) -> StepResult:
        positions.extend(batch.positions.tolist() if batch.program else ())
        return compute(batch, masks)

    backend._compute = computed  # type: ignore[method-assign]
    assert ask(engine, 1, range(20), 120) == continuation(range(20), 120, VOCAB)
    assert 55 < max(positions) < 64


def test_a_draft_model_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    engine, backend = fake_engine(LIMITS, share=1.0)
    compute = backend._compute

    def failing(batch: Batch, masks: Bitmasks | None) -> StepResult:
        if batch.program:
            raise RuntimeError("no luck")
        return compute(batch, masks)

    backend._compute = failing  # type: ignore[method-assign]
    assert ask(engine, 1, range(20), 60) == continuation(range(20), 60, VOCAB)
    assert [record.getMessage() for record in caplog.records] == [
        "the draft model failed and is not used any more: no luck"
    ]


# -- real models --------------------------------------------------------------------------------------------------


def golden_pair(draft: str) -> Engine:
    backend = CpuBackend(1)
    backend.load(load_model(CHECKPOINT, backend))
    backend.load(load_model(open_checkpoint(GOLDENS / draft), backend), 1)
    backend.reserve_kv(GOLDEN_LIMITS.num_blocks, GOLDEN_LIMITS.block_size)
    random = Random(9)
    model = DraftModel(backend, GOLDEN_LIMITS, GOLDEN_LIMITS.max_len, depths=RandomDepths(random))
    return assemble(backend, GOLDEN_LIMITS, drafting=RandomLengths(random), draft_model=model)


@pytest.mark.parametrize("draft", ["llama3", "untied"])
def test_however_answers_are_sampled(draft: str) -> None:
    """A draft model that is its target draws what the target does, so that all of its drafts are accepted."""
    plain, _ = run(golden_engine(), requests())
    engine = golden_pair(draft)
    drafted, reports = run(engine, requests())
    for id in plain:
        assert sorted_out(drafted[id]) == sorted_out(plain[id]), STEERED[id % len(STEERED)]
    for id, report in reports.items():
        counts = [each for each in report.drafts if each.source == "model"]
        if draft == "llama3" and "mirostat=2" not in str(STEERED[id % len(STEERED)]):
            assert sum(each.drafted for each in counts) == sum(each.accepted for each in counts) > 0
    assert 0 < model_counts(engine).accepted <= model_counts(engine).drafted


@pytest.mark.parametrize("logprobs", [None, 1])
def test_however_answers_are_constrained(logprobs: int | None) -> None:
    """What Babble says depends on the place and the grammar alone, so all drafts that know the grammar are right."""
    plain, _ = run(babbling(), constrained(logprobs))
    random, backend = Random(4), Babble()
    backend.load(None, 1)  # type: ignore[arg-type]
    backend.reserve_kv(BABBLE_LIMITS.num_blocks, BABBLE_LIMITS.block_size)
    model = DraftModel(backend, BABBLE_LIMITS, BABBLE_LIMITS.max_len, depths=RandomDepths(random))
    grammars = Grammars(Bytes, BABBLE_LIMITS.vocab)
    engine = assemble(backend, BABBLE_LIMITS, drafting=RandomLengths(random), draft_model=model, grammars=grammars)
    drafted, _ = run(engine, constrained(logprobs))
    for id in plain:
        assert sorted_out(drafted[id]) == sorted_out(plain[id]), id
    assert model_counts(engine).accepted == model_counts(engine).drafted > 300
