"""The numbers of a step, as a GPU gets them: word for word what kernels and captured graphs read. It needs no torch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from hashlib import blake2b

import numpy as np
import pytest

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs, step_layout
from penstock.backend.cuda.inputs import AttentionPlan, Shape
from penstock.backend.cuda.kv_expansion import KvExpansion
from penstock.backend.cuda.mla_expansion import MlaDims, MlaExpansion
from penstock.backend.cuda.segments import plan_segments
from penstock.backend.cuda.shared_prefixes import Sharing
from penstock.backend.cuda.step_layout import FIELDS, DeviceInputs, StepNumbers

BLOCK_SIZE, SCRATCH_BLOCK, SCRATCH_SLOT = 16, 9999, 64


def roomy(shape: Shape) -> Shape:
    """Returns a shape with room for padding wherever the step has something."""
    return Shape(*(count + 3 if count else 0 for count in shape[:6]), *shape[6:])


def prompt(start: int, count: int, row: int, shared: int = 0) -> Chunk:
    """Returns tokens of a row whose first blocks are those of all rows."""
    blocks = -(-(start + count) // BLOCK_SIZE)
    table = [*range(shared), *range(300 * row + 1000, 300 * row + 1000 + blocks - shared)]
    return Chunk([row + 5] * count, start, table, slot=row, sample=1)


def adapted(batch: Batch) -> Batch:
    return replace(batch, adapters=np.resize(np.array([2, -1, 0], np.int32), len(batch.slots)))


def grouped(batch: Batch) -> Batch:
    """Returns the batch over two KV layer groups."""
    return replace(batch, tables=np.concatenate([batch.tables, batch.tables + 5]))


def sampled(batch: Batch) -> Batch:
    """Returns the batch with its positions sampled in all kinds of ways."""
    count = len(batch.sampled)
    rows = replace(
        batch.sample,
        target=np.resize(np.array([-1, 7], np.int32), count),
        temperature=np.linspace(0, 1, count, dtype=np.float32),
        top_p=np.linspace(0.5, 1, count, dtype=np.float32),
        top_k=np.arange(count, dtype=np.int32),
        min_p=np.linspace(0, 0.1, count, dtype=np.float32),
        seed=np.arange(count, dtype=np.uint64) * np.uint64(0x123456789ABCDEF),
    )
    return replace(batch, sample=rows)


DECODE = greedy_batch([prompt(50 + row, 1, row) for row in range(20)])
PROMPTS = greedy_batch([prompt(0, 48, 0), prompt(16, 21, 1), prompt(300, 7, 2)])
MIXED = greedy_batch([*(prompt(50, 1, row) for row in range(5)), prompt(0, 300, 6), prompt(64, 30, 7)])
DRAFTS = greedy_batch([Chunk([1] * 5, 5000, range(313), row, 5) for row in range(6)])
PREFIX = greedy_batch([prompt(3600, 1, row, shared=223) for row in range(24)])
MLA = MlaExpansion(MlaDims(128, 128, 64, 512, 128), 1024)
plan = partial(inputs.plan_attention, tile_tokens=16, pad=roomy, most_decodes=64, run_sizes=(1, 4, 16))
STEPS = {
    "decode": (DECODE, plan),
    "decode with adapters": (adapted(sampled(DECODE)), plan),
    "prompts": (sampled(PROMPTS), plan),
    "prompts in two groups": (grouped(PROMPTS), plan),
    "decode in two groups with adapters": (grouped(adapted(DECODE)), plan),
    "mixed": (adapted(MIXED), plan),
    "drafts": (sampled(DRAFTS), plan),
    "a shared prefix": (sampled(PREFIX), partial(plan, sharing=Sharing(BLOCK_SIZE, 8))),
    "a shared prefix with adapters": (adapted(PREFIX), partial(plan, sharing=Sharing(BLOCK_SIZE, 8))),
    "expanded contexts of MLA": (MIXED, partial(plan, expansion=MLA)),
    "copied contexts": (PROMPTS, partial(plan, expansion=KvExpansion(32, 8, 128, 1 << 14))),
    "segments": (adapted(MIXED), lambda batch: plan_segments(batch, 4, roomy)),
    "nothing": (greedy_batch([]), lambda batch: plan(batch, pad=lambda _: Shape(128, 1, 8, 72, 64, 4, 0, 0, 0))),
}


def sent(batch: Batch, work: AttentionPlan) -> bytes:
    """Returns the words of a step, over a buffer that other steps have used."""
    groups = len(batch.tables)
    words = np.full(step_layout.words(work.shape, groups) + batch.tables.size + 8, -77, np.int32)
    into = step_layout.device_inputs(words, work.shape, step_layout.as_floats, groups)
    count = step_layout.fill(into, StepNumbers(batch, work, BLOCK_SIZE, SCRATCH_BLOCK, SCRATCH_SLOT))
    assert (words[count:] == -77).all()
    return words[:count].tobytes()


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_sent_word_for_word(name: str) -> None:
    """A digest that changes means other numbers on the device: kernels and graphs must expect them."""
    batch, planned = STEPS[name]
    words = sent(batch, planned(batch))
    assert blake2b(words, digest_size=8).hexdigest() == DIGESTS[name], name


def test_every_field_belongs_to_one_section() -> None:
    others = {"tables", "groups", "run", "decodes"}
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names))
    assert set(names) | others == {field.name for field in fields(DeviceInputs)}


DIGESTS = {
    "decode": "3e91454d5894f69f",
    "decode with adapters": "fc0a16e1037ced8b",
    "prompts": "b9fab5f79a440c0b",
    "prompts in two groups": "4e60ec1ee69dc701",
    "decode in two groups with adapters": "ed278de0c28a8a5e",
    "mixed": "06a391c4d8ec24d3",
    "drafts": "58543cc368e09356",
    "a shared prefix": "6104cf3afdb24b2f",
    "a shared prefix with adapters": "e70b07f9c9ae73d9",
    "expanded contexts of MLA": "83042b100633d79d",
    "copied contexts": "510a26d8257fdbb8",
    "segments": "500255a27c7ab572",
    "nothing": "e6d35222c096b6bd",
}
