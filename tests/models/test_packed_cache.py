"""Packed weights that are read from a file are those that were packed, whatever has become of the file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backend import packed_cache
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend, weights
from penstock.backend.cpu._native import Weight, checksum, isas
from penstock.backend.cpu.packed_file import PackedFile
from penstock.backend.cpu.write_behind import WriteBehind
from penstock.backend.packed_cache import PackedCache, packed_cache_of
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config, packed_home
from penstock.engine.build import build_engine
from penstock.model.load import load_model, open_checkpoint
from penstock.model.tensor import STORAGE
from penstock.types import Request, SamplingParams
from tests.engine.test_draft_options import answer
from tests.models.test_heads import with_head

MODELS = Path(__file__).parent
GOLDENS = MODELS / "goldens"
TIED = GOLDENS / "tied" / "model.gguf"


@pytest.fixture(autouse=True)
def small_models_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights, "LEAST_BYTES", 0)


def config_of(path: Path, **options: Any) -> Config:
    return Config(model=str(path), device="cpu", threads=2, max_rows=1, kv_memory=1 << 20, **options)


def cache_of(path: Path, **options: Any) -> PackedCache:
    found = packed_cache_of(config_of(path, **options), open_checkpoint(path))
    assert found
    return found


def load(path: Path, cache: PackedCache | None, isa: str = "auto", quantize: str = "") -> tuple[np.ndarray, bool]:
    """Returns what the model computes, and whether its weights had to be packed; then they are written, too."""
    backend = CpuBackend(2, isa=isa, kv="f32", packed=[cache])
    checkpoint = quantized(open_checkpoint(path), config_of(path, quantize=quantize))
    model = load_model(checkpoint, backend)
    unsaved = backend._packing.finish()
    backend.load(model)
    backend.reserve_kv(4, 8, 1)
    logits = backend.logits(greedy_batch([Chunk(list(range(24)), 0, range(4))]))
    if unsaved:
        for _ in unsaved.write():
            pass
    return logits, unsaved is not None


def files() -> list[Path]:
    return [file for file in packed_home().rglob("*") if file.is_file()]


CASES = [
    *[(GOLDENS / name / "model.gguf", "") for name in ("tied", "bias", "qwen2_moe", "deepseek_v3", "gemma3n", "bamba")],
    *[(GOLDENS / name, "") for name in ("untied", "gpt_oss", "llama4")],
    *[(GOLDENS / "untied", to) for to in ("q8_0", "q4_k", "int4")],
    (GOLDENS / "mixtral", "q8_0"),
    (MODELS / "float8" / "block", ""),
    (MODELS / "formats" / "exl3", ""),
    (MODELS / "encoders" / "bert", ""),
]


@pytest.mark.parametrize(("path", "quantize"), CASES, ids=lambda value: str(value).replace(str(MODELS), ""))
def test_the_logits_are_the_same_to_the_bit(path: Path, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(path, quantize=quantize)
    wanted, _ = load(path, None, quantize=quantize)
    packed, was_packed = load(path, cache, quantize=quantize)
    assert was_packed
    assert files() == [cache.path]
    monkeypatch.setattr(weights, "fill_parts", lambda parts, _: pytest.fail("packed again") if parts else None)
    read, was_packed = load(path, cache, quantize=quantize)
    assert not was_packed
    assert np.array_equal(wanted, packed)
    assert np.array_equal(wanted, read)


def test_every_instruction_set_reads_the_same_file() -> None:
    cache = cache_of(TIED)
    load(TIED, cache, isas()[-1])
    for isa in isas():
        logits, was_packed = load(TIED, cache, isa)
        assert not was_packed
        assert np.array_equal(logits, load(TIED, None, isa)[0])


def test_each_way_to_quantize_has_its_file() -> None:
    path = GOLDENS / "untied"
    for quantize in ("", "q8_0", "int4"):
        assert load(path, cache_of(path, quantize=quantize), quantize=quantize)[1]
    for quantize in ("", "q8_0", "int4"):
        assert not load(path, cache_of(path, quantize=quantize), quantize=quantize)[1]
    assert len(files()) == 3


# ---- a file that is not the right one ----


@pytest.mark.parametrize("place", [0, 9, 20, 40, 200, 4096, 20_000, -1])
def test_a_flipped_bit_is_found(place: int) -> None:
    cache = cache_of(TIED)
    wanted, _ = load(TIED, cache)
    data = bytearray(cache.path.read_bytes())
    data[place] ^= 0x10
    cache.path.write_bytes(data)
    logits, was_packed = load(TIED, cache)
    assert was_packed
    assert np.array_equal(logits, wanted)
    logits, was_packed = load(TIED, cache)
    assert not was_packed
    assert np.array_equal(logits, wanted)


def test_a_damaged_file_is_deleted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(TIED)
    load(TIED, cache)
    data = cache.path.read_bytes()
    cache.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    backend = CpuBackend(2, packed=[cache])
    backend.load(load_model(open_checkpoint(TIED), backend))
    assert "is damaged" in caplog.text
    assert files() == []


@pytest.mark.parametrize("size", [0, 7, 24, 300, 4096, 4097, 20_000])
def test_a_truncated_file_is_packed_again(size: int) -> None:
    cache = cache_of(TIED)
    wanted, _ = load(TIED, cache)
    os.truncate(cache.path, size)
    logits, was_packed = load(TIED, cache)
    assert was_packed
    assert np.array_equal(logits, wanted)


def test_a_file_of_another_version_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    load(TIED, cache_of(TIED))
    monkeypatch.setattr(packed_cache, "LAYOUT", packed_cache.LAYOUT + 1)
    cache = cache_of(TIED)
    assert load(TIED, cache)[1]
    assert not load(TIED, cache)[1]
    assert files() == [cache.path]


def test_a_model_that_changed_is_packed_again(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(TIED.read_bytes())
    before = model.stat()
    wanted, _ = load(model, cache_of(model))
    data = bytearray(TIED.read_bytes())
    data[-1000] ^= 0x40
    time.sleep(0.02)  # of file systems whose clocks are coarse
    model.write_bytes(data)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))  # as some tools that copy files do
    logits, was_packed = load(model, cache_of(model))
    assert was_packed
    assert not np.array_equal(logits, wanted)
    assert len(files()) == 1


def test_any_changed_word_changes_the_checksum() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    sums = {checksum(data), checksum(data[:-1]), checksum(np.concatenate([data, np.zeros(1, np.uint8)]))}
    for place in range(1000):
        for bit in (1, 128):
            changed = data.copy()
            changed[place] ^= bit
            sums.add(checksum(changed))
    assert len(sums) == 2003


def test_another_layout_has_another_number() -> None:
    """If this fails because kernels want another layout, raise LAYOUT: old files must not be read any more."""
    sums = []
    for name, format in sorted(STORAGE.items()):
        data = np.random.default_rng(0).integers(0, 256, 40 * 256 // format.values * format.bytes, np.uint8)
        weight = Weight(256, [(name, 24), (name, 16)])
        cut = 24 * 256 // format.values * format.bytes
        weight.fill(0, 0, 24, data[:cut])
        weight.fill(1, 0, 16, data[cut:])
        sums.append(checksum(weight.packed))
    assert (packed_cache.LAYOUT, checksum(np.array(sums, np.uint64).view(np.uint8))) == (2, 3480125004884322368)


# ---- room ----


def test_the_least_recently_used_make_room() -> None:
    paths = [GOLDENS / name / "model.gguf" for name in ("tied", "bias", "qwen2", "llama3")]
    caches = [cache_of(path) for path in paths]
    for when, (path, cache) in enumerate(zip(paths, caches, strict=True)):
        load(path, cache)
        os.utime(cache.path, (when, when))
    load(paths[0], caches[0])  # reading it is a use
    sizes = [cache.path.stat().st_size for cache in caches]
    caches[3].path.unlink()
    load(paths[3], caches[3]._replace(limit=sum(sizes) - sizes[1]))
    assert set(files()) == {caches[each].path for each in (0, 2, 3)}
    assert not caches[1].path.parent.exists()
    caches[3].path.unlink()
    load(paths[3], caches[3]._replace(limit=sum(sizes) - sizes[1] - 4096))
    assert set(files()) == {caches[each].path for each in (0, 3)}


def test_a_model_beyond_the_limit_is_not_written() -> None:
    cache = cache_of(TIED)._replace(limit=1000)
    with pytest.raises(OSError, match="beyond the limit"):
        load(TIED, cache)
    assert files() == []


def test_zero_bytes_mean_no_cache() -> None:
    assert packed_cache_of(config_of(TIED, packed_cache=0), open_checkpoint(TIED)) is None


def test_a_full_disk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "FREE", 1 << 62)
    with pytest.raises(OSError, match="no room"):
        load(TIED, cache_of(TIED))
    assert files() == []


def test_what_an_interrupted_write_left_is_deleted() -> None:
    cache = cache_of(TIED)
    left = [cache.path.with_suffix(".part"), packed_home() / "other" / "one.part"]
    for part in left:
        part.parent.mkdir(parents=True)
        part.write_bytes(bytes(1_000_000))
    load(TIED, cache)
    assert files() == [cache.path]
    assert not left[1].parent.exists()


# ---- who writes, and when ----


def unsaved_file(path: Path = TIED) -> PackedFile:
    backend = CpuBackend(2, packed=[cache_of(path)])
    load_model(open_checkpoint(path), backend)
    file = backend._packing.finish()
    assert file
    return file


def test_one_of_two_writers_writes() -> None:
    first, second = unsaved_file().write(), unsaved_file().write()
    next(first)
    with pytest.raises(BlockingIOError):
        next(second)
    list(first)
    assert files() == [cache_of(TIED).path]
    assert not load(TIED, cache_of(TIED))[1]


def test_a_write_that_stops_leaves_nothing() -> None:
    writing = unsaved_file().write()
    next(writing)
    assert len(files()) == 1
    writing.close()
    assert files() == []


def test_a_model_that_is_removed_meanwhile_is_not_written(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(TIED.read_bytes())
    writing = unsaved_file(model).write()
    next(writing)
    model.unlink()
    with pytest.raises(FileNotFoundError, match="removed meanwhile"):
        list(writing)
    assert files() == []


class SteppedFile:
    """Is written in endless pieces, or so many, and counts them."""

    def __init__(self, pieces: int = 1 << 30) -> None:
        self.pieces, self.written, self.closed = pieces, 0, threading.Event()

    def write(self) -> Iterator[None]:
        try:
            while self.written < self.pieces:
                self.written += 1
                yield
        finally:
            self.closed.set()


def write_behind(*files: SteppedFile) -> WriteBehind:
    behind = WriteBehind()
    for file in files:
        behind.add(file)  # type: ignore[arg-type]
    return behind


def test_nothing_is_written_before_the_first_step_and_during_one() -> None:
    file, other = SteppedFile(3), SteppedFile(2)
    behind = write_behind(file, other)
    behind.pause()
    assert behind._thread is None
    behind.resume()
    behind.pause()
    assert not file.closed.wait(0.2)
    assert file.written == 0
    behind.resume()
    assert other.closed.wait(5)
    assert (file.written, other.written) == (3, 2)
    behind.end()


def test_an_end_waits_for_a_short_rest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.cpu.write_behind.LAST_SECONDS", 0.1)
    for pieces in (3, 1 << 30):
        file = SteppedFile(pieces)
        behind = write_behind(file)
        behind.resume()
        behind.pause()
        behind.end()
        assert file.closed.is_set()
        assert (file.written == 3) == (pieces == 3)
        assert file.written


def test_an_engine_writes_after_its_first_answer() -> None:
    config, cache = config_of(TIED), cache_of(TIED)
    engine = build_engine(config, open_checkpoint(TIED))
    assert files() == []
    engine.add(Request(1, (1, 2, 3), SamplingParams(temperature=0.0), 4))
    while not engine.idle:
        engine.step()
    ends = time.monotonic() + 10
    while not cache.path.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    engine.close()
    assert files() == [cache.path]
    assert not load(TIED, cache)[1]


@pytest.mark.parametrize("kind", ["model", "mtp", "eagle3"])
def test_what_drafts_has_a_file_of_its_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts again packs nothing, and a draft model's file is the one that serving it would read."""
    target, draft = {
        "model": (GOLDENS / "untied", GOLDENS / "llama3"),
        "mtp": (with_head(tmp_path / "model", "glm4_moe"), "mtp"),
        "eagle3": (MODELS / "eagle3" / "target", MODELS / "eagle3" / "vllm"),
    }[kind]
    config = replace(config_of(target, draft=str(draft), quantize="q8_0"), max_len=64, config=("rope_theta=20000",))
    wanted, _ = answer(config)
    assert [file.suffix for file in files()] == [".packed"] * 2
    monkeypatch.setattr(weights, "fill_parts", lambda parts, _: pytest.fail("packed again") if parts else None)
    assert answer(config)[0] == wanted
    assert kind != "model" or cache_of(GOLDENS / "llama3", quantize="q8_0").path in files()


def test_a_store_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    caplog.set_level("INFO")
    engine = build_engine(replace(config_of(TIED), max_len=64), open_checkpoint(TIED))
    engine.add(Request(1, (1, 2, 3), SamplingParams(temperature=0.0), 4))
    while not engine.idle:
        engine.step()
    engine.close()
    assert "packed weights are not cached" in caplog.text


def test_processes_at_once_share_one_file(smollm2: Path) -> None:
    patient = "import penstock.cli, penstock.backend.cpu.write_behind as w; w.LAST_SECONDS = 60; penstock.cli.main()"
    command = [sys.executable, "-c", patient, "run", str(smollm2), "The capital of France is", "--raw"]
    command += ["--max-tokens", "8", "--temperature", "0"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def answer(process: subprocess.Popen[str]) -> str:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return out

    first = [answer(process) for process in (start(), start())]
    (file,) = files()
    assert file.suffix == ".packed"
    used = file.stat().st_mtime_ns
    assert {*first, answer(start())} == {first[0]}
    assert files() == [file]
    assert file.stat().st_mtime_ns > used
