"""MPNet: distances beyond the last bucket, what the published config says, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import UnsupportedModel
from penstock.model.families.mpnet import buckets
from penstock.model.load import load_model, open_checkpoint
from tests.models.config_json import read_config

FOLDER = Path(__file__).parent / "encoders" / "mpnet"
PUBLISHED = {  # as sentence-transformers/all-mpnet-base-v2 has it
    "_name_or_path": "microsoft/mpnet-base",
    "architectures": ["MPNetForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "mpnet",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "transformers_version": "4.8.2",
    "vocab_size": 30527,
}


def test_the_published_config():
    for architecture in ("MPNetForMaskedLM", "MPNetModel"):
        spec = read_config(PUBLISHED | {"architectures": [architecture]})
        assert (spec.layers, spec.dim, spec.attn.heads, spec.max_len, spec.first_position) == (12, 768, 12, 512, 2)
        assert (spec.encoder, spec.segments, spec.eps, spec.attn.vectors) == (
            True,
            0,
            1e-5,
            {"distance_bias": 12 * 257},
        )


@pytest.mark.parametrize(
    "change", [{"relative_attention_num_buckets": 64}, {"is_decoder": True}, {"hidden_act": "swish"}]
)
def test_what_is_refused_by_name(change):
    with pytest.raises(UnsupportedModel, match=f"{next(iter(change))} = "):
        read_config(PUBLISHED | change)


def test_buckets_grow_with_the_logarithm():
    found = buckets()
    assert found[128:136].tolist() == [0, *range(17, 24)]  # keys at the query and after it
    assert found[128::-1][:8].tolist() == list(range(8))  # and before it
    firsts = [int(np.argmax(found[128::-1] == bucket)) for bucket in range(8, 16)]
    assert firsts == [8, 12, 16, 23, 32, 46, 64, 91]  # as transformers computes them in float32
    assert (found[0], found[-1]) == (15, 31)


@pytest.mark.parametrize("make", [RefBackend, partial(CpuBackend, 2, kv="f32")], ids=["ref", "cpu"])
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_text_longer_than_the_distances_that_differ(make, block_size):
    with np.load(FOLDER / "expected.npz") as file:
        tokens, states = file["long_tokens"].tolist(), file["long_states"]
    backend = make()
    backend.load(load_model(open_checkpoint(FOLDER, strict=True), backend))
    backend.reserve_kv(30, block_size)
    blocks = np.random.default_rng(0).permutation(30).tolist()
    assert np.abs(backend.logits(greedy_batch([Chunk(tokens, 0, blocks)])) - states).max() < 3e-5
