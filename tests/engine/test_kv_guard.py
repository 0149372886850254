"""What a quantized KV cache costs is measured at load, said, kept and, beyond a bound, refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.backend.cpu import CpuBackend
from penstock.config import Config, configure
from penstock.engine.build import open_engine
from penstock.errors import ConfigError, KvLossTooLarge
from penstock.model.dequantize import dequantize
from penstock.model.load import open_checkpoint
from penstock.model.safetensors import read_safetensors
from penstock.planning.evaluation import GUARD_TOKENS, followers
from penstock.planning.kv_guard import batches_of, guard_windows, kept_loss

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
OUTLIER = 2000.0
Open = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def folder_of(golden: str, path: Path, **config: Any) -> Path:
    """A golden with a tokenizer that has a token for each letter and for spaces, and drops all else."""
    shutil.copytree(GOLDENS / golden, path)
    vocab = {char: number for number, char in enumerate("Ġabcdefghijklmnopqrstuvwxyz")}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    stated = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stated | config))
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return folder_of("qwen2", tmp_path / "sound", max_position_embeddings=512)


@pytest.fixture
def outlying(tmp_path: Path) -> Path:
    """Returns the same model in exact arithmetic, but one channel of all values is 2,000 times as large, and what the
    output projection makes of it as much smaller. In 8 bits with a common scale the other channels are rounded away."""
    folder = folder_of("qwen2", tmp_path / "outlying", max_position_embeddings=512)
    file, step = folder / "model.safetensors", open_checkpoint(folder).spec.attn.head_dim
    tensors = {name: dequantize(tensor).copy() for name, tensor in read_safetensors(file).items()}
    for name, tensor in tensors.items():
        if "self_attn.v_proj" in name:  # its weight, and its bias
            tensor[::step] *= OUTLIER
        if "self_attn.o_proj" in name:
            tensor[:, ::step] /= OUTLIER
    file.unlink()
    save_file(tensors, file)
    return folder


@pytest.fixture
def opened(capsys: pytest.CaptureFixture[str]) -> Open:
    """Opens an engine and closes it; returns what it said."""

    def run(path: Path, **options: Any) -> list[str]:
        options = {"device": "cpu", "threads": 1, "kv": "int8", "kv_memory": 1 << 22} | options
        open_engine(configure(path, options)).close()
        return capsys.readouterr().err.splitlines()

    return run


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of cache that are tried from now on."""
    tried: list[str] = []
    real = CpuBackend.trial_logits

    def trial(self: CpuBackend, model: Any, kv: str, *others: Any) -> Any:
        tried.append(kv)
        return real(self, model, kv, *others)

    monkeypatch.setattr(CpuBackend, "trial_logits", trial)
    return tried


def test_what_a_sound_model_loses_is_said(sound: Path, opened: Open) -> None:
    (line,) = opened(sound)
    assert line.startswith("KV cache in int8, compared with 16 bits: mean KL 0.0")
    assert "same top token" in line


@pytest.mark.parametrize(("device", "kv"), [("cpu", "f16:int8"), ("ref", "int8:f16")])
def test_a_cache_is_measured_if_keys_or_values_are_quantized(sound: Path, opened: Open, device: str, kv: str) -> None:
    (line,) = opened(sound, device=device, kv=kv)
    assert line.startswith(f"KV cache in {kv}, compared with 16 bits: mean KL 0.0")
    with pytest.raises(KvLossTooLarge, match=f"a KV cache in {kv} changes the predictions"):
        opened(sound, device=device, kv=kv, kv_loss="0")


def test_a_model_that_it_harms_is_refused(outlying: Path, opened: Open, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KvLossTooLarge, match=r"too much: mean KL .* the bound is 0\.05: leave out --kv") as caught:
        opened(outlying)
    assert caught.value.code == "kv_loss_too_large"
    assert capsys.readouterr().err.startswith("KV cache in int8")
    assert opened(outlying, kv="auto") == opened(outlying, kv="f32") == []
    assert opened(outlying, kv_loss="any")[0].startswith("KV cache in int8")
    assert opened(outlying, kv_loss=100)[0].startswith("KV cache in int8")
    with pytest.raises(KvLossTooLarge):
        opened(outlying, kv_loss="0")


@pytest.mark.parametrize("kv", ["int8", "f16:int8"])
def test_it_is_what_eval_kl_finds(sound: Path, opened: Open, kv: str) -> None:
    """The command without a text has the text and the windows of the check."""
    opened(sound, kv=kv)
    command = [sys.executable, "-m", "penstock", "eval", "kl", str(sound), "--against", str(sound), "--kv", kv]
    done = subprocess.run([*command, "--device", "cpu", "--threads", "1", "--json"], stdout=subprocess.PIPE, check=True)
    expected = json.loads(done.stdout)["kl"]
    found = kept_loss(Config(model=str(sound), device="cpu", kv=kv), open_checkpoint(sound))
    assert found is not None
    assert found.mean == pytest.approx(expected["mean"], rel=1e-9)
    assert (found.same_top, expected["predictions"]) == (expected["same_top"], 2 * (512 // 2 - 1))
    assert 0 < found.mean < 0.05


def test_a_model_with_a_short_context_has_shorter_windows(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_of("qwen2", tmp_path / "short", max_position_embeddings=100))
    windows = guard_windows(checkpoint)
    assert {len(window) for window in windows} == {100}
    assert len(windows) == GUARD_TOKENS // 100


@pytest.mark.parametrize("step_tokens", [256, 100, 7])
def test_small_steps_measure_the_same(
    sound: Path, opened: Open, home: Path, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    expected = opened(sound)
    shutil.rmtree(home)
    tried = spied(monkeypatch)
    assert opened(sound, step_tokens=step_tokens, max_rows=4) == expected
    assert tried == 2 * ["auto", "int8"]


def test_a_restart_does_not_measure_again(sound: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, tried = opened(sound), spied(monkeypatch)
    assert opened(sound) == expected
    assert opened(sound, threads=2, max_rows=3, kv_loss="any") == expected
    assert tried == []
    (sound / "config.json").write_text((sound / "config.json").read_text() + "\n")
    assert opened(sound) == expected
    assert tried == 2 * ["auto", "int8"]
    opened(sound, quantize="q8_0")
    assert len(tried) == 8


@pytest.mark.parametrize("kept", ["", "[]", '["other", [0.5, 0.1, 0.9]]', '[1, 2, "'])
def test_a_damaged_record_is_measured_again(
    sound: Path, opened: Open, home: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    expected = opened(sound)
    (record,) = home.rglob("*.kv_loss")
    assert list(record.parent.iterdir()) == [record]
    record.write_text(kept)
    tried = spied(monkeypatch)
    assert opened(sound) == expected
    assert tried == 2 * ["auto", "int8"]


def test_where_nothing_can_be_kept_it_is_measured_each_time(
    sound: Path, opened: Open, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.write_text("a file where the folder would be")
    tried = spied(monkeypatch)
    assert opened(sound) == opened(sound)
    assert len(tried) == 8


@pytest.mark.parametrize("golden", ["qwen3next", "gemma3", "deepseek_v2", "gpt_oss"])
def test_other_kinds_of_models(golden: str, tmp_path: Path, opened: Open) -> None:
    """Tries models with recurrent states, with layer groups, with MLA and with attention sinks."""
    (line,) = opened(folder_of(golden, tmp_path / golden), kv_loss="any")
    assert line.startswith("KV cache in int8, compared with 16 bits: mean KL 0.")


def test_a_model_without_a_tokenizer_is_served(opened: Open) -> None:
    (line,) = opened(GOLDENS / "llama3")
    assert "no tokenizer" in line


@pytest.mark.parametrize(("size", "step"), [(256, 512), (256, 100), (9, 2), (10, 3)])
def test_steps_cover_a_window_once(size: int, step: int) -> None:
    window = np.arange(100, 100 + size, dtype=np.int32)
    batches = list(batches_of(window, step, 1))
    tokens = [int(token) for batch in batches for token in batch.tokens]
    sampled = [int(batch.tokens[place]) for batch in batches for place in batch.sampled]
    assert tokens == window[:-1].tolist()
    assert [token + 1 for token in sampled] == followers(window).tolist()
    assert [position for batch in batches for position in batch.positions] == list(range(size - 1))


@pytest.mark.parametrize("value", ["much", "", "-1", "nan", "inf", -0.5, True, None])
def test_bounds_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="kv_loss is any, or a number of nats"):
        configure("model", {"kv_loss": value})


def bounds(values: Sequence[Any]) -> list[str]:
    return [configure("model", {"kv_loss": value}).kv_loss for value in values]


def test_bounds() -> None:
    assert bounds(["any", "0.1", 0.1, 0, 2]) == ["any", "0.1", "0.1", "0", "2"]
