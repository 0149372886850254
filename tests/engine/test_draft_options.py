"""Draft models by config: which are refused and why, what memory they take, and that the built engine uses them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from penstock.config import Config, configure
from penstock.engine.build import open_engine
from penstock.errors import ConfigError
from penstock.model.draft import open_draft
from penstock.model.load import Checkpoint, open_checkpoint
from penstock.planning.forecast import make_forecasts
from penstock.planning.memory_plan import MemoryPlan
from penstock.types import Limits, Request, SamplingParams, Tokens

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
ENCODERS = GOLDENS.parent / "encoders"
TARGET = GOLDENS / "llama3"


def config(draft: Path | str, target: Path = TARGET, **options: object) -> Config:
    given = {"device": "cpu", "threads": 1, "max_len": 64, "max_rows": 4, "draft": str(draft), **options}
    return configure(target, given)


def opened(draft: Path, target: Path = TARGET, **options: object) -> Checkpoint | None:
    return open_draft(config(draft, target, **options), open_checkpoint(target))


@pytest.mark.parametrize(
    ("draft", "target", "options", "problem"),
    [
        ("qwen3", "llama3", {}, "their vocabularies have 48 and 64 tokens and must be the same"),
        ("qwen3next", "qwen3", {}, "has recurrent layers, whose state cannot go back to before a rejected draft"),
        ("llama3", "mistral", {}, "all layers of .* have windows"),
        ("llama3", "llama3", {"speculation": "off"}, "--draft is of no use with --speculation off"),
    ],
)
def test_what_cannot_draft_is_refused(draft: str, target: str, options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        opened(GOLDENS / draft, GOLDENS / target, **options)


def test_an_encoder_cannot_draft() -> None:
    with pytest.raises(ConfigError, match="bert is an encoder and generates no text"):
        opened(ENCODERS / "bert")


def with_tokens(folder: Path, **changed: str) -> Path:
    """Returns a copy of the target that has a tokenizer, of which some tokens are changed."""
    shutil.copytree(TARGET, folder)
    (folder / "model.gguf").unlink()
    words = [changed.get(f"t{id}", f"t{id}") for id in range(64)]
    tokenizer = Tokenizer(BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_another_vocabulary_of_the_same_size_is_refused_by_its_tokens(tmp_path: Path) -> None:
    target, same = with_tokens(tmp_path / "target"), with_tokens(tmp_path / "same")
    other = with_tokens(tmp_path / "other", t7="seven", t60="<sixty>")
    assert opened(same, target) is not None
    with pytest.raises(ConfigError, match="a token has two meanings: 7 is 'seven' and 't7', 60 is '<sixty>' and 't60'"):
        opened(other, target)


def answer(config: Config) -> tuple[list[int], list[str]]:
    """Returns an answer of the config's engine, and the sources of drafts in it."""
    engine = open_engine(config)
    engine.add(Request(1, (5, 9, 3, 7, 5, 2), SamplingParams(temperature=0.0), 50))
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for event in engine.step() if isinstance(event, Tokens) for token in event.tokens]
    drafts = engine.stats().drafts
    engine.close()
    return tokens, [counts.source for counts in drafts]


def test_an_engine_drafts_with_the_model_of_its_config(caplog: pytest.LogCaptureFixture) -> None:
    plain, _ = answer(config("", speculation="off"))
    drafted, sources = answer(config(TARGET))
    assert drafted == plain
    assert "model" in sources
    assert not caplog.records


def test_a_draft_model_that_is_larger_than_its_target_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer(config(GOLDENS / "untied"))
    assert any("a smaller one drafts faster" in record.getMessage() for record in caplog.records)


def test_the_draft_model_takes_its_part_of_the_memory() -> None:
    target = open_checkpoint(TARGET)
    plans: dict[bool, MemoryPlan] = {}
    built: dict[bool, Limits] = {}
    for draft in ("", GOLDENS / "untied"):
        asked = config(draft, kv_memory=40_000, kv_ram=0)
        forecast, *_ = make_forecasts(asked, target, 16, lambda *_: None)
        assert forecast.memory is not None
        plans[bool(draft)] = forecast.memory
        engine = open_engine(asked)
        built[bool(draft)] = engine.limits
        engine.close()
    alone, both = plans[False], plans[True]
    assert both.limits.num_blocks < alone.limits.num_blocks
    assert built[True].num_blocks < built[False].num_blocks
    assert built[True].memory - built[False].memory > 0.9 * both.footprint.draft_weights
    assert both.footprint.kv_token == alone.footprint.kv_token + both.footprint.draft_token
    assert both.footprint.weights == alone.footprint.weights + both.footprint.draft_weights
    assert "of them for drafts" in "\n".join(both.lines())
