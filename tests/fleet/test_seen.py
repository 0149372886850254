"""What a gateway shows of its replicas: in answers' headers and reports, in metrics, and in traces."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from prometheus_client.parser import text_string_to_metric_families

from penstock.fleet.client import FleetClient
from penstock.fleet.foreign.engine import parse_engine
from penstock.fleet.foreign.gateway import ForeignGateway
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.placement import ScaleStatus
from tests.fleet.fleets import Keepers
from tests.fleet.foreign.scripted import chat, engine, gateway
from tests.fleet.test_survive_kinds import KINDS
from tests.server import toys
from tests.server.browsing import browsing, visiting
from tests.server.conftest import Server, serving
from tests.server.test_dashboards import ROOT, expressions
from tests.server.test_restart import MODEL, STREAMS
from tests.server.test_tracing import Traced, open_traces
from tests.server.toys import LIMITS, ToyText

COUNTED = {f"penstock_replica_{name}_total" for name in ("deaths", "refused", "pull_failures")}
COUNTED |= {"penstock_fleet_pulls_total", "penstock_requests_refused_total"}  # are there once that has happened
SCALE = ScaleStatus(2, 1, 4, "2 give TTFT 300 and ITL 20 ms")
NAMES = {"fake-0", "fake-1"}
WHY = r"(fake-\d): \d+ ms = \d+ queue \+ \d+ prefill of \d+.*; next: (fake-\d), \d+ ms"


class Fleet(Traced):
    """Is a server with two replicas, its spans and who keeps the replicas."""

    keepers: Keepers

    def of_trace(self, trace: str, count: int) -> list[ReadableSpan]:
        """Returns the spans of a trace, once there are so many: the request's is the last. Others may end meanwhile."""

        def found() -> list[ReadableSpan]:
            return [span for span in self.kept.get_finished_spans() if f"{span.context.trace_id:032x}" == trace]  # type: ignore[union-attr]

        self.server.until(lambda: len(found()) >= count)
        assert len(found()) == count
        return found()


@pytest.fixture(scope="module")
def seen() -> Iterator[Fleet]:
    traces, kept = open_traces()
    keepers = Keepers(2, launcher=KINDS, models=("parrot",) * 2, name=MODEL)
    pool = {"metric_sets": ("dynamo",)}
    client = FleetClient(keepers, scale=lambda: SCALE)
    with serving(client, ToyText(), MODEL, traces=traces, pool=pool) as server:
        server.until(lambda: [each.state for each in server.client.replicas] == ["ready"] * 2)
        fleet = Fleet(server, kept)
        fleet.keepers = keepers
        yield fleet


def samples(server: Server) -> dict[tuple[str, ...], float]:
    """Returns every sample by its name and the values of its labels, sorted and without the model's."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    told = [sample for family in families for sample in family.samples]
    return {
        (each.name, *sorted(value for name, value in each.labels.items() if name != "model")): each.value
        for each in told
    }


def of_replicas(server: Server, name: str, label: str = "") -> list[float]:
    told = samples(server)
    labels = ({replica, label} - {""} for replica in sorted(NAMES))
    return [told.get((f"penstock_replica_{name}", *sorted(each)), 0.0) for each in labels]


@pytest.mark.parametrize("dialect", list(STREAMS))
@pytest.mark.parametrize("streaming", [True, False])
def test_the_route_is_a_header_in_every_dialect(seen: Fleet, dialect: str, streaming: bool) -> None:
    path, body = STREAMS[dialect]
    path = path if streaming else path.replace("generate_stream", "generate")
    body = body if streaming else {name: value for name, value in body.items() if name != "stream_options"}
    answer = seen.server.http.post(path, json={"model": MODEL, "stream": streaming, **body})
    assert answer.status_code == 200
    assert all(re.fullmatch(WHY, each) for each in answer.headers["x-penstock-route"].split(" | "))


def test_embeddings_and_reports_say_it_too(seen: Fleet) -> None:
    answer = seen.server.post("/v1/embeddings", model=MODEL, input="some text")
    assert re.fullmatch(WHY, answer.headers["x-penstock-route"])
    asked = {"model": MODEL, "prompt": "[hello]", "max_tokens": 9}
    explained = seen.server.http.post("/v1/completions", json=asked, headers={"x-penstock-explain": "1"})
    assert explained.json()["penstock"]["route"] == [explained.headers["x-penstock-route"]]
    assert "penstock" not in seen.server.post("/v1/completions", **asked).json()


def test_what_waited_for_room_says_so(seen: Fleet) -> None:
    server, count = seen.server, 4 * LIMITS.max_rows
    asked = {"model": MODEL, "prompt": [f"[{number} words to say]" for number in range(count)], "max_tokens": 20}
    before = samples(server)
    trace = "1bf7651916cd43dd8448eb211c80319d"
    headers = {"x-penstock-explain": "1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    answer = server.http.post("/v1/completions", json=asked, headers=headers).json()["penstock"]
    seconds = sorted(each["seconds"].get("gateway", 0.0) for each in answer["choices"])
    told = [re.search(r"; waited (\d+) ms for room$", route) for route in answer["route"]]
    said = sorted(0 if each is None else int(each[1]) for each in told)
    waited = sum(each > 0 for each in seconds)
    assert waited == sum(each is not None for each in told) > LIMITS.max_rows
    assert said == pytest.approx([1000 * each for each in seconds], abs=1)
    *below, request = seen.of_trace(trace, 2 * count + waited + 1)
    waits = [span for span in below if span.name == "wait for room"]
    assert {span.parent and span.parent.span_id for span in below} == {request.context and request.context.span_id}
    spans = [(span.end_time - span.start_time) / 1e9 for span in waits]  # type: ignore[operator]
    assert sorted(spans) == pytest.approx([each for each in seconds if each], abs=1e-3)
    after = samples(server)

    def more(*name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("penstock_fleet_turns_total", "waited") == waited
    assert more("penstock_fleet_turns_total", "at_once") == count - waited
    assert more("penstock_fleet_waited_seconds_total") == pytest.approx(sum(seconds), rel=0.01)
    health = server.get("/health").json()
    assert after[("penstock_fleet_waiting_requests",)] == health["waiting"] == 0


def test_how_many_replicas_there_are_to_be_and_why(seen: Fleet) -> None:
    health = seen.server.get("/health").json()
    assert health["scale"] == health["models"][0]["scale"] == SCALE._asdict()
    told = samples(seen.server)
    assert [told["penstock_fleet_replicas", bound] for bound in ("wanted", "least", "most")] == [2, 1, 4]


def test_what_was_promised_is_what_was_reused(seen: Fleet) -> None:
    server, asked = seen.server, {"model": MODEL, "prompt": "[" + "a long prompt " * 16 + "]", "max_tokens": 2}
    server.post("/v1/completions", **asked)
    server.until_idle()
    counters = "routed_requests", "promised_tokens", "reused_tokens"
    before = [of_replicas(server, f"{name}_total") for name in counters]
    unsplit = samples(server)["penstock_fleet_splits_total", "no_target"]
    route = server.post("/v1/completions", **asked).headers["x-penstock-route"]
    server.until_idle()
    after = [of_replicas(server, f"{name}_total") for name in counters]
    routed, promised, reused = (np.subtract(*each) for each in zip(after, before, strict=True))
    assert sum(routed) == 1
    assert list(promised) == list(reused)  # others may not get what was promised
    assert sum(promised) > 200
    assert f"{sum(promised):.0f} cached" in route
    assert of_replicas(server, "up") == [1, 1]
    assert of_replicas(server, "kv_blocks", "cached") != [0, 0]
    assert of_replicas(server, "queued_tokens") == [0, 0]
    assert samples(server)["penstock_fleet_splits_total", "no_target"] == unsplit + 1


def test_the_engine_view_has_the_replicas(seen: Fleet) -> None:
    found = {each["name"]: each for each in seen.server.get("/engine").json()["replicas"]}
    assert found.keys() == NAMES
    first, second = found["fake-0"], found["fake-1"]
    assert (first["state"], sum(first["kv_blocks"].values())) == ("ready", LIMITS.num_blocks)
    assert [second[name] for name in ("running", "waiting", "queued_tokens")] == [0, 0, 0]


def test_the_page_shows_the_replicas(seen: Fleet) -> None:
    with browsing() as browser, visiting(browser, seen.server.url) as page:
        page.click("#show-engine")
        rows = page.locator("#replicas tr")
        rows.nth(1).wait_for()
        assert rows.count() == 2
        assert re.match(r"fake-0\s+0\s+0\s+\d+ %\s+0\s", rows.first.inner_text())


def test_the_dashboard_asks_for_what_there_is(seen: Fleet) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-fleet.json").read_text())
    there = {name for name, *_ in samples(seen.server)} | COUNTED
    asked = {name for each in expressions(dashboard) for name in re.findall(r"\bpenstock_\w+", each)}
    assert len(asked) > 10
    assert not re.findall(r"\b(dynamo_|vllm:|sglang:)", str(expressions(dashboard)))  # names that may be off
    assert asked <= there
    assert all(f"rate({name}" in str(expressions(dashboard)) for name in asked if name.endswith("_total"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert all('model=~"$model"' in each["expr"] for panel in panels for each in panel["targets"])


def test_a_stream_that_is_resumed_is_seen_everywhere(seen: Fleet) -> None:
    """The last of this module: counters after a death."""
    server = seen.server
    server.until_idle()
    asked = {"model": MODEL, "prompt": "[*abc]", "max_tokens": 400, "stream": True}
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-penstock-explain": "1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with server.http.stream("POST", "/v1/completions", json=asked, headers=headers) as answer:
        first, second = re.fullmatch(WHY, answer.headers["x-penstock-route"]).groups()  # type: ignore[union-attr]
        lines = answer.iter_lines()
        for _ in range(8):  # it is trusted once it has several tokens
            next(lines)
        seen.keepers.kill(first, signal.SIGSTOP)  # there is something left to resume, however long a look takes
        assert of_replicas(server, "requests", "running") == [float(name == first) for name in sorted(NAMES)]
        seen.keepers.kill(first, signal.SIGKILL)
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    told = last["penstock"]
    assert told["resumed_on"] == [second]
    assert [why.partition(":")[0] for why in told["route"]] == [first, second]

    *below, request = seen.of_trace(trace, 5)
    assert [span.name for span in below] == ["route", f"engine {first}", "route", f"engine {second}"]
    assert all(span.parent.span_id == request.context.span_id for span in below)  # type: ignore[union-attr]
    _, begun, rerouted, resumed = (dict(span.attributes or {}) for span in below)
    assert begun["error.type"] == "interrupted"
    assert resumed["penstock.resumed"] is True
    assert rerouted["penstock.replica"] == second
    assert rerouted["penstock.route.prefill_ms"] > 0  # type: ignore[operator]
    assert resumed["gen_ai.latency.time_in_model_decode"] > 0  # type: ignore[operator]
    assert rerouted["penstock.route.why"] == told["route"][1]
    assert below[2].end_time == below[3].start_time > below[2].start_time  # type: ignore[operator]
    (event,) = request.events
    assert (event.name, event.attributes) == ("penstock.resume", {"penstock.replica": second})

    server.until(lambda: of_replicas(server, "up") == [1, 1])
    assert of_replicas(server, "resumed_requests_total") == [float(name == second) for name in sorted(NAMES)]
    lost = [float(name == first) for name in sorted(NAMES)]
    assert of_replicas(server, "deaths_total", "killed") == lost
    assert of_replicas(server, "connections_lost_total") == of_replicas(server, "restarts_total") == lost
    assert samples(server)["dynamo_frontend_model_migration_total", "ongoing_request"] == 1


def test_a_replica_that_cannot_be_used_is_counted() -> None:
    keepers = Keepers(2, launcher=KINDS, models=("parrot", "sampling"), name=MODEL)
    with serving(FleetClient(keepers), ToyText(), MODEL) as server:
        server.until(lambda: of_replicas(server, "refused_total", "unsuited") != [0, 0])
        assert sum(of_replicas(server, "up")) == 1
        assert of_replicas(server, "state", "starting") == [1 - up for up in of_replicas(server, "up")]


def test_dynamos_names(seen: Fleet) -> None:
    seen.server.post("/v1/completions", model=MODEL, prompt="[hello]", max_tokens=9)
    seen.server.until_idle()
    told = samples(seen.server)
    assert told["dynamo_frontend_requests_total", "success"] >= 1
    assert told["dynamo_frontend_requests_total", "error"] == 0
    assert told[("dynamo_frontend_inflight_requests",)] == told[("dynamo_frontend_queued_requests",)] == 0
    for name in ("time_to_first_token", "inter_token_latency", "request_duration"):
        assert told[(f"dynamo_frontend_{name}_seconds_count",)] >= 1
    assert told[("dynamo_frontend_output_sequence_tokens_sum",)] >= 5
    assert told[("dynamo_frontend_output_tokens_total",)] >= 5
    assert told[("dynamo_component_kvstats_total_blocks",)] == 2 * LIMITS.num_blocks
    assert told["dynamo_frontend_worker_active_prefill_tokens", "fake-0"] == 0
    assert told["dynamo_frontend_worker_active_decode_blocks", "fake-1"] >= 0


def test_other_engines_belong_to_the_trace() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    traces, kept = open_traces()
    with engine(kind="vllm") as one, gateway(f"{one.url},name=one", traces=traces) as server:
        fields = {"model": "m", "messages": [{"role": "user", "content": "count"}]}
        server.http.post("/v1/chat/completions", json=fields, headers={"traceparent": parent})
        route, child, request = Traced(server, kept).spans(3)
        assert child.context is not None
        assert request.context is not None
        assert one.headers[-1]["traceparent"] == f"00-{request.context.trace_id:032x}-{child.context.span_id:016x}-01"
        assert child.name == "engine one"
        assert (route.attributes or {})["penstock.route.why"] == "one: no other engine"
        assert route.parent == child.parent
    with engine(kind="vllm") as one, gateway(one.url) as server:
        server.http.post("/v1/chat/completions", json=fields, headers={"traceparent": parent})
        assert one.headers[-1]["traceparent"] == parent  # nothing is exported here, and it still has its place
        asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "count"}]}
        told = server.http.post("/v1/messages", json=asked, headers={"x-penstock-explain": "1"})
        assert told.json()["penstock"]["route"] == [told.headers["x-penstock-route"]]
        assert chat(server).status_code == 200
        assert "traceparent" not in one.headers[-1]


def test_a_model_whose_name_is_an_alias_of_an_own_one_can_be_looked_up() -> None:
    with engine(kind="vllm") as one:
        foreign = ForeignGateway([parse_engine(one.url)])
        own = InProcessClient(toys.open_parrot, "parrot")
        with serving(own, toys.ToyText(), "toy/parrot", pool={"foreign": foreign, "aliases": ["m"]}) as server:
            server.until(lambda: server.get("/v1/models/m").json().get("owned_by") == "vllm")
            assert chat(server).json()["choices"][0]["message"]["content"]
