"""Work for a client ends when the client leaves, and the task that did it goes on unharmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.server.chat.stream import while_connected


class Client:
    """Is a client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Waits for ever unless it is told to end, and notes what became of it."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.cleaned = False

    async def __call__(self) -> str:
        try:
            await self.end.wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            self.cleaned = True


def cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def others_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_work_of_a_client_that_stays_is_returned() -> None:
    async def scenario() -> None:
        client, work = Client(), Work()
        asyncio.get_running_loop().call_soon(work.end.set)
        assert await while_connected(client.receive, work()) == "done"
        client.left.set()
        await others_run()
        assert (cancellations(), len(asyncio.all_tasks())) == (0, 1)

    asyncio.run(scenario())


def test_work_of_a_client_that_leaves_is_ended_and_cleaned_up() -> None:
    async def scenario() -> None:
        client, work = Client(), Work()
        asyncio.get_running_loop().call_soon(client.left.set)
        assert await while_connected(client.receive, work()) is None
        assert work.cleaned
        await others_run()
        assert (cancellations(), len(asyncio.all_tasks())) == (0, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_who_leaves_just_as_the_work_ends_cancels_nothing_else(turns: int) -> None:
    async def scenario() -> None:
        client, work = Client(), Work()

        async def both() -> None:
            client.left.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            work.end.set()

        other = asyncio.create_task(both())
        assert await while_connected(client.receive, work()) in (None, "done")
        await others_run()
        await other
        assert cancellations() == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_task_that_is_cancelled_stays_so(leaves: bool) -> None:
    async def scenario() -> None:
        client, work = Client(), Work()
        task = asyncio.create_task(while_connected(client.receive, work()))
        await others_run()
        task.cancel()
        if leaves:
            client.left.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.cleaned

    asyncio.run(scenario())


def test_errors_of_the_work_are_raised() -> None:
    async def fail() -> None:
        raise ValueError("wrong")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="wrong"):
            await while_connected(Client().receive, fail())

    asyncio.run(scenario())
