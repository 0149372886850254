"""Beam search finds what a search of everything finds, and what a search that never stops early finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from penstock.errors import InvalidRequest
from penstock.text.beam_search import Beam, BeamSearch
from penstock.types import TokenLogprob

END = 0
Model = Callable[[tuple[int, ...]], TokenLogprob]


def random_model(seed: int, vocab: int) -> Model:
    """Every context has logprobs of its own, the same at every call."""

    def ask(tokens: tuple[int, ...]) -> TokenLogprob:
        rng = np.random.default_rng([seed, *tokens])
        logits = rng.normal(size=vocab) * 2
        logprobs = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-logprobs)
        top = tuple((int(token), float(logprobs[token])) for token in order)
        return TokenLogprob(*top[0], top)

    return ask


def search(model: Model, **settings: float) -> list[Beam]:
    given = {"prompt_len": 3, "width": 4, "max_tokens": 6, "ends": {END}} | settings
    found = BeamSearch(**given)  # type: ignore[arg-type]
    while not found.done:
        found.advance([model(beam.tokens) for beam in found.running])
    return found.best(int(given["width"]))  # type: ignore[call-overload]


def everything(model: Model, max_tokens: int) -> dict[tuple[int, ...], float]:
    """The total of every answer there is; one that ends has its end in the total only."""
    totals = {}
    for length in range(max_tokens + 1):
        for tokens in itertools.product((1, 2), repeat=length):
            total = sum(dict(model(tokens[:at]).top)[token] for at, token in enumerate(tokens))
            totals[tokens] = total + (dict(model(tokens).top)[END] if length < max_tokens else 0.0)
    return totals


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(10))
def test_beams_that_hold_every_prefix_find_the_best_of_everything(seed: int, penalty: float) -> None:
    model = random_model(seed, vocab=3)
    totals = everything(model, max_tokens=3)
    found = search(model, width=8, max_tokens=3, length_penalty=penalty)
    best = sorted(totals, key=lambda tokens: totals[tokens] / (3 + len(tokens)) ** penalty, reverse=True)[:8]
    assert [beam.tokens for beam in found] == best
    assert [beam.total for beam in found] == pytest.approx([totals[tokens] for tokens in best])


def unhurried(model: Model, width: int, max_tokens: int, penalty: float) -> list[tuple[int, ...]]:
    """Runs the same search, written anew and without an early end."""
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        longer = []
        for tokens, total in running:
            for token, logprob in model(tokens).top[: 2 * width]:
                if token == END:
                    finished.append((tokens, total + logprob))
                else:
                    longer.append(((*tokens, token), total + logprob))
        running = sorted(longer, key=lambda beam: -beam[1] / (3 + len(beam[0])) ** penalty)[:width]
    finished += running
    return [tokens for tokens, _ in sorted(finished, key=lambda b: -b[1] / (3 + len(b[0])) ** penalty)[:width]]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -2.0])
def test_stopping_early_changes_nothing(penalty: float) -> None:
    asked = 0
    for seed in range(12):
        model = random_model(seed, vocab=12)

        def counted(tokens: tuple[int, ...], model: Model = model) -> TokenLogprob:
            nonlocal asked
            asked += 1
            return model(tokens)

        found = search(counted, width=3, max_tokens=12, length_penalty=penalty)
        assert [beam.tokens for beam in found] == unhurried(model, 3, 12, penalty)
    if penalty <= 0:
        assert asked < 12 * (1 + 11 * 3)


def test_an_answer_says_how_it_ended_and_has_a_logprob_for_each_token() -> None:
    for beam in search(random_model(1, vocab=5), max_tokens=4):
        assert beam.finish == ("stop" if beam.stop_token == END else "length")
        assert [entry.token for entry in beam.logprobs] == list(beam.tokens)
        scored = sum(entry.logprob for entry in beam.logprobs)
        assert beam.total == pytest.approx(scored) if beam.finish == "length" else beam.total < scored


@pytest.mark.parametrize("settings", [{"width": 0}, {"width": 11}, {"length_penalty": 99.0}])
def test_what_cannot_be_searched_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        search(random_model(0, 3), **settings)
