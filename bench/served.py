"""Starts servers for benchmarks and waits until they answer."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

READY_SECONDS = 120.0


def free_port() -> int:
    """Returns a port of loopback that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def until_ready(http: httpx.AsyncClient) -> None:
    """Returns once the server generates; raises TimeoutError if it does not in time."""
    async with asyncio.timeout(READY_SECONDS):
        while True:
            try:
                if (await http.get("/health?generate=1")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


@asynccontextmanager
async def running_fleet(model: str, *options: str) -> AsyncIterator[str]:
    """Runs `penstock fleet serve` on a free port under a name of its own. Yields its URL when all are ready."""
    port = free_port()
    command = (sys.executable, "-m", "penstock", "fleet", "serve", model, "--port", str(port))
    names = ("--name", f"fleet-{port}", "--log-level", "warning")
    process = await asyncio.create_subprocess_exec(*command, *names, *options, stderr=DEVNULL)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            await until_ready(http)
            while any(replica["state"] != "ready" for replica in (await http.get("/health")).json()["replicas"]):
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
