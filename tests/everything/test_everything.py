"""Has everything on at once: random worlds in which each feature of engines and requests meets each other, while the
engines are paused, killed, put to sleep and given other weights. Each answer must be that of the same request alone.

`scripts/soak` runs worlds with new seeds for as long as one likes. A feature joins by one line in features.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.everything.features import FEATURES
from tests.everything.pairs import IMPOSSIBLE, POSSIBLE, Pairs, worlds
from tests.everything.recipe import Recipe
from tests.everything.shrinking import explained, failure_of

PARTS, WORLDS = 8, 30  # in each part
SHARE = 0.95  # of all pairs of features that are possible


@pytest.fixture(scope="module")
def drawn() -> Iterator[tuple[Pairs, Recipe]]:
    return worlds(1)


@pytest.mark.long(cases=2)  # pairs are counted where all worlds run
@pytest.mark.parametrize("part", range(PARTS))
def test_each_answer_is_as_if_alone_with_everything_on_at_once(
    part: int, drawn: Iterator[tuple[Pairs, Recipe]], capsys: pytest.CaptureFixture[str]
) -> None:
    for pairs, recipe in islice(drawn, WORLDS):
        failure = failure_of(recipe, pairs.count)
        if failure is not None:
            pytest.fail(explained(recipe, failure))
    if pairs.worlds == PARTS * WORLDS:
        with capsys.disabled():
            print(f"\n{pairs}")
        assert pairs.share >= SHARE


def test_impossible_pairs_are_of_features() -> None:
    names = {feature.name for feature in FEATURES}
    assert len(names) == len(FEATURES)
    assert {name for pair in IMPOSSIBLE for name in pair} <= names
    assert not POSSIBLE & IMPOSSIBLE.keys()
