"""Engines on a GPU are killed, stopped, lose their device and run out of memory under 32 streams of every kind. The
process that forks them and the server are killed, too. tests/server/test_random_faults.py does the same on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.device import DEVICE
from tests.traffic.faults import DEVICE_FAULTS, KILLS, Fault, Plan, disturbed, killed_server

pytestmark = [pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU"), pytest.mark.timeout(900)]
ON_GPU = ("--device", "cuda", "--deterministic")  # without it, company changes the last bits
FAULTS = [fault for fault in KILLS + DEVICE_FAULTS if fault.part in ("engine", "fork parent")]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_no_stream_is_lost_or_different(fault: Fault, smollm2: Path, tmp_path: Path) -> None:
    """The fault happens three times. After one of the process that forks engines, the engine is killed: the next engine
    needs that process."""
    after = [each for each in KILLS if str(each) == "KILL of the engine"] if "fork parent" in str(fault) else []
    damage = disturbed(tmp_path, smollm2, Plan([fault, *after], (2.0, 4.0), rounds=3), *ON_GPU)
    print(damage.table())
    assert not damage.violations, "\n\n".join(each.shown("") for each in damage.violations)
    assert fault in {each for _, each in damage.happened}
    assert damage.restarts == (0 if fault.kind == "shortage" else 3)


def test_a_killed_server_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    assert killed_server(tmp_path, smollm2, *ON_GPU) == []
