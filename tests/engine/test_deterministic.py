"""Answers of a deterministic engine on a CPU: the same to the bit alone, in company, in any chunks, from cached
prefixes and with drafts. What a GPU does is in tests/cuda/test_deterministic.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.errors import ConfigError
from penstock.types import Event, Request, SamplingParams, TokenLogprob, Tokens

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
PROMPT = tuple((7 * at * at + 3 * at) % 29 + 2 for at in range(45))
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, logprobs=3)


def engine_of(name: str, **options: Any) -> Engine:
    usual = {"device": "cpu", "threads": 2, "max_rows": 6, "max_len": 64, "block_size": 8, "kv_memory": 1 << 20}
    return open_engine(configure(GOLDENS / name, usual | {"deterministic": True} | options))


def told(engine: Engine, id: int = 1, others: int = 0, seed: int = 0) -> list[TokenLogprob]:
    """Returns the tokens and logprobs that the prompt is answered with, while others begin at random."""
    rng = np.random.default_rng(seed)
    company = [
        Request(100 + each, tuple(rng.integers(1, 30, rng.integers(1, 40)).tolist()), SamplingParams(seed=each), 12)
        for each in range(others)
    ]
    for request in (*company[: others // 2], Request(id, PROMPT, SEEDED, 12)):
        engine.add(request)
    later, events = company[others // 2 :], list[Event]()
    while not engine.idle or later:
        events += engine.step()
        if later:
            engine.add(later.pop())
    return [each for event in events if isinstance(event, Tokens) and event.seq == id for each in event.logprobs]


@pytest.mark.parametrize("name", ["llama3", "gpt_oss", "qwen3next"])
def test_an_answer_is_the_same_to_the_bit_whatever_is_computed_beside_it(name: str) -> None:
    alone = told(engine_of(name))
    assert len(alone) == 12
    for step_tokens, others in ((64, 5), (16, 4), (7, 2)):
        engine = engine_of(name, step_tokens=step_tokens, prefill_budget=step_tokens // 2, threads=1)
        assert told(engine, others=others, seed=step_tokens) == alone
        assert told(engine, id=2) == alone  # from cached blocks
        assert engine.stats().cached_tokens > 0


def test_drafts_change_nothing() -> None:
    assert told(engine_of("llama3", speculation=4), others=3) == told(engine_of("llama3", speculation="off"))


def test_the_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not deterministic.*device cpu"):
        engine_of("llama3", device="ref")


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_it_is_on_or_off(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="deterministic takes True or False"):
        configure("m", {"deterministic": wrong})
