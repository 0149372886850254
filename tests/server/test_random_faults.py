"""Parts of a server are killed and stopped under streams of every kind: each stream is as it would have been.
`scripts/random_faults.py` does the same at random for as long as one wants; `tests/cuda/test_faults.py` on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.traffic.faults import DEVICE_FAULTS, KILLS, Plan, disturbed, killed_server

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
FAULTS = [fault for fault in KILLS + DEVICE_FAULTS if fault.part != "fork parent"]


@pytest.mark.timeout(900)  # a busy machine takes minutes
def test_no_stream_is_lost_or_different(smollm2: Path, tmp_path: Path) -> None:
    damage = disturbed(tmp_path, smollm2, Plan(FAULTS, (1.0, 3.0), streams=16, calm=1.0))
    print(damage.table())
    assert not damage.violations, "\n\n".join(each.shown("") for each in damage.violations)
    assert {fault for _, fault in damage.happened} == {*FAULTS}
    ending = {fault for fault in FAULTS if fault.ends_engine}
    assert (damage.replaced.keys(), damage.restarts) == (ending, len(ending))


def test_a_killed_server_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    assert killed_server(tmp_path, smollm2) == []
