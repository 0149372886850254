"""Engines on a GPU are killed, stopped, lose their device and run out of memory under 32 streams of every kind. The
process that forks them and the server are killed, too. tests/server/test_random_faults.py does the same on a CPU.

To measure on an H200 how long streams are silent, with weights and KV cache kept on the device:

    pytest -m cuda -s tests/cuda/test_faults.py -k "kept or KILL"
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from statistics import median

import pytest

from tests.cuda.device import DEVICE
from tests.traffic.asking import Drawer
from tests.traffic.faults import DEVICE_FAULTS, IN_ENGINE, KILLS, Fault, Plan, disturb, disturbed, killed_server
from tests.traffic.material import our_material
from tests.traffic.served import serving

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


def test_weights_and_prompts_are_kept(smollm2: Path, tmp_path: Path) -> None:
    """The first engine that is started after a death reads no weights and computes no prompt again; with a process that
    waits, half of the streams are silent for at most a second."""
    kill = next(each for each in KILLS if str(each) == "KILL of the engine")
    with serving(tmp_path, smollm2, *ON_GPU, environment=IN_ENGINE) as server:
        damage = asyncio.run(
            disturb(server, Drawer(our_material(), Random(0)), Plan([kill], (6.0, 8.0), rounds=5), Random(0))
        )
        adopted = server.until_idle()["penstock_adopted_blocks_total"]
    print(damage.table())
    assert not damage.violations
    assert adopted > 0
    assert median(damage.silences[str(kill)]) <= 1.0


def test_a_killed_server_leaves_nothing(smollm2: Path, tmp_path: Path) -> None:
    assert killed_server(tmp_path, smollm2, *ON_GPU) == []
