"""What GPUs can do, and the file of measured tilings: neither needs torch."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.tuned_tilings import Product, TunedTilings, entry_name, read_tuned, write_tuned

A100 = DeviceProperties("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10, 40 << 20, 2.0e12)
RTX_4090 = DeviceProperties("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 << 10, 72 << 20, 1.0e12)
L4 = DeviceProperties("NVIDIA L4", (8, 9), 58, 99 << 10, 48 << 20, 3.0e11)
H100 = DeviceProperties("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 50 << 20, 3.3e12)
H200 = DeviceProperties("NVIDIA H200", (9, 0), 132, 227 << 10, 60 << 20, 4.8e12)
B200 = DeviceProperties("NVIDIA B200", (10, 0), 148, 227 << 10, 126 << 20, 8.0e12)
GPUS = (A100, RTX_4090, L4, H100, H200, B200)

MEASURED = {
    Product("gemv", "16 bits", 1, 4096, 4096): (2, 512, 8),
    Product("skinny", "16 bits", 16, 4096, 4096, True): (64, 128, 4, 4, 3),
}


def test_features_follow_the_compute_capability() -> None:
    assert [device.has_fp8 for device in GPUS] == [False, True, True, True, True, True]
    assert [device.has_hopper_gemm for device in GPUS] == [False, False, False, True, True, False]
    assert [device.has_hopper_attention for device in GPUS] == [False, False, False, True, True, False]
    assert [device.is_tuned for device in GPUS] == [False, False, False, True, True, False]


def test_stages_are_as_many_as_fit() -> None:
    assert RTX_4090.stages_that_fit(4, 32 << 10) == 3
    assert RTX_4090.stages_that_fit(4, 32 << 10, fixed_bytes=40 << 10) == 1
    assert RTX_4090.stages_that_fit(4, 1 << 20) == 1
    assert H200.stages_that_fit(4, 32 << 10) == 4


def test_measured_tilings_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tilings.json"
    assert read_tuned(path, A100.name) == TunedTilings()
    write_tuned(path, A100.name, MEASURED.items())
    write_tuned(path, L4.name, [])
    assert read_tuned(path, A100.name).measured == MEASURED
    assert read_tuned(path, L4.name).measured == {}


def test_tilings_of_another_gpu_or_version_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tilings.json"
    write_tuned(path, A100.name, MEASURED.items())
    with caplog.at_level(logging.INFO):
        assert not read_tuned(path, L4.name).measured
    assert len(caplog.records) == 1
    for name in ("__version__", "version"):
        with monkeypatch.context() as patch:
            patch.setattr(
                f"penstock.backend.cuda.tuned_tilings.{name}", "0.0.0" if name == "__version__" else lambda _: "0.0.0"
            )
            assert entry_name(A100.name) not in json.loads(path.read_text())
            assert not read_tuned(path, A100.name).measured
    assert read_tuned(path, A100.name).measured


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"ENTRY": [1]}', '{"ENTRY": [{"product": {"x": 1}, "tiling": []}]}']
)
def test_an_unreadable_file_is_ignored_with_one_line(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tilings.json"
    path.write_text(text.replace("ENTRY", entry_name(A100.name)))
    with caplog.at_level(logging.INFO):
        assert not read_tuned(path, A100.name).measured
    assert len(caplog.records) == 1
    write_tuned(path, A100.name, MEASURED.items())
    assert read_tuned(path, A100.name).measured == MEASURED


def test_the_nearest_measured_product_stands_for_others() -> None:
    tuned = TunedTilings(
        {
            Product("quant_gemm", "4 bits", count, rows, 4096): (count, rows)
            for count in (32, 64)
            for rows in (4096, 6144)
        }
    )

    def find(count: int, rows: int, width: int = 4096, kind: str = "4 bits") -> tuple[int, ...] | None:
        return tuned.find(Product("quant_gemm", kind, count, rows, width))

    assert find(32, 4096) == (32, 4096)
    assert find(33, 6000) == (64, 6144)
    assert find(17, 3000) == (32, 4096)
    assert find(65, 4096) is None
    assert find(32, 28672) is None
    assert find(32, 4096, 1024) is None
    assert find(32, 4096, kind="more bits") is None


def test_device_properties_import_no_torch() -> None:
    code = (
        "import sys, penstock.backend.cuda.tuned_tilings as _; print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
