"""Implements `penstock bench`, which measures an engine or a server under load."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

from penstock.cli.framework import options
from penstock.cli.framework.command import Exit, Option, UsageError
from penstock.cli.terminal import note, obtain, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.tools.bench import Result, Target, Workload


ServerUrl = Annotated[str, Option(help="Server to measure instead of MODEL, such as http://127.0.0.1:8000/v1.")]
ServerModel = Annotated[str, Option(help="Model of the server. Default: the first listed.", name="--model")]
Concurrency = Annotated[str, Option(help="Concurrent clients; several levels are separated by commas.")]
InputLength = Annotated[int, Option(minimum=1, help="Tokens of each prompt.")]
OutputLength = Annotated[int, Option(minimum=1, help="Tokens of each answer.")]
Requests = Annotated[int, Option(minimum=0, help="Requests at each level of concurrency. 0: four per client.")]
SharedPrefix = Annotated[int, Option(minimum=0, help="Leading tokens shared by all prompts.")]


def bench(
    model: options.ModelRef = "",
    url: ServerUrl = "",
    served: ServerModel = "",
    concurrency: Concurrency = "1",
    input_len: InputLength = 128,
    output_len: OutputLength = 64,
    requests: Requests = 0,
    shared_prefix: SharedPrefix = 0,
    seed: Annotated[int, Option(help="Seed of the random prompts.")] = 0,
    api_key: Annotated[str, Option(env="OPENAI_API_KEY", help="API key for --url.")] = "",
    json: options.Json = False,
    *,
    engine: options.EngineSettings,
) -> None:
    """Measure the speed of an engine or a server.

      penstock bench
      penstock bench ./model.gguf --concurrency 1,8,32 --input-len 512 --output-len 128
      penstock bench --url http://127.0.0.1:8000/v1 --concurrency 8 --shared-prefix 256 --json

    Prints tokens per second, the time to the first token (TTFT) and the inter-token latency (ITL: the time between two
    pieces of one answer); with speculative decoding, also the number of drafted tokens and the share accepted. Each
    client sends its next request when the previous one is answered (closed loop). MODEL runs in an engine process
    without a server. With --url, tokens are the server's own counts.
    """
    levels = _levels(concurrency)
    if shared_prefix > input_len:
        raise UsageError(f"--shared-prefix {shared_prefix} is longer than --input-len {input_len}")
    if url and model:
        raise UsageError("MODEL runs here and cannot be combined with --url: choose the server's model with --model")

    from penstock.tools.bench import Workload, run

    lengths = {"input_len": input_len, "output_len": output_len, "shared_prefix": shared_prefix}
    workloads = [
        Workload(concurrency=clients, requests=requests or 4 * clients, seed=seed, **lengths) for clients in levels
    ]
    if url:
        results = run(_measure_url(url, served, api_key, workloads))
    else:
        path = obtain(model or options.DEFAULT_MODEL)

        from penstock.config import configure
        from penstock.store import with_local_draft

        rows = engine["max_rows"] or max(64, *levels)
        results = run(
            _measure_engine(with_local_draft(configure(path, engine | {"max_rows": rows}), obtain), workloads)
        )
    if json:
        print_json({"target": url or model or options.DEFAULT_MODEL, "results": [asdict(result) for result in results]})
    else:
        _print(results)
    _report_errors(results)


async def _measure_url(url: str, model: str, api_key: str, workloads: list[Workload]) -> list[Result]:
    from penstock.tools.bench import UrlTarget

    target = UrlTarget(url, model, api_key)
    await target.negotiate()
    return await _measure(target, workloads)


async def _measure_engine(config: Config, workloads: list[Workload]) -> list[Result]:
    from penstock.ipc.spawn import ProcessClient
    from penstock.tools.bench import EngineTarget, RequestTiming

    client = ProcessClient(config)
    try:
        hello = await client.start()
        target = EngineTarget(client, hello.limits)
        await target.complete(target.vocab[:8], 2, RequestTiming())
        return await _measure(target, workloads)
    finally:
        await client.close()


async def _measure(target: Target, workloads: list[Workload]) -> list[Result]:
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    from penstock.tools.bench import run_workload

    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        results = []
        for workload in workloads:
            task = bar.add_task(f"{workload.concurrency} clients", total=workload.requests)
            results.append(await run_workload(target, workload, partial(bar.advance, task)))
        return results


def _levels(text: str) -> list[int]:
    levels = [int(level) if level.strip().isdecimal() else 0 for level in text.split(",")]
    if not all(1 <= level <= 10_000 for level in levels):
        raise UsageError(f"--concurrency takes numbers from 1 to 10000, separated by commas; got {text!r}")
    return levels


def _print(results: list[Result]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    heads = ("clients", "requests", "errors", "out tok/s", "all tok/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for r in results:
        figures = (r.output_tok_s, r.total_tok_s, r.ttft_p50, r.ttft_p99, r.itl_p50, r.itl_p99)
        table.add_row(str(r.concurrency), str(r.requests), str(r.errors), *map(_readable, figures))
    print_table(table)
    for r in results:
        if r.drafted_tokens:
            share = r.accepted_tokens / r.drafted_tokens
            print(f"concurrency {r.concurrency}: {r.drafted_tokens:,} tokens drafted, {share:.0%} accepted")


def _readable(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}"


def _report_errors(results: list[Result]) -> None:
    failed = sum(result.errors for result in results)
    if failed:
        first = next(result.first_error for result in results if result.errors)
        note(f"error: {failed} requests failed, the first with: {first} [bench_errors]")
        raise Exit(1)
