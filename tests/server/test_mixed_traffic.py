"""Everything at once, with the default model and the defaults that users have: requests of every dialect, several at a
time, repeated and left early. `scripts/mixed_traffic.py` does the same for as long as one wants."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

import pytest

from tests.traffic.asking import Drawer
from tests.traffic.material import our_material
from tests.traffic.mixed import Amount, send
from tests.traffic.served import serving

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")


def test_mixed_traffic(smollm2: Path, tmp_path: Path) -> None:
    """No engine dies, nothing is refused, repeated requests get the same answers, and nothing is left behind."""
    with serving(tmp_path, smollm2) as server:
        drawer = Drawer(our_material(), Random(0))
        tally = asyncio.run(send(server, drawer, Amount(requests=300, seconds=60)))
        assert not tally.violations, "\n\n".join(each.shown(server.url) for each in tally.violations)
        assert server.end() == []
    print(tally.table())
