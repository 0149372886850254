"""What `precision.py` takes to a GPU: tokens of a text, and greedy answers of the CPU backend with their runners-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.model.load import load_text
from penstock.types import Request, SamplingParams, Tokens

WINDOW = 512
ANSWER = 128
TOP = 8
PROMPTS = (
    "Why is the sky blue?",
    "Name three rivers in Europe and say where each of them ends.",
    "Write a short story about a lighthouse keeper.",
    "Explain to a child how a bicycle stays upright.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for pancakes.",
    "Write a Python function that reverses a string.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=TOP)


def make(model: Path, text: Path, out: Path, windows: int) -> None:
    written = load_text(model)
    tokens = written.tokenizer.encode(text.read_text())[: windows * WINDOW]
    if len(tokens) < windows * WINDOW:
        raise SystemExit(f"{text} has {len(tokens)} tokens; {windows} windows need {windows * WINDOW}")
    prompts = [written.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    engine = open_engine(Config(model=str(model), device="cpu", max_len=2048))
    answers = [greedy(engine, id, prompt) for id, prompt in enumerate(prompts)]
    out.write_text(json.dumps({"tokens": tokens, "prompts": prompts, "answers": answers}))
    print(f"{out}: {len(tokens)} tokens, {len(answers)} answers of {ANSWER}")


def greedy(engine: Engine, id: int, prompt: list[int], count: int = ANSWER) -> dict[str, Any]:
    """Alone: tokens, and for each the likeliest ones with their log-probabilities."""
    engine.add(Request(id, tuple(prompt), GREEDY, count))
    tokens: list[int] = []
    top: list[list[tuple[int, float]]] = []
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens += event.tokens
                top += [[(token, round(value, 5)) for token, value in entry.top] for entry in event.logprobs]
    return {"tokens": tokens, "top": top}
