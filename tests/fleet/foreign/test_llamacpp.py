"""The real server of llama.cpp behind a gateway: two processes, the SDKs, and the death of one.

It needs the package xllamacpp, here or in the interpreter that PENSTOCK_LLAMACPP names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import ollama
import pytest

from tests.fleet.foreign.scripted import gateway, metric, moved, states
from tests.server.conftest import WAIT, Server

PYTHON = os.environ.get("PENSTOCK_LLAMACPP") or (sys.executable if find_spec("xllamacpp") else "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="xllamacpp is not installed")

PROGRAM = """
import sys, time, xllamacpp
parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.n_ctx, parameters.n_parallel, parameters.port, parameters.warmup = 2048, 2, 0, False
parameters.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
STORY: Any = [{"role": "user", "content": "Tell me a long story about a river."}]
ASKED: dict[str, Any] = {"model": "smol", "messages": STORY, "max_tokens": 40, "temperature": 0, "seed": 1}


class LlamaCpp(NamedTuple):
    process: subprocess.Popen[str]
    url: str


def start(model: Path) -> LlamaCpp:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([PYTHON, "-c", PROGRAM, str(model)], text=True, **pipes)
    assert process.stdout is not None
    url = next((line.strip() for line in process.stdout if line.startswith("http")), "")
    assert url, "llama.cpp's server did not start"
    return LlamaCpp(process, url)


@pytest.fixture(scope="module")
def engines(smollm2: Path) -> Iterator[tuple[LlamaCpp, LlamaCpp]]:
    started = [start(smollm2), start(smollm2)]
    yield started[0], started[1]
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.fixture(scope="module")
def server(engines: tuple[LlamaCpp, LlamaCpp]) -> Iterator[Server]:
    first, second = engines
    with gateway(f"{first.url},name=first,model=smol", f"{second.url},name=second,model=smol,priority=1") as server:
        yield server


def test_it_is_known_and_answers_in_every_dialect(server: Server) -> None:
    told = server.get("/health").json()["engines"]
    assert [(each["kind"], each["state"], each["models"]) for each in told] == [("llamacpp", "ready", ["smol"])] * 2
    text = server.sdk().chat.completions.create(**ASKED | {"max_tokens": 8}).choices[0].message.content
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=WAIT)
    message = claude.messages.create(
        model="smol", max_tokens=8, messages=STORY, extra_body={"temperature": 0, "top_k": 1}
    )
    assert message.content[0].text == text  # type: ignore[union-attr]
    assert message.stop_reason == "max_tokens"
    assert message.usage.cache_read_input_tokens > 0
    counted = claude.messages.count_tokens(model="smol", messages=STORY).input_tokens
    assert counted == message.usage.input_tokens + message.usage.cache_read_input_tokens
    lines = list(
        ollama.Client(host=server.url, timeout=WAIT).chat(
            "smol", STORY, stream=True, options={"temperature": 0, "num_predict": 8}
        )
    )
    assert "".join(line.message.content or "" for line in lines) == text
    assert (lines[-1].eval_count, lines[-1].prompt_eval_count) == (8, counted)
    raw = server.sdk().completions.create(model="smol", prompt="The capital of France is", max_tokens=2, temperature=0)
    assert "Paris" in raw.choices[0].text


def test_an_answer_that_was_begun_is_continued_and_not_repeated(server: Server) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=WAIT)
    begun: Any = [*STORY, {"role": "assistant", "content": "The river was called"}]
    text = claude.messages.create(model="smol", max_tokens=8, messages=begun).content[0].text  # type: ignore[union-attr]
    assert text
    assert not text.startswith("The river was called")


def test_prompts_stay_with_the_engine_that_holds_them(engines: tuple[LlamaCpp, LlamaCpp]) -> None:
    first, second = engines
    prompts = [f"{topic} " * 80 for topic in ("rivers", "bridges")]
    with gateway(f"{first.url},name=first,model=smol", f"{second.url},name=second,model=smol") as both:

        def ask(text: str) -> tuple[str, int]:
            answer = both.post("/v1/completions", model="smol", prompt=text, max_tokens=1)
            usage = answer.json()["usage"]
            return answer.headers["x-penstock-route"], usage["prompt_tokens_details"]["cached_tokens"]

        homes = [ask(prompt)[0].partition(":")[0] for prompt in prompts]
        assert set(homes) == {"first", "second"}
        for prompt, home in zip(prompts, homes, strict=True):
            route, cached = ask(prompt)
            assert route.startswith(f"{home}:")
            assert cached > 40


@pytest.mark.parametrize("stream", [False, True])
def test_stopped_while_it_answers_another_engine_does(
    engines: tuple[LlamaCpp, LlamaCpp], server: Server, stream: bool
) -> None:
    def ask() -> str:
        if not stream:
            return str(server.sdk().chat.completions.create(**ASKED).choices[0].message.content)
        chunks = server.sdk().chat.completions.create(**ASKED, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def in_flight() -> int:
        return int(server.get("/health").json()["engines"][0]["in_flight"])

    undisturbed = ask()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        server.until(lambda: in_flight() == 1)
        os.kill(engines[0].process.pid, signal.SIGSTOP)
        try:
            assert asked.result() == undisturbed
            assert states(server) == {"first": "down", "second": "ready"}
        finally:
            os.kill(engines[0].process.pid, signal.SIGCONT)
    server.until(lambda: states(server)["first"] == "ready")


def test_killed_in_the_middle_of_a_stream_the_answer_is_the_same(
    engines: tuple[LlamaCpp, LlamaCpp], server: Server
) -> None:
    whole = server.sdk().chat.completions.create(**ASKED).choices[0].message.content
    text, marks, resumed = "", [], moved(server, "resumed")
    for at, chunk in enumerate(server.sdk().chat.completions.create(**ASKED, stream=True)):
        text += chunk.choices[0].delta.content or ""
        marks += [chunk.model_extra["penstock"]] if chunk.model_extra and "penstock" in chunk.model_extra else []
        if at == 10:
            os.kill(engines[0].process.pid, signal.SIGKILL)
    assert text == whole
    assert marks == [{"resumed_on": ["second"]}]
    assert moved(server, "resumed") == resumed + 1
    assert states(server) == {"first": "down", "second": "ready"}
    assert server.sdk().chat.completions.create(**ASKED).choices[0].message.content == whole
    assert metric(server, 'penstock_foreign_up{engine="first"') == 0.0
