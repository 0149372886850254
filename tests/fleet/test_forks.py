"""The process that forks the engines of a fleet on a machine dies: engines go on, and the next launch starts another
process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from penstock.fleet.forks import RemoteForkLauncher
from penstock.ipc.spawn import ProcessClient
from tests.engine.test_fork_parent import ask, ended, state_of
from tests.engine.test_ipc import run, started, until
from tests.engine.test_kept_kv import config


def test_the_process_that_forks_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "forks"

    async def scenario() -> None:
        async with started(ProcessClient(config(), RemoteForkLauncher(str(path)))) as client:
            said, engine = await ask(client), client.hello.pid
            parent = state_of(engine)[1]
            os.kill(parent, signal.SIGKILL)
            await until(lambda: ended(parent))
            assert await ask(client) == said
            assert (client.restarts, client.hello.pid) == (0, engine)
            os.kill(engine, signal.SIGKILL)
            assert await ask(client) == said
            assert state_of(client.hello.pid)[1] != parent
        path.unlink()  # the process that forks ends

    run(scenario())
