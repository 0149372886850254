"""Implements `penstock fleet replay`, which sends a trace of requests to servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from penstock.cli.fleet_sim import Limit, Scale, Speed, TraceFile, open_trace
from penstock.cli.framework import options
from penstock.cli.framework.command import Exit, Option, UsageError
from penstock.cli.terminal import note, print_json

if TYPE_CHECKING:
    from penstock.tools.trace_replay import ReplayOptions, ReplayReport
    from penstock.tools.traces import Trace


def replay(
    trace: TraceFile = "",
    url: Annotated[
        list[str] | None, Option(help="Server such as http://127.0.0.1:8000/v1. Several receive requests in turn.")
    ] = None,
    model: Annotated[str, Option(help="Model of the servers. Default: the first that each lists.")] = "",
    speed: Speed = 1.0,
    limit: Limit = 0,
    scale: Scale = 1.0,
    concurrency: Annotated[int, Option(minimum=1, maximum=10_000, help="Maximum concurrent requests.")] = 256,
    seed: Annotated[int, Option(help="Seed of the prompts. Servers have the prompts of an earlier seed cached.")] = 0,
    api_key: Annotated[str, Option(env="OPENAI_API_KEY", help="API key of the servers.")] = "",
    json: options.Json = False,
) -> None:
    """Send a trace of requests to servers at the trace's own times, and measure the answers.

      penstock fleet replay --trace conversation.jsonl --url http://127.0.0.1:8000/v1 --limit 500
      penstock fleet replay --trace conversation.jsonl --url http://a:8000/v1 --url http://b:8000/v1 --scale 0.05 --json

    Prompts are generated from the trace's block ids, so they share the trace's prefixes. Prints the time to the first
    token (TTFT), the inter-token latency (ITL), the servers' own counts of reused tokens (cached_tokens) and goodput,
    named as in penstock fleet sim. The exit code is 1 if requests failed.
    """
    import asyncio

    from penstock.tools.trace_replay import ReplayOptions

    if not url:
        raise UsageError("--url URL is needed: the server to send the trace to")
    requests = open_trace(trace, speed, limit, scale)
    note(f"{len(requests.requests)} requests in {requests.requests[-1].arrival / 1000:,.0f} s")
    report = asyncio.run(_replay(requests, url, (model, api_key), ReplayOptions(concurrency, seed)))
    if json:
        print_json(report._asdict())
    else:
        _print(report)
    if report.held_back:
        note(f"{report.held_back} requests were sent late: more than --concurrency {concurrency} were under way")
    if report.errors:
        note(f"error: {report.errors} requests failed, the first with: {report.first_error} [replay_errors]")
        raise Exit(1)


async def _replay(trace: Trace, urls: list[str], access: tuple[str, str], options: ReplayOptions) -> ReplayReport:
    from penstock.tools.bench import UrlTarget
    from penstock.tools.trace_replay import replay

    targets = [UrlTarget(url, *access) for url in urls]
    for target in targets:
        await target.negotiate()
    return await replay(trace, targets, options)


def _print(report: ReplayReport) -> None:
    print(f"requests        {report.requests:,} in {report.seconds:,.1f} s, {report.errors} failed")
    print(f"mean TTFT       {report.ttft_mean_ms:,.1f} ms, p99 {report.ttft_p99_ms:,.1f} ms")
    print(f"mean ITL        {report.itl_mean_ms:,.1f} ms")
    print(f"reuse           {report.reuse:.1%}")
    print(f"goodput         {report.goodput:.2f} requests/s")
