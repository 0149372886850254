"""Which device computes when nobody says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock.backend
from penstock.backend import open_backend, resolve_defaults
from penstock.config import Config
from penstock.errors import ConfigError

AUTO = Config(model="m")


@pytest.fixture
def with_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine with an NVIDIA GPU and a torch that says this of itself."""

    def make(version: str) -> None:
        for package in ("torch", "triton"):
            monkeypatch.delitem(sys.modules, package, raising=False)
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text("raise ImportError('too slow to be imported here')")
        (tmp_path / "torch" / "version.py").write_text(version)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(penstock.backend, "NVIDIA", tmp_path)

    return make


def test_without_a_gpu_the_cpu_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(penstock.backend, "NVIDIA", tmp_path / "none")
    assert resolve_defaults(AUTO).device == "cpu"


def test_with_a_torch_without_cuda_the_cpu_computes_and_says_so(
    with_gpu: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    with_gpu("cuda = None")
    assert resolve_defaults(AUTO).device == "cpu"
    assert resolve_defaults(AUTO).max_rows == 64
    assert "there is an NVIDIA GPU, but this torch was built without CUDA; the CPU computes" in caplog.text


def test_a_device_that_was_named_is_not_replaced(with_gpu: Callable[[str], None]) -> None:
    with_gpu("cuda = None")
    assert resolve_defaults(Config(model="m", device="cuda")).device == "cuda"


def test_cuda_without_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        open_backend(resolve_defaults(Config(model="m", device="cuda")))
