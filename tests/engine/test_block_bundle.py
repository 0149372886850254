"""KV blocks that go from one backend to another: answers go on as they would have, and other layouts are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.block_bundle import bundle_blocks, unbundle_blocks
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import with_groups
from penstock.errors import KvLayoutMismatch
from penstock.model.load import load_model, open_checkpoint
from penstock.types import TokenLogprob

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
BLOCK_SIZE, BLOCKS, ANSWER = 4, 14, 12
BACKENDS: dict[str, Callable[[], Any]] = {
    "ref": RefBackend,
    "f16": lambda: CpuBackend(2),
    "f32": lambda: CpuBackend(1, kv="f32"),
    "int8": lambda: CpuBackend(2, kv="int8"),
}


def loaded(backend: str, model: str = "gpt_oss", block_size: int = BLOCK_SIZE) -> Any:
    checkpoint = open_checkpoint(GOLDENS / model)
    found = BACKENDS[backend]()
    found.load(load_model(checkpoint, found))
    groups = checkpoint.spec.kv_groups
    found.reserve_kv(2 * BLOCKS * len(groups), block_size, 1, groups)
    return found


def answer(backend: Any, tokens: Sequence[int], start: int, first_block: int, model: str) -> list[TokenLogprob]:
    """Computes the tokens from position `start` on and answers greedily. The sequence's blocks begin at one of the
    cache; what lies behind a window is no block at all."""
    windows = open_checkpoint(GOLDENS / model).spec.windows
    said: list[TokenLogprob] = []
    table = range(first_block, first_block + BLOCKS)
    while len(said) < ANSWER:
        chunk = Chunk(tokens, start, table, slot=0, sample=1)
        batch = with_groups(greedy_batch([chunk], step=len(said)), windows, BLOCK_SIZE, behind=10**6)
        batch = replace(batch, sample=replace(batch.sample, logprobs=np.zeros(1, np.int32)))
        said += backend.wait(backend.launch(batch)).rows[0].logprobs
        tokens, start = [said[-1].token], start + len(tokens)
    return said


def same(one: Sequence[TokenLogprob], other: Sequence[TokenLogprob]) -> bool:
    """Compares answers. NumPy adds up in another order for other chunks, so the last bits may differ."""
    pairs = list(zip(one, other, strict=True))
    return all(a.token == b.token and abs(a.logprob - b.logprob) < 1e-5 for a, b in pairs)


@pytest.mark.parametrize("model", ["gpt_oss", "gemma3", "llama3", "deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_goes_on_elsewhere_with_the_same_tokens(backend: str, model: str) -> None:
    with np.load(GOLDENS / model / "expected.npz") as file:
        tokens = file["tokens"].tolist()[:30]
    groups = len(open_checkpoint(GOLDENS / model).spec.kv_groups)
    first, second = loaded(backend, model), loaded(backend, model)
    wanted = answer(first, tokens, 0, 0, model)
    computed = range(7 * groups)  # blocks of whole tokens, 28 of them
    bundle = bundle_blocks(first.kv, computed)
    unbundle_blocks(second.kv, [block + BLOCKS * groups for block in computed], bundle)
    assert same(answer(second, tokens[28:], 28, BLOCKS, model), wanted)
    assert not same(answer(loaded(backend, model), tokens[28:], 28, BLOCKS, model), wanted), "the blocks matter"


def test_blocks_of_another_layout_are_refused_and_nothing_is_written() -> None:
    bundle = bundle_blocks(loaded("f16").kv, [0, 1])
    for other in (loaded("f32"), loaded("int8"), loaded("ref"), loaded("f16", "llama3"), loaded("f16", block_size=8)):
        before = other.kv.export_blocks([0, 1])
        with pytest.raises(KvLayoutMismatch, match=r"got \(cpu 2; f16, blocks of 4 positions.*this cache has"):
            unbundle_blocks(other.kv, [0, 1], bundle)
        assert other.kv.export_blocks([0, 1]) == before
    with pytest.raises(KvLayoutMismatch, match="2 KV blocks, and there is room for 3"):
        unbundle_blocks(loaded("f16").kv, [0, 1, 2], bundle)
    with pytest.raises(KvLayoutMismatch, match="no bundle of KV blocks"):
        unbundle_blocks(loaded("f16").kv, [0, 1], bundle[:-1])
