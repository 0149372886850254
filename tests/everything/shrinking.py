"""Makes a recipe that fails smaller, as long as it fails in the same way."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.everything.recipe import Recipe
from tests.everything.world import World, run


class Failure(NamedTuple):
    """Says how a recipe fails: `where` is the same for smaller ones that fail for the same reason."""

    where: str
    message: str
    trace: str


def failure_of(recipe: Recipe, count: Callable[[World], object] = lambda world: None) -> Failure | None:
    """Returns how a recipe fails; None: it does not, and its world is counted."""
    try:
        count(run(recipe))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = "".join(letter for letter in str(error)[:24] if letter.isalpha())
        return Failure(f"{type(error).__name__} {frame.name} {words}", str(error), traceback.format_exc())
    return None


def shrink(recipe: Recipe, failure: Failure, most: int = 400) -> tuple[Recipe, Failure]:
    """Returns a recipe that fails as this one does and from which nothing can be left out, unless more than `most`
    others would have to be run."""
    tried = 0
    shrunk = True
    while shrunk and tried < most:
        shrunk = False
        for smaller in _smaller(recipe):
            tried += 1
            found = failure_of(smaller)
            if found is not None and found.where == failure.where:
                recipe, failure, shrunk = smaller, found, True
                break
            if tried >= most:
                break
    return recipe, failure


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Yields recipes that are a little smaller, the smallest first."""
    yield from (recipe._replace(asks=asks) for asks in _without(recipe.asks) if asks)
    yield from (recipe._replace(moments=moments) for moments in _without(recipe.moments))
    yield from (recipe._replace(engine=engine) for engine in _without(recipe.engine))
    for at, ask in enumerate(recipe.asks):
        others: list[dict[str, object]] = [{"features": features} for features in _without(ask.features)]
        others += [{"at": 0}] if ask.at else []
        others += [{"max_tokens": ask.max_tokens // 2}] if ask.max_tokens > 1 else []
        others += [{"prompt": ask.prompt[len(ask.prompt) // 2 :]}] if len(ask.prompt) > max(ask.period, 1) * 2 else []
        for changed in others:
            yield recipe._replace(asks=(*recipe.asks[:at], ask._replace(**changed), *recipe.asks[at + 1 :]))


def _without(parts: tuple) -> Iterator[tuple]:  # type: ignore[type-arg]
    """Yields all but a half of the parts, then all but one."""
    half = len(parts) // 2
    if half > 1:
        yield from (parts[half:], parts[:half])
    for at in range(len(parts)):
        yield (*parts[:at], *parts[at + 1 :])


def explained(recipe: Recipe, failure: Failure) -> str:
    """Returns how the smallest recipe fails that fails as this one does, and how to run it again."""
    smallest, shrunk = shrink(recipe, failure)
    again = f"from tests.everything.recipe import *; from tests.everything.world import run\nrun({smallest!r})"
    return f"the recipe of seed {recipe.seed} fails: {failure.message}\n\nThe smallest does:\n{shrunk.trace}\n{again}\n"
