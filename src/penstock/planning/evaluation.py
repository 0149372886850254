"""Measures the perplexity of a model and the KL divergence of its predictions from another model's.

A text is cut into windows. In each window the tokens of the second half are predicted from all tokens before them, so
that every prediction has a context of at least half a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.backend import open_backend, resolve_defaults
from penstock.backend.base import Backend, Batch, Floats, Ints
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.devices import device_kind
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config
from penstock.errors import ConfigError, InvalidRequest, UnsupportedModel
from penstock.model.load import Checkpoint, load_model, open_checkpoint, text_of

Doubles = NDArray[np.float64]

CONTEXT = 512
TOKENS = 8192
GUARD_TOKENS = 1024  # length of the built-in text, which measures quantized KV caches at load
MIN_CONTEXT = 8
LONG_TOKEN = 32  # characters: tokens are shorter on average
MAX_CHARACTERS = 1 << 22  # given to the tokenizer in one call
ROWS = 32  # rows of logits whose probabilities are computed together


class BackendWithLogits(Backend, Protocol):
    """Is a backend that can return logits."""

    def logits(self, batch: Batch) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Holds the perplexity of a model on a text."""

    value: float
    error: float  # standard error
    predictions: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Describes the distribution of KL(reference || model) over predictions, in nats."""

    mean: float
    error: float  # standard error
    median: float
    p90: float
    p99: float
    most: float  # the maximum
    same_top: float  # share of predictions whose most likely token is the same
    predictions: int
    perplexity: Perplexity
    reference: Perplexity


class Comparison(NamedTuple):
    """Compares two models; each array has one value per prediction."""

    divergence: Doubles
    same: NDArray[np.bool_]  # whether the most likely token is the same
    known: Doubles  # log-probability of the token that follows
    known_to_reference: Doubles


class Scorer:
    """Runs a model on windows of one length."""

    def __init__(self, config: Config, context: int = CONTEXT) -> None:
        longest = max(config.max_len, context)
        checkpoint = open_checkpoint(Path(config.model), config.config, config.strict_config, longest)
        config = resolve_defaults(config, checkpoint.fp8, checkpoint.whole)
        self.at_once = device_kind(config.device).eval_windows
        self.vocab = checkpoint.spec.vocab
        self._context = context
        self._block = config.block_size
        self._blocks = -(-context // self._block)
        tokens = max(config.step_tokens, self.at_once * context)
        self._backend = cast(BackendWithLogits, open_backend(replace(config, step_tokens=tokens)))
        self._backend.load(load_model(quantized(checkpoint, config), self._backend))
        states = self.at_once if checkpoint.spec.recurrent else 0
        self._backend.reserve_kv(self.at_once * self._blocks, self._block, states)
        self._steps = 0

    def logits(self, windows: Sequence[Ints]) -> Floats:
        return self._backend.logits(self._batch(windows))

    def scores(self, windows: Sequence[Ints]) -> Doubles:
        batch = self._batch(windows)
        targets = np.concatenate([followers(window) for window in windows])
        rows = replace(batch.sample, target=targets, logprobs=np.zeros(len(targets), np.int32))
        result = self._backend.wait(self._backend.launch(replace(batch, sample=rows)))
        return np.array([score.logprob for row in result.rows for score in row.scores])

    def close(self) -> None:
        self._backend.close()

    def _batch(self, windows: Sequence[Ints]) -> Batch:
        self._steps += 1
        tables = [range(i * self._blocks, (i + 1) * self._blocks) for i in range(len(windows))]
        chunks = [
            Chunk(window[:-1].tolist(), 0, table, slot=slot, sample=len(followers(window)))
            for slot, (window, table) in enumerate(zip(windows, tables, strict=True))
        ]
        return greedy_batch(chunks, self._steps)


def followers(window: Ints) -> Ints:
    return window[len(window) // 2 + 1 :]


def windows_of(
    path: Path, text: str, context: int = CONTEXT, tokens: int = 0, changes: Sequence[str] = ()
) -> list[Ints]:
    """Returns at most `tokens` tokens of the text, cut into windows; 0 stands for TOKENS, or for one window if that is
    longer. Each window begins with BOS if the model uses it. `changes`: see `open_checkpoint`."""
    checkpoint = open_checkpoint(path, changes, max_len=context)
    if checkpoint.spec.encoder:
        raise UnsupportedModel("this model is an encoder, which predicts no tokens: it has no perplexity")
    if not checkpoint.spec.generates:
        raise UnsupportedModel("this model has no output head and predicts no tokens: it has no perplexity")
    if not MIN_CONTEXT <= context <= checkpoint.spec.max_len:
        longest = checkpoint.spec.max_len
        raise ConfigError(f"--context must be from {MIN_CONTEXT} to {longest} tokens with this model; got {context}")
    return windows_in(checkpoint, text, context, tokens or max(TOKENS, context))


def windows_in(checkpoint: Checkpoint, text: str, context: int, tokens: int) -> list[Ints]:
    if tokens < context:
        raise ConfigError(
            f"--tokens {tokens} is less than one window of {context} tokens: raise --tokens, or lower --context"
        )
    tokenizer = text_of(checkpoint).tokenizer
    ids = tokenizer.encode(text[: min(tokens * LONG_TOKEN, MAX_CHARACTERS)], bos=True)
    begins = ids[:1] if ids[:1] == [tokenizer.bos_id] else []
    count = min(len(ids), tokens) // context
    if not count:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens and one window needs {context}: give more text, or lower --context",
            param="text",
        )
    windows = np.array(ids[: count * context], np.int32).reshape(count, context)
    windows[:, : len(begins)] = begins
    return list(windows)


def built_in_text() -> str:
    """Returns the text that comes with the package. It has more than GUARD_TOKENS tokens."""
    return files("penstock.planning").joinpath("kv_text.txt").read_text("utf-8")


def in_steps(windows: Sequence[Ints], size: int) -> Iterator[Sequence[Ints]]:
    return (windows[first : first + size] for first in range(0, len(windows), size))


def measure_perplexity(scorer: Scorer, windows: Sequence[Ints], advance: Callable[[], None]) -> Perplexity:
    scores = []
    for some in in_steps(windows, scorer.at_once):
        scores.append(scorer.scores(some))
        for _ in some:
            advance()
    return perplexity(np.concatenate(scores))


def measure_divergence(
    scorer: Scorer, reference: Scorer, windows: Sequence[Ints], advance: Callable[[], None]
) -> Divergence:
    if scorer.vocab != reference.vocab:
        raise ConfigError(f"the models differ in their vocabularies: {scorer.vocab} tokens and {reference.vocab}")
    parts = []
    for some in in_steps(windows, scorer.at_once):
        targets = np.concatenate([followers(window) for window in some])
        parts.append(compare(reference.logits(some), scorer.logits(some), targets))
        for _ in some:
            advance()
    return summary(Comparison(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def compare(truth: Floats, answer: Floats, targets: Ints) -> Comparison:
    found = []
    for first in range(0, len(truth), ROWS):
        part = slice(first, first + ROWS)
        wanted, given = log_softmax(truth[part]), log_softmax(answer[part])
        at = np.arange(len(wanted)), targets[part]
        same = wanted.argmax(1) == given.argmax(1)
        found.append(Comparison(divergence(wanted, given), same, given[at], wanted[at]))
    return Comparison(*(np.concatenate(column) for column in zip(*found, strict=True)))


def log_softmax(logits: Floats) -> Doubles:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def divergence(truth: Doubles, answer: Doubles, within: float = np.inf) -> Doubles:
    """Returns KL(truth || answer) for each row of log-probabilities, over the tokens that are at
    most `within` nats less likely than the best."""
    with np.errstate(invalid="ignore"):
        terms = np.where(truth > -np.inf, np.exp(truth) * (truth - answer), 0.0)
    counted = truth > truth.max(axis=1, keepdims=True) - within
    per_row: Doubles = np.where(counted, terms, 0.0).sum(axis=1)
    return per_row


def perplexity(logprobs: Doubles) -> Perplexity:
    value = float(np.exp(-logprobs.mean()))
    return Perplexity(value, value * standard_error(logprobs), len(logprobs))


def standard_error(values: Doubles) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def summary(comparison: Comparison) -> Divergence:
    kl = comparison.divergence
    median, p90, p99 = (float(value) for value in np.quantile(kl, (0.5, 0.9, 0.99)))
    return Divergence(
        mean=float(kl.mean()),
        error=standard_error(kl),
        median=median,
        p90=p90,
        p99=p99,
        most=float(kl.max()),
        same_top=float(comparison.same.mean()),
        predictions=len(kl),
        perplexity=perplexity(comparison.known),
        reference=perplexity(comparison.known_to_reference),
    )
