"""What Prometheus sees: the engine's own numbers at the moment of asking, and the timing of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from time import perf_counter
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.ipc.client import EngineClient
from penstock.server.accounts import ACCOUNT
from penstock.server.aliases import Aliases
from penstock.types import Request

FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
SLOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    def __init__(self, client: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        engine = EngineNumbers(client)
        self._registry.register(engine)
        self.first_token = self._histogram("time_to_first_token", "From asking the engine to the first token", SLOW)
        self.inter_token = Intervals("inter_token", "Between one token of a request and the next")
        self._registry.register(self.inter_token)
        self.request = self._histogram("request", "From asking the engine to the end of the answer", SLOW)
        self.finished = Counter(
            "penstock_requests_finished", "Requests by how they ended", ["reason"], registry=self._registry
        )
        sources = (engine, self.first_token, self.inter_token, self.request, self.finished)
        self._registry.register(Aliases(sources, model))

    def register(self, collector: Collector) -> None:
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"penstock_{name}_seconds", told, buckets=buckets, registry=self._registry)


class Intervals:
    """A histogram for what happens with every token: a fifth of the cost of the library's, which takes a lock."""

    def __init__(self, name: str, told: str) -> None:
        self._name, self._told = f"penstock_{name}_seconds", told
        self._counts = [0] * (len(FAST) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(FAST, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, FAST), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._told, buckets=buckets, sum_value=self._sum)


class Watch:
    """Times one request from here to its end: a finish reason, an error, or a caller that left."""

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self.reason = "abort"
        self._metrics = metrics
        self._request = request
        self._generated = 0
        self._began = perf_counter()
        self._last = 0.0  # of the latest token; 0: none yet

    def tokens(self, count: int) -> None:
        now = perf_counter()
        self._generated += count
        if self._last:
            self._metrics.inter_token.observe((now - self._last) / count)
        else:
            self._metrics.first_token.observe(now - self._began)
        self._last = now

    def __enter__(self) -> Self:
        self._account = ACCOUNT.get()
        if self._account is not None:
            self._account.charge("prompt", len(self._request.prompt))
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._account is not None:
            self._account.charge("generated", self._generated)
        failed = kind is not None and issubclass(kind, Exception)
        self._metrics.request.observe(perf_counter() - self._began)
        self._metrics.finished.labels("error" if failed else self.reason).inc()


class EngineNumbers:
    """Reads the engine's latest word on itself when it is asked for. Counters start again with a new engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        blocks = GaugeMetricFamily("penstock_kv_blocks", "Blocks of the KV cache", labels=["state"])
        blocks.add_metric(["free"], stats.blocks_free)
        blocks.add_metric(["used"], stats.blocks_used)
        blocks.add_metric(["cached"], stats.blocks_cached)
        yield blocks
        requests = GaugeMetricFamily("penstock_requests", "Requests in the engine", labels=["state"])
        requests.add_metric(["running"], stats.running)
        requests.add_metric(["waiting"], stats.waiting)
        yield requests
        yield GaugeMetricFamily("penstock_engine_up", "1 while there is an engine", self._client.hello is not None)
        for name, told, value in (
            ("engine_restarts", "Engines started after the first", self._client.restarts),
            ("engine_busy_seconds", "Time spent in steps", stats.busy_seconds),
            ("steps", "Steps of the engine", stats.steps),
            ("prompt_tokens", "Prompt tokens of admitted requests", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens whose KV was reused", stats.cached_tokens),
            ("generated_tokens", "Tokens generated", stats.generated_tokens),
            ("preemptions", "Sequences sent back to wait for blocks", stats.preemptions),
            ("grammars", "Grammars compiled", stats.grammars),
            ("grammar_compile_seconds", "Time spent on compiling grammars, beside the steps", stats.grammar_seconds),
            ("grammar_masks", "Masks of the tokens that grammars allow", stats.masks),
            ("grammar_mask_seconds", "Time spent on masks", stats.mask_seconds),
            ("forced_tokens", "Generated tokens that grammars left no choice about", stats.forced_tokens),
        ):
            yield CounterMetricFamily(f"penstock_{name}", told, value)
