"""The KV cache of a model on the CPU outlives its engine: the next one computes what is missing, and answers the same.
What another model, or another layout, has left there is dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.errors import EngineUnavailable
from penstock.ipc.spawn import ProcessClient
from penstock.types import Finished, Request, SamplingParams, Tokens
from tests.engine.one_head import ONE_HEAD
from tests.engine.test_ipc import events_of, run, started, tokens_of, until

MODELS = Path(__file__).parents[1] / "models"
LLAMA = str(MODELS / "goldens" / "llama3")
HYBRID = str(MODELS / "goldens" / "qwen3next")
PROMPT = tuple(range(3, 40))
ANSWER = 20
MOST = 2**20  # bytes of KV


def config(model: str = LLAMA, **options: Any) -> Config:
    values = {"block_size": 4, "kv_memory": MOST, "device": "cpu", "threads": 1, "packed_cache": 0}
    return Config(model=model, post_mortem="off", **values | {"speculation": "off"} | options)


def answer(engine: Engine, count: int = ANSWER) -> list[int]:
    """Returns the tokens that an engine answers the prompt with."""
    engine.add(Request(engine.stats().steps + 1, PROMPT, SamplingParams(temperature=0), count))
    said: list[int] = []
    while not engine.idle:
        for event in engine.step():
            said += event.tokens if isinstance(event, Tokens) else ()
            assert isinstance(event, Tokens | Finished), event
    return said


@pytest.fixture
def kv_file(tmp_path: Path) -> str:
    file = tmp_path / "kv"
    file.touch()
    return str(file)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("goldens/llama3", {"kv_memory": 0}),
        ("goldens/gemma3", {}),  # has windows
        ("goldens/mistral", {"kv": "int8"}),  # has nothing else
        ("goldens/untied", {"kv": "int8:int4", "config": ONE_HEAD}),
        ("goldens/deepseek_v32", {}),  # has MLA, and an index
        ("goldens/qwen3next", {}),  # has states
        ("goldens/bamba", {"kv_memory": 0}),
        ("goldens/lfm2", {}),
        ("goldens/kimi_linear", {}),
        ("eagle3/target", {"draft": str(MODELS / "eagle3" / "vllm"), "speculation": "3"}),  # has hidden states
    ],
)
def test_the_next_engine_adopts_full_blocks(model: str, options: dict[str, Any], kv_file: str) -> None:
    kept = config(str(MODELS / model), kv_file=kv_file, **options)
    first = open_engine(kept)
    said = answer(first)
    used = first.stats().blocks_cached
    first.close()
    second = open_engine(kept)
    assert second.limits == first.limits
    assert second.stats().adopted_blocks == used > 0
    assert answer(second) == said == answer(open_engine(replace(kept, kv_file="")))
    assert second.stats().cached_tokens == 36
    second.close()


@pytest.mark.parametrize(
    "other",
    [{"kv": "f32"}, {"block_size": 8}, {"kv_memory": MOST // 2}, {"model": str(MODELS / "goldens" / "untied")}],
    ids=str,
)
def test_what_another_cache_has_left_is_dropped(other: dict[str, Any], kv_file: str) -> None:
    first = open_engine(config(kv_file=kv_file))
    said = answer(first)
    first.close()
    second = open_engine(config(**{"kv_file": kv_file} | other))
    assert second.stats().adopted_blocks == 0
    assert answer(second) == answer(open_engine(config(**other)))
    second.close()
    third = open_engine(config(kv_file=kv_file))
    assert third.stats().adopted_blocks == 0
    assert answer(third) == said


def kept_files() -> int:
    """Returns how many files for KV caches this process has open."""
    return sum("memfd:penstock-kv" in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    ("kind", "model", "again"),
    [(signal.SIGKILL, LLAMA, 4), (signal.SIGSTOP, LLAMA, 4), (signal.SIGKILL, HYBRID, 20)],
    ids=["killed", "stopped", "hybrid"],
)
def test_answers_go_on_without_their_contexts_being_computed_again(
    kind: signal.Signals, model: str, again: int
) -> None:
    """Asserts that few tokens of each answer are computed again: what follows its last block or its last state."""

    async def ask(client: ProcessClient, seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return tokens_of(await events_of(client, Request(client.next_id(), (*PROMPT, seed), sampling, ANSWER)))

    async def scenario() -> None:
        before = kept_files()
        async with started(ProcessClient(config(model))) as client:
            alone = [await ask(client, seed) for seed in range(8)]
            asked = asyncio.gather(*(ask(client, seed) for seed in range(8, 16)))
            await until(lambda: client.stats.generated_tokens > 9 * ANSWER)
            os.kill(client.hello.pid, kind)
            again_asked = asyncio.gather(*(ask(client, seed) for seed in range(8)))  # so that there is work in any case
            await until(lambda: client.restarts == 1 and client.state == "ready")
            assert await again_asked == alone
            await asked
            assert client.stats.adopted_blocks > 8
            assert client.stats.computed_tokens < 16 * (again + ANSWER)
            assert [await ask(client, seed) for seed in range(8, 16)] == await asked
            assert kept_files() == before + 1
        assert kept_files() == before

    run(scenario())


class NoLauncher:
    """Starts nothing, and remembers what it should have started."""

    def __init__(self) -> None:
        self.files: list[tuple[int, int]] = []

    async def launch(self, address: str, config: Config) -> Any:
        found = os.stat(config.kv_file)
        self.files.append((found.st_size, found.st_ino))
        os.truncate(config.kv_file, 100)
        raise OSError("there is nothing to start")


def test_after_two_engines_that_did_nothing_the_next_starts_with_an_empty_cache() -> None:
    async def scenario() -> None:
        launcher = NoLauncher()
        client = ProcessClient(config(), launcher)
        for failures in (0, 1, 2, 3):
            client._failures = failures
            with pytest.raises(EngineUnavailable):
                await client._launch()
        assert [size for size, _ in launcher.files] == [0, 100, 0, 0]
        await client.close()

    run(scenario())
