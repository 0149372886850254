"""Kills and stops processes of `penstock serve` at random under streams of every kind, and compares every answer with
the one that comes without faults: `python scripts/random_faults.py --rounds 4`.

Each round has each of --kinds for each of --parts, once. --load makes the machine busy meanwhile. Prints how
soon engines were replaced and the longest silence of streams, by fault. Exits with 1 if a stream is lost or different,
if an engine is replaced during --calm, or if a process or a file is left."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.store import fetch
from tests.traffic.faults import DEVICE_FAULTS, PARTS, Fault, Plan, disturbed, loaded

SHOWN = 10  # violations that are printed
LOGGED = 5000  # characters of the log
DEVICE_KINDS = [fault.kind for fault in DEVICE_FAULTS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=1, help="how often every fault happens")
    parser.add_argument(
        "--every", type=float, default=5.0, help="fewest seconds between two faults; at most twice that"
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the server that get signals")
    parser.add_argument("--kinds", default="KILL,STOP", help="signals, or faults of a device: assertion, shortage")
    parser.add_argument("--calm", type=float, default=0.0, help="seconds before the first fault")
    parser.add_argument("--load", type=float, default=0.0, help="busy processes for each processor")
    options, more = parser.parse_known_args()
    parts, kinds = options.parts.split(","), options.kinds.split(",")
    faults = [Fault(part, kind) for part in parts for kind in kinds if part == "engine" or kind not in DEVICE_KINDS]
    plan = Plan(faults, (options.every, 2 * options.every), options.streams, options.rounds, options.calm)
    with tempfile.TemporaryDirectory() as folder, loaded(options.load):
        damage = disturbed(Path(folder), fetch(options.model), plan, *more, seed=options.seed)
        log = (Path(folder) / "log").read_text()
    print(damage.table())
    for violation in damage.violations[:SHOWN]:
        print(f"\n{violation.shown('')}")
    if damage.violations:
        print(f"\nThe end of the server's log:\n{log[-LOGGED:]}")
    return 1 if damage.violations else 0


if __name__ == "__main__":
    sys.exit(main())
