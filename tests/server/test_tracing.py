"""A span for every request that generates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import ollama
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.cli.serve import TelemetryOptions
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.placement import RequestPlacement
from penstock.ipc.spawn import ProcessClient
from penstock.server.context.request_context import RequestContext
from penstock.server.telemetry.metrics import RequestTimer
from penstock.server.telemetry.tracing import RequestSpan, Traces, traces_to
from penstock.types import Request, SamplingParams
from tests.server import toys

MODEL = "toy/parrot"
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


class Traced(NamedTuple):
    server: Any
    kept: InMemorySpanExporter

    def spans(self, count: int) -> list[ReadableSpan]:
        """Those since the last time, once there are so many."""
        self.server.until(lambda: len(self.kept.get_finished_spans()) >= count)
        spans = list(self.kept.get_finished_spans())
        self.kept.clear()
        assert len(spans) == count
        return spans


def open_traces() -> tuple[Traces, InMemorySpanExporter]:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return Traces(provider), kept


@pytest.fixture(scope="module")
def traced(serve: Callable[..., Any]) -> Iterator[Traced]:
    traces, kept = open_traces()
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serve(client, toys.ToyText(), MODEL, traces=traces) as server:
        yield Traced(server, kept)


def test_a_span_tells_of_its_request(traced: Traced) -> None:
    fields = {"model": MODEL, "prompt": "[hello]", "max_tokens": 20, "temperature": 0.5, "seed": 3, "stop": ["zz"]}
    answer = traced.server.post("/v1/completions", **fields)
    (span,) = traced.spans(1)
    told = dict(span.attributes or {})
    seconds = told.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds < (span.end_time - span.start_time) / 1e9  # type: ignore[operator]
    stages = [told.pop(f"gen_ai.latency.time_in_{stage}") for stage in ("queue", "model_prefill", "model_decode")]
    assert 0 < sum(stages) < (span.end_time - span.start_time) / 1e9  # type: ignore[operator]
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("zz",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "penstock.request_id": answer.headers["x-request-id"],
    }
    assert (span.name, span.kind, span.parent) == (f"text_completion {MODEL}", SpanKind.SERVER, None)
    assert span.status.status_code == StatusCode.UNSET


def test_every_dialect_streamed_too(traced: Traced) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "[hi there]"}]}
    traced.server.post("/v1/chat/completions", **asked, stream=True)
    traced.server.post("/v1/messages", **asked, max_tokens=4, stream=True)
    client = ollama.Client(traced.server.url)
    list(client.chat(**asked, stream=True))
    list(client.generate(MODEL, "[hi there]", stream=True))
    first, second, third, fourth = traced.spans(4)
    assert [span.name.split()[0] for span in (first, second, third, fourth)] == ["chat"] * 3 + ["text_completion"]
    assert (first.attributes or {})["gen_ai.usage.output_tokens"] == 9
    assert (second.attributes or {})["gen_ai.response.finish_reasons"] == ("length",)
    prompt = len("user:[hi there]\nassistant:")
    assert {(span.attributes or {})["gen_ai.usage.input_tokens"] for span in (first, second, third)} == {prompt}
    assert (third.attributes or {})["gen_ai.usage.cache_read.input_tokens"] == 16


def test_a_route_names_who_gives_blocks_and_who_computes_them() -> None:
    """The wait is over once: a request that goes on elsewhere has not waited again."""
    traces, kept = open_traces()
    span = RequestSpan(traces._begin("chat", SpanKind.SERVER, None), "chat", traces._tracer)
    costs = {"queue": 1.0, "pull": 0.25}
    span.place(7, RequestPlacement("a", "a: 1 ms", costs, 32, source="b", waited=0.5, decided=0.001))
    span.place(7, RequestPlacement("b", "b: 2 ms", costs, resumed=True, computing="c", waited=0.5))
    span.end()
    wait, route, first, again, *_ = kept.get_finished_spans()
    assert [each.name for each in (wait, route, first, again)] == ["wait for room", "route", "engine a", "route"]
    assert [each.name for each in kept.get_finished_spans()].count("wait for room") == 1
    assert wait.end_time - wait.start_time == 500_000_000  # type: ignore[operator]
    assert wait.end_time == route.start_time
    assert route.end_time - route.start_time == 1_000_000  # type: ignore[operator]
    assert dict(route.attributes or {}) == {
        "penstock.replica": "a",
        "penstock.route.why": "a: 1 ms",
        "penstock.route.cached_tokens": 32,
        "penstock.route.queue_ms": 1.0,
        "penstock.route.pull_ms": 0.25,
        "penstock.route.source": "b",
    }
    assert (again.attributes or {})["penstock.route.computing"] == "c"


def test_choices_count_their_prompt_once(traced: Traced) -> None:
    traced.server.post("/v1/completions", model=MODEL, prompt=["[abc]", "[de]"], max_tokens=2, n=2)
    (span,) = traced.spans(1)
    told = span.attributes or {}
    assert told["gen_ai.usage.input_tokens"] == len("[abc][de]")
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.response.finish_reasons"] == ("length",) * 4
    assert told["gen_ai.request.choice.count"] == 4


def test_a_traceparent_is_the_parent(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "tracestate": "a=b"}
    fields = {"model": MODEL, "prompt": "[x]"}
    traced.server.http.post("/v1/completions", json=fields, headers=headers)
    traced.server.http.post("/v1/completions", json=fields, headers={"traceparent": "nonsense"})
    child, orphan = traced.spans(2)
    assert child.context is not None
    assert child.parent is not None
    assert (child.context.trace_id, child.parent.span_id) == (TRACE, PARENT)
    assert child.context.trace_state == {"a": "b"}
    assert orphan.parent is None
    headers["traceparent"] = headers["traceparent"][:-1] + "0"  # not sampled there, and so not here
    traced.server.http.post("/v1/completions", json=fields, headers=headers)
    traced.server.http.post("/v1/completions", json=fields)
    traced.spans(1)


def test_what_was_refused_failed_or_left(traced: Traced) -> None:
    traced.server.post("/v1/completions", model="other", prompt="x")
    (refused,) = traced.spans(1)
    assert (refused.attributes or {})["error.type"] == "404"
    assert "gen_ai.usage.input_tokens" not in (refused.attributes or {})
    stream = traced.server.sdk().completions.create(model=MODEL, prompt="[*abc]", max_tokens=30_000, stream=True)
    next(stream)
    stream.close()
    (left,) = traced.spans(1)
    assert (left.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    for path in ("/health", "/metrics", "/v1/models", "/api/tags"):
        traced.server.get(path)
    traced.server.post("/detokenize", tokens=[65])
    traced.spans(0)


def test_an_engine_that_dies_is_an_error(serve: Callable[..., Any]) -> None:
    traces, kept = open_traces()
    with serve(ProcessClient(Config(model="parrot"), toys.HOST, ()), toys.ToyText(), MODEL, traces=traces) as server:
        stream = server.sdk().completions.create(model=MODEL, prompt="[*abc]", max_tokens=30_000, stream=True)
        next(stream)
        os.kill(server.get("/health").json()["engine"]["pid"], signal.SIGKILL)
        with pytest.raises(Exception, match="killed"):
            list(stream)
        (span,) = Traced(server, kept).spans(1)
        assert span.status.status_code == StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "engine"
        server.until(lambda: server.client.hello is None)
        server.post("/v1/completions", model=MODEL, prompt="x")
        (span,) = Traced(server, kept).spans(1)
        assert (span.attributes or {})["error.type"] == "503"


def test_what_goes_on_alone_has_a_span_of_its_own() -> None:
    """As batches and background answers do: there is no request over HTTP around them."""
    traces, kept = open_traces()

    class Listeners:
        listeners: list[Any] = []  # noqa: RUF012
        open: dict[Any, None] = {}  # noqa: RUF012

        def end(self, context: Any, finished: Any) -> None:
            for listener in self.listeners:
                listener(context, finished)

    metrics: Any = Listeners()
    traces.around(None, metrics, "m")  # type: ignore[arg-type]
    request, client = Request(1, (1, 2), SamplingParams(), 4), InProcessClient(toys.open_parrot, "m")
    with RequestTimer(metrics, RequestContext(), request, client):
        pass
    (span,) = kept.get_finished_spans()
    assert (span.name, span.kind) == ("chat m", SpanKind.INTERNAL)
    assert (span.attributes or {})["gen_ai.usage.input_tokens"] == 2


# -- sending them -------------------------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """One on loopback that keeps what it is sent."""
    got: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                got.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_spans_arrive_at_a_collector(
    collector: tuple[str, list[ExportTraceServiceRequest]], serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, got = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    client = InProcessClient(toys.open_parrot, "parrot")
    with serve(client, toys.ToyText(), MODEL, traces=traces_to(f"{url}/")) as server:
        server.post("/v1/completions", model=MODEL, prompt="[hello]")
    (sent,) = got
    resource = {pair.key: pair.value.string_value for pair in sent.resource_spans[0].resource.attributes}
    assert resource["service.name"] == "penstock"
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert span.name == f"text_completion {MODEL}"


def test_urls_that_are_none_and_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a URL such as"):
        TelemetryOptions(otlp="localhost:4318").traces()
    monkeypatch.delitem(sys.modules, "penstock.server.telemetry.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[otel\]'"):
        TelemetryOptions(otlp="http://127.0.0.1:4318").traces()


def test_nothing_is_imported_without_it() -> None:
    code = "import sys, penstock.server.app; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_penstock_serve_sends_them(
    collector: tuple[str, list[ExportTraceServiceRequest]], smollm2: Path, tmp_path: Path
) -> None:
    url, got = collector
    command = [sys.executable, "-m", "penstock", "serve", str(smollm2), "--port", "0", "--name", "small"]
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "PENSTOCK_HOME": str(tmp_path)}
    process = subprocess.Popen([*command, "--max-len", "256"], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[3]
        asked = {"model": "small", "prompt": "The sea is", "max_tokens": 2}
        httpx.post(f"{address}/v1/completions", json=asked, timeout=60).raise_for_status()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    (sent,) = got
    assert sent.resource_spans[0].scope_spans[0].spans[0].name == "text_completion small"
