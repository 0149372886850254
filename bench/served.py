"""Waits for a server that a benchmark has started."""

from __future__ import annotations

import asyncio

import httpx

READY_SECONDS = 120.0


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
