"""EAGLE-3 heads: what they compute is what the authors' own code computes (scripts/make_eagle_goldens.py), and files
that do not fit are refused by what is wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.backend.base import Floats
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.eagle import EagleHead, build, observed, open_eagle, problems
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from penstock.model.packer import Packer

FOLDER = Path(__file__).parent / "eagle3"
HEADS = ("sglang", "vllm", "speculators")
BLOCK_SIZE = 8
TABLE = range(3, 11)  # blocks of the text and its draft


def loaded(name: str, make: Callable[[], Any]) -> tuple[Any, EagleHead]:
    """Returns a backend with the target and a head of it."""
    backend, head = make(), open_eagle(FOLDER / name)
    load_pair(backend, head)
    backend.reserve_kv(TABLE.stop, BLOCK_SIZE)
    return backend, head


def load_pair(backend: Any, head: EagleHead, target: Checkpoint | None = None) -> None:
    """Loads the heads' target or another one, and the head as program 1."""
    model: Any = load_model(observed(target or open_checkpoint(FOLDER / "target"), head), backend)
    backend.load(model)
    pack = Packer(head.tensors, backend)
    backend.load(build(head, pack, model.ends), 1, head.token_ids)
    pack.check_all_used()


def run(backend: Any, program: int, tokens: list[int], start: int, sample: int | None = None) -> Floats:
    """Returns the logits of a step of one row."""
    batch = greedy_batch([Chunk(tokens, start, TABLE, sample=sample)])
    return backend.logits(replace(batch, program=program))


@pytest.mark.parametrize("make", [partial(CpuBackend, 2, kv="f32"), RefBackend], ids=["cpu", "ref"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_and_drafts_are_those_of_the_authors(name: str, make: Callable[[], Any]) -> None:
    with np.load(FOLDER / name / "expected.npz") as file:
        tokens, wanted, draft, drafted = (file[key] for key in ("tokens", "logits", "draft", "draft_logits"))
    backend, head = loaded(name, make)
    text, close = tokens.tolist(), 1e-4 if make is RefBackend else 0.05  # rows of a CPU are stored in BF16
    run(backend, 0, text, 0)
    assert np.abs(run(backend, 1, text[1:], 0) - wanted).max() < close
    run(backend, 0, text, 0)  # what the head stored of known positions is gone
    run(backend, 1, text[1:18], 0, sample=0)
    found = [run(backend, 1, text[18:], 17, sample=1)]
    for depth, token in enumerate(draft[:-1].tolist()):
        assert head.token_ids[found[-1].argmax()] == token
        found.append(run(backend, 1, [token], len(text) - 1 + depth))
    assert np.abs(np.concatenate(found) - drafted).max() < close


def test_the_layouts_differ_in_what_they_say() -> None:
    target = open_checkpoint(FOLDER / "target").spec
    sglang, vllm, speculators = (open_eagle(FOLDER / name) for name in HEADS)
    assert sglang.eagle.layers_of(target) == (2, 4, 5)
    assert vllm.eagle.layers_of(target) == (1, 4, 8)
    assert (vllm.spec.dim, vllm.eagle.target_dim, "embed" in vllm.tensors) == (48, 32, True)
    assert speculators.eagle.layers_of(target) == (0, 3, 7)
    assert [head.eagle.norm_before_residual for head in (sglang, vllm, speculators)] == [False, False, True]
    for head in (sglang, vllm, speculators):
        assert not head.unknown
        assert not list(problems(head, open_checkpoint(FOLDER / "target")))


def changed(folder: Path, config: dict[str, Any], tensors: dict[str, Any] | None = None, name: str = "sglang") -> Path:
    """Returns a copy of a head with other fields and tensors; None takes one away."""
    shutil.copytree(FOLDER / name, folder)
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    if tensors:
        stored = load_file(folder / "model.safetensors") | tensors
        save_file({key: value for key, value in stored.items() if value is not None}, folder / "model.safetensors")
    return folder


def test_layers_in_sglangs_table_are_those_before(tmp_path: Path) -> None:
    table = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}}
    assert open_eagle(changed(tmp_path / "head", table)).eagle.layers == (1, 4, 7)


def test_a_head_with_all_tokens_needs_no_table_of_them(tmp_path: Path) -> None:
    own = {"d2t": None, "t2d": None, "lm_head.weight": None}
    head = open_eagle(changed(tmp_path / "head", {"draft_vocab_size": 64}, own))
    assert head.token_ids == ()
    backend = RefBackend()
    target: Any = load_model(open_checkpoint(FOLDER / "target"), backend)
    assert build(head, Packer(head.tensors, backend), target.ends).head is target.ends.head


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers = 2 in config.json is not supported"),
        ({"fc_norm": True}, {}, "fc_norm = True in config.json is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state = False"),
        ({"draft_vocab_size": 25}, {}, r"'d2t' has shape \(24,\); draft_vocab_size in config.json needs \(25,\)"),
        ({}, {"d2t": None}, "the head drafts 24 of 64 tokens, and no tensor 'd2t' says which ones"),
        ({}, {"d2t": np.full(24, 60)}, "'d2t' leads to token 64, and the target has 64 tokens"),
        ({}, {"d2t": np.zeros(24, np.float32)}, "'d2t' is stored as F32; it must be I64 or I32"),
        ({}, {"fc.weight": None}, "has no tensor 'fc.weight', which every EAGLE-3 head has"),
        ({}, {"gate.weight": np.zeros((2, 2), np.float32)}, "a tensor named 'gate.weight', which this engine does not"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str
) -> None:
    with pytest.raises((MalformedFile, UnsupportedModel), match=problem):
        open_eagle(changed(tmp_path / "head", config, tensors))


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({}, {"fc.weight": np.zeros((32, 64), np.float32)}, r"'fc.weight' has shape \(32, 64\)"),
        ({}, {"lm_head.weight": None}, "no tensor for 'head'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, r"'fc.weight' has shape \(32, 96\); .* needs \(32, 64\)"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], problem: str) -> None:
    with pytest.raises(MalformedFile, match=problem):
        load_pair(RefBackend(), open_eagle(changed(tmp_path / "head", config, tensors)))
