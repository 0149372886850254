"""Which device computes when nobody says so, and which GPU of several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import penstock.backend
from penstock.backend import check_quantize, open_backend, recoded_to, resolve_defaults
from penstock.config import Config, Device
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


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", ("cpu", 0)), ("ref", ("ref", 0)), ("auto", ("auto", 0)), ("cuda", ("cuda", 0)), ("cuda:12", ("cuda", 12))],
)
def test_a_device_may_have_an_index(text: str, device: tuple[str, int]) -> None:
    assert Device.parse(text) == device


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cpu:0", "CUDA", "cuda:\u0661"])
def test_other_devices_are_refused_and_the_known_ones_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*: use one of auto, cpu, cuda, ref, or cuda:N"):
        resolve_defaults(Config(model="m", device=text))


def test_any_gpu_gets_the_sizes_and_formats_of_gpus() -> None:
    complete = resolve_defaults(Config(model="m", device="cuda:1", quantize="fp8"))
    assert (complete.device, complete.max_rows, complete.step_tokens) == ("cuda:1", 256, 2048)
    check_quantize(complete)
    assert recoded_to(replace(complete, quantize="int4")) == ""


def test_a_gpu_is_named_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock.backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="device cuda:3 needs torch and triton"):
        open_backend(resolve_defaults(Config(model="m", device="cuda:3")))
