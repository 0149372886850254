"""Layers are divided into KV groups that cost the same, and a window's groups hold no more than the window needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.model.load import open_checkpoint
from penstock.model.spec import AttentionSpec, KvGroup, ModelSpec, RopeSpec, group_by_window
from penstock.types import blocks_for
from tests.models.config_json import read_config

GOLDENS = Path(__file__).parent / "goldens"
GEMMA_3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def alternating(period: int, layers: int, window: int) -> list[int]:
    """Returns the windows of layers of which every `period`-th sees everything."""
    return [0 if (layer + 1) % period == 0 else window for layer in range(layers)]


def sizes(windows: list[int]) -> dict[int, list[int]]:
    """Returns how many layers the groups of each window have, in the order of the groups."""
    found: dict[int, list[int]] = {}
    for group in group_by_window(windows):
        found.setdefault(group.window, []).append(len(group.layers))
    return found


PUBLISHED = {  # windows of the layers, and what their groups are to be
    "gemma-3-270m": (alternating(6, 18, 512), {0: [3], 512: [3] * 5}),
    "gemma-3-1b": (alternating(6, 26, 512), {0: [4], 512: [4] * 5 + [2]}),
    "gemma-3-4b": (alternating(6, 34, 1024), {0: [5], 1024: [5] * 5 + [4]}),
    "gemma-3-12b": (alternating(6, 48, 1024), {0: [8], 1024: [8] * 5}),
    "gemma-3-27b": (alternating(6, 62, 1024), {0: [10], 1024: [11] * 4 + [8]}),
    "gemma-2-2b": (alternating(2, 26, 4096), {0: [13], 4096: [13]}),
    "gpt-oss-20b": (alternating(2, 24, 128), {0: [12], 128: [12]}),
    "ministral-8b": ([0, 32768, 32768, 32768] * 9, {0: [9], 32768: [9] * 3}),
    "mistral-7b-v0.1": ([4096] * 32, {4096: [32]}),
    "llama-3.1-8b": ([0] * 32, {0: [32]}),
    "one more than the other": ([0, 7, 0] * 13, {0: [13, 13], 7: [13]}),
    "nearly alike": ([0, 7] * 11 + [7], {0: [11], 7: [12]}),
}


@pytest.mark.parametrize(("windows", "wanted"), PUBLISHED.values(), ids=PUBLISHED)
def test_groups_have_room_for_equally_many_layers(windows: list[int], wanted: dict[int, list[int]]) -> None:
    assert sizes(windows) == wanted
    groups = group_by_window(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)
    assert [group.window for group in groups] == sorted(group.window for group in groups), "full attention is first"
    size = max(len(group.layers) for group in groups)
    for window, found in wanted.items():
        assert len(found) * size <= 1.1 * windows.count(window)


def test_layers_keep_their_order_within_a_group() -> None:
    assert group_by_window([5, 0, 5, 0]) == (KvGroup(0, (1, 3)), KvGroup(5, (0, 2)))
    assert group_by_window([5, 5]) == (KvGroup(5, (0, 1)),)


def read(name: str) -> ModelSpec:
    return open_checkpoint(GOLDENS / name).spec


def test_specs_of_every_kind_have_groups() -> None:
    assert read_config(GEMMA_3_270M).windows == (0, 512, 512, 512, 512, 512)
    assert len(read_config(GEMMA_3_270M).kv_planes) == 3
    assert read("llama3").kv_groups == (KvGroup(0, tuple(range(read("llama3").layers))),)
    latent = read("deepseek_v3")
    assert latent.kv_groups == (KvGroup(0, tuple(range(latent.layers))),)


def test_layers_of_groups_are_counted_among_those_that_keep_kv() -> None:
    hybrid = read("qwen3next")
    assert hybrid.recurrent
    assert hybrid.kv_groups == (KvGroup(0, tuple(range(hybrid.layers - len(hybrid.recurrent)))),)


def test_the_layers_of_an_encoder_share_one() -> None:
    attn = AttentionSpec(2, 2, 8, RopeSpec((), False), causal=False)
    spec = ModelSpec("bert", 4, 16, 32, 100, 64, 1e-5, attn)
    assert spec.kv_groups == (KvGroup(0, (0,)),)
    assert len(replace(spec, attn=replace(attn, causal=True)).kv_planes) == 4


def test_at_8192_tokens_the_cache_of_gemma_3_270m_is_a_quarter() -> None:
    spec = read_config(GEMMA_3_270M)
    before = blocks_for(8192, (0,), 16) * spec.layers  # in blocks of one layer
    assert before >= 4 * blocks_for(8192, spec.windows, 16) * len(spec.kv_planes)


def held_at_once(tokens: int, window: int, block_size: int, chunk: int) -> int:
    """Counts the blocks that some step touches, over all steps of a sequence and all ways to begin its chunks."""
    most = 0
    for first in range(tokens):
        for count in range(1, min(chunk, tokens - first) + 1):
            seen = max(first - window + 1, 0) if window else 0
            most = max(most, (first + count - 1) // block_size - seen // block_size + 1)
    return most


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 5, 8, 9, 30, 100])
@pytest.mark.parametrize("chunk", [1, 2, 5, 12])
def test_a_sequence_holds_the_blocks_that_some_step_touches(window: int, chunk: int) -> None:
    for tokens in (1, 3, 4, 5, 17, 40):
        exact = held_at_once(tokens, window, 4, chunk)
        assert exact <= blocks_for(tokens, (window,), 4, chunk) <= exact + (tokens < window + chunk + 4)


def test_goldens_cover_two_windows() -> None:
    configs = [json.loads(path.read_text()) for path in GOLDENS.glob("*/config.json")]
    assert sum(len(set(read_config(config).windows)) > 1 for config in configs) >= 3
