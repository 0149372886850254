"""Tests what is told about the folder of --kv-disk, and about models that have no use for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.engine.kv_disk.summary import DiskSummary, described, summarize
from penstock.planning.memory_plan import missing_tiers
from penstock.types import Limits
from tests.engine.test_kv_segments import LAYOUT, opened, segments, write

LIMITS = Limits(max_len=64, max_rows=4, step_tokens=64, block_size=4, num_blocks=16, vocab=100)


def test_a_folder_tells_its_prompts_of_all_models(tmp_path: Path) -> None:
    assert summarize(tmp_path / "none") == DiskSummary()
    assert described(str(tmp_path), 2 * 10**9) == f"nothing yet in {tmp_path}; at most 2.00 GB"
    first, other = opened(tmp_path), opened(tmp_path, LAYOUT._replace(fingerprint=b"o" * 16))
    write(first, 1)
    write(first, 2, blocks=5)
    write(other, 1)
    (tmp_path / "notes.txt").write_text("of somebody else")
    found = summarize(tmp_path)
    assert found == DiskSummary(found.bytes, 11 * LAYOUT.block_size, 3, 2, 0)
    assert found.bytes == sum(file.stat().st_size for file in segments(tmp_path)) > 0
    line = described(str(tmp_path), 2 * 10**9)
    assert line.startswith(f"3 prompts of {11 * LAYOUT.block_size} tokens in 0.00 GB of 2.00 GB, 2 models")


def test_prompts_that_begin_alike_are_counted_apart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1, blocks=2)
    assert summarize(tmp_path).prompts == 1
    write(store, 1, blocks=4)
    assert summarize(tmp_path)[1:3] == (4 * LAYOUT.block_size, 1), "the longer one has the shorter"


def test_files_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    write(opened(tmp_path), 1)
    (file,) = segments(tmp_path)
    for data in (b"", b"x" * 100, bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]):
        file.with_name("9.kv").write_bytes(data)
        assert summarize(tmp_path)[2:] == (1, 1, 1)
        assert "1 files cannot be used" in described(str(tmp_path), 10**9)


def test_a_model_that_has_no_use_for_a_tier_says_so() -> None:
    asked, limits = Config(model="", kv_ram="1000000", kv_disk="/kv"), LIMITS._replace(encoder=True)
    assert not list(missing_tiers(Config(model=""), limits))
    lines = list(missing_tiers(asked, limits))
    assert [line.split(" has no effect on this model: it has ")[0] for line in lines] == ["--kv-ram", "--kv-disk"]
    for device in ("cpu", "cuda"):
        assert not list(missing_tiers(replace(asked, device=device), LIMITS._replace(states=4)))
