"""Describes one world: which features its engines have, who asks for what, and what happens meanwhile. A recipe decides
everything, and its text is a Python expression that makes it again."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from penstock.types import Limits, blocks_for
from tests.everything.backend import VOCAB, LoopingPrompt

MAX_LEN = 96
FULL_WINDOWS = ((0, 5), (0, 8, 8), (6, 0), (0, 0, 3, 17))
WINDOWS = (*FULL_WINDOWS, (4,), (6, 1))


class Ask(NamedTuple):
    """Is a request, or several with the feature "n". `when` is the moment at which the features act that need one: a
    number of steps, or of tokens."""

    id: int
    at: int  # the step before which it comes
    prompt: tuple[int, ...]
    max_tokens: int
    features: tuple[str, ...] = ()
    when: int = 3
    period: int = 0  # tokens at the prompt's end that the answer repeats without end; 0: it does not

    @property
    def looping(self) -> LoopingPrompt:
        return LoopingPrompt(self.prompt, self.period)


class Moment(NamedTuple):
    """Is something that happens to the engines before a step."""

    at: int
    what: str
    lasts: int = 3  # steps


class Recipe(NamedTuple):
    """Is all that a world is made of. `seed` decides what is left to chance."""

    seed: int
    engine: tuple[str, ...]
    asks: tuple[Ask, ...]
    moments: tuple[Moment, ...] = ()

    @property
    def every(self) -> int:
        """Returns the tokens after which the loop guard looks again."""
        return 3 + self.seed % 6

    @property
    def peers(self) -> bool:
        """Returns whether there are two engines, which read blocks of each other."""
        return any({"pull", "hand-over"} & {*ask.features} for ask in self.asks)

    def limits(self) -> Limits:
        """Returns what the engines can hold."""
        random = Random(self.seed)
        block_size = random.choice((1, 2, 4, 4, 8))
        seeing_all = {"draft model", "head"} & {*self.engine} or any(
            {"embedding", "first embedding"} & {*ask.features} for ask in self.asks
        )
        windows = random.choice(FULL_WINDOWS if seeing_all or random.random() < 0.8 else WINDOWS)
        windows = windows if "windows" in self.engine else (0,)
        max_rows = random.randint(2, 6)
        encoder = "encoder" in self.engine
        needed = blocks_for(MAX_LEN, windows, block_size, MAX_LEN if encoder else 1)
        small = "small cache" in self.engine
        host = "RAM tier" in self.engine
        return Limits(
            max_len=MAX_LEN,
            max_rows=max_rows,
            step_tokens=random.randint(max_rows, 40) + (MAX_LEN if encoder else 0),
            block_size=block_size,
            num_blocks=needed + random.randint(0, 8) if small else 4 * needed,
            vocab=VOCAB,
            prefill_budget=random.choice((0, 1, 5, 20)),
            states=random.choice((1, 2, 3, 20)) if "states" in self.engine else 0,
            windows=windows,
            host_places=random.choice((3, 9, 40, 200)) if host else 0,
            host_states=random.choice((1, 4, 20)) if host and "states" in self.engine else 0,
            memory=1000,
            encoder=encoder,
        )
