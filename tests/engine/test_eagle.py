"""An EAGLE-3 head drafts from the target's residual streams, in its own vocabulary, and answers stay what they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.backend.cpu import CpuBackend
from penstock.backend.packed_cache import packed_cache_of
from penstock.config import Config, configure
from penstock.core.drafting.depths import DepthPlan, DraftDepths
from penstock.core.drafting.lengths import Proposal
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.drafts.draft_model import EAGLE3_HEAD, DraftModel, DraftTask
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, PenstockError, UnsupportedModel
from penstock.model.draft import open_draft
from penstock.model.eagle import observed, open_eagle
from penstock.model.load import load_model, open_checkpoint
from penstock.planning.forecast import make_forecasts
from penstock.types import DraftCounts, Limits, Request, SamplingParams
from penstock.types.messages import UpdateWeights
from tests.engine.changed_weights import change_weights
from tests.engine.test_draft_model import RandomDepths, RandomLengths
from tests.engine.test_draft_options import answer
from tests.engine.test_speculation import STEERED, requests, run, sorted_out
from tests.engine.test_weights import UPDATE, ask, drain, tokens_of
from tests.models.test_eagle import FOLDER, HEADS, changed, load_pair
from tests.models.test_eagle import loaded as loaded_pair
from tests.models.test_eagle import run as run_step

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
TARGET = FOLDER / "target"
LIMITS = Limits(max_len=64, max_rows=8, step_tokens=48, block_size=4, num_blocks=128, vocab=64)


def target_alone() -> Engine:
    backend = CpuBackend(1)
    backend.load(load_model(open_checkpoint(TARGET), backend))
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS)


def with_head(name: str, model: type[DraftModel] = DraftModel) -> Engine:
    """Returns an engine that drafts at random lengths."""
    backend, random = CpuBackend(1), Random(9)
    head = open_eagle(FOLDER / name)
    load_pair(backend, head)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    kind = EAGLE3_HEAD._replace(token_ids=head.token_ids)
    drafts = model(backend, LIMITS, LIMITS.max_len, kind=kind, depths=RandomDepths(random))
    return assemble(backend, LIMITS, drafting=RandomLengths(random), draft_model=drafts)


def counts_of(engine: Engine) -> DraftCounts:
    """Returns what the head has drafted."""
    return next((each for each in engine.stats().drafts if each.source == "eagle3"), DraftCounts("eagle3"))


@pytest.mark.parametrize("name", HEADS)
def test_however_answers_are_sampled(name: str) -> None:
    plain, _ = run(target_alone(), requests())
    engine = with_head(name)
    drafted, _ = run(engine, requests())
    for id in plain:
        assert sorted_out(drafted[id]) == sorted_out(plain[id]), STEERED[id % len(STEERED)]
    assert 0 < counts_of(engine).accepted < counts_of(engine).drafted


def test_drafts_depend_on_the_text_alone() -> None:
    """What a head drafts after drafts were accepted or rejected, beside others and with shared blocks, is what it would
    draft if the whole text were computed at once. Texts that part at the end of a block are left out: what a head
    computes of that position depends on the next token, and the last of them to compute it decides."""
    backend, head = loaded_pair("sglang", lambda: CpuBackend(1))
    seen = 0

    def anew(text: list[int], depth: int) -> list[int]:
        run_step(backend, 0, text[:-1], 0, sample=0)
        logits, drafted = run_step(backend, 1, text[1:], 0, sample=1), list[int]()
        while len(drafted) < depth:
            drafted.append(head.token_ids[int(logits[0].argmax())])
            logits = run_step(backend, 1, drafted[-1:], len(text) + len(drafted) - 2)
        return drafted

    class Checked(DraftModel):
        def propose(self, tasks: Sequence[DraftTask], copied: Sequence[Proposal], *rest: Any) -> list[Proposal]:
            nonlocal seen
            found = super().propose(tasks, copied, *rest)
            for task, proposal in zip(tasks, found, strict=True):
                if proposal.source == "eagle3":
                    assert list(proposal.tokens) == anew(task.room.seq.tokens, len(proposal.tokens))
                    seen += len(proposal.tokens)
            return found

    engine = with_head("sglang", Checked)
    prompt = [5, 9, 3, 7, 5, 2, 8, 1, 4, 4, 6, 2, 3]
    asked = [Request(id, (*prompt[: 5 + 2 * id], id + 20), SamplingParams(temperature=0.0), 24) for id in range(5)]
    run(engine, asked)
    run(engine, [request._replace(id=request.id + 10) for request in asked])
    assert seen > 100


# -- by config ----------------------------------------------------------------------------------------------------


def config(draft: Path | str, target: Path = TARGET, **options: object) -> Config:
    given = {"device": "cpu", "threads": 1, "max_len": 64, "max_rows": 4, "draft": str(draft), **options}
    return configure(target, given)


@pytest.mark.parametrize(
    ("target", "fields", "problem"),
    [
        (GOLDENS / "gemma3n", {}, "residual streams cannot be taken from models of the family gemma3n yet"),
        (GOLDENS / "qwen3", {}, "it is for a model of 64 tokens, and qwen3 has 48"),
        (TARGET, {"target_hidden_size": 48}, "it is for a model of width 48, and the width of target is 32"),
        (GOLDENS / "llama3", {}, "it takes states before layers 2, 1, -1, and llama3 has 2 layers"),
        (TARGET, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "before layers 2, 4, 9, and target has 8 layers"),
        (TARGET, {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}, "before layers 2, 2, 4"),
        (TARGET, {"hidden_size": 48, "target_hidden_size": 32}, "it has no embeddings, and those of target have"),
        (GOLDENS / "mistral", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "all layers of mistral have windows"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path: Path, target: Path, fields: dict[str, Any], problem: str) -> None:
    head = changed(tmp_path / "head", fields)
    with pytest.raises(ConfigError, match=f"head cannot draft for .*{problem}"):
        open_draft(config(head, target), open_checkpoint(target))


def test_older_heads_are_refused_by_name(tmp_path: Path) -> None:
    head = changed(tmp_path / "head", {"architectures": ["EagleLlamaForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="head is a head of architecture EagleLlamaForCausalLM; of EAGLE heads"):
        open_draft(config(head), open_checkpoint(TARGET))


def test_a_head_is_no_model() -> None:
    with pytest.raises(PenstockError, match="a head that drafts for a model: give the model itself"):
        open_checkpoint(FOLDER / "sglang")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines draft two tokens and verify them, whatever that costs."""

    def choose(_: Any, chances: Sequence[Sequence[float]], *rest: Any) -> DepthPlan:
        return DepthPlan([min(len(chance), 2) for chance in chances], 0.0)

    def lengths(_: Any, proposals: Sequence[Proposal], *rest: Any) -> list[int]:
        return [len(proposal.tokens) for proposal in proposals]

    monkeypatch.setattr(DraftDepths, "choose", choose)
    monkeypatch.setattr(Drafting, "lengths", lengths)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{}, {"quantize": "q8_0"}])
@pytest.mark.parametrize("name", HEADS)
def test_an_engine_drafts_with_the_head_of_its_config(
    name: str, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = answer(config("", speculation="off", **options))
    drafted, sources = answer(config(FOLDER / name, **options))
    assert drafted == plain
    assert "eagle3" in sources
    assert not [
        record for record in caplog.records if record.levelno >= logging.WARNING and "rows of" not in record.msg
    ]


def test_the_head_takes_its_part_of_the_memory() -> None:
    target = open_checkpoint(TARGET)
    tokens, weights, blocks = {}, {}, {}
    for draft in ("", FOLDER / "vllm"):
        asked = config(draft, kv_memory=40_000)
        forecast, *_ = make_forecasts(asked, target, 16, lambda *_: None)
        assert forecast.memory is not None
        has = forecast.memory.footprint
        tokens[bool(draft)], weights[bool(draft)] = has.kv_token, has.weights
        engine = open_engine(asked)
        blocks[bool(draft)] = engine.limits.num_blocks, forecast.memory.limits.num_blocks
        engine.close()
    head = open_eagle(FOLDER / "vllm")
    assert tokens[True] - tokens[False] == 2 * (head.spec.attn.kv_values + head.spec.dim)  # its KV, and what it sees
    size = sum(2 * int(np.prod(tensor.shape)) for tensor in (*head.tensors.values(), head.fuse))
    assert weights[True] - weights[False] == pytest.approx(size, 0.05)
    assert blocks[True][0] < blocks[False][0]
    assert blocks[True][1] < blocks[False][1]


@pytest.mark.usefixtures("eager")
def test_weights_are_exchanged_beside_a_head(tmp_path: Path) -> None:
    other = change_weights(TARGET, tmp_path / "other")
    engine, fresh = open_engine(config(FOLDER / "sglang")), open_engine(config("", other))
    before = tokens_of(drain(engine, ask(1, max_tokens=40)), 1)
    drain(engine, UpdateWeights(str(other), id=UPDATE))
    drafted = counts_of(engine).drafted
    after = tokens_of(drain(engine, ask(2, max_tokens=40)), 2)
    assert after == tokens_of(drain(fresh, ask(1, max_tokens=40)), 1) != before
    assert counts_of(engine).drafted > drafted > 0


def test_packed_weights_are_cached_for_each_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The projection is packed with the target, so that another head needs another file."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    target = open_checkpoint(TARGET)
    targets = [target, *(observed(target, open_eagle(FOLDER / name)) for name in HEADS)]
    caches = [packed_cache_of(config("", packed_cache=1 << 30), each) for each in targets]
    assert len({cache.path for cache in caches if cache}) == len({cache.key for cache in caches if cache}) == 4
