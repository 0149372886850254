"""`penstock tune` finds a fleet's configuration for a trace and targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.command import Argument, Exit, Option
from penstock.cli.fleet_sim import Limit, Scale, Speed, TraceFile, model_timing, open_trace
from penstock.cli.terminal import note, print_json

if TYPE_CHECKING:
    from penstock.fleet.timing import EngineTiming
    from penstock.fleet.tune import TunedFleet


def tune(
    model: Annotated[
        str, Argument(metavar="MODEL", help="Model whose speed on this machine counts. Empty: Dynamo's mock engine's.")
    ] = "",
    trace: TraceFile = "",
    ttft: Annotated[float, Option(minimum=1, help="Milliseconds in which the first token has to come.")] = 2000.0,
    itl: Annotated[
        float, Option(minimum=0.1, help="Milliseconds that each further token may take, on average.")
    ] = 50.0,
    most: Annotated[int, Option(minimum=1, maximum=1000, help="Most replicas.")] = 64,
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

    Tries numbers of replicas, rows, prefill budgets, a RAM tier and pulls from other replicas. The smallest and
    plainest fleet in which 95 % of the requests meet both targets is printed, with the figures to expect and the
    command that starts it. The exit code is 1 if no fleet does; the nearest one is printed then. A split of prefill and
    decode is not tried.
    """
    from penstock.fleet.scale import ServiceTargets
    from penstock.fleet.timing import EngineTiming
    from penstock.fleet.tune import tune

    requests = open_trace(trace, speed, limit, scale)
    timing = model_timing(model, engine, requests) if model else EngineTiming()
    best = tune(requests, timing, ServiceTargets(ttft, itl), most, _note_tried)
    if json:
        print_json(_to_json(best, model, timing))
    else:
        _print(best, model, timing)
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
    extras = [f"{tier:g}x RAM tier"] * bool(tier) + ["pulls"] * fleet.options.weights.pull
    return ", ".join([f"{timing.max_rows} rows", f"prefill budget {timing.prefill_budget or 'none'}", *extras])


def command(fleet: TunedFleet, model: str, timing: EngineTiming) -> str:
    """Returns the command that starts such a fleet."""
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in fleet.changed(timing).items())
    return f"penstock fleet serve {model or 'MODEL'} --replicas {fleet.options.replicas}{flags}"


def _to_json(best: TunedFleet, model: str, timing: EngineTiming) -> dict[str, Any]:
    own = best.options
    return {
        "meets": best.meets,
        "good": best.good,
        "replicas": own.replicas,
        "max_rows": own.timing.max_rows,
        "prefill_budget": own.timing.prefill_budget,
        "ram": own.host_factor,
        "pull": own.weights.pull,
        "command": command(best, model, timing),
        "expected": {name: value for name, value in best.report._asdict().items() if name != "policy"},
    }


def _print(best: TunedFleet, model: str, timing: EngineTiming) -> None:
    report = best.report
    print(f"{best.options.replicas} replicas, {_described(best)}: {best.good:.1%} of the requests meet both targets")
    print(f"  TTFT {report.ttft_mean_ms:,.0f} ms on average, p99 {report.ttft_p99_ms:,.0f} ms")
    print(f"  ITL {report.itl_mean_ms:.1f} ms, reuse {report.reuse:.1%}, goodput {report.goodput:.2f} requests/s")
    print(f"  {command(best, model, timing)}")
    if best.options.host_factor:
        blocks = int(best.options.host_factor * best.options.timing.kv_tokens)
        print(f"  with --kv-ram for {blocks:,} tokens: {best.options.host_factor:g} times the KV cache")
