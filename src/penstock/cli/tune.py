"""Implements `penstock tune`, which finds a fleet's configuration for a trace and targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.fleet_sim import Limit, PlannedReplica, Scale, Speed, TraceFile, open_trace, planned_replica
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Exit, Option
from penstock.cli.terminal import note, print_json

if TYPE_CHECKING:
    from penstock.tools.fleet_tuning import TunedFleet
    from penstock.tools.sim.simulation import FleetOptions

BYTES = "BYTES"  # placeholder of an unknown number


def tune(
    model: Annotated[
        str, Argument(metavar="MODEL", help="Model whose speed on this machine is used. Empty: Dynamo's mock engine.")
    ] = "",
    trace: TraceFile = "",
    ttft: Annotated[float, Option(minimum=1, help="Target for the time to first token, in milliseconds.")] = 2000.0,
    itl: Annotated[
        float, Option(minimum=0.1, help="Target for an answer's mean inter-token latency, in milliseconds.")
    ] = 50.0,
    most: Annotated[int, Option(minimum=1, maximum=1000, help="Maximum number of replicas.")] = 64,
    speed: Speed = 1.0,
    limit: Limit = 3000,
    scale: Scale = 1.0,
    json: options.Json = False,
    *,
    engine: options.EngineSettings,
) -> None:
    """Find the smallest fleet that meets targets under a trace, in the simulator.

      penstock tune --trace conversation.jsonl --ttft 2000 --itl 50
      penstock tune smollm2 --trace conversation.jsonl --scale 0.05 --ttft 3000 --itl 80 --json

    Tries numbers of replicas, rows, prefill budgets and a RAM tier. Prints the smallest and plainest fleet in which 95
    % of the requests meet both targets, with the expected figures and the command that starts it. Each replica is
    assumed to have a machine like this one, or a GPU, to itself. If no fleet meets the targets, prints the nearest and
    exits with 1. A split of prefill and decode is not tried.
    """
    from penstock.fleet.scale import ServiceTargets
    from penstock.tools.fleet_tuning import plain_fleet, tune

    requests = open_trace(trace, speed, limit, scale)
    replica = planned_replica(model, engine, requests)
    plain = plain_fleet(replica.timing, ServiceTargets(ttft, itl), replica.tier)
    best = tune(requests, plain, most, _note_tried)
    ram = kv_ram(best, plain, replica)
    changed = best.changed(plain) | ({} if ram is None else {"kv_ram": ram})
    line = command(model, best.options.replicas, (stated(engine) if model else {}) | changed)
    if json:
        print_json(_to_json(best, ram, line))
    else:
        _print(best, ram, line)
    if not best.meets:
        note(
            f"error: no fleet of up to {most} replicas answers 95 % of the requests with a TTFT of {ttft:g} ms and an "
            f"ITL of {itl:g} ms; the nearest, above, reaches {best.good:.1%}: relax a target, or allow more with "
            "--most [targets_missed]"
        )
        raise Exit(1)


def _note_tried(tried: TunedFleet) -> None:
    note(f"{tried.options.replicas} replicas, {_described(tried)}: {tried.good:.1%} good")


def _described(fleet: TunedFleet) -> str:
    timing, tier = fleet.options.timing, fleet.options.host_factor
    extras = [f"{tier:g}x RAM tier"] * bool(tier)
    return ", ".join([f"{timing.max_rows} rows", f"prefill budget {timing.prefill_budget or 'none'}", *extras])


def kv_ram(fleet: TunedFleet, plain: FleetOptions, replica: PlannedReplica) -> int | str | None:
    """Returns such a fleet's --kv-ram: a number of bytes, BYTES if unknown, or None for the engine's default."""
    tier = fleet.options.host_factor
    if tier == plain.host_factor:
        return None
    return int(tier * replica.cache) or BYTES


def stated(engine: dict[str, Any]) -> dict[str, Any]:
    from penstock.config import DEFAULTS

    return {name: value for name, value in engine.items() if value is not None and value != DEFAULTS[name]}


def command(model: str, replicas: int, engine: dict[str, Any]) -> str:
    import shlex

    words = ["penstock", "fleet", "serve", model or "MODEL", "--replicas", str(replicas)]
    for name, value in engine.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag)  # all such flags are off by default
        else:
            words += [
                word for each in (value if isinstance(value, list | tuple) else [value]) for word in (flag, str(each))
            ]
    return shlex.join(words)


def _to_json(best: TunedFleet, ram: int | str | None, command: str) -> dict[str, Any]:
    own = best.options
    return {
        "meets": best.meets,
        "good": best.good,
        "replicas": own.replicas,
        "max_rows": own.timing.max_rows,
        "prefill_budget": own.timing.prefill_budget,
        "ram": own.host_factor,
        "kv_ram": ram if isinstance(ram, int) else None,
        "command": command,
        "expected": {name: value for name, value in best.report._asdict().items() if name != "policy"},
    }


def _print(best: TunedFleet, ram: int | str | None, command: str) -> None:
    report, own = best.report, best.options
    print(f"{own.replicas} replicas, {_described(best)}: {best.good:.1%} of the requests meet both targets")
    print(f"  TTFT {report.ttft_mean_ms:,.0f} ms on average, p99 {report.ttft_p99_ms:,.0f} ms")
    print(f"  ITL {report.itl_mean_ms:.1f} ms, reuse {report.reuse:.1%}, goodput {report.goodput:.2f} requests/s")
    print(f"  {command}")
    if ram == BYTES:
        tokens = int(own.host_factor * own.timing.kv_tokens)
        print(f"  {BYTES}: {own.host_factor:g} times the bytes of your KV cache (penstock plan), for {tokens:,} tokens")
