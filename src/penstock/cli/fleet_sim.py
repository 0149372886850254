"""Implements `penstock fleet sim`, which simulates a fleet under a trace of requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Option, UsageError
from penstock.cli.terminal import note, print_json, print_table

if TYPE_CHECKING:
    from penstock.fleet.timing import EngineTiming
    from penstock.tools.sim.simulation import FleetReport
    from penstock.tools.traces import Trace

PICTURE = "fleet-sim.svg"  # default of --plot
TraceFile = Annotated[
    str, Option(help="File of requests: Mooncake's or Dynamo's JSON lines, or Azure's CSV, optionally with .gz.")
]
Speed = Annotated[float, Option(minimum=0.001, help="Factor of the requests' arrival rate.")]
Limit = Annotated[int, Option(minimum=0, help="Use only this many requests from the beginning of the trace. 0: all.")]
Scale = Annotated[float, Option(minimum=0.0001, help="Factor of the lengths of prompts and answers.")]
Plot = Annotated[
    str,
    Option(help=f"Write an SVG picture of the times to the first token to this file, or to {PICTURE}.", bare=PICTURE),
]


def sim(
    trace: TraceFile = "",
    replicas: Annotated[int, Option(minimum=1, maximum=10_000, help="Replicas of the engine.")] = 8,
    policy: Annotated[
        str, Option(help="Routing policy: kv, round-robin, least-loaded, dynamo, or all of these in turn.")
    ] = "all",
    speed: Speed = 1.0,
    limit: Limit = 0,
    scale: Scale = 1.0,
    ram: Annotated[
        float, Option(minimum=0, help="Blocks in a replica's RAM tier, as a multiple of its device blocks.")
    ] = 0.0,
    pull: Annotated[bool, Option(help="With kv: pull blocks from another replica if that is cheaper.")] = False,
    model: Annotated[
        str, Option(help="Model whose speed on this machine the replicas have. Default: Dynamo's mock engine.")
    ] = "",
    plot: Plot = "",
    json: options.Json = False,
    *,
    engine: options.EngineSettings,
) -> None:
    """Simulate a fleet on a virtual clock, and compare ways to route requests.

      penstock fleet sim --trace conversation.jsonl --replicas 8
      penstock fleet sim --trace conversation.jsonl --replicas 8 --policy kv --speed 2 --json
      penstock fleet sim --trace conversation.jsonl --ram 4 --pull --plot ttft.svg
      penstock fleet sim --trace conversation.jsonl --scale 0.05 --replicas 3 --model smollm2

    By default the engines are the mock engines of Dynamo's simulator: steps of up to 8,192 prompt tokens, 262,144
    tokens of KV cache, and its published polynomials for the time of a step. With --model, they have the limits of the
    engine options and the speed that penstock plan expects on this machine. Goodput counts the requests per second with
    a time to first token of at most 2 s and inter-token latencies of at most 50 ms.
    """
    from penstock.fleet.route import RoutingWeights
    from penstock.tools.sim.policies import NAMES
    from penstock.tools.sim.simulation import FleetOptions, FleetSimulation

    if policy not in (*NAMES, "all"):
        raise UsageError(f"--policy takes {', '.join(NAMES)} or all; got {policy!r}")
    requests = open_trace(trace, speed, limit, scale)
    timing = planned_replica(model, engine, requests).timing
    weights = RoutingWeights(pull=pull)
    reports, ttfts = [], {}
    for name in NAMES if policy == "all" else (policy,):
        note(f"{name}: {len(requests.requests)} requests on {replicas} replicas")
        fleet = FleetSimulation(requests, FleetOptions(replicas, name, timing, weights, ram))
        reports.append(fleet.run())
        ttfts[name] = fleet.ttfts()
    if plot:
        from penstock.tools.plot import ttft_chart

        Path(plot).write_text(ttft_chart(f"{Path(trace).name} at {speed:g}x, {replicas} replicas", ttfts))
        note(f"the picture is in {plot}")
    if json:
        print_json({"policies": [report._asdict() for report in reports]})
    else:
        _print(reports)


def open_trace(path: str, speed: float, limit: int, scale: float) -> Trace:
    from penstock.tools.traces import Trace, read_trace

    if not path:
        raise UsageError("--trace FILE is needed: the requests to simulate or send")
    found = read_trace(Path(path)).at_speed(speed)
    return Trace(found.block_size, found.requests[: limit or None]).scaled(scale)


class PlannedReplica(NamedTuple):
    """Describes the expected limits and speed of one replica."""

    timing: EngineTiming
    cache: int = 0  # bytes of its KV cache; 0: unknown
    tier: float = 0.0  # blocks in host memory per block in the KV cache


def planned_replica(model: str, engine: dict[str, Any], trace: Trace) -> PlannedReplica:
    """Describes a replica of a model with these options on this machine, for the trace's requests. Without a model, it
    is Dynamo's mock engine.
    """
    from penstock.fleet.timing import EngineTiming

    if not model:
        return PlannedReplica(EngineTiming())
    from penstock.cli.machine_profile import machine_profile
    from penstock.cli.terminal import obtain
    from penstock.config import configure
    from penstock.errors import ConfigError
    from penstock.fleet.timing_fit import fit_timing
    from penstock.model.load import open_checkpoint
    from penstock.planning.forecast import make_forecasts

    path = obtain(model)
    config = configure(path, engine)
    checkpoint = open_checkpoint(path, config.config, config.strict_config, config.max_len)
    context = sum(each.prompt + each.output // 2 for each in trace.requests) // len(trace.requests)
    forecast = next(make_forecasts(config, checkpoint, context, machine_profile))
    memory = forecast.memory
    if memory is None or forecast.profile is None or forecast.costs is None:
        raise ConfigError(forecast.problem or f"the speed of device {config.device} is not known: measure another")
    timing = fit_timing(forecast.profile, forecast.costs, memory.limits, context)
    return PlannedReplica(timing, memory.cache, memory.limits.host_places / memory.limits.num_blocks)


def _print(reports: list[FleetReport]) -> None:
    from rich.table import Table

    table = Table(
        "policy", "mean TTFT ms", "p99 TTFT ms", "mean ITL ms", "reuse", "goodput/s", box=None, pad_edge=False
    )
    for each in reports:
        times = (f"{value:,.1f}" for value in (each.ttft_mean_ms, each.ttft_p99_ms, each.itl_mean_ms))
        table.add_row(each.policy, *times, f"{each.reuse:.1%}", f"{each.goodput:.2f}")
    print_table(table)
