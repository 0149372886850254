"""An engine process that takes its time: a tiny model that samples, one that follows grammars, or a toy, also one that
speaks an older protocol."""

from __future__ import annotations

import time
from typing import Any

from penstock.backend.cpu import CpuBackend
from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Grammars
from penstock.ipc import shared_wire
from penstock.ipc.host import host
from penstock.model.load import load_model
from tests.engine.test_grammar import LIMITS as BABBLE_LIMITS
from tests.engine.test_grammar import Babble, Bytes
from tests.engine.test_speculation import CHECKPOINT, LIMITS
from tests.server.toys import LIMITS as TOY_LIMITS
from tests.server.toys import Parrot

PACE = {"parrot": 0.001}  # seconds of a step: there is a middle of a stream


def open_kind(config: Config) -> Engine:
    if config.model == "older":
        shared_wire.PROTOCOL = shared_wire.OLDEST = 0
    engine = _open(config.model, bool(config.listen))
    step = engine.step

    def slow() -> Any:
        time.sleep(PACE.get(config.model, 0.005))
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


def _open(kind: str, block_events: bool) -> Engine:
    if kind == "sampling":
        backend = CpuBackend(1)
        backend.load(load_model(CHECKPOINT, backend))
        backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
        return assemble(backend, LIMITS, block_events=block_events)
    if kind == "grammars":
        babble = Babble()
        babble.reserve_kv(BABBLE_LIMITS.num_blocks, BABBLE_LIMITS.block_size)
        grammars = Grammars(Bytes, BABBLE_LIMITS.vocab)
        return assemble(babble, BABBLE_LIMITS, grammars=grammars, block_events=block_events)
    return assemble(Parrot(TOY_LIMITS), TOY_LIMITS, block_events=block_events)  # type: ignore[arg-type]


if __name__ == "__main__":
    host(lambda config, _: open_kind(config))
