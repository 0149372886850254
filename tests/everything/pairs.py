"""Counts which pairs of features had a part in one answer, and draws worlds for those that had none yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, count
from random import Random

from tests.everything.drawing import draw
from tests.everything.features import EMBEDDINGS, ENCODER, FEATURES, Feature
from tests.everything.recipe import Recipe
from tests.everything.world import World

Pair = frozenset[str]

APART = "one request or engine has at most one of the two"
ONCE = "an answer ends in one way"
BOUNDED = "the grammar ends the answer before it can be a loop"
UNSHARED = "scores are not cached, so a prompt that wants some is computed"
UNCACHED = "its prompts are not cached"
UNDRAFTED = "it asks for no drafts, or its sampler can have none"
DRAFTERS = ("guesses", "copied drafts", "draft model", "head", "prediction")
TIERS = ("prefix reused", "RAM tier", "disk tier", "pull")


def _pairs(reason: str, some: Sequence[str], others: Sequence[str]) -> dict[Pair, str]:
    return {frozenset((one, other)): reason for one in some for other in others if one != other}


ENDS = ("stop ids", "stop strings", "loop guard", "pause abort", "abort all", "abort")
IMPOSSIBLE = {
    **_pairs(ONCE, ENDS, ENDS),
    **_pairs(BOUNDED, ("loop guard",), ("JSON schema", "choice", "tools", "Lark", "thinking budget")),
    **_pairs(UNSHARED, ("prompt logprobs",), TIERS),
    **_pairs(UNDRAFTED, ("no drafts", "mirostat"), DRAFTERS),
    **_pairs("a request that may not be kept is not on disk", ("not durable",), ("disk tier",)),
    **_pairs("an embedding is aborted as a failure", ("pause abort", "abort all"), (*EMBEDDINGS, ENCODER)),
    **_pairs(UNCACHED, ("first embedding",), TIERS),
    **_pairs(UNCACHED, (ENCODER,), (*TIERS, "failed copy")),
    **_pairs("its prompts are computed whole, so none is under way between two steps", (ENCODER,), ("mixed weights",)),
}


def impossible(one: Feature, other: Feature) -> str:
    """Returns why no answer can show two features; empty: one can."""
    if not one.goes_with(other):
        return APART
    return IMPOSSIBLE.get(frozenset((one.name, other.name)), "")


POSSIBLE: frozenset[Pair] = frozenset(
    frozenset((one.name, other.name)) for one, other in combinations(FEATURES, 2) if not impossible(one, other)
)


class Pairs:
    """Counts the pairs of features that worlds have shown."""

    def __init__(self) -> None:
        self.seen: set[Pair] = set()
        self.worlds = 0
        self._tries: dict[Pair, int] = {}

    def count(self, world: World) -> None:
        """Counts the pairs of a world that has ended as it should."""
        self.worlds += 1
        every: set[str] = set()
        for client in world.clients.values():
            names = {feature.name for feature in FEATURES if feature.had_part(client)}
            every |= names
            self._add(combinations(sorted(names), 2))
        whole = [feature.name for feature in FEATURES if feature.whole and feature.name in world.notes]
        self._add((name, other) for name in whole for other in {*every, *whole} - {name})

    def _add(self, pairs: Iterable[tuple[str, ...]]) -> None:
        self.seen |= {frozenset(pair) for pair in pairs}

    @property
    def missing(self) -> list[Pair]:
        """Returns the pairs that were not seen yet."""
        return sorted(POSSIBLE - self.seen, key=sorted)

    @property
    def share(self) -> float:
        """Returns the share of all possible pairs that were seen."""
        return len(self.seen & POSSIBLE) / len(POSSIBLE)

    def next(self, random: Random) -> Sequence[str]:
        """Returns features of which a world may show a pair that was not seen yet: of those tried least often."""
        missing = self.missing
        if not missing:
            return ()
        least = min(self._tries.get(pair, 0) for pair in missing)
        pair = random.choice([pair for pair in missing if self._tries.get(pair, 0) == least])
        self._tries[pair] = least + 1
        return sorted(pair)

    def __str__(self) -> str:
        """Returns how many pairs were seen, and which were not."""
        lines = [f"{len(self.seen & POSSIBLE)} of {len(POSSIBLE)} pairs ({self.share:.1%}) in {self.worlds} worlds"]
        lines += [f"  not seen: {' + '.join(sorted(pair))}" for pair in self.missing]
        return "\n".join(lines)


def worlds(first: int) -> Iterator[tuple[Pairs, Recipe]]:
    """Yields recipes with the seeds from `first` on, each drawn for a pair that those before have not shown. Whoever
    runs one counts it."""
    pairs, random = Pairs(), Random(first)
    for seed in count(first):
        yield pairs, draw(seed, pairs.next(random))
