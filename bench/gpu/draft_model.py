"""Draft models on a GPU: what a drafted token costs, and what drafts of a set acceptance gain, with random weights.

    PYTHONPATH=src python bench/gpu/draft_model.py [--draft head] [--kind bf16] [--rows 1 8] [--acceptance 0 0.8]

Needs torch and Triton, and a GPU to itself. The target has the shape of Llama-3.1-8B, the draft model that of
Llama-3.2-1B, or it is a head with one layer of the target's shape (MTP). Every step of both is computed. Answers are
made up, and so is what the draft model samples: the token of the answer with the given probability. With drafts and
without in turn.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from cells import BLOCK_SIZE, decode_batch, llama8b
from random_weights import KINDS, RandomWeights
from scripted import Recorded, Runner, Script, described

from penstock.backend.cuda import CudaBackend
from penstock.core.drafting.depths import DraftDepths
from penstock.engine.assemble import assemble
from penstock.engine.batch import DraftRow, draft_batch
from penstock.engine.drafts.draft_model import MTP_HEAD, SMALL_MODEL, DraftingRow, DraftKind, DraftModel, DraftStep
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.samplers.sampler import Sampler
from penstock.model.families import mtp
from penstock.model.families.llama import build
from penstock.model.mtp_head import head_spec
from penstock.model.rope import plain
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.types import Limits, Request, RowResult, SamplingParams, TokenLogprob

ROWS, STEP_TOKENS, VOCAB, BLOCKS = 64, 2048, 128256, 20_000
CONTEXT = 768
LIMITS = Limits(16384, ROWS, STEP_TOKENS, BLOCK_SIZE, BLOCKS, VOCAB)
TURNS = 30
PREPARED = (1, 2, 4, 8, 16)  # tokens of steps that are made ready before they are measured


def llama1b() -> ModelSpec:
    attn = AttentionSpec(32, 8, 64, RopeSpec(plain(500000.0, 64), interleaved=False))
    return ModelSpec("llama", 16, 2048, 8192, VOCAB, 131072, 1e-5, attn)


def opened(kind: str, layers: int, draft: str) -> CudaBackend:
    backend = CudaBackend(STEP_TOKENS, ROWS)
    weights: Any = RandomWeights(backend._packer.target.workspace, kind)
    spec = replace(llama8b(layers), stores_hidden=draft == "head")
    target = build(spec, weights)
    backend.load(target)
    backend.load(mtp.build(head_spec(spec), weights, target.ends) if draft == "head" else build(llama1b(), weights), 1)
    backend.reserve_kv(LIMITS.num_blocks, BLOCK_SIZE)
    backend.warm_up()
    for number, program in backend._programs.items():  # as a server does while it is idle
        for size in PREPARED:
            for run in (0, *program.program.run_sizes[:2]):
                backend.prepare(size, run=run, program=number)
    return backend


# -- what a step costs ----------------------------------------------------------------------------------------------


def drafting_rows(rows: int, more: int, shift: int = 0) -> list[DraftRow]:
    """Returns the rows of a draft step after so many others: their last token is on the device alone."""
    params, prompt = SamplingParams(temperature=0.0), (1,) * 8
    blocks = np.random.default_rng(rows).permutation(BLOCKS).astype(np.int32)
    width = -(-2 * CONTEXT // BLOCK_SIZE)
    end = CONTEXT + more
    return [
        DraftRow(
            [1] * CONTEXT,
            end - 1,
            end,
            blocks[row * width : (row + 1) * width],
            Sampler(Request(row, prompt, params, 8)).for_draft(),
            row,
            shift,
        )
        for row in range(rows)
    ]


def one_by_one(backend: CudaBackend, rows: int, shift: int) -> dict[str, float]:
    """Returns the median milliseconds of the parts of a draft step whose answer is waited for."""
    parts: dict[str, list[float]] = {"build": [], "launch": [], "wait": []}
    for turn in range(TURNS):
        given, marks = drafting_rows(rows, turn, shift), [time.perf_counter()]
        made = draft_batch(given, BLOCK_SIZE, 1, -1 - turn)
        marks.append(time.perf_counter())
        ticket = backend.launch(made)
        marks.append(time.perf_counter())
        backend.wait(ticket)
        marks.append(time.perf_counter())
        for spent, (began, ended) in zip(parts.values(), pairwise(marks), strict=True):
            spent.append((ended - began) * 1e3)
    return {name: statistics.median(spent[3:]) for name, spent in parts.items()}


def ahead(backend: CudaBackend, rows: int, shift: int) -> float:
    """Returns the milliseconds of each of many draft steps, of which one is always in flight."""
    steps = [drafting_rows(rows, turn, shift) for turn in range(TURNS)]
    launched, began = -1, time.perf_counter()
    for turn, given in enumerate(steps):
        ticket = backend.launch(draft_batch(given, BLOCK_SIZE, 1, -1 - turn))
        if turn:
            backend.wait(launched)
        launched = ticket
    backend.wait(launched)
    return (time.perf_counter() - began) / TURNS * 1e3


def print_costs(backend: CudaBackend, rows: int, shift: int) -> None:
    target = decode_batch(rows, CONTEXT, BLOCKS, 0)
    draft = draft_batch(drafting_rows(rows, 0, shift), BLOCK_SIZE, 1, -1)
    steps = [backend.time_step(batch, 10) * 1e3 for batch in (target, draft)]
    one_by_one(backend, rows, shift)
    parts, pipelined = one_by_one(backend, rows, shift), min(ahead(backend, rows, shift) for _ in range(3))
    alone = sum(parts.values())
    told = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    print(
        f"{rows} rows: a step of the target takes {steps[0]:.3f} ms, one that drafts {steps[1]:.3f} ms on the GPU; "
        f"a drafted token {alone:.3f} ms one by one ({told}), {pipelined:.3f} ms one step ahead: "
        f"{pipelined / steps[0]:.3f} steps of the target",
        flush=True,
    )


# -- what drafts gain -----------------------------------------------------------------------------------------------


class ScriptedDrafts(DraftModel):
    """Drafts the token of the recorded answer with the probability `acceptance`."""

    acceptance = 0.0
    script: Script
    dice = random.Random(3)

    def _wait(self, step: DraftStep) -> Sequence[RowResult]:
        return list(map(self._made_up, step.rows, super()._wait(step)))

    def _made_up(self, row: DraftingRow, answer: RowResult) -> RowResult:
        prompt, tokens = self.script.answers[row.request.id]
        at = len(row.text) - prompt
        token = tokens[at] if self.dice.random() < self.acceptance and at < len(tokens) else 1
        chance = min(max(self.acceptance, 0.001), 0.99)
        return answer._replace(tokens=(token,), logprobs=(TokenLogprob(token, log(chance), ()),))


def unlike(count: int, length: int) -> list[Recorded]:
    """Returns records of which nothing can be copied."""
    dice = random.Random(1)
    return [
        Recorded(dice.sample(range(1000, 60_000), 500), dice.sample(range(60_000, 120_000), length), str(number))
        for number in range(count)
    ]


def print_gains(backend: CudaBackend, what: DraftKind, given: argparse.Namespace) -> None:
    for acceptance in given.acceptance:
        depths = DraftDepths(backend.padded_sizes)
        drafts = ScriptedDrafts(backend, LIMITS, LIMITS.max_len, depths=depths, kind=what, depth=backend.depth)
        options = {"drafting": Drafting(backend.padded_sizes), "draft_model": drafts}
        drafts.script, drafts.acceptance = Script(), acceptance
        engine = assemble(backend, LIMITS, depth=backend.depth, more=(drafts.script,), **options)
        runner = Runner(engine)
        for count in given.rows:
            records = unlike(count, given.tokens)
            runner.run(records, count, drafts=True)  # shapes are captured and costs learned
            found = described(*runner.compare(records, count, given.rounds))
            print(f"{given.draft} of {given.kind}, {count} rows, {acceptance:.0%}: {found}", flush=True)
        drafts.script.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="bf16")
    parser.add_argument("--draft", choices=("model", "head"), default="model")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--acceptance", nargs="*", type=float, default=[0.0, 0.6, 0.8])
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    backend = opened(given.kind, given.layers, given.draft)
    what = MTP_HEAD if given.draft == "head" else SMALL_MODEL
    for rows in given.rows:
        print_costs(backend, rows, what.shift)
    print_gains(backend, what, given)


if __name__ == "__main__":
    main()
