"""`penstock fleet sim` simulates a fleet of replicas under a trace of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli import options
from penstock.cli.command import Option, UsageError
from penstock.cli.terminal import note, print_json, print_table

if TYPE_CHECKING:
    from penstock.fleet.sim import FleetReport


def sim(
    trace: Annotated[
        str, Option(help="File of requests: Mooncake's or Dynamo's JSON lines, or Azure's CSV; .gz is read too.")
    ] = "",
    replicas: Annotated[int, Option(minimum=1, maximum=10_000, help="Replicas of the engine.")] = 8,
    policy: Annotated[
        str, Option(help="How requests are routed: kv, round-robin, least-loaded, dynamo, or all of these in turn.")
    ] = "all",
    speed: Annotated[float, Option(minimum=0.001, help="How many times as fast requests arrive.")] = 1.0,
    ram: Annotated[
        float, Option(minimum=0, help="Blocks in a replica's RAM tier, as a multiple of those on its device.")
    ] = 0.0,
    pull: Annotated[bool, Option(help="With kv: blocks may come from another replica when that is cheaper.")] = False,
    json: options.Json = False,
) -> None:
    """Simulate a fleet on a virtual clock, and compare ways to route requests.

      penstock fleet sim --trace conversation.jsonl --replicas 8
      penstock fleet sim --trace conversation.jsonl --replicas 8 --policy kv --speed 2 --json
      penstock fleet sim --trace conversation.jsonl --ram 4 --pull

    The engines are the mock engines of Dynamo's simulator: steps of up to 8,192 prompt tokens, 262,144 tokens of KV
    cache, and its published polynomials for the time of a step. Goodput counts the requests per second whose first
    token came within 2 s, and whose others came within 50 ms each.
    """
    from penstock.fleet.policies import NAMES
    from penstock.fleet.route import RoutingWeights
    from penstock.fleet.sim import FleetOptions, simulate
    from penstock.fleet.traces import read_trace

    if not trace:
        raise UsageError("--trace FILE is needed: the requests to simulate")
    if policy not in (*NAMES, "all"):
        raise UsageError(f"--policy takes {', '.join(NAMES)} or all; got {policy!r}")
    requests = read_trace(Path(trace)).at_speed(speed)
    weights = RoutingWeights(pull=pull)
    reports = []
    for name in NAMES if policy == "all" else (policy,):
        note(f"{name}: {len(requests.requests)} requests on {replicas} replicas")
        reports.append(simulate(requests, FleetOptions(replicas, name, weights=weights, host_factor=ram)))
    if json:
        print_json({"policies": [report._asdict() for report in reports]})
    else:
        _print(reports)


def _print(reports: list[FleetReport]) -> None:
    from rich.table import Table

    table = Table(
        "policy", "mean TTFT ms", "p99 TTFT ms", "mean ITL ms", "reuse", "goodput/s", box=None, pad_edge=False
    )
    for each in reports:
        times = (f"{value:,.1f}" for value in (each.ttft_mean_ms, each.ttft_p99_ms, each.itl_mean_ms))
        table.add_row(each.policy, *times, f"{each.reuse:.1%}", f"{each.goodput:.2f}")
    print_table(table)
