"""A device that computes nothing any more ends its engine process, as a crash does: another one goes on. An error that
harms one step fails that step's requests alone. Engines in this process fail their requests."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backend.base import Batch, Ticket
from penstock.backend.cuda.lost_device import cannot_go_on
from penstock.backend.fake import FakeBackend
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.errors import DeviceLost, EngineUnavailable
from penstock.ipc import post_mortem
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.inprocess_engine import InProcessEngine
from penstock.ipc.launchers import SpawnLauncher
from penstock.ipc.spawn import ProcessClient
from penstock.llm.shared_engine import SharedEngine
from penstock.types import Failed, Request, SamplingParams, StepResult
from tests.engine.test_crashes import check_whole, request
from tests.engine.test_ipc import LIMITS, VOCAB, events_of, run, started, until

# tokens of prompts, and what the step does that computes them at their places
ASSERTS, FAILS, BUG = 666, 667, 668

HOST = f"""
import pathlib, time
from penstock.backend.fake import FakeBackend
from penstock.engine.assemble import assemble
from penstock.engine.feature import Feature
from penstock.ipc.host import host
from penstock.types import Limits

class Device(FakeBackend):
    lost = False

    def launch(self, batch):
        at = dict(zip(batch.positions.tolist(), batch.tokens.tolist()))
        self.fail(at.get(3))
        return super().launch(batch)

    def wait(self, ticket):
        time.sleep(0.002)
        self.fail(0)
        return super().wait(ticket)

    def fail(self, token):
        if self.lost or token == {ASSERTS}:
            self.lost = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        if token == {FAILS}:
            raise RuntimeError("CUDA error: invalid argument")

    def is_lost(self):
        return self.lost

    def close(self):
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

class Bug(Feature):
    def launched(self, plan, gap):
        if now.exists():
            how = now.read_text()
            now.unlink()
            if how == "{BUG}":
                raise KeyError("a bug")
            self.engine.backend.lost = True

def open(config, _):
    global now
    now = pathlib.Path(config.model)
    backend, limits = Device({VOCAB}), Limits{tuple(LIMITS)}
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    return assemble(backend, limits, more=(Bug(),))

host(open)
"""


def on_device(now: Path, post_mortem: str = "off") -> ProcessClient:
    """Returns a client whose engine's device does at once what the file says, if there is one."""
    config = Config(model=str(now), post_mortem=post_mortem)
    return ProcessClient(config, SpawnLauncher((sys.executable, "-c", HOST)), (0.0, 0.01, 0.05))


class Dying(FakeBackend):
    """Is lost in its third step."""

    lost = False

    def launch(self, batch: Batch) -> Ticket:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().launch(batch)

    def wait(self, ticket: Ticket) -> StepResult:
        self.lost = ticket >= 3
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return super().wait(ticket)

    def is_lost(self) -> bool:
        return self.lost

    def close(self) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")


def dying_engine(depth: int = 0) -> Engine:
    backend = Dying(VOCAB)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS, depth=depth)


@pytest.mark.parametrize("how", [ASSERTS, BUG])
def test_answers_go_on_after_an_error_that_ends_the_engine_process(
    how: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    now = tmp_path / "now"

    async def scenario() -> None:
        async with started(on_device(now, "shapes")) as client:
            prompts = [[seed, 2] for seed in range(12)]
            asking = [asyncio.create_task(events_of(client, request(client, prompt))) for prompt in prompts]
            for death in range(1, 3):
                await until(lambda: client.state == "ready" and client.stats.generated_tokens > 120)
                (tmp_path / "next").write_text(str(how))
                (tmp_path / "next").rename(now)
                await until(lambda death=death: client.restarts == death)
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                check_whole(answer, prompt)

    run(scenario())
    raised = "DeviceLost: the device computes nothing any more after RuntimeError: CUDA error: device-side assert"
    for path in (tmp_path / "post-mortem").iterdir():
        bundle = post_mortem.read(path)
        assert bundle.reason.endswith("exited with code 1")
        assert (raised if how == ASSERTS else "KeyError: 'a bug'") in bundle.stack
        assert " in step\n" in bundle.stack
        assert len(bundle.requests) == 12
    assert len(list((tmp_path / "post-mortem").iterdir())) == 2


def test_a_request_that_costs_the_device_each_time_fails_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(on_device(tmp_path / "now")) as client:
            stays = asyncio.create_task(events_of(client, request(client, [1, 2], 400)))
            await until(lambda: client.stats.generated_tokens > 10)
            (failed,) = await events_of(client, request(client, [1, 2, 3, ASSERTS]))
            assert (type(failed), failed.code) == (Failed, "poisoned_request")
            check_whole(await stays, [1, 2], 400)
            assert client.restarts == 2

    run(scenario())


def test_an_error_that_the_device_gets_over_fails_its_step_and_no_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(on_device(tmp_path / "now")) as client:
            pid = client.hello.pid
            (failed,) = await events_of(client, request(client, [1, 2, 3, FAILS]))
            assert (type(failed), failed.code) == (Failed, "step_failed")
            assert "CUDA error: invalid argument" in failed.message
            check_whole(await events_of(client, request(client, [1, 2])), [1, 2])
            assert (client.restarts, client.hello.pid) == (0, pid)

    run(scenario())


def test_a_client_in_this_process_fails_its_requests_and_says_why() -> None:
    async def scenario() -> None:
        async with started(InProcessClient(dying_engine)) as client:
            *_, failed = await events_of(client, request(client, [1, 2]))
            assert (type(failed), failed.code) == (Failed, "engine_died")
            assert "DeviceLost: the device computes nothing any more" in failed.message
            assert "unspecified launch failure" in failed.message
            assert client.state == "failed"
            with pytest.raises(EngineUnavailable, match="launch failure"):
                client.submit(request(client, [1, 2]))

    run(scenario())


def advance_for_ever(engine: SharedEngine) -> None:
    while True:
        engine.advance()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_python_api_raises_the_same_error_from_then_on(depth: int) -> None:
    inner = InProcessEngine(lambda: dying_engine(depth))
    inner.open()
    engine = SharedEngine(inner)
    choice: Any = SimpleNamespace(request=Request(1, (1, 2), SamplingParams(), 20), add=len, finish_reason="")
    engine.submit([choice])
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        advance_for_ever(engine)
    with pytest.raises(DeviceLost, match="unspecified launch failure"):
        engine.advance()
    engine.close()


@pytest.mark.parametrize(
    ("raised", "lost"),
    [
        (None, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (type("AcceleratorError", (RuntimeError,), {})("CUDA error: device-side assert triggered"), True),
    ],
)
def test_a_gpu_is_lost_if_it_still_has_nothing_but_errors_to_say(raised: Exception | None, lost: bool) -> None:
    def synchronize() -> None:
        if raised is not None:
            raise raised

    assert cannot_go_on(synchronize) is lost
