"""Serves the default model as users do, and sends it requests of every dialect with everything on at once.

    python scripts/mixed_traffic.py --seconds 60
    python scripts/mixed_traffic.py --requests 100000 --data FOLDER

The folder has public prompts, tools and schemas (tests/traffic/material.py says which); without it, our own are sent.
Engines must not die, no request may be refused, every repeated request must get the same answer, and every answer must
be well-formed. Prints what was sent, and for each violation a command that sends the request again. Exits with 1 if
there is a violation."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.store import fetch
from tests.traffic.asking import Drawer
from tests.traffic.material import material_of, our_material
from tests.traffic.mixed import Amount, Violation, send
from tests.traffic.served import serving

SHOWN = 20  # violations that are printed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10**9, help="most requests")
    parser.add_argument("--seconds", type=float, default=10.0**9, help="most seconds")
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument("--seed", type=int, default=0, help="which requests are drawn, and in which order")
    parser.add_argument("--data", type=Path, help="folder of public prompts, tools and schemas")
    parser.add_argument("--model", type=Path, help="model file in place of the default model's")
    options, more = parser.parse_known_args()
    if options.requests == 10**9 and options.seconds == 10**9:
        parser.error("give --requests or --seconds")
    material = material_of(options.data) if options.data else our_material()
    drawer = Drawer(material, Random(options.seed))
    amount = Amount(options.requests, options.seconds, options.clients)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with serving(home, options.model or fetch("smollm2"), *more) as server:
            tally = asyncio.run(send(server, drawer, amount))
            tally.violations += [Violation(problem, None) for problem in server.end()]
        print(tally.table())
        for violation in tally.violations[:SHOWN]:
            print(f"\n{violation.shown(server.url)}")
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
