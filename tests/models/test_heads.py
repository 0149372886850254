"""Heads that predict further tokens (MTP), against what transformers computes (scripts/make_head_goldens.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.ref import RefBackend
from penstock.config import configure
from penstock.core.drafting.depths import DepthPlan, DraftDepths
from penstock.engine.build import open_engine
from penstock.engine.drafts.drafting import Drafting
from penstock.errors import ConfigError, MalformedFile
from penstock.model import names
from penstock.model.draft import open_draft
from penstock.model.families.mtp import MtpHead
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.writer import PendingTensor, encoded, write_gguf
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from penstock.model.mtp_head import FOLDER_PARTS, GGUF_PARTS, beside, ends_of, load_head, open_mtp
from penstock.model.registry import family
from penstock.model.safetensors import read_safetensors
from penstock.planning.forecast import make_forecasts
from penstock.types import Failed, Request, SamplingParams, Tokens
from penstock.types.messages import UpdateWeights
from tests.engine.changed_weights import change_weights
from tests.engine.test_weights import drain, last_of, real_engine, same, scored

FOLDER = Path(__file__).parent
GOLDENS, HEADS = FOLDER / "goldens", FOLDER / "heads"
NAMES = ["deepseek_v3", "deepseek_v32", "glm4_moe", "qwen35", "qwen3next"]
BLOCK_SIZE = 16
TABLE = [5, 2, 0, 3]
BACKENDS: dict[str, tuple[Callable[[], Any], float]] = {
    "ref": (RefBackend, 1e-4),
    "cpu": (lambda: CpuBackend(2, kv="f32"), 5e-2),  # its hidden states are BF16
}


def with_head(folder: Path, name: str, head: str = "") -> Path:
    """Returns a folder with the model of a golden and a head of its own, or that of another model."""
    folder.mkdir()
    config = json.loads((GOLDENS / name / "config.json").read_text())
    if not name.startswith("qwen"):  # whose configs say nothing of a head
        config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDENS / name / "model.safetensors", folder / "model.safetensors")
    shutil.copy(HEADS / (head or name) / "head.safetensors", folder / "head.safetensors")
    files = ("model.safetensors", "head.safetensors")
    places = {tensor: file for file in files for tensor in read_safetensors(folder / file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def in_gguf(path: Path, name: str, without: str = "") -> Path:
    """Writes the model of a golden and its head as a GGUF file, without one of its tensors if that is named."""
    golden = read_gguf(GOLDENS / name / "model.gguf")
    arch = golden.metadata["general.architecture"]
    kind, layer = family("glm4moe"), 2
    theirs = {ours: theirs for theirs, ours in kind.GGUF.but(**GGUF_PARTS).parts.items()}
    tensors = {each: tensor for each, tensor in golden.tensors.items() if not each.startswith(f"blk.{layer}.")}
    for each, tensor in read_safetensors(HEADS / name / "head.safetensors").items():
        ours, part, _ = names.identify(each, kind.HUGGING_FACE.but(**FOLDER_PARTS))
        stem = part.removesuffix(".bias") if part != "choice_bias" else part
        expert = ours.split(".")[3] if "*" in part else ""
        suffix = "" if part == "choice_bias" else ".bias" if part.endswith(".bias") else ".weight"
        tensors[f"blk.{layer}.{theirs[stem].replace('*', expert)}{suffix}"] = tensor
    tensors.pop(f"blk.{layer}.{without}.weight", None)
    keys = {key: encoded(value) for key, value in golden.metadata.items()}
    keys |= {f"{arch}.block_count": encoded(layer + 1), f"{arch}.nextn_predict_layers": encoded(1)}
    pending = [PendingTensor(each, t.format, t.shape, lambda t=t: iter([t.data])) for each, t in tensors.items()]
    write_gguf(path, keys, pending, lambda *_: None)
    return path


def loaded(path: Path, backend: Any) -> Any:
    """Loads a model and its head into a backend."""
    target = open_checkpoint(path)
    head = open_mtp(target)
    target = beside(target, head)
    model = load_model(target, backend)
    backend.load(model)
    backend.load(load_head(head, model, backend), 1)
    backend.reserve_kv(6, BLOCK_SIZE, 2, target.spec.kv_groups)
    return backend


def golden(name: str) -> dict[str, Any]:
    with np.load(HEADS / name / "expected.npz") as file:
        return dict(file)


def head_logits(backend: Any, tokens: list[int], position: int, sample: int | None = None) -> np.ndarray:
    """Returns the logits of the head's rows from a position on, whose tokens are those behind."""
    return backend.logits(replace(greedy_batch([Chunk(tokens, position, TABLE, sample=sample)]), program=1))


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def check_head(backend: Any, name: str, tolerance: float) -> None:
    """Checks all rows of a prompt at once, and a draft after some chunks."""
    expected = golden(name)
    tokens, drafted = expected["tokens"].tolist(), expected["drafted"].tolist()
    backend.logits(greedy_batch([Chunk(tokens, 0, TABLE)]))
    assert relative(head_logits(backend, tokens[1:], 0), expected["rows"]) < tolerance
    backend.logits(greedy_batch([Chunk(tokens, 0, TABLE)]))  # the head has written over hidden states
    for first, last in ((0, 7), (7, 30)):
        head_logits(backend, tokens[first + 1 : last + 1], first, sample=0)
    found = [head_logits(backend, tokens[31:], 30, sample=1)]
    for at, token in enumerate(drafted[:-1]):
        found.append(head_logits(backend, [token], len(tokens) - 1 + at))
    assert relative(np.concatenate(found), np.concatenate([expected["rows"][-1:], expected["drafts"]])) < tolerance


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", BACKENDS)
def test_logits_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    make, tolerance = BACKENDS[kind]
    check_head(loaded(with_head(tmp_path / name, name), make()), name, tolerance)


def test_a_gguf_file_holds_a_head_too(tmp_path: Path) -> None:
    backend = loaded(in_gguf(tmp_path / "model.gguf", "glm4_moe"), RefBackend())
    check_head(backend, "glm4_moe", 1e-4)


def test_a_head_without_a_last_norm_has_the_models(tmp_path: Path) -> None:
    target = open_checkpoint(in_gguf(tmp_path / "model.gguf", "glm4_moe", without="nextn.shared_head_norm"))
    model = load_model(target, RefBackend())
    head = load_head(open_mtp(target), model, RefBackend())
    assert isinstance(head, MtpHead)
    assert head.norm is head.ends.norm is ends_of(model).norm


def test_the_goldens_are_all_there() -> None:
    assert sorted(folder.name for folder in HEADS.iterdir()) == NAMES


def config(path: Path, **options: object) -> Any:
    given = {"device": "cpu", "threads": 1, "max_len": 64, "max_rows": 4, "draft": "mtp", **options}
    return configure(path, given)


def answers(path: Path, **options: object) -> tuple[dict[int, list[int]], set[str]]:
    """Returns the answers of an engine, and the sources of drafts in them."""
    engine = open_engine(config(path, **options))
    for id in range(6):
        prompt = (5, 9, 3, 7, 5, 2, 8, 1)[: id + 2]
        engine.add(Request(id, prompt, SamplingParams(temperature=0.7 * (id % 2), seed=id), 40))
    said: dict[int, list[int]] = {id: [] for id in range(6)}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, Tokens):
                said[event.seq] += event.tokens
    sources = {counts.source for counts in engine.stats().drafts}
    engine.close()
    return said, sources


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all drafted and verified, whatever pays."""
    monkeypatch.setattr(DraftDepths, "choose", lambda self, chances, *_: DepthPlan([len(each) for each in chances]))
    monkeypatch.setattr(Drafting, "lengths", lambda self, proposals, *_: [len(each.tokens) for each in proposals])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3next"])
def test_an_engine_drafts_with_the_head_and_answers_as_without(name: str, tmp_path: Path) -> None:
    path = with_head(tmp_path / name, name)
    plain, _ = answers(path, draft="", speculation="off")
    drafted, sources = answers(path)
    assert drafted == plain
    assert "mtp" in sources


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_a_head_stays_when_weights_are_exchanged(device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_head(tmp_path / "model", "glm4_moe")
    other = change_weights(path, tmp_path / "other")
    engine, fresh = real_engine(path, device, draft="mtp"), real_engine(other, device, speculation="off")
    prompt = (5, 9, 3, 7)
    scored(engine, 1, prompt, 20)
    before = {each.source: each.drafted for each in engine.stats().drafts}
    assert not isinstance(last_of(drain(engine, UpdateWeights(str(other), "v2", id=2)), 2), Failed)
    same(scored(engine, 3, prompt, 50), scored(fresh, 3, prompt, 50), device)
    after = {each.source: each.drafted for each in engine.stats().drafts}
    assert after["mtp"] > before["mtp"] > 0
    assert not caplog.records  # such as that the head has failed


def test_weights_and_hidden_states_take_their_part_of_the_memory(tmp_path: Path) -> None:
    path = with_head(tmp_path / "model", "deepseek_v3")
    target = open_checkpoint(path)
    plans, built = {}, {}
    for draft in ("", "mtp"):
        asked = config(path, draft=draft, kv_memory=40_000)
        forecast, *_ = make_forecasts(asked, target, 16, lambda *_: None)
        assert forecast.memory is not None
        plans[draft] = forecast.memory
        engine = open_engine(asked)
        built[draft] = engine.limits
        engine.close()
    has, alone = plans["mtp"].footprint, plans[""].footprint
    head = open_mtp(target)
    assert has.draft_token == 2 * target.spec.dim + 2 * sum(each.kv_values for each in head.spec.cached_attention)
    assert has.kv_token == alone.kv_token + has.draft_token
    assert 0 < has.draft_weights == has.weights - alone.weights
    assert plans["mtp"].limits.num_blocks < plans[""].limits.num_blocks
    assert plans["mtp"].limits.num_blocks == built["mtp"].num_blocks


def refused(path: Path, **options: object) -> Checkpoint | None:
    return open_draft(config(path, **options), open_checkpoint(path))


def test_a_model_without_a_head_is_named() -> None:
    for name in ("llama3", "deepseek_v3", "qwen3next"):
        with pytest.raises(ConfigError, match=f"--draft mtp: {name} has no MTP head"):
            refused(GOLDENS / name)


def test_speculation_off_is_refused(tmp_path: Path) -> None:
    path = with_head(tmp_path / "model", "glm4_moe")
    assert refused(path, device="cuda") is not None
    with pytest.raises(ConfigError, match="--draft is of no use with --speculation off"):
        refused(path, speculation="off")


def test_the_head_of_another_model_is_refused(tmp_path: Path) -> None:
    path = with_head(tmp_path / "model", "qwen3next", head="qwen35")
    with pytest.raises(MalformedFile, match=r"tensor 'mtp\.layers\.0\.mlp\.gate_proj\.weight' has shape \(16, 32\)"):
        loaded(path, RefBackend())
