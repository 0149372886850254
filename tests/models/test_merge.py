"""A merged model computes what its base and the adapter do, written as the kind of file that the base is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.ref import RefBackend
from penstock.cli.app import run_command
from penstock.model.load import load_model, open_checkpoint

MODELS = Path(__file__).parent
ADAPTERS = MODELS / "adapters"


def logits_of(path: Path, tokens: list[int]) -> np.ndarray:
    backend = RefBackend()
    backend.load(load_model(open_checkpoint(path), backend))
    backend.reserve_kv(13, 4, 2)
    return backend.logits(greedy_batch([Chunk(tokens, 0, range(13))]))


@pytest.mark.parametrize("gguf", [False, True])
@pytest.mark.parametrize("name", ["tied", "untied", "phi3", "gpt2", "gemma2", "deepseek_v2"])
def test_a_merged_model_computes_what_peft_merged(name: str, gguf: bool, tmp_path: Path):
    golden = MODELS / "goldens" / name
    out = tmp_path / ("merged.gguf" if gguf else "merged")
    assert run_command("merge", [str(golden / "model.gguf" if gguf else golden), str(ADAPTERS / name), str(out)]) == 0
    tokens = np.load(golden / "expected.npz")["tokens"].tolist()
    wanted = np.load(ADAPTERS / name / "expected.npz")["logits"]
    plain = np.load(golden / "expected.npz")["logits"]
    found = logits_of(out, tokens)
    assert np.abs(found - wanted).mean() < 0.05 * np.abs(plain - wanted).mean()  # merged weights are BF16 or F16


def test_what_cannot_be_merged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    golden, adapter = str(MODELS / "goldens" / "tied"), str(ADAPTERS / "tied")
    assert run_command("merge", [golden, str(ADAPTERS / "gpt2"), str(tmp_path / "out")]) != 0
    assert "trained on another base" in capsys.readouterr().err
    for words, named in (
        ([golden, adapter, str(tmp_path)], "exists"),
        ([f"{golden}/model.gguf", adapter, str(tmp_path / "out")], "must end in .gguf"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run_command("merge", words)
        assert named in capsys.readouterr().err
