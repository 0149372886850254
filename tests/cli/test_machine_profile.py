"""What is kept of this machine's measured speed: nothing from while it was busy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import machine_profile as profiles
from penstock.cli.doctor import _speed
from penstock.cli.machine_profile import BusyTime, busy_text, machine_profile
from penstock.config import Config
from penstock.planning.roofline import MachineProfile, MatmulTimes

CORES = 4
CONFIG = Config(model="m", device="cpu", kv="f16")
Others = Callable[..., None]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, own_store: Path) -> list[list[str]]:
    """Has measuring return at once; lists the formats that were measured each time."""
    calls: list[list[str]] = []

    def measure(_: Config, kinds: Iterable[str], known: MachineProfile | None, log: Any) -> MachineProfile:
        calls.append(list(kinds))
        start = known or MachineProfile(1e-5, 1e-6, 1e9, 1e9, {})
        return start._replace(matmuls={**start.matmuls, **dict.fromkeys(calls[-1], MatmulTimes((1, 8), (1e-9, 1e-9)))})

    monkeypatch.setattr("penstock.planning.calibration.measure", measure)
    monkeypatch.setattr("os.cpu_count", lambda: CORES)
    monkeypatch.setattr(profiles, "_not_kept", {})
    return calls


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    """Sets the share of the machine that other processes use while it is measured: each measurement takes 10 s."""

    def use(share: float) -> None:
        times = [BusyTime(5.0, 50.0, 100.0), BusyTime(5.0 + 30, 50.0 + 30 + share * 10 * CORES, 110.0)]
        monkeypatch.setattr(profiles, "_busy_time", lambda: times.pop(0))

    return use


def kept(store: Path) -> list[str]:
    """The formats whose speed is in the file."""
    if not (file := store / "machine.json").exists():
        return []
    return [name for each in json.loads(file.read_text())["machines"].values() for name in each["matmuls"]]


def forgotten() -> None:
    """Begins another process."""
    profiles._not_kept.clear()


def test_a_measurement_on_a_quiet_machine_is_kept(own_store: Path, measured: list[Any], others: Others) -> None:
    others(0.05)
    found = machine_profile(CONFIG, "cpu", ["BF16"])
    assert found is not None
    forgotten()
    assert machine_profile(CONFIG, "cpu", ["BF16"]) == found
    assert (measured, kept(own_store)) == ([["BF16"]], ["BF16"])


def test_a_measurement_on_a_busy_machine_is_used_once_and_not_kept(
    own_store: Path, measured: list[Any], others: Others, capsys: pytest.CaptureFixture[str]
) -> None:
    others(0.45)
    found = machine_profile(CONFIG, "cpu", ["BF16"])
    assert found is not None
    assert found.busy == pytest.approx(0.45)
    assert "other processes used 45% of this machine" in capsys.readouterr().err
    assert machine_profile(CONFIG, "cpu", ["BF16"]) is found, "this process does not measure again"
    assert (measured, kept(own_store)) == ([["BF16"]], [])
    forgotten()
    others(0.0)
    assert machine_profile(CONFIG, "cpu", ["BF16"]) == found._replace(busy=0.0)
    assert (measured, kept(own_store)) == ([["BF16"], ["BF16"]], ["BF16"])


def test_a_busy_measurement_changes_nothing_that_is_kept(own_store: Path, measured: list[Any], others: Others) -> None:
    others(0.0)
    machine_profile(CONFIG, "cpu", ["BF16"])
    before = (own_store / "machine.json").read_bytes()
    others(0.3)
    machine_profile(CONFIG, "cpu", ["BF16", "Q8_0"])
    others(0.3)
    machine_profile(CONFIG, "cpu", ["BF16"], again=True)
    assert measured == [["BF16"], ["Q8_0"], ["BF16"]]
    assert (own_store / "machine.json").read_bytes() == before


def test_doctor_says_that_its_figures_are_of_a_busy_machine(others: Others) -> None:
    others(0.45)
    state, detail = _speed(again=True)
    assert state == "note"
    assert detail.endswith("while its speed was measured: it is faster than that, and the measurement is not kept")
    others(0.0)
    assert _speed(again=True)[0] == "ok"


def test_time_that_a_virtual_machine_lost_counts_as_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fields of /proc/stat are user, nice, system, idle, iowait, irq, softirq, steal and two that are in user."""
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr(profiles, "STAT", tmp_path / "stat")
    (tmp_path / "stat").write_text("cpu  100 20 300 99999 99999 4 5 600 100 20\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    assert profiles._busy_time().everyone == (100 + 20 + 300 + 4 + 5 + 600) / 100
    (tmp_path / "stat").unlink()
    assert profiles._busy_time().everyone == profiles._busy_time().own


def test_the_text_names_the_share() -> None:
    assert "45%" in busy_text(MachineProfile(1, 1, 1, 1, {}, 0.45))
