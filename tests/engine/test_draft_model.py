"""A draft model drafts over the target's KV blocks, and answers stay what they are without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.backend.base import Batch, Bitmasks
from penstock.backend.fake import FakeBackend, continuation
from penstock.core import check
from penstock.core.draft_depths import DraftDepths
from penstock.core.speculation import Proposal
from penstock.engine.draft_model import DraftModel
from penstock.engine.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.types import Aborted, Finished, Limits, Request, SamplingParams, StepResult, Tokens

VOCAB = 1000
LIMITS = Limits(max_len=160, max_rows=6, step_tokens=48, block_size=4, num_blocks=64, vocab=VOCAB)
GOLDENS = Path(__file__).parents[1] / "models" / "goldens"


class RandomDepths(DraftDepths):
    """Chooses random depths."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def choose(self, chances: Sequence[Sequence[float]], *_: Any) -> list[int]:
        return [self._random.randint(0, len(chance)) for chance in chances]


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
        for row in result.rows:
            right = self._random.random() < self._share
            self.drafted += len(row.tokens)
            self.right += right and len(row.tokens)
            rows.append(row._replace(tokens=tuple((token - right) % VOCAB for token in row.tokens)))
        return StepResult(result.step, tuple(rows))


def fake_engine(limits: Limits, share: float = 0.8, random: Random | None = None) -> tuple[Engine, OftenRight]:
    """Returns an engine that drafts as pays or, if `random` is given, at random."""
    backend = OftenRight(share, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    depths, drafting = (RandomDepths(random), RandomLengths(random)) if random else (None, Drafting())
    model = DraftModel(backend, limits, limits.max_len, depths=depths, group=limits.windows.index(0))
    return Engine(backend, limits, drafting=drafting, draft_model=model), backend


def prompts(random: Random, count: int) -> list[list[int]]:
    """Returns prompts of which many share a beginning."""
    shared = [random.randrange(VOCAB) for _ in range(40)]
    return [
        shared[: random.choice((0, 10, 24, 40))] + [random.randrange(VOCAB) for _ in range(random.randint(1, 30))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("windows", [(0,), (6, 0)])
@pytest.mark.parametrize("num_blocks", [44, 200])
def test_answers_stay_under_preemption_sharing_stops_and_aborts(windows: tuple[int, ...], num_blocks: int) -> None:
    random = Random(num_blocks)
    limits = LIMITS._replace(num_blocks=num_blocks * len(windows), windows=windows)
    engine, backend = fake_engine(limits, random=random)
    asked = {}
    for id, prompt in enumerate(prompts(random, 40)):
        count = random.randint(1, 60)
        right = continuation(prompt, count, VOCAB, windows=windows)
        stops = frozenset({random.choice(right)}) if random.random() < 0.3 else frozenset[int]()
        asked[id] = Request(id, tuple(prompt), SamplingParams(temperature=0.0), count, stop_ids=stops)
    waiting, said, ended = list(asked.values()), {id: list[int]() for id in asked}, dict[int, Any]()
    aborted = set(random.sample(sorted(asked), 6))
    while waiting or not engine.idle:
        for request in waiting[: random.randint(0, 4)]:
            engine.add(waiting.pop(0)) if request else None
        for event in engine.step():
            if isinstance(event, Tokens):
                said[event.seq] += event.tokens
                if event.seq in aborted and len(said[event.seq]) > 5:
                    engine.abort(event.seq)
            else:
                ended[event.seq] = event
        check(engine._scheduler)
    assert ended.keys() == asked.keys()
    for id, request in asked.items():
        right = continuation(request.prompt, request.max_tokens, VOCAB, windows=windows)
        stop = next((at + 1 for at, token in enumerate(right) if token in request.stop_ids), len(right))
        if isinstance(ended[id], Aborted):
            assert said[id] == right[: len(said[id])]
        else:
            assert isinstance(ended[id], Finished)
            assert said[id] == right[:stop]
    counts = {each.source: each for each in engine.stats().drafts}
    assert counts["model"].drafted > 300
    if windows == (0,):  # the draft model has none, so it cannot be right for a target with some
        assert backend.right > 0.75 * backend.drafted
        assert counts["model"].accepted > counts["model"].drafted / 3
