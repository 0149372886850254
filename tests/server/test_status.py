"""/health, /metrics and the life of the application."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import Config
from penstock.engine.build import open_engine
from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.server.app import bind
from tests.server import toys

MODEL = "toy/parrot"
LLAMA = Path(__file__).parents[1] / "models" / "goldens" / "tied"


def samples(server: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {(s.name, tuple(s.labels.items())): s.value for family in families for s in family.samples}


def test_health(parrot: Any) -> None:
    answer = parrot.get("/health")
    assert answer.status_code == 200
    told = answer.json()
    assert (told["status"], told["engine"]) == ("ok", {"pid": os.getpid(), "model": MODEL})
    assert [model["name"] for model in told["models"]] == [MODEL]


def test_health_names_config_fields_that_nothing_is_known_of(serve: Any) -> None:
    config = Config(model=str(LLAMA), device="cpu", threads=1, config=("colour=red", "rope_colour=1"))
    with serve(InProcessClient(lambda: open_engine(config), "tiny"), toys.ToyText(), "tiny") as server:
        engine = server.get("/health").json()["engine"]
    assert engine == {"pid": os.getpid(), "model": "tiny", "unknown_fields": ["colour", "rope_colour"]}


def test_metrics_follow_the_requests(parrot: Any) -> None:
    before = samples(parrot)
    for text in ("[hello there, hello there, hello there]", "[*abc]"):
        parrot.post("/v1/completions", model=MODEL, prompt=text, max_tokens=40)
    parrot.until_idle()
    after = samples(parrot)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert grown("penstock_prompt_tokens_total") == 45
    assert grown("penstock_generated_tokens_total") == 78
    assert grown("penstock_requests_finished_total", reason="stop") == 1
    assert grown("penstock_requests_finished_total", reason="length") == 1
    assert grown("penstock_time_to_first_token_seconds_count") == 2
    assert grown("penstock_inter_token_seconds_count") == 76
    assert grown("penstock_request_seconds_count") == 2
    assert after["penstock_engine_up", ()] == 1
    assert after["penstock_requests", (("state", "running"),)] == 0
    assert after["penstock_requests", (("state", "waiting"),)] == 0
    blocks = {state: after["penstock_kv_blocks", (("state", state),)] for state in ("free", "used", "cached")}
    assert blocks["used"] == 0
    assert blocks["cached"] > 0
    assert sum(blocks.values()) == 256


def test_other_engines_names_say_the_same(parrot: Any) -> None:
    parrot.post("/v1/completions", model=MODEL, prompt="[hello there, hello there]", max_tokens=9)
    parrot.until_idle()
    all = samples(parrot)
    theirs = (("engine", "0"), ("model_name", MODEL))
    for ours, vllm, llamacpp in (
        ("penstock_generated_tokens_total", "vllm:generation_tokens_total", "llamacpp:tokens_predicted_total"),
        ("penstock_prompt_tokens_total", "vllm:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
        ("penstock_prompt_tokens_total", "vllm:prefix_cache_queries_total", None),
        ("penstock_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum", None),
        ("penstock_inter_token_seconds_count", "vllm:inter_token_latency_seconds_count", None),
        ("penstock_request_seconds_count", "vllm:e2e_request_latency_seconds_count", None),
        ("penstock_request_queue_seconds_count", "vllm:request_queue_time_seconds_count", None),
        ("penstock_request_prefill_seconds_sum", "vllm:request_prefill_time_seconds_sum", None),
        ("penstock_request_decode_seconds_sum", "vllm:request_decode_time_seconds_sum", None),
    ):
        assert all[vllm, theirs] == all[ours, ()] > 0
        assert llamacpp is None or all[llamacpp, ()] == all[ours, ()]
    finished = all["penstock_requests_finished_total", (("reason", "length"),)]
    assert all["vllm:request_success_total", (theirs[0], ("finished_reason", "length"), theirs[1])] == finished > 0
    assert all["vllm:num_requests_running", theirs] == all["llamacpp:requests_processing", ()] == 0
    assert 0 <= all["vllm:kv_cache_usage_perc", theirs] < 1


def test_metrics_count_those_who_left(slow_parrot: Any) -> None:
    stream = slow_parrot.sdk().completions.create(model=MODEL, prompt="[*abc]", max_tokens=30_000, stream=True)
    next(stream)
    stream.close()
    key = ("penstock_requests_finished_total", (("reason", "abort"),))
    slow_parrot.until(lambda: samples(slow_parrot).get(key) == 1)


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="70000"):
        bind("127.0.0.1", 70000)
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


SERVE = """
import toys
from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.server import serve

client = ProcessClient(Config(model="parrot"), toys.HOST)
serve(toys.pool_of(client, toys.ToyText(), "toy/parrot"), "127.0.0.1", 0)
print("left in peace")
"""


def test_serve_drains_on_interrupt(request: pytest.FixtureRequest) -> None:
    """An answer under way when Ctrl-C comes is finished, and the engine process goes with the server."""
    path = os.pathsep.join([str(request.path.parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert told.startswith("serving toy/parrot on http://127.0.0.1:")
        url = told.split()[3]
        pid = httpx.get(f"{url}/health", timeout=120).json()["engine"]["pid"]
        asked = {"model": MODEL, "prompt": "[*abc]", "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert out == "left in peace\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
