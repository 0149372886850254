"""Draws recipes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.everything.features import BY_NAME, EMBEDDINGS, ENCODER, MOMENTS, OF_ENGINES, OF_REQUESTS, Feature
from tests.everything.recipe import MAX_LEN, Ask, Moment, Recipe

SHARED = ((), tuple(range(1, 12)), tuple(range(30, 62)), (5,) * 9)  # beginnings of prompts
LATER = (20, 40, 70)  # steps after which a request may come again
DEEP = {"disk tier": ("death", "sleep"), "ledger": ("death",), "RAM tier": ("pause keep",)}  # what shows a feature


def draw_ask(random: Random, id: int, features: tuple[str, ...]) -> Ask:
    """Draws a request with these features."""
    at, when = random.randint(0, 25), random.randint(1, 12)
    if "loop guard" in features:
        period = random.randint(1, 4)
        phrase = tuple(random.randrange(97, 107) for _ in range(period))
        prompt = (*random.choice(SHARED), *(random.randrange(200) for _ in range(random.randint(0, 3))), *phrase)
        return Ask(id, at, prompt, random.randint(30, 50), features, when, period)
    own = tuple(random.randrange(256) for _ in range(random.randint(1, 6)))
    prompt = (*random.choice(SHARED), *random.choice((own, own, (7, 8, 9), tuple(range(62, 70)))))
    most = 60 if "tools" in features else 40 if {"JSON schema", "Lark"} & {*features} else 24
    return Ask(id, at, prompt, random.randint(2, min(most, MAX_LEN - len(prompt))), features, when)


def draw(seed: int, wanted: Sequence[str] = ()) -> Recipe:
    """Draws a recipe that has these features if they can be had together, and others at random."""
    random = Random(seed)
    on: set[str] = {each.name for each in OF_ENGINES if random.random() < (0.05 if each.name == ENCODER else 0.45)}
    on |= {"RAM tier"} if {"disk tier", "failed copy"} & {*wanted} else set()
    on |= {"small cache"} if "RAM tier" in wanted or ("RAM tier" in on and random.random() < 0.6) else set()
    on |= {"copied drafts"} if "prediction" in wanted else set()
    engine = _together(random, [each for each in OF_ENGINES if each.name in {*wanted}], OF_ENGINES, on)
    possible = OF_REQUESTS
    if ENCODER in engine:
        possible = tuple(each for each in OF_REQUESTS if each.goes_with(BY_NAME[ENCODER]))
    asked = [each for each in possible if each.name in {*wanted}]
    asks = []
    for id in range(random.randint(6 if "RAM tier" in engine else 3, 9)):
        share = random.choice((0.04, 0.1, 0.2))
        drawn = {each.name for each in possible if random.random() < share}
        first = asked if random.random() < 0.6 else []
        first = [*first, BY_NAME[random.choice(EMBEDDINGS)]] if ENCODER in engine else first
        features = _together(random, first, possible, drawn)
        asks.append(draw_ask(random, id, features))
    named = [each.name for each in MOMENTS if each.name in wanted]
    happening = [*named, *random.choices([each.name for each in MOMENTS], k=random.choice((0, 1, 2, 4)))]
    happening += [random.choice(DEEP[name]) for name in engine if name in DEEP and random.random() < 0.7]
    moments = [Moment(random.randint(1, 40), what, random.randint(1, 4)) for what in happening]
    if "sleep" in happening:
        asks = [ask._replace(at=ask.at + random.choice((0, 0, 90))) for ask in asks]
    often = 0.7 if DEEP.keys() & {*engine} else 0.3
    chosen = [ask for ask in asks if random.random() < often]
    again = [ask._replace(id=len(asks) + at, at=ask.at + random.choice(LATER)) for at, ask in enumerate(chosen)]
    return Recipe(seed, engine, (*asks, *again), tuple(moments))


def _together(random: Random, first: Sequence[Feature], every: Sequence[Feature], on: set[str]) -> tuple[str, ...]:
    """Returns the names of the first features and of those that are on, as far as they can be had together."""
    chosen: list[Feature] = []
    others = [each for each in every if each.name in on]
    random.shuffle(others)
    for each in (*first, *others):
        if each not in chosen and all(each.goes_with(other) for other in chosen):
            chosen.append(each)
    return tuple(each.name for each in chosen)
