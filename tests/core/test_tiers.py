"""Tests the host tier: what leaves the device comes back as it was, from places that have one owner each."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import Limits, blocks_for
from tests.core.test_properties import VOCAB, Arrival, Shuffles, World, beyond, run_world
from tests.engine.guesses import RandomDrafting

WINDOWS = ((0,), (0,), (0, 5), (0, 8, 8), (0, 0, 3, 17), (4,), (6, 1))
CONVERSATIONS = [tuple(range(20)), tuple(range(50)), (*range(50), *range(10)), (9,) * 60, (8,) * 50]


@st.composite
def crowded_worlds(draw: st.DrawFn) -> World:
    """Returns a world of a few conversations that come back again and again, where the device holds about one."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    windows = draw(st.sampled_from(WINDOWS))
    least = blocks_for(72, windows, block_size)
    max_rows = draw(st.integers(1, 4))
    limits = Limits(
        max_len=72,
        max_rows=max_rows,
        step_tokens=draw(st.integers(max(max_rows, 8), 64)),
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, least // 2)),
        vocab=VOCAB,
        states=draw(st.sampled_from([0, 0, 0, 0, 3])),
        windows=windows,
        host_places=draw(st.sampled_from([5, 20, 40, 100, 300])),
    )
    requests = []
    for at in range(0, 41, draw(st.sampled_from([3, 5, 8]))):
        prompt = (*draw(st.sampled_from(CONVERSATIONS)), at)
        requests.append(
            Arrival(
                at,
                prompt,
                draw(st.integers(1, 72 - len(prompt))) if draw(st.booleans()) else 1,
                frozenset(),
                priority=0,
                salt="",
                score=False,
                penalty=0.0,
                pooling="",
                background=False,
                abort_at=draw(st.sampled_from([None, None, None, at + 1, at + 5])),
            )
        )
    return limits, draw(st.sampled_from([0, 1])), requests


@settings(max_examples=120, deadline=None)
@given(crowded_worlds(), st.randoms(use_true_random=False), st.sampled_from(["", "order", "drafts"]))
def test_each_request_answers_as_if_alone_whatever_lies_on_the_host(world: World, random: Random, kind: str) -> None:
    limits = world[0]
    drafting = RandomDrafting(lambda request: beyond(request, limits), VOCAB, random) if kind == "drafts" else None
    run_world(world, Shuffles(limits, random) if kind else None, drafting)
