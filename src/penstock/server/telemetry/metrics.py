"""Exports Prometheus metrics: the engine's statistics at the moment of a scrape, and the timing of requests."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, chain
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock import __version__
from penstock.ipc.client import EngineClient, EngineState
from penstock.server.access.expected_wait import WaitOutcome
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry import compat_metrics
from penstock.server.telemetry.compat_metrics import CompatMetrics
from penstock.server.telemetry.fleet_metrics import FleetCollector
from penstock.server.telemetry.peer_metrics import peer_metrics
from penstock.types import STEP_SIZES, DiskCounts, DraftCounts, PeerCounts, Report, Request, Stats, add_drafts

# Bucket bounds in seconds: our own, and the bounds of the dashboards that compat_metrics serves.
FAST = sorted({0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, *compat_metrics.INTER_TOKEN})
SOON = sorted({0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, *compat_metrics.FIRST_TOKEN})
SLOW = sorted({0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, *compat_metrics.REQUEST})
ENGINE_ENDED = "of requests that the engine ended (not a stop string or a client that left)"


class FinishedRequest(NamedTuple):
    """Describes a request that has ended, as the server saw it. Times are perf_counter's."""

    request: Request
    reason: str  # stop, length, abort or error
    began: float
    first: float  # time of the first token; 0: there was none
    last: float  # time of the last token
    ended: float
    generated: int
    cached: int
    report: Report | None = None  # the engine's, if the engine ended it
    charged: int = 0  # prompt tokens: none for a choice that shares its prompt, or where an error was the answer


Engines = Callable[[], Iterable[tuple[str, EngineClient]]]  # the name and the client of every loaded model


class RequestDistributions:
    """Holds the histograms of requests: their times and their tokens."""

    def __init__(self) -> None:
        self.first_token = Distribution(
            "time_to_first_token_seconds", "From the start of a request to its first token", SOON
        )
        self.inter_token = Distribution("inter_token_seconds", "Between two tokens of a request", FAST)
        self.mean_token = Distribution("request_token_seconds", "A request's mean time from token to token", FAST)
        self.request = Distribution("request_seconds", "From the start of a request to its end", SLOW)
        self.queued = Distribution("request_queue_seconds", f"From arrival to the first step, {ENGINE_ENDED}", SLOW)
        self.prefill = Distribution(
            "request_prefill_seconds", f"From the first step to the first token, {ENGINE_ENDED}", SLOW
        )
        self.decode = Distribution("request_decode_seconds", f"From the first token to the end, {ENGINE_ENDED}", SLOW)
        self.prompt = Distribution("request_prompt_tokens", "Prompt tokens of a request", compat_metrics.TOKENS)
        self.generated = Distribution(
            "request_generated_tokens", "Generated tokens of a request", compat_metrics.TOKENS
        )
        self.most = Distribution(
            "request_max_tokens", "Most tokens that a request could generate", compat_metrics.TOKENS
        )

    def end(self, finished: FinishedRequest) -> None:
        self.request.observe(finished.ended - finished.began)
        self.prompt.observe(len(finished.request.prompt))
        self.most.observe(finished.request.max_tokens)
        self.generated.observe(finished.generated)
        if finished.generated > 1:
            self.mean_token.observe((finished.last - finished.first) / (finished.generated - 1))
        if finished.report is not None:
            self.queued.observe(finished.report.queued)
            self.prefill.observe(finished.report.prefill)
            self.decode.observe(finished.report.decode)


class Metrics:
    """Holds all metrics of a server. `listeners` are called with every request that has ended."""

    def __init__(self, engines: Engines, model: str, sets: Collection[str] = compat_metrics.DEFAULT_SETS) -> None:
        """Takes a function that lists the engines, the default model, and the sets of metric names that are exported in
        addition to our own."""
        self.listeners: list[Callable[[RequestContext, FinishedRequest], None]] = []
        self.open: dict[RequestTimer, None] = {}  # timers of requests in flight, the oldest first
        self.distributions = RequestDistributions()
        self.finished = Counter("penstock_requests_finished", "Requests by how they ended", ["reason"], registry=None)
        self.refused = Counter(
            "penstock_requests_refused",
            "Requests whose first token would have come too late: for their deadline, ttft or the server's patience",
            ["reason"],
            registry=None,
        )
        self.first_tokens = Counter(
            "penstock_first_tokens",
            "First tokens by what said how long they may take (deadline, ttft or patience): in_time or late",
            ["limit", "outcome"],
            registry=None,
        )
        self.wait_forecasts = Counter(
            "penstock_wait_forecasts",
            "Forecasts of the time to a first token that came: right, too_high or too_low by more than half",
            ["forecast"],
            registry=None,
        )
        self.fallbacks = Counter(
            "penstock_model_fallbacks",
            "Requests that another model (to) has answered, because no engine of their own could",
            ["model", "to"],
            registry=None,
        )
        held = [*vars(self.distributions).values(), *vars(self).values()]
        own = [each for each in held if isinstance(each, Distribution | Counter)]
        sources: list[Collector] = [EngineCollector(engines), FleetCollector(engines), *own]
        self._rendering = asyncio.Lock()
        self._registry = CollectorRegistry()
        for source in [*sources, CompatMetrics(sources, model, sets)]:
            self._registry.register(source)

    def register(self, collector: Collector) -> None:
        self._registry.register(collector)

    async def render(self) -> bytes:
        """Returns all metrics as text. A turn of the event loop renders at most one text, because a text delays other
        requests."""
        async with self._rendering:
            await asyncio.sleep(0)
            return generate_latest(self._registry)

    def note_wait(self, limit: str, outcome: WaitOutcome) -> None:
        self.first_tokens.labels(limit, "late" if outcome.late else "in_time").inc()
        if outcome.forecast:
            self.wait_forecasts.labels(outcome.forecast).inc()

    def end(self, context: RequestContext, finished: FinishedRequest) -> None:
        self.distributions.end(finished)
        self.finished.labels(finished.reason).inc()
        for listener in self.listeners:
            listener(context, finished)


class Distribution:
    """Is a histogram that is cheap enough for every token: a fifth of the cost of the library's, which takes a lock."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name, self._help, self._bounds = f"penstock_{name}", help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        yield histogram(self._name, self._help, self._bounds, self._counts, self._sum)


def histogram(name: str, help: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    buckets = zip([*map(floatToGoString, bounds), "+Inf"], accumulate(counts), strict=True)
    return HistogramMetricFamily(name, help, buckets=list(buckets), sum_value=total)


class RequestTimer:
    """Times one request from its start to its end, which is a finish reason, an error or a client that left, and
    charges its tokens to the payer."""

    __slots__ = (
        "_aside",
        "_client",
        "_last",
        "_metrics",
        "began",
        "cached",
        "context",
        "first",
        "generated",
        "reason",
        "report",
        "request",
    )

    def __init__(self, metrics: Metrics, context: RequestContext, request: Request, client: EngineClient) -> None:
        self.reason = "abort"
        self.report: Report | None = None
        self._metrics = metrics
        self.context = context
        self.request = request
        self._client = client
        self.began = perf_counter()
        self.first = self._last = 0.0  # times of the first and the latest token; 0: none yet
        self.generated = self.cached = 0
        self._aside = 0  # prompt tokens that are charged at the end

    def tokens(self, count: int, cached: int) -> None:
        now = perf_counter()
        if self._last:
            self._metrics.distributions.inter_token.observe((now - self._last) / count)
        else:
            self._metrics.distributions.first_token.observe(now - self.began)
            self.first, self.cached = now, cached
        self._last = now
        self.generated += count

    @property
    def phase(self) -> str:
        if self.generated:
            return "decode"
        return "prefill" if self.request.id in self._client.stats.prefilling else "waiting"

    def __enter__(self) -> Self:
        self._metrics.open[self] = None
        charged, prompt = self.context.notes.outcome.charged, hash(self.request.prompt)
        self._aside = 0 if prompt in charged else len(self.request.prompt)
        charged.add(prompt)
        if self.context.caller.payer is not None:
            self.context.caller.payer.set_aside(self._aside)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        del self._metrics.open[self]
        reason = "error" if kind is not None and issubclass(kind, Exception) else self.reason
        charged = self._charge(unanswered=reason == "error" and not self.first)
        finished = FinishedRequest(
            self.request,
            reason,
            began=self.began,
            first=self.first,
            last=self._last,
            ended=perf_counter(),
            generated=self.generated,
            cached=self.cached,
            report=self.report,
            charged=charged,
        )
        self._metrics.end(self.context, finished)

    def _charge(self, unanswered: bool) -> int:
        """Charges the payer, and returns the tokens of the prompt that it is charged for. Choices share a prompt: the
        first of them has it. An error before the first token costs nothing."""
        if unanswered and self._aside:
            self.context.notes.outcome.charged.discard(hash(self.request.prompt))
        charged = 0 if unanswered else self._aside
        if (payer := self.context.caller.payer) is not None:
            payer.set_aside(-self._aside)
            payer.charge("prompt", charged)
            payer.charge("generated", self.generated)
        return charged


DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[DraftCounts], int]], ...] = (
    ("drafts", "Drafts that steps verified, by where they come from", lambda counts: counts.drafts),
    ("drafted_tokens", "Tokens of drafts", lambda counts: counts.drafted),
    ("accepted_tokens", "Tokens of drafts that turned out right", lambda counts: counts.accepted),
)


class EngineCollector:
    """Reports the latest statistics of all engines, added up. Counters start again with a new engine."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        clients = [client for _, client in self._engines()]
        stats = sum_stats([client.stats for client in clients])
        blocks = GaugeMetricFamily("penstock_kv_blocks", "Blocks of the KV cache", labels=["state"])
        blocks.add_metric(["free"], stats.blocks_free)
        blocks.add_metric(["used"], stats.blocks_used)
        blocks.add_metric(["cached"], stats.blocks_cached)
        yield blocks
        requests = GaugeMetricFamily("penstock_requests", "Requests in the engine", labels=["state"])
        requests.add_metric(["running"], stats.running)
        requests.add_metric(["waiting"], stats.waiting)
        yield requests
        yield from _tiers(stats)
        yield from _adapters(stats)
        yield from _disk(stats.disk)
        yield from peer_metrics(stats.peers)
        up = bool(clients) and all(client.state is EngineState.READY for client in clients)
        yield GaugeMetricFamily("penstock_engine_up", "1 while every loaded model has an engine", up)
        for name, help, value in (
            ("engine_restarts", "Engines started after the first", sum(client.restarts for client in clients)),
            ("engine_busy_seconds", "Time spent in steps", stats.busy_seconds),
            ("steps", "Steps of the engine", stats.steps),
            ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens whose KV was reused", stats.cached_tokens),
            ("adopted_blocks", "Blocks whose KV an engine before had computed", stats.adopted_blocks),
            ("generated_tokens", "Tokens generated", stats.generated_tokens),
            ("preemptions", "Sequences sent back to wait for blocks", stats.preemptions),
            ("grammars", "Grammars compiled", stats.grammars),
            ("grammar_compile_seconds", "Time spent on compiling grammars, beside the steps", stats.grammar_seconds),
            ("grammar_masks", "Masks of the tokens that grammars allow", stats.masks),
            ("grammar_mask_seconds", "Time spent on masks", stats.mask_seconds),
            ("forced_tokens", "Generated tokens that grammars left no choice about", stats.forced_tokens),
        ):
            yield CounterMetricFamily(f"penstock_{name}", help, value)
        for name, help, value_of in DRAFT_COUNTERS:
            drafted = CounterMetricFamily(f"penstock_{name}", help, labels=["source"])
            for counts in stats.drafts:
                drafted.add_metric([counts.source], value_of(counts))
            yield drafted
        yield histogram(
            "penstock_step_tokens", "Tokens computed in a step", STEP_SIZES, stats.step_sizes, stats.computed_tokens
        )
        yield self._info()

    def _info(self) -> Metric:
        info = GaugeMetricFamily(
            "penstock_model_info",
            "Each loaded model, the version and the KV cache",
            labels=["model", "version", "block_size", "blocks"],
        )
        for model, client in self._engines():
            if (hello := client.hello) is not None:
                limits = hello.limits
                info.add_metric([model, __version__, str(limits.block_size), str(limits.num_blocks)], 1)
        return info


def _tiers(stats: Stats) -> Iterator[Metric]:
    """Yields where reused tokens came from, and what host memory keeps of the KV cache."""
    reused = CounterMetricFamily(
        "penstock_reused_tokens",
        "Prompt tokens whose KV was reused, by where it was: device, ram or disk",
        labels=["tier"],
    )
    for tier, tokens in stats.reused:
        reused.add_metric([tier], tokens)
    yield reused
    copied = CounterMetricFamily(
        "penstock_kv_blocks_copied", "Blocks copied from host memory (in) and to it (out)", labels=["direction"]
    )
    copied.add_metric(["in"], stats.copied_in)
    copied.add_metric(["out"], stats.copied_out)
    yield copied
    host = GaugeMetricFamily("penstock_host_kv_blocks", "Places for KV blocks in host memory", labels=["state"])
    host.add_metric(["used"], stats.host_blocks)
    host.add_metric(["free"], stats.host_places - stats.host_blocks)
    yield host


def _adapters(stats: Stats) -> Iterator[Metric]:
    """Yields which adapters requests use and wait for, and the room that adapters have and take."""
    requests = GaugeMetricFamily(
        "penstock_adapter_requests",
        "Requests by the adapter that they name; a waiting one's adapter has no slot yet",
        labels=["adapter", "state"],
    )
    for name, running, waiting in stats.adapters:
        requests.add_metric([name, "running"], running)
        requests.add_metric([name, "waiting"], waiting)
    yield requests
    yield GaugeMetricFamily("penstock_adapter_slots", "Most adapters in memory at once", stats.adapter_slots)
    yield GaugeMetricFamily("penstock_adapter_bytes", "Memory that adapters take", stats.adapter_bytes)


def _disk(counts: DiskCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_kv_disk_blocks", "KV blocks on disk that can be reused", counts.blocks)
    yield GaugeMetricFamily("penstock_kv_disk_bytes", "Bytes that they take", counts.bytes)
    for name, help, value in (
        ("written_blocks", "KV blocks written to disk", counts.written),
        ("dropped_blocks", "KV blocks deleted from disk to make room", counts.dropped),
        ("read_blocks", "KV blocks read from disk", counts.read),
        ("given_up", "Reads that were given up because computing was sooner", counts.given_up),
    ):
        yield CounterMetricFamily(f"penstock_kv_disk_{name}", help, value)
    skipped = CounterMetricFamily(
        "penstock_kv_disk_skipped", "Files, KV blocks and writes that were of no use, by reason", labels=["reason"]
    )
    for reason, count in counts.skipped:
        skipped.add_metric([reason], count)
    yield skipped


def sum_stats(every: Sequence[Stats]) -> Stats:
    sizes = tuple(map(sum, zip(*(each.step_sizes for each in (Stats(), *every)), strict=True)))
    drafts = add_drafts(counts for each in every for counts in each.drafts)
    adapters = tuple(chain.from_iterable(each.adapters for each in every))
    reused: dict[str, int] = {}
    for tier, tokens in chain.from_iterable(each.reused for each in every):
        reused[tier] = reused.get(tier, 0) + tokens
    disk = reduce(DiskCounts.plus, (each.disk for each in every), DiskCounts())
    peers = reduce(PeerCounts.plus, (each.peers for each in every), PeerCounts())
    prefilling = tuple(chain.from_iterable(each.prefilling for each in every))
    measured = [each.step_seconds for each in every if any(each.step_seconds)]
    mean = tuple(sum(seconds) / len(measured) for seconds in zip(*measured, strict=False))
    apart = ("step_sizes", "adapters", "drafts", "reused", "disk", "peers", "step_seconds", "prefilling")
    names = [name for name in Stats._fields if name not in apart]
    added = {name: sum(getattr(each, name) for each in every) for name in names}
    added |= {"step_sizes": sizes, "adapters": adapters, "drafts": drafts, "prefilling": prefilling}
    added |= {"step_seconds": mean}
    return Stats(**added, reused=tuple(reused.items()), disk=disk, peers=peers)
