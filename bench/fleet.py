"""Measures what routing costs and what it gains.

    python bench/fleet.py                                    the decision, and the simulator's speed on a made-up trace
    python bench/fleet.py --trace conversation.jsonl ...     the tables of policies too, for each trace
    python bench/fleet.py --json                             for machines

The decision: an index of a million blocks on 64 replicas, a prompt of 8,192 tokens in blocks of 16, hashing included.
The tables: 8 replicas with the timing of Dynamo's mock engine, arrivals at several speeds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from penstock.engine.chain_hash import chain_hash
from penstock.fleet.holders import DEVICE, chain_hash_table
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, Load
from penstock.fleet.route import PRECISION, RoutedPrompt, Router, RoutingWeights
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.policies import NAMES
from penstock.tools.sim.simulation import FleetOptions, FleetReport, FleetSimulation, simulate
from penstock.tools.traces import Trace, TracedRequest, read_trace

REPLICAS = 64
PROMPT_TOKENS, BLOCK = 8192, 16
PROMPTS = 3_500  # of up to 512 blocks: about a million in all
SPEEDS = (1, 1.5, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5)
TIERS = (4.0, 8.0)  # blocks in the RAM tier for each on the device
GATEWAYS = 16


def best_us(work: Callable[[Any], object], inputs: list[Any], tries: int = 5) -> float:
    """Returns the microseconds of this process for one call: the least mean of several tries over the inputs."""
    means = []
    for _ in range(tries):
        began = time.process_time()
        for each in inputs:
            work(each)
        means.append((time.process_time() - began) / len(inputs) * 1e6)
    return min(means)


def decision() -> dict[str, float]:
    """Measures one decision and its parts, in microseconds."""
    random, chain = Random(0), chain_hash()
    index, ledger, numbers = BlockIndex(chain_hash_table()), Ledger(), [0] * REPLICAS
    system = [random.randrange(50_000) for _ in range(1024)]  # a beginning that all prompts share
    prompts = []
    for _ in range(PROMPTS):
        tokens = system + [random.randrange(50_000) for _ in range(PROMPT_TOKENS - len(system))]
        hashes = chain("", tokens, BLOCK)
        prompts.append(tokens)
        for replica in random.sample(range(REPLICAS), random.choice((1, 1, 2, 3, 6))):
            changes = [(DEVICE, block) for block in hashes[: random.randint(64, len(hashes))]]
            index.apply(replica, 1, numbers[replica], changes)
            numbers[replica] += len(changes)
    for replica in range(REPLICAS):
        ledger.join(replica)
        ledger.report(replica, Load(random.randrange(20_000), 0, random.randrange(64), random.randrange(200_000)), 0)
    router = Router(EngineTiming(), index, ledger)
    asked = random.sample(prompts, 200)
    chains = [chain("", tokens, BLOCK) for tokens in asked]
    clock, received = iter(range(10**9)), [0] * REPLICAS

    def route(hashes: list[bytes]) -> None:
        chosen = router.route(RoutedPrompt(hashes, PROMPT_TOKENS, BLOCK), next(clock) * 1e6)
        received[chosen.replica] += 1
        ledger.report(chosen.replica, Load(1000, 1000, 16, 50_000), received[chosen.replica])

    return {
        "blocks": len(index),
        "hash_us": best_us(lambda tokens: chain("", tokens, BLOCK), asked),
        "index_us": best_us(lambda hashes: index.lookup(hashes, within=len(hashes) // PRECISION + 1), chains),
        "route_us": best_us(route, chains),
        "decision_us": best_us(lambda tokens: route(chain("", tokens, BLOCK)), asked),
    }


def made_up_trace(count: int = 12_000, seed: int = 0) -> Trace:
    """Makes conversations of growing prompts, of the size of Mooncake's."""
    random, requests, blocks = Random(seed), [], 0
    for _ in range(count // 4):
        path: list[int] = [0]
        at = random.uniform(0, count * 300)
        for _ in range(4):
            fresh = random.randint(2, 18)
            path += range(blocks + 1, blocks + fresh + 1)
            blocks += fresh
            requests.append(TracedRequest(at, len(path) * 512 + 9, random.randint(1, 700), tuple(path)))
            at += random.uniform(20_000, 120_000)
    return Trace(512, sorted(requests, key=lambda each: each.arrival))


def speed(trace: Trace, replicas: int, policy: str = "kv") -> float:
    """Returns how many requests are simulated in a second of this process's time."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        simulate(trace, FleetOptions(replicas, policy))
        seconds.append(time.process_time() - began)
    return len(trace.requests) / min(seconds)


def herd(count: int = 4000, interval_ms: float = 25.0) -> dict[str, dict[str, float]]:
    """Routes prompts that begin with the same 6,144 tokens through 16 gateways that do not talk to each other. Returns
    the busiest replica's requests as a multiple of the mean, and the mean TTFT."""
    random, requests = Random(0), []
    for at in range(count):
        path = (*range(12), *range(100 + at * 4, 100 + at * 4 + random.randint(0, 3)))
        requests.append(TracedRequest(at * interval_ms, len(path) * 512 + 9, random.randint(1, 200), path))
    found = {}
    for name in NAMES:
        fleet = FleetSimulation(Trace(512, requests), FleetOptions(8, name, gateways=GATEWAYS))
        report = fleet.run()
        found[name] = {"max_over_mean": fleet.imbalance(), "ttft_mean_ms": report.ttft_mean_ms}
    return found


def policies(trace: Trace) -> dict[str, Any]:
    """Runs every policy at several speeds."""
    variants = {name: (name, RoutingWeights(), 0.0) for name in NAMES}
    for tier in TIERS:
        variants[f"kv, {tier:.0f}x tier, pulls"] = ("kv", RoutingWeights(pull=True), tier)
    found: dict[str, Any] = {}
    for label, (name, weights, tier) in variants.items():
        reports = [
            simulate(trace.at_speed(factor), FleetOptions(8, name, weights=weights, host_factor=tier))
            for factor in SPEEDS
        ]
        found[label] = {
            "peak_goodput": max(report.goodput for report in reports),
            "speeds": {str(factor): _fields(report) for factor, report in zip(SPEEDS, reports, strict=True)},
        }
    return found


def _fields(report: FleetReport) -> dict[str, Any]:
    return {name: value for name, value in report._asdict().items() if name != "policy"}


def show(results: dict[str, Any]) -> None:
    parts = results["decision"]
    print(f"decision at {parts['blocks']:,} blocks, {REPLICAS} replicas, {PROMPT_TOKENS:,} tokens:")
    print(f"  {parts['decision_us']:.0f} us = {parts['hash_us']:.0f} hashing + {parts['route_us']:.0f} routing", end="")
    print(f" (of it the index {parts['index_us']:.1f}); aims 200 and 8")
    for replicas, rate in results["requests_per_s"].items():
        print(f"simulator, {replicas} replicas: {rate:,.0f} requests/s; aim 10,000 at 8")
    print(f"one hot prefix, {GATEWAYS} gateways, 8 replicas: most requests of one over the mean (aim 1.3), mean TTFT")
    for name, row in results["herd"].items():
        print(f"  {name:20}{row['max_over_mean']:9.2f}{row['ttft_mean_ms']:9.0f}")
    for path, table in results["policies"].items():
        base = table["round-robin"]["peak_goodput"]
        print(f"\n{path}, mean TTFT ms at 1x and 2x, peak goodput and its ratio to round robin")
        for label, row in table.items():
            first, second = (row["speeds"][factor]["ttft_mean_ms"] for factor in ("1", "2"))
            print(f"  {label:20}{first:9.0f}{second:9.0f}{row['peak_goodput']:9.2f}{row['peak_goodput'] / base:7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    trace = made_up_trace()
    results = {
        "decision": decision(),
        "requests_per_s": {replicas: speed(trace, replicas) for replicas in (8, 1000)},
        "herd": herd(),
        "policies": {path.name: policies(read_trace(path)) for path in args.trace},
    }
    if args.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
