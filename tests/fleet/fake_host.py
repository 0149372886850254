"""An engine process over the fake backend, whose steps take two milliseconds and which a token of a prompt can end."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import time
from typing import Any

import msgspec

from penstock.backend.base import Batch
from penstock.backend.fake import FakeBackend
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.kv_transfer.peers import TransferOptions
from penstock.ipc.host import _host
from penstock.ipc.launchers import ForkedChild
from penstock.ipc.orphans import fork_parent
from penstock.types import Limits, StepResult

VOCAB = 1000
LIMITS = Limits(max_len=4096, max_rows=16, step_tokens=64, block_size=16, num_blocks=1024, vocab=VOCAB, dim=4)
POISON = 666  # among the first tokens of a prompt
PACE = 0.002  # seconds
TOYS = ("parrot", "slow parrot")


class Mortal(FakeBackend):
    def launch(self, batch: Batch) -> Any:
        for token, at in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
            if token == POISON and at < 4:
                ctypes.string_at(0)
        return super().launch(batch)

    def wait(self, ticket: Any) -> StepResult:
        time.sleep(PACE)
        return super().wait(ticket)


def open_fake(config: Config, *_: object) -> Engine:
    """Returns an engine of the fleet's model, of another one, or of a toy."""
    if config.model in TOYS:
        return open_toy(config)
    limits = LIMITS._replace(block_size=32) if config.model == "other" else LIMITS
    limits = limits._replace(max_len=256, num_blocks=64) if config.model == "small" else limits
    backend = Mortal(VOCAB)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    transfer = TransferOptions(b"fake", config.offers)
    return assemble(backend, limits, sleeper=backend.sleeper, block_events=bool(config.listen), transfer=transfer)


def open_toy(config: Config) -> Engine:
    """Returns a toy that says what it is told to say, as fast as it can or slowly."""
    from tests.server.toys import ENDLESS, LIMITS, Parrot, Reciting

    limits, slow = LIMITS, config.model == "slow parrot"
    if slow:
        limits = LIMITS._replace(max_len=ENDLESS, num_blocks=4 * ENDLESS // LIMITS.block_size)
    toy: Any = Parrot(limits, PACE if slow else 0.0)
    return assemble(toy, limits, drafting=None if slow else Reciting(), block_events=bool(config.listen))


def serve(address: str, config: bytes, constants: dict[str, float]) -> None:
    """Serves in a forked process, with other values of the shared host's constants."""
    from penstock.ipc import shared_host

    vars(shared_host).update(constants)
    os.setsid()
    _host(open_fake, address, msgspec.json.decode(config, type=Config), fork_parent())


class FakeLauncher:
    """Forks engines from a process that has imported everything: that takes a twentieth of the time."""

    def __init__(self, **constants: float) -> None:
        self._constants = constants

    async def launch(self, address: str, config: Config) -> ForkedChild:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.fleet.fake_host", "tests.server.toys"])
        arguments = address, msgspec.json.encode(config), self._constants
        process = context.Process(target=serve, args=arguments)
        await asyncio.to_thread(process.start)
        return ForkedChild(process, lambda: None)
