"""What dashboards ask for is there: our own Grafana file's metrics, and those of vLLM's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.ipc.inprocess import InProcessClient
from penstock.server.telemetry.metrics import sum_stats
from penstock.types import AdapterRequests, DraftCounts, Stats
from tests.server import toys

ROOT = Path(__file__).parents[2]
MODEL = "toy/parrot"


def families(server: Any) -> dict[str, Any]:
    """By name; of a counter, without its _total."""
    return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


@pytest.fixture(scope="module")
def used(parrot: Any) -> Any:
    parrot.post("/v1/completions", model=MODEL, prompt="[hello there]", max_tokens=9)
    parrot.until_idle()
    return parrot


@pytest.fixture(scope="module")
def drafted(watched_parrot: Any) -> Any:
    prediction, messages = {"type": "content", "content": "hello"}, [{"role": "user", "content": "[hello]"}]
    watched_parrot.post("/v1/chat/completions", model=MODEL, messages=messages, prediction=prediction)
    watched_parrot.until_idle()
    return watched_parrot


def expressions(dashboard: dict[str, Any]) -> list[str]:
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return [*drawn, *asked]


def test_the_dashboard_asks_for_what_there_is(drafted: Any) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    there = {sample.name: set(sample.labels) for family in families(drafted).values() for sample in family.samples}
    asked = {name for each in expressions(dashboard) for name in re.findall(r"\bpenstock_\w+", each)}
    assert len(asked) > 20
    assert asked <= there.keys()
    for each in expressions(dashboard):
        for counter in re.findall(r"(?:rate\(|label_values\()(penstock_\w+)", each):
            assert counter.endswith(("_total", "_bucket", "_info"))
        for labels, name in re.findall(r"sum by \((\w+)\) \((?:rate\()?(penstock_\w+)", each):
            assert labels in there[name]


def test_the_dashboard_can_be_imported() -> None:
    """As far as that can be known without a Grafana."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    assert [each["name"] for each in dashboard["templating"]["list"]] == ["datasource", "model"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all('model=~"$model"' in target["expr"] for target in panel["targets"])
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Throughput", "Latency", "Queue", "KV cache", "Speculation", "Structured output", "Errors"]


def test_the_dashboard_is_current() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_dashboard.py", "--check"], check=True)


TOKENS = [digit * 10**power for power in range(6) for digit in (1, 2, 5)] + [10**6]
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
BETWEEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640]
STEPS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("vllm:e2e_request_latency_seconds", LATENCY),
        ("vllm:time_to_first_token_seconds", [*FIRST, 2560]),
        ("vllm:inter_token_latency_seconds", BETWEEN),
        ("vllm:request_time_per_output_token_seconds", BETWEEN),
        ("vllm:request_queue_time_seconds", LATENCY),
        ("vllm:request_prefill_time_seconds", LATENCY),
        ("vllm:request_decode_time_seconds", LATENCY),
        ("vllm:request_prompt_tokens", TOKENS),
        ("vllm:request_generation_tokens", TOKENS),
        ("vllm:request_max_num_generation_tokens", TOKENS),
        ("vllm:iteration_tokens_total", STEPS),
    ],
)
def test_vllms_histograms_have_its_buckets(used: Any, name: str, bounds: list[float]) -> None:
    family = families(used)[name]
    assert family.type == "histogram"
    buckets = [sample for sample in family.samples if sample.name == f"{name}_bucket"]
    assert [float(sample.labels["le"]) for sample in buckets] == [*bounds, float("inf")]
    counts = [sample.value for sample in buckets]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    told = {sample.name: sample.value for sample in family.samples if "le" not in sample.labels}
    assert told[f"{name}_count"] == counts[-1]
    assert all({"model_name": MODEL, "engine": "0"}.items() <= sample.labels.items() for sample in family.samples)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm:prompt_tokens", "counter"),
        ("vllm:generation_tokens", "counter"),
        ("vllm:request_success", "counter"),
        ("vllm:num_preemptions", "counter"),
        ("vllm:prefix_cache_queries", "counter"),
        ("vllm:prefix_cache_hits", "counter"),
        ("vllm:prompt_tokens_cached", "counter"),
        ("vllm:num_requests_running", "gauge"),
        ("vllm:num_requests_waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "gauge"),
        ("vllm:cache_config_info", "gauge"),
    ],
)
def test_vllms_counters_and_gauges(used: Any, name: str, kind: str) -> None:
    family = families(used)[name]
    assert family.type == kind
    for sample in family.samples:
        assert sample.name == (f"{name}_total" if kind == "counter" else name)
        assert sample.labels["engine"] == "0"
        assert sample.labels["model_name"] == MODEL


def test_what_they_say(used: Any) -> None:
    all = {(s.name, s.labels.get("le")): s for family in families(used).values() for s in family.samples}
    assert all["vllm:request_prompt_tokens_sum", None].value == len("[hello there]")
    assert all["vllm:request_generation_tokens_sum", None].value == 9
    assert all["vllm:request_max_num_generation_tokens_sum", None].value == 9
    assert all["vllm:iteration_tokens_total_count", None].value == all["penstock_steps_total", None].value
    assert all["vllm:iteration_tokens_total_sum", None].value == len("[hello there]") + 9 - 1
    parts = [all[f"penstock_request_{part}_seconds_sum", None].value for part in ("queue", "prefill", "decode")]
    assert 0 < sum(parts) <= all["penstock_request_seconds_sum", None].value
    assert all["llamacpp:prompt_seconds_total", None].value == parts[1]
    assert all["llamacpp:tokens_predicted_seconds_total", None].value == parts[2]
    config = all["vllm:cache_config_info", None].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "256")


def test_adapters_are_told_in_our_words_and_in_vllms(serve: Any) -> None:
    client = InProcessClient(toys.open_parrot, "parrot")
    with serve(client, toys.ToyText(), MODEL) as server:
        assert "vllm:lora_requests_info" not in families(server)  # the engine has no slots
        loads = (AdapterRequests("pirate", 2, 0), AdapterRequests("terse", 1, 1), AdapterRequests("late", 0, 3))
        client.stats = client.stats._replace(adapter_slots=4, adapter_bytes=1000, adapters=loads)
        told = families(server)
        (info,) = told["vllm:lora_requests_info"].samples
        assert info.labels == {
            "max_lora": "4",
            "running_lora_adapters": "pirate,terse",
            "waiting_lora_adapters": "terse,late",
        }
        assert abs(info.value - time.time()) < 60
        counts = {tuple(sample.labels.values()): sample.value for sample in told["penstock_adapter_requests"].samples}
        assert counts[("terse", "running")] == counts[("terse", "waiting")] == 1
        assert counts[("late", "waiting")] == 3
        assert told["penstock_adapter_slots"].samples[0].value == 4
        assert told["penstock_adapter_bytes"].samples[0].value == 1000


def test_statistics_of_several_engines_are_added_up() -> None:
    one = Stats(steps=3, adapters=(AdapterRequests("a", 1, 0),), drafts=(DraftCounts("text", 5, 2),))
    two = Stats(steps=4, drafts=(DraftCounts("text", 1, 1), DraftCounts("recent", 7, 0)))
    both = sum_stats([one, two])
    assert (both.steps, both.adapters) == (7, one.adapters)
    assert both.drafts == (DraftCounts("text", 6, 3), DraftCounts("recent", 7, 0))


# -- names of other engines ---------------------------------------------------------------------------------------

PREFIXES = {"vllm": "vllm:", "llamacpp": "llamacpp:", "sglang": "sglang:", "tgi": "tgi_", "nv": "nv_"}


def renaming(serve: Any) -> Any:
    """Serves a model that exports the names of SGLang, TGI and Triton only."""
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    return serve(client, toys.ToyText(), MODEL, pool={"metric_sets": ("sglang", "tgi", "nv")})


@pytest.fixture(scope="module")
def renamed(serve: Any) -> Any:
    """Has those names, after an answer and a client that left."""
    with renaming(serve) as server:
        server.post("/v1/completions", model=MODEL, prompt="[hello there]", max_tokens=9)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "[*ab]", "stream": True}) as answer:
            next(answer.iter_lines())
        server.until_idle()
        yield server


def values(server: Any) -> dict[str, float]:
    """Returns every sample that has no labels but those of its set."""
    return {
        sample.name: sample.value
        for family in families(server).values()
        for sample in family.samples
        if not {"le", "reason", "err"} & sample.labels.keys()
    }


def test_sets_of_names_are_exported_where_they_are_asked_for(used: Any, renamed: Any) -> None:
    for server, wanted in ((used, {"vllm", "llamacpp"}), (renamed, {"sglang", "tgi", "nv"})):
        names = families(server)
        assert {each for each, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in names)} == wanted


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("sglang:num_running_reqs", "gauge", 0),
        ("sglang:num_queue_reqs", "gauge", 0),
        ("sglang:token_usage", "gauge", 0),
        ("sglang:prompt_tokens_total", "counter", 18),
        ("sglang:num_requests_total", "counter", 1),
        ("sglang:time_to_first_token_seconds_count", "histogram", 2),
        ("sglang:e2e_request_latency_seconds_count", "histogram", 2),
        ("sglang:cached_tokens_total", "counter", 0),
        ("tgi_request_count", "unknown", 2),
        ("tgi_request_success", "unknown", 1),
        ("tgi_queue_size", "gauge", 0),
        ("tgi_batch_current_size", "gauge", 0),
        ("tgi_request_generated_tokens_count", "histogram", 2),
        ("tgi_request_input_length_sum", "histogram", 18),
        ("tgi_request_duration_count", "histogram", 2),
        ("nv_inference_request_success", "unknown", 1),
        ("nv_inference_count", "unknown", 1),
        ("nv_inference_pending_request_count", "gauge", 0),
    ],
)
def test_names_of_sglang_tgi_and_triton(renamed: Any, name: str, kind: str, value: float) -> None:
    assert values(renamed)[name] == value
    family = re.sub("_(total|count|sum)$", "", name) if kind in ("counter", "histogram") else name
    assert families(renamed)[family].type == kind


def test_their_labels_and_what_they_derive(renamed: Any) -> None:
    told = families(renamed)
    (running,) = told["sglang:num_running_reqs"].samples
    assert running.labels == {"model_name": MODEL}
    failures = {sample.labels["reason"]: sample for sample in told["nv_inference_request_failure"].samples}
    assert {reason: sample.value for reason, sample in failures.items()} == {"BACKEND": 0, "CANCELED": 1}
    assert failures["CANCELED"].labels == {"model": MODEL, "version": "1", "reason": "CANCELED"}
    seconds = values(renamed)["tgi_request_duration_sum"]
    assert values(renamed)["nv_inference_request_duration_us"] == pytest.approx(seconds * 1e6)
    assert values(renamed)["nv_inference_queue_duration_us"] > 0
    assert values(renamed)["nv_inference_exec_count"] == values(renamed)["penstock_steps_total"]


def test_throughput_is_what_was_generated_since_the_last_scrape(serve: Any) -> None:
    with renaming(serve) as server:
        values(server)
        server.post("/v1/completions", model=MODEL, prompt="[hello there]", max_tokens=9)
        server.until_idle()
        assert values(server)["sglang:gen_throughput"] > 0
        assert values(server)["sglang:gen_throughput"] == 0
