"""Tiny checkpoints against logits that transformers computed (scripts/make_goldens.py), from both kinds of file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.backend.ref.random_steps import blocks_for, random_steps
from penstock.model.load import load_model, open_checkpoint

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
BLOCK_SIZE = 4
SLOTS = 10  # states, of models that have any
TOLERANCE = 1e-4


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDENS / request.param


@pytest.fixture(params=["gguf", "folder"])
def backend(folder: Path, request: pytest.FixtureRequest) -> RefBackend:
    backend = RefBackend()
    path = folder / "model.gguf" if request.param == "gguf" else folder
    backend.load(load_model(open_checkpoint(path), backend))
    return backend


@pytest.fixture
def expected(folder: Path) -> tuple[list[int], np.ndarray]:
    with np.load(folder / "expected.npz") as file:
        return file["tokens"].tolist(), file["logits"]


def test_every_kind_of_golden_is_there():
    assert NAMES == [
        "bamba",
        "bias",
        "cohere",
        "cohere2",
        "cohere_plus",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "falcon",
        "falcon_h1",
        "falcon_h1_norm",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma3n_three",
        "gemma4",
        "gemma4_moe",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitehybrid_dense",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "hunyuan",
        "hunyuan_v1_moe",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2moe",
        "linear",
        "llama3",
        "llama4",
        "longrope",
        "minicpm",
        "minimax_m2",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron_h",
        "nemotron_h_moe",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3_moe",
        "qwen3next",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "stablelm_12b",
        "stablelm_parallel",
        "starcoder2",
        "tied",
        "untied",
        "yarn",
    ]


def test_whole_prompt(backend, expected):
    tokens, logits = expected
    size = blocks_for([tokens], BLOCK_SIZE)
    backend.reserve_kv(size, BLOCK_SIZE, SLOTS)
    got = backend.logits(greedy_batch([Chunk(tokens, 0, range(size))]))
    assert np.abs(got - logits).max() < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_random_chunks_among_others(backend, expected, seed):
    """The prompt, two beginnings of it, and blocks all over the cache."""
    tokens, logits = expected
    prompts = [tokens, tokens[:5], tokens[:30]]
    backend.reserve_kv(blocks_for(prompts, BLOCK_SIZE), BLOCK_SIZE, SLOTS)
    for chunks in random_steps(np.random.default_rng(seed), prompts, BLOCK_SIZE):
        wanted = np.concatenate([logits[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.abs(backend.logits(greedy_batch(chunks)) - wanted).max() < TOLERANCE


def test_greedy_steps_follow_the_logits(backend, expected):
    """Sampled tokens stay in the backend and feed the next step, each slot its own."""
    tokens, logits = expected
    prompts = [tokens[:20], tokens[:11]]
    tables = [range(0, 12), range(12, 24)]
    backend.reserve_kv(24, BLOCK_SIZE, SLOTS)
    chunks = [Chunk(p, 0, t, slot, 1) for slot, (p, t) in enumerate(zip(prompts, tables, strict=True))]
    first = backend.wait(backend.launch(greedy_batch(chunks, step=0)))
    assert [row.tokens for row in first.rows] == [(logits[19].argmax(),), (logits[10].argmax(),)]

    swapped = [Chunk([-1], len(prompts[slot]), tables[slot], slot, 1) for slot in (1, 0)]
    second = backend.wait(backend.launch(greedy_batch(swapped, step=1)))
    for slot, row in zip((1, 0), second.rows, strict=True):
        known = [*prompts[slot], *first.rows[slot].tokens]
        alone = backend.logits(greedy_batch([Chunk(known, 0, tables[slot], 9, 1)]))
        assert row.tokens == (alone[0].argmax(),)


def test_moved_blocks_are_read_where_they_are_now(backend, expected):
    tokens, logits = expected
    backend.reserve_kv(30, BLOCK_SIZE, SLOTS)
    backend.logits(greedy_batch([Chunk(tokens[:40], 0, range(10))]))
    backend.kv.copy_blocks([(block, 29 - block) for block in range(10)])
    got = backend.logits(greedy_batch([Chunk(tokens[40:], 40, [*range(29, 19, -1), 0, 1])]))
    assert np.abs(got - logits[40:]).max() < TOLERANCE


def test_bytes_are_those_of_the_cache(backend, folder):
    spec = open_checkpoint(folder).spec
    assert backend.memory_needs().kv_bytes_per_token == 4 * sum(a.kv_values for a in spec.cached_attention)
    assert backend.memory_needs().state_bytes == spec.state_bytes


@pytest.mark.parametrize("path", ["longrope", "longrope/model.gguf"])
@pytest.mark.parametrize("make", [RefBackend, partial(CpuBackend, 2, kv="f32")], ids=["ref", "cpu"])
def test_beyond_the_original_context_all_positions_have_the_long_factors(path, make):
    """The prompt in chunks, and an answer that crosses the boundary, where transformers computes its cache again."""
    with np.load(GOLDENS / "longrope" / "long.npz") as file:
        tokens, logits, answer = file["tokens"].tolist(), file["logits"], file["answer"]
    backend = make()
    backend.load(load_model(open_checkpoint(GOLDENS / path, max_len=len(tokens)), backend))
    backend.reserve_kv(2 * len(tokens), BLOCK_SIZE, SLOTS)
    for chunks in random_steps(np.random.default_rng(1), [tokens], BLOCK_SIZE):
        wanted = np.concatenate([logits[chunk.start : chunk.start + len(chunk.tokens)] for chunk in chunks])
        assert np.abs(backend.logits(greedy_batch(chunks)) - wanted).max() < TOLERANCE
    known = [*tokens[: 48 - 4], *answer.tolist()]
    got = backend.logits(greedy_batch([Chunk(known, 0, range(30))])).argmax(-1)
    assert got[48:-1].tolist() == answer[5:].tolist()
