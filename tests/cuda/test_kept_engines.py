"""Engine processes of the CUDA backend are killed, and the next ones have their weights and KV cache. The device is
shared memory of the host (shared_driver.py); tests/cuda/test_faults.py does the same on a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.errors import EngineUnavailable
from penstock.ipc import kv_memory
from penstock.ipc.kv_memory import KvMemory
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.process import EngineProcess
from penstock.ipc.spawn import ProcessClient
from penstock.types import Request, SamplingParams
from tests.cuda.device import DEVICE
from tests.engine.test_ipc import events_of, started, tokens_of, until

pytestmark = [pytest.mark.skipif(DEVICE == "cuda", reason="stands for a GPU"), pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "tests" / "models" / "goldens" / "llama3"
PROMPT = tuple(range(3, 24))
ANSWER = 8
HOST = f"""
import os, signal, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {str(ROOT)!r})
import torch
from dataclasses import replace
from penstock.backend.cuda import device as cuda
from penstock.backend.cuda.backend import CudaBackend
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.keeper import CudaKeeper
from penstock.ipc.host import host, open_logging
from tests.cuda.shared_driver import SharedDriver

FOLDER = os.environ["PENSTOCK_TEST_FOLDER"]

class Mortal(CudaBackend):
    def pack_matrix(self, parts, bias):
        with open(f"{{FOLDER}}/packed", "a") as file:
            file.write("x")
        weight = super().pack_matrix(parts, bias)
        if os.path.exists(f"{{FOLDER}}/die") and len(open(f"{{FOLDER}}/packed").read()) > 4:
            os.remove(f"{{FOLDER}}/die")
            os.kill(os.getpid(), signal.SIGKILL)
        return weight

def open_cuda(config, device, packed, kv_file):
    arena = Arena(torch.device("cpu"), SharedDriver(1 << 28))
    arena.keeper = CudaKeeper(arena, config.descriptors)
    sizes = config.step_tokens, config.max_rows
    return Mortal(*sizes, device="cpu", dtype=torch.float32, kv=config.kv, arena=arena)

cuda.DEVICE = replace(cuda.DEVICE, open=open_cuda)
host(open_logging)
"""
LAUNCHER = SpawnLauncher([sys.executable, "-c", HOST])
SERVER = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from penstock.errors import EngineUnavailable
from penstock.ipc import kv_memory
from penstock.ipc.spawn import ProcessClient
from tests.cuda.test_kept_engines import LAUNCHER, config
kv_memory.DRIVER = Path("/")
async def main():
    client = ProcessClient(config(), LAUNCHER)
    await client.start()
    print(client.hello.pid, client._launched.descriptors, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def config(**options: Any) -> Config:
    sizes = {"kv_memory": 2**20, "block_size": 4, "step_tokens": 32, "max_rows": 4, "prefill_budget": 32}
    return Config(model=str(LLAMA), device="cuda", post_mortem="off", speculation="off", **sizes | options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines note the matrices that they pack. The server takes this machine for one with a GPU."""
    monkeypatch.setenv("PENSTOCK_TEST_FOLDER", str(tmp_path))
    monkeypatch.setattr(kv_memory, "DRIVER", tmp_path)
    return tmp_path


def packed(folder: Path) -> int:
    return len((folder / "packed").read_text())


async def ask(client: ProcessClient, seed: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    return tokens_of(await events_of(client, Request(client.next_id(), (*prompt, seed), sampling, ANSWER)))


def test_engines_that_are_killed_in_steps_leave_weights_and_prompts(folder: Path) -> None:
    """Two are, one after the other. Only the first has packed weights, and answers are those without a death."""

    async def scenario() -> None:
        async with started(ProcessClient(config(), LAUNCHER)) as client:
            alone = [await ask(client, seed) for seed in (3, 4)]
            matrices = packed(folder)
            for death in (1, 2):
                generated = client.stats.generated_tokens
                asked = asyncio.gather(*(ask(client, seed) for seed in (3, 4)))
                await until(lambda before=generated: client.stats.generated_tokens > before + 2)
                assert client.hello is not None
                os.kill(client.hello.pid, signal.SIGKILL)
                assert await asked == alone
                assert client.restarts == death
                assert client.stats.adopted_blocks >= len(PROMPT) // 4
                assert client.stats.computed_tokens < 2 * (ANSWER + 4), "the prompt is not computed again"
            assert packed(folder) == matrices > 5

    asyncio.run(scenario())


def test_weights_that_an_engine_has_half_packed_are_packed_again(folder: Path) -> None:
    async def scenario() -> None:
        memory = KvMemory()
        given = config(kv_file=memory.open(), descriptors=memory.open_descriptors())
        (folder / "die").touch()
        counts = []
        for life in range(3):
            before = packed(folder) if life else 0
            engine = await EngineProcess.spawn(LAUNCHER, given)
            if life:
                await engine.open(())
            else:
                with pytest.raises(EngineUnavailable, match="SIGKILL"):
                    await engine.open(())
            counts.append(packed(folder) - before)
            await engine.end(grace=5)
        memory.close()
        half, whole, none = counts
        assert 0 < half < whole
        assert none == 0

    asyncio.run(scenario())


def test_a_killed_server_leaves_no_memory() -> None:
    """Its descriptors end with it, and its engine ends because it has."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid, address = server.stdout.readline().split()
    held = [link for link in Path(f"/proc/{server.pid}/fd").iterdir() if "memfd:device" in str(link.resolve())]
    assert held
    assert address.removeprefix("@") in Path("/proc/net/unix").read_text()
    server.kill()
    server.wait()

    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists()))
    assert address.removeprefix("@") not in Path("/proc/net/unix").read_text()
