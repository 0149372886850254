"""Every family through the engine: prompts that reuse a prefix, and sequences that are preempted, have the logits of
those that are computed at once and alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.engine.drafts.speculation import Drafters
from penstock.engine.engine import Engine
from penstock.model.load import load_model, open_checkpoint
from penstock.planning.memory_plan import all_states
from penstock.types import Finished, Limits, Request, SamplingParams, TokenLogprob, Tokens, blocks_for
from tests.engine.guesses import RandomDrafting

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
CHUNKED = GOLDENS.parent / "folders" / "llama4_chunks"  # chunks leave blocks behind, as windows do
BACKENDS: dict[str, Callable[[], Any]] = {"ref": RefBackend, "cpu": lambda: CpuBackend(2, kv="f32")}
LIMITS = Limits(max_len=64, max_rows=4, step_tokens=24, block_size=4, num_blocks=0, vocab=48)
PARAMS = SamplingParams(temperature=0, logprobs=20, ignore_eos=True)
NEAR = 1e-3

Make = Callable[..., Engine]


@pytest.fixture(params=[*sorted(GOLDENS.iterdir()), CHUNKED], ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(params=BACKENDS)
def fresh(folder: Path, request: pytest.FixtureRequest) -> Make:
    """Makes engines that have computed nothing yet, with room for four of the longest sequences, or for nearly two."""
    checkpoint = open_checkpoint(folder)

    def make(tight: bool = False, drafting: Drafters[Any] | None = None) -> Engine:
        backend, spec = BACKENDS[request.param](), checkpoint.spec
        backend.load(load_model(checkpoint, backend))
        most = partial(blocks_for, LIMITS.max_len, spec.windows, LIMITS.block_size)
        blocks = 2 * most() - 1 if tight else 4 * most(LIMITS.step_tokens)
        states = 8 if spec.state_bytes else 0
        limits = LIMITS._replace(num_blocks=blocks, vocab=spec.vocab, states=states, windows=spec.windows)
        backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits), spec.kv_groups)
        return assemble(backend, limits, drafting=drafting)

    return make


def answers(engine: Engine, *prompts: list[int], count: int) -> tuple[list[list[TokenLogprob]], list[int]]:
    """What follows each prompt, and how much of it was reused."""
    first = engine.stats().steps * 100
    for id, prompt in enumerate(prompts, first):
        engine.add(Request(id, tuple(prompt), PARAMS, count))
    said: dict[int, list[TokenLogprob]] = {}
    reused: dict[int, int] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                said.setdefault(event.seq, []).extend(event.logprobs)
            else:
                assert isinstance(event, Finished)
                assert event.report is not None
                reused[event.seq] = event.report.cached
    return [said[first + i] for i in range(len(prompts))], [reused[first + i] for i in range(len(prompts))]


def difference(one: TokenLogprob, other: TokenLogprob) -> float:
    found = dict(other.top)
    shared = [abs(value - found[token]) for token, value in one.top if token in found]
    assert len(shared) >= 18  # of 20: the last ones may change places
    return max(shared)


def test_a_prefix_that_is_reused(folder: Path, fresh: Make) -> None:
    with np.load(folder / "expected.npz") as file:
        tokens, logits = file["tokens"].tolist(), file["logits"].astype(np.float64)
    engine = fresh()
    answers(engine, tokens[:25], count=1)
    [said], [reused] = answers(engine, tokens, count=1)
    assert 20 <= reused <= 24
    wanted = logits[-1] - np.log(np.exp(logits[-1]).sum())
    scale = np.abs(logits).max()
    assert max(abs(value - wanted[token]) for token, value in said[0].top) < NEAR * scale


@pytest.mark.usefixtures("overcommitted")
def test_sequences_that_are_preempted(folder: Path, fresh: Make) -> None:
    with np.load(folder / "expected.npz") as file:
        tokens, scale = file["tokens"].tolist(), float(np.abs(file["logits"]).max())
    prompts = [tokens[3 * i : 3 * i + 2 + i] for i in range(4)]  # short: windows keep longer ones from growing
    engine = fresh(tight=True)
    said, _ = answers(engine, *prompts, count=32)
    assert engine.stats().preemptions > 0
    for prompt, crowded in zip(prompts, said, strict=True):
        [alone], _ = answers(fresh(), prompt, count=32)
        assert [one.token for one in crowded] == [one.token for one in alone]
        assert max(map(difference, crowded, alone)) < NEAR * scale


def test_blocks_behind_a_window_are_freed_as_a_sequence_goes_on(folder: Path, fresh: Make) -> None:
    windows = open_checkpoint(folder).spec.windows
    engine = fresh()
    with np.load(folder / "expected.npz") as file:
        prompt = file["tokens"].tolist()[:20]
    engine.add(Request(1, tuple(prompt), PARAMS, 28))
    held = []  # blocks, after each step
    while not engine.idle:
        engine.step()
        held.append(engine.stats().blocks_used)
    answering = held[1:-1]  # the first step computes the prompt, and the last one's blocks are given back
    assert len(answering) == 26
    for tokens, used in enumerate(answering, len(prompt) + 1):
        assert used <= blocks_for(tokens, windows, LIMITS.block_size)
    assert all(window < 24 for window in windows)
    whole = len(windows) * -(-47 // LIMITS.block_size)
    assert held[-2] < whole if any(windows) else held[-2] == whole


def test_answers_with_drafts_are_those_without(folder: Path, fresh: Make, request: pytest.FixtureRequest) -> None:
    with np.load(folder / "expected.npz") as file:
        tokens, scale = file["tokens"].tolist(), float(np.abs(file["logits"]).max())
    prompts = [tokens[3 * i : 3 * i + 6 + i] for i in range(3)]
    plain, _ = answers(fresh(), *prompts, count=32)
    known = {tuple(prompt): [one.token for one in said] for prompt, said in zip(prompts, plain, strict=True)}
    engine = fresh(drafting=RandomDrafting(lambda asked: known[asked.prompt], LIMITS.vocab, Random(5)))
    drafted, _ = answers(engine, *prompts, count=32)
    [counts] = engine.stats().drafts
    assert 0 < counts.accepted < counts.drafted
    if "cpu" in request.node.callspec.id:
        assert drafted == plain
    for one, other in zip(chain(*drafted), chain(*plain), strict=True):
        assert one.token == other.token
        assert difference(one, other) < NEAR * scale
