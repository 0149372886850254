"""Log-probabilities told while decoding equal those of scoring the same tokens, to the bit, however either was
computed. A training loop may take them for its policy's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.engine.loop import advance
from penstock.types import Event, Request, SamplingParams, TokenLogprob, Tokens
from penstock.types.messages import Add

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
OPTIONS = {"device": "cpu", "threads": 2, "max_rows": 8, "kv_memory": 1 << 22, "max_len": 64, "block_size": 8}
PROMPTS = tuple(tuple((7 * at * at + 3 * at + start) % 29 + 2 for at in range(21)) for start in (0, 1, 5))
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0, "seed": 11}
COUNT = 14


def engine_of(path: Path, **options: Any) -> Engine:
    return open_engine(configure(path, OPTIONS | options))


def run(engine: Engine, *requests: Request) -> list[Event]:
    events = advance(engine, [Add(request) for request in requests])
    while not engine.idle:
        events += engine.step()
    return events


def decoded(engine: Engine, first: int, prompts: tuple[tuple[int, ...], ...], **how: Any) -> list[list[TokenLogprob]]:
    """Returns each answer's tokens, as they were told while all were decoded together."""
    params = SamplingParams(logprobs=3, **how)
    requests = [Request(first + at, prompt, params, COUNT) for at, prompt in enumerate(prompts)]
    events = run(engine, *requests)
    told = {request.id: list[TokenLogprob]() for request in requests}
    for event in events:
        if isinstance(event, Tokens):
            told[event.seq] += event.logprobs
    return list(told.values())


def score(engine: Engine, id: int, prompt: tuple[int, ...], answer: list[TokenLogprob]) -> list[TokenLogprob]:
    """Returns what the answer's tokens are told to be when they are scored as a part of a prompt."""
    tokens = (*prompt, *(one.token for one in answer))
    events = run(engine, Request(id, tokens, SamplingParams(temperature=0, prompt_logprobs=3), 1))
    scores = [one for event in events if isinstance(event, Tokens) for one in event.scores]
    return scores[len(prompt) - 1 :]


FORMATS = [
    ("llama3", {}),
    ("llama3", {"kv": "int8"}),
    ("qwen2", {}),
    ("qwen2", {"quantize": "q8_0"}),
    ("mixtral", {}),
    ("gemma3", {}),
    ("deepseek_v3", {}),
    ("bamba", {}),
    ("linear", {}),
]


@pytest.mark.parametrize(("name", "options"), FORMATS)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_scores_equal_what_decoding_told(name: str, options: dict[str, Any], how: dict[str, Any]) -> None:
    engine = engine_of(GOLDENS / name, **options)
    together = decoded(engine, 1, PROMPTS, **how)
    alone = [decoded(engine, 10 + at, (prompt,), **how)[0] for at, prompt in enumerate(PROMPTS)]  # on a cached prefix
    assert alone == together
    for chunk in (128, 8, 5):
        scorer = engine_of(GOLDENS / name, **options, step_tokens=chunk)
        for at, (prompt, answer) in enumerate(zip(PROMPTS, together, strict=True)):
            assert score(scorer, 20 + at, prompt, answer) == answer
    assert any(one.token != one.top[0][0] for answer in together for one in answer) is (how is SAMPLED)


def test_scores_of_the_default_model_equal_what_decoding_told(smollm2: Path) -> None:
    engine = engine_of(smollm2, kv_memory=1 << 26, max_len=256)
    prompts = tuple(tuple(range(400 + 37 * at, 430 + 40 * at)) for at in range(2))
    for number, how in enumerate((GREEDY, SAMPLED)):
        answers = decoded(engine, 100 * number + 1, prompts, **how)
        for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            assert score(engine, 100 * number + 10 + at, prompt, answer) == answer
