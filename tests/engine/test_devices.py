"""Which device computes when nobody says so, and which GPU of several."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backend import check_quantize, devices, open_backend, recoded_to, resolve_defaults
from penstock.backend.cuda import device as cuda
from penstock.backend.device import DeviceKind
from penstock.backend.devices import device_kind, option_help, parse_device, possible_kinds
from penstock.config import OPTIONS, Config
from penstock.errors import ConfigError
from penstock.plugins import plugins

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
        monkeypatch.setattr(cuda, "NVIDIA", tmp_path)

    return make


def test_without_a_gpu_the_cpu_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "NVIDIA", tmp_path / "none")
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
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        open_backend(resolve_defaults(Config(model="m", device="cuda")))


@pytest.mark.parametrize(
    ("text", "device"),
    [("cpu", ("cpu", 0)), ("ref", ("ref", 0)), ("cuda", ("cuda", 0)), ("cuda:12", ("cuda", 12))],
)
def test_a_device_may_have_an_index(text: str, device: tuple[str, int]) -> None:
    found = parse_device(text)
    assert (found.kind.name, found.number) == device
    assert parse_device(str(found)) == found


def test_auto_is_no_device_yet() -> None:
    with pytest.raises(ConfigError, match="'auto' is not decided yet"):
        device_kind("auto")


@pytest.mark.parametrize(
    "text", ["", "gpu", "auto:1", "cuda:", "cuda:-1", "cuda:x", "cuda:1:2", "cpu:0", "CUDA", "cuda:\u0661"]
)
def test_other_devices_are_refused_and_the_known_ones_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown device .*: use one of auto, cpu, cuda, ref, or cuda:N"):
        resolve_defaults(Config(model="m", device=text))


def test_any_gpu_gets_the_sizes_and_formats_of_gpus() -> None:
    complete = resolve_defaults(Config(model="m", device="cuda:1", quantize="fp8"))
    assert (complete.device, complete.max_rows, complete.step_tokens) == ("cuda:1", 256, 2048)
    check_quantize(complete)
    assert recoded_to(replace(complete, quantize="int4")) == ""


def test_a_gpu_is_named_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="device cuda:3 needs torch and triton"):
        open_backend(resolve_defaults(Config(model="m", device="cuda:3")))


def test_each_kind_declares_what_the_others_do() -> None:
    """A backend that lacks a declared default, or that auto tries at the same time as another, is found here."""
    kinds = devices.kinds()
    assert kinds.keys() == {"cpu", "cuda", "ref"}
    assert [kind.name for kind in devices.in_order()] == ["cuda", "cpu", "ref"]
    assert len({frozenset(kind.defaults) for kind in kinds.values()}) == 1
    for name, kind in kinds.items():
        assert kind.name == name
        assert kind.fp8_defaults.keys() <= kind.defaults.keys() <= OPTIONS.keys()


def test_declarations_are_read_without_what_computes() -> None:
    code = "from penstock.backend.devices import kinds; kinds(); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "triton", "numpy", "importlib.metadata", "penstock.backend.base", "penstock.backend.cpu.backend"}
    assert not heavy & set(done.stdout.split())


def test_auto_may_be_a_gpu_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert possible_kinds("gpu") == possible_kinds("None") == []
    assert [kind.name for kind in possible_kinds("cuda:3")] == ["cuda"]

    def names(present: bool) -> list[str]:
        kinds: dict[str, DeviceKind] = {**declared, "cuda": replace(cuda.DEVICE, is_present=lambda: present)}
        monkeypatch.setattr(devices, "kinds", lambda: kinds)
        return [kind.name for kind in possible_kinds("auto")]

    assert names(False) == ["cpu", "ref"]
    assert names(True) == ["cuda", "cpu", "ref"]


declared = devices.kinds()


TOY = """
from dataclasses import replace

from penstock.backend.ref.device import DEVICE as REF

opened = []
DEVICE = replace(
    REF, name="toy", indexed=True, noun="a toy", open=lambda config, device, *_: opened.append(str(device))
)
"""


def test_another_package_brings_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has an entry point; auto does not search for it."""
    about = tmp_path / "toy-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[penstock.backends]\ntoy = toy_device:DEVICE\n")
    (tmp_path / "toy_device.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    for found in (devices.other_kinds, plugins):
        found.cache_clear()
    try:
        resolve_defaults(AUTO)
        assert "toy_device" not in sys.modules
        open_backend(resolve_defaults(Config(model="m", device="toy:1")))
        assert sys.modules["toy_device"].opened == ["toy:1"]
        with pytest.raises(ConfigError, match="one of auto, cpu, cuda, ref, toy, or cuda:N for GPU number N, or toy:N"):
            parse_device("joy")
    finally:
        for found in (devices.other_kinds, plugins):
            found.cache_clear()
        sys.modules.pop("toy_device", None)


def test_help_has_the_values_that_devices_declare() -> None:
    texts = {name: option_help(name, option) for name, option in OPTIONS.items()}
    assert texts["device"] == (
        "Device that computes: auto, cpu, cuda, cuda:N (the GPU with that index) or ref (NumPy, slow)."
    )
    assert texts["max_rows"].endswith("further requests wait. 0: 64; on a GPU 256.")
    assert texts["prefill_budget"].endswith(" 0: 192; on a GPU 384, with FP8 weights 640.")
    assert texts["threads"] == OPTIONS["threads"].help
