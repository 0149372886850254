"""Several programs run on one GPU, each with memory and graphs of its own for the same blocks and slots."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.base import LAST_SAMPLED, Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.arena import Arena, tensors_in
from penstock.backend.cuda.graphs import common_shapes, draft_shapes
from penstock.backend.ref import RefBackend
from penstock.config import configure
from penstock.core.drafting.depths import DepthPlan, DraftDepths
from penstock.core.drafting.lengths import Proposal
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.drafts.draft_model import EAGLE3_HEAD, MTP_HEAD, DraftModel
from penstock.engine.drafts.drafting import Drafting
from penstock.model.eagle import EagleHead, observed
from penstock.model.families import llama, mtp
from penstock.model.load import load_model, open_checkpoint
from penstock.model.mtp_head import ends_of, head_spec
from penstock.model.packer import Packer
from penstock.planning.memory_plan import footprint_of
from penstock.types import DraftCounts, Limits, Request, RowResult, SamplingParams, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.small import load_small, spec_for
from tests.engine import test_programs as programs
from tests.engine.test_draft_model import model_counts
from tests.engine.test_heads import TOY, toy_tensors
from tests.models import test_eagle as eagle

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
BLOCK_SIZE = 4
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7, 1])
TABLES = ([2, 0, 4], [1, 5, 3])
SEEDS = (0, 1)  # of the weights of each program


def empty(tokens: int = 16, rows: int = 4) -> CudaBackend:
    arena = None if DEVICE == "cuda" else Arena(torch.device(DEVICE), FakeDriver())
    return CudaBackend(tokens, rows, device=DEVICE, dtype=torch.float32, arena=arena)


def loaded(*numbers: int, tokens: int = 16) -> CudaBackend:
    """Returns a backend with some of the programs, which have computed both prompts but for their last tokens."""
    backend = empty(tokens)
    for number in numbers:
        load_small(backend, "F32", SEEDS[number], number)
    backend.reserve_kv(8, BLOCK_SIZE)
    for number in numbers:
        prompt(backend, number)
    return backend


def prompt(backend: Any, program: int) -> None:
    chunks = [Chunk(p[:-1], 0, table, slot, 0) for slot, (p, table) in enumerate(zip(PROMPTS, TABLES, strict=True))]
    backend.wait(backend.launch(replace(greedy_batch(chunks, -1), program=program)))


def step(number: int, program: int, tables: Sequence[Sequence[int]] = TABLES) -> Batch:
    """Returns the batch of one more token for each prompt: its last, or later on the token that was sampled last."""
    chunks = [
        Chunk([LAST_SAMPLED if number else p[-1]], len(p) - 1 + number, table, slot, 1)
        for slot, (p, table) in enumerate(zip(PROMPTS, tables, strict=True))
    ]
    return scored(chunks, 10 * program + number, program)


def scored(chunks: Sequence[Chunk], number: int, program: int = 1) -> Batch:
    """Returns a batch that also asks for the likeliest tokens."""
    batch = greedy_batch(chunks, number)
    return replace(batch, program=program, sample=replace(batch.sample, logprobs=np.full(2, 3, np.int32)))


def run(backend: Any, *batches: Batch) -> list[tuple[RowResult, ...]]:
    return [backend.wait(backend.launch(batch)).rows for batch in batches]


@pytest.mark.parametrize(
    "check",
    [
        programs.test_target_and_draft_answer_as_each_does_alone,
        programs.test_exported_blocks_are_as_good_as_computed_ones_for_every_program,
        programs.test_all_programs_are_counted,
        programs.test_copied_blocks_are_as_good_as_computed_ones_for_every_program,
        programs.test_layouts_that_differ_have_other_fingerprints,
    ],
    ids=lambda check: check.__name__,
)
def test_as_on_other_backends(check: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.BACKENDS, "cuda", empty)
    check("cuda")


def test_each_answers_as_it_does_alone_while_a_step_of_another_is_in_flight() -> None:
    """Three steps of the second program run before the first one's answer is asked for, as when it drafts."""
    both = loaded(0, 1)
    ticket = both.launch(step(0, 0))
    second = run(both, step(0, 1), step(1, 1), step(2, 1))
    first = [both.wait(ticket).rows, *run(both, step(1, 0))]
    assert first == run(loaded(0), step(0, 0), step(1, 0))
    assert second == run(loaded(1), step(0, 1), step(1, 1), step(2, 1))
    assert first[0] != second[0]


def test_blocks_have_a_part_in_each_program() -> None:
    backend = loaded(0, 1)
    wanted = run(backend, step(0, 0), step(0, 1))
    data = backend.kv.export_blocks([2, 0])
    assert len(data) == 2 * BLOCK_SIZE * backend.memory_needs().kv_bytes_per_token
    backend.kv.copy_blocks([(1, 7), (2, 6)])
    backend.kv.import_blocks([1, 2], bytes(len(data)))
    backend.kv.import_blocks([4, 3], data)  # the first prompt has two blocks, of which only the first is full
    assert run(backend, *(step(0, number, [[6, 0], [7]]) for number in (0, 1))) == wanted
    assert run(backend, *(step(0, number, [[4, 3], [7]]) for number in (0, 1))) == wanted
    assert backend.kv.fingerprint() != loaded(0).kv.fingerprint()


def test_programs_share_the_memory_of_activations_and_nothing_else() -> None:
    backend = loaded(0, 1)
    first, second = (backend._programs[number] for number in (0, 1))
    places = [{buffer.data_ptr() for buffer in each.program._buffers} for each in (first, second)]
    assert places[0] == places[1]
    kept = [[t.data_ptr() for t in tensors_in([each.memory.kv.planes, each.memory.last])] for each in (first, second)]
    assert not set(kept[0]) & set(kept[1])


def test_both_answer_after_sleep_as_before() -> None:
    backend = loaded(0, 1)
    turns = 3 if DEVICE == "cuda" else 1  # launched, captured, replayed
    before = [run(backend, step(0, 0), step(0, 1)) for _ in range(turns)][-1]
    graphs = [dict(each.graphs._graphs) for each in backend._programs.values()]
    assert all(graphs) or DEVICE == "cpu"
    assert backend.sleeper is not None
    assert backend.sleeper.sleep() == backend._packer.target.workspace.arena.kept_bytes > 0
    assert backend._packer.target.workspace.arena.device_bytes == 0
    backend.sleeper.wake()
    for number in (0, 1):
        prompt(backend, number)
    assert run(backend, step(0, 0), step(0, 1)) == before
    assert [dict(each.graphs._graphs) for each in backend._programs.values()] == graphs


class TwoTokens(DraftDepths):
    """Has two tokens drafted for each row in every step."""

    def choose(self, chances: Sequence[Sequence[float]], *_: Any) -> DepthPlan:
        return DepthPlan([min(len(chance), 2) for chance in chances])


class AllVerified(Drafting):
    """Has steps verify all that is proposed."""

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        return [len(proposal.tokens) for proposal in proposals]


def answers(draft: int | None) -> tuple[dict[int, list[int]], DraftCounts]:
    """Returns what requests are answered, with drafts of a model of the given seed or without, and what it
    drafted."""
    backend = load_small(empty(), "F32", SEEDS[0])
    if draft is not None:
        load_small(backend, "F32", draft, 1)
    limits = Limits(32, 4, 16, BLOCK_SIZE, 16, spec_for("F32").vocab)
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
    model = DraftModel(backend, limits, 32, depths=TwoTokens(), depth=backend.depth)
    drafts: dict[str, Any] = {"drafting": AllVerified(), "draft_model": model} if draft is not None else {}
    engine = assemble(backend, limits, depth=backend.depth, **drafts)
    asked = PROMPTS if DEVICE == "cuda" else PROMPTS[1:]
    for id, prompt in enumerate(asked):
        engine.add(Request(id, tuple(prompt), SamplingParams(temperature=0.8, seed=7, ignore_eos=True), 5))
    found: dict[int, list[int]] = {id: [] for id in range(len(asked))}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                found[event.seq] += event.tokens
    return found, model_counts(engine)


@pytest.mark.parametrize("seed", [1, 0])
def test_a_draft_model_changes_no_answer(seed: int) -> None:
    """Compares answers with a draft model and without. One with its target's seed is that target: all is accepted."""
    (plain, _), (drafted, counts) = answers(None), answers(seed)
    assert drafted == plain
    assert counts.drafted > 1
    assert counts.accepted == counts.drafted or seed != SEEDS[0]


def test_a_head_reads_the_hidden_states_that_its_target_has_stored() -> None:
    """Its drafts are right only where it reads those of the position before, and its own while it drafts on."""
    backend, following = empty(), np.random.default_rng(1).permutation(64)
    pack = Packer(toy_tensors(following), backend)
    model = llama.build(TOY, pack)
    backend.load(model)
    backend.load(mtp.build(head_spec(TOY), pack, ends_of(model)), 1)
    limits = Limits(max_len=32, max_rows=4, step_tokens=16, block_size=BLOCK_SIZE, num_blocks=16, vocab=64)
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE, 0, TOY.kv_groups)
    head = DraftModel(backend, limits, 32, depths=TwoTokens(), kind=MTP_HEAD, depth=backend.depth)
    engine = assemble(backend, limits, depth=backend.depth, drafting=AllVerified(), draft_model=head)
    engine.add(Request(1, (3, 9, 5), SamplingParams(temperature=0.0), 5))
    tokens = [5]
    while not engine.idle:
        tokens += [token for event in engine.step() if isinstance(event, Tokens) for token in event.tokens]
    assert tokens[1:] == [int(following[token]) for token in tokens[:-1]]
    assert len(tokens) == 6
    [counts] = engine.stats().drafts
    assert counts.accepted == counts.drafted > 1
    assert "hidden states of" in backend.kv.fingerprint()
    wide = BLOCK_SIZE * backend.memory_needs().kv_bytes_per_token
    assert len(backend.kv.export_blocks([0])) == wide > 2 * BLOCK_SIZE * 64 * 4


@pytest.mark.skipif(DEVICE != "cuda", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("name", eagle.HEADS)
def test_an_eagle_head_computes_what_its_authors_do(name: str) -> None:
    eagle.test_logits_and_drafts_are_those_of_the_authors(name, lambda: empty(64, 64))


def load_eagle(backend: Any) -> EagleHead:
    """Loads a target of two layers, and a head of another width that chooses among fewer tokens; returns the head."""
    target, head = open_checkpoint(eagle.FOLDER / "target"), eagle.open_eagle(eagle.FOLDER / "vllm")
    kept = {name: tensor for name, tensor in target.tensors.items() if not re.match(r"layers\.[2-7]", name)}
    head = replace(head, eagle=replace(head.eagle, layers=(0, 1, 2)))
    eagle.load_pair(backend, head, replace(target, spec=replace(target.spec, layers=2), tensors=kept))
    return head


def test_an_eagle_head_drafts_what_it_does_on_the_reference() -> None:
    """It reads what its target has projected and, further on, its own stream and the token that it sampled last."""
    found = []
    for backend in (RefBackend(), empty()):
        head = load_eagle(backend)
        backend.reserve_kv(8, BLOCK_SIZE)
        prompt(backend, 0)
        steps = [
            [
                Chunk([LAST_SAMPLED] if at else p[1:], at + len(p) - 2 if at else 0, table, slot, 1)
                for slot, (p, table) in enumerate(zip(PROMPTS, TABLES, strict=True))
            ]
            for at in range(3)
        ]
        found.append([row for at, chunks in enumerate(steps) for row in run(backend, scored(chunks, at))[0]])
    for wanted, row in zip(*found, strict=True):
        assert row.tokens == wanted.tokens
        assert dict(row.logprobs[0].top) == pytest.approx(dict(wanted.logprobs[0].top), abs=1e-4)
    assert any(head.token_ids[token] != token for row in found[0] for token in row.tokens)


@pytest.mark.skipif(DEVICE != "cuda", reason="takes a minute in the interpreter")
def test_an_eagle_head_changes_no_answer() -> None:
    backend = empty()
    kind = EAGLE3_HEAD._replace(token_ids=load_eagle(backend).token_ids)
    limits = Limits(max_len=32, max_rows=4, step_tokens=16, block_size=BLOCK_SIZE, num_blocks=16, vocab=64)
    backend.reserve_kv(limits.num_blocks, BLOCK_SIZE)
    model = DraftModel(backend, limits, 32, depths=TwoTokens(), kind=kind, depth=backend.depth)
    found = []
    for drafts in ({}, {"drafting": AllVerified(), "draft_model": model}):
        engine, tokens = assemble(backend, limits, depth=backend.depth, **drafts), list[int]()
        engine.add(Request(1, tuple(PROMPTS[1]), SamplingParams(temperature=0.8, seed=7, ignore_eos=True), 24))
        while not engine.idle:
            tokens += [token for event in engine.step() if isinstance(event, Tokens) for token in event.tokens]
        found.append(tokens)
    assert found[0] == found[1]
    [counts] = engine.stats().drafts
    assert counts.drafted > 10


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter captures nothing")
def test_both_get_ready_in_idle() -> None:
    backend = loaded(0, 1, tokens=256)
    backend.warm_up()
    wanted = run(backend, step(0, 0), step(0, 1))
    while backend.prepare_in_idle():
        pass
    for number, shapes in enumerate((common_shapes, draft_shapes)):
        program = backend._programs[number]
        common = shapes(4, 256, 0, *program.program.split_sizes)
        ready = [shape for shape in common if shape == backend._steps.pad(program, shape)]
        assert ready
        assert all(program.graphs.has(shape) for shape in ready)
    assert run(backend, step(0, 0), step(0, 1)) == wanted


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_an_engine_drafts_with_the_model_of_its_config() -> None:
    tokens, counts = answered(GOLDENS / "llama3", GOLDENS / "llama3")
    assert len(tokens) == 50
    assert counts["model"].accepted > counts["model"].drafted / 2 > 0


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("quantize", ["", "fp8", "int4"])
@pytest.mark.parametrize("name", eagle.HEADS)
def test_an_engine_drafts_with_the_eagle_head_of_its_config(name: str, quantize: str) -> None:
    tokens, counts = answered(eagle.FOLDER / "target", eagle.FOLDER / name, quantize=quantize)
    assert len(tokens) == 50
    assert counts["eagle3"].drafted > 0


def answered(target: Path, draft: Path, **options: object) -> tuple[list[int], dict[str, DraftCounts]]:
    """Returns an answer of an engine with a draft model or head, and what each source has drafted for it."""
    given = {"device": "cuda", "max_len": 64, "max_rows": 4, "draft": str(draft), "kv_memory": 1 << 24, **options}
    engine = open_engine(configure(target, given))
    engine.add(Request(1, (5, 9, 3, 7, 5, 2), SamplingParams(temperature=0.0, ignore_eos=True), 50))
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for event in engine.step() if isinstance(event, Tokens) for token in event.tokens]
    counts = {each.source: each for each in engine.stats().drafts}
    engine.close()
    return tokens, counts


def test_a_draft_model_takes_no_workspace_of_its_own() -> None:
    target, draft = (open_checkpoint(GOLDENS / name) for name in ("untied", "llama3"))
    backend = empty()
    alone, other = (footprint_of(backend, each, None) for each in (target, draft))
    both = footprint_of(backend, target, draft)
    assert both.weights == alone.weights + other.weights == alone.weights + both.draft_weights
    assert both.workspace == max(alone.workspace, other.workspace)
    assert both.reserve == alone.reserve
    assert both.kv_token == alone.kv_token + both.draft_token


@pytest.mark.parametrize("name", eagle.HEADS)
def test_streams_that_an_eagle_head_sees_take_their_part_of_the_workspace(name: str) -> None:
    told, taken, target = [], [], open_checkpoint(eagle.FOLDER / "target")
    for each in (target, observed(target, eagle.open_eagle(eagle.FOLDER / name))):
        backend = CudaBackend(512, 64, device=DEVICE, dtype=HALF)
        told.append(backend.footprint(each.spec, each.tensors.values()))
        backend.load(load_model(each, backend))
        taken.append(sum(buffer.nbytes for buffer in backend._programs[0].program._buffers))
        assert told[-1].kv_token == backend.memory_needs().kv_bytes_per_token
    more = taken[1] - taken[0]
    assert 0 < more <= told[1].workspace - told[0].workspace <= 1.5 * more


def test_draft_shapes_are_those_of_prompts_alone_and_of_answers() -> None:
    shapes = set(draft_shapes(64, 2048, 384, (4, 16)))
    assert shapes < set(common_shapes(64, 2048, 384, (4, 16)))
    assert {bool(shape.tiles) for shape in shapes} == {False, True}
    assert not [shape for shape in shapes if shape.tiles and shape.decodes]
    assert any(shape.run for shape in shapes)


def test_two_tokens_of_a_row_attend_as_drafts_do() -> None:
    """A draft model has such rows after a draft that was wholly accepted; as a prompt they would be padded to 128."""
    backend = loaded(1)
    wanted = run(backend, step(0, 1), step(1, 1))[1]
    tokens = [row.tokens[0] for row in run(backend, step(0, 1))[0]]
    chunks = [
        Chunk([p[-1], token], len(p) - 1, table, slot, 1)
        for slot, (p, token, table) in enumerate(zip(PROMPTS, tokens, TABLES, strict=True))
    ]
    batch = replace(greedy_batch(chunks, 5), program=1, sample=step(0, 1).sample)
    assert backend._steps.plan(backend._programs[1], batch).shape.run
    assert [row.tokens for row in run(backend, batch)[0]] == [row.tokens for row in wanted]
