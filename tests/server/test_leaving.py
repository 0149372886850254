"""Clients that leave: their requests end within a step, nothing of theirs stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.backend.fake import FakeBackend, continuation
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.ipc.inprocess import InProcessClient
from penstock.types import Limits
from tests.server import toys

MODEL = "toy/parrot"
ENDLESS = {"model": MODEL, "messages": [{"role": "user", "content": "[*abc]"}]}


def test_leaving_a_stream(slow_parrot: Any) -> None:
    done = slow_parrot.client.stats.generated_tokens
    stream = slow_parrot.sdk().chat.completions.create(**ENDLESS, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.generated_tokens - done < toys.ENDLESS // 2
    assert slow_parrot.client.stats.blocks_used == 0


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream": True}], ids=["whole", "several", "unread stream"])
def test_leaving_without_having_read_anything(slow_parrot: Any, fields: dict[str, Any]) -> None:
    done = slow_parrot.client.stats.generated_tokens
    url = httpx.URL(slow_parrot.url)
    body = httpx.Request("POST", url, json=ENDLESS | fields).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=120) as connection:
        connection.sendall(head.encode() + body)
        slow_parrot.until(lambda: slow_parrot.client.stats.running > 0)
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.generated_tokens - done < toys.ENDLESS // 2
    assert slow_parrot.client.stats.blocks_used == 0


def test_leaving_while_waiting_for_a_place(slow_parrot: Any) -> None:
    """Twenty requests on sixteen rows: those that wait leave too."""
    connections = []
    url = httpx.URL(slow_parrot.url)
    body = httpx.Request("POST", url, json=ENDLESS | {"stream": True}).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        connections.append(socket.create_connection((url.host, url.port), timeout=120))
        connections[-1].sendall(head.encode() + body)
    slow_parrot.until(lambda: slow_parrot.client.stats.waiting > 0)
    for connection in connections:
        connection.close()
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.blocks_used == 0


def test_a_body_cut_short_is_no_bug(slow_parrot: Any, caplog: pytest.LogCaptureFixture) -> None:
    url = httpx.URL(slow_parrot.url)
    with socket.create_connection((url.host, url.port), timeout=120) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model": ')
    assert slow_parrot.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


LIMITS = Limits(max_len=512, max_rows=12, step_tokens=64, block_size=16, num_blocks=40, vocab=257)


class Fake(FakeBackend):
    def wait(self, ticket: int) -> Any:
        time.sleep(0.001)
        return super().wait(ticket)


def fake_engine() -> Engine:
    backend = Fake(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    return assemble(backend, LIMITS)


def test_32_clients_a_third_of_them_leaving(serve: Callable[..., Any], toy_text: Any) -> None:
    """Prompts share beginnings, and the pool is too small for all of them, so that sequences wait for blocks:
    each answer must be what the fake answers with no cache and nobody else there."""
    prompts = [f"shared beginning number {seed % 4} and then {seed}" for seed in range(32)]

    async def read(sdk: Any, prompt: str, leave_after: int) -> str:
        asked = {"model": "fake", "prompt": prompt, "max_tokens": 100, "stream": True}
        stream = await sdk.completions.create(**asked, extra_body={"ignore_eos": True})
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) >= leave_after:
                await stream.close()
                break
        return text

    async def crowd(server: Any) -> list[str]:
        async with server.async_sdk() as sdk:
            reads = [read(sdk, prompt, 10 if seed % 3 == 0 else 1000) for seed, prompt in enumerate(prompts)]
            return await asyncio.gather(*reads)

    with serve(InProcessClient(fake_engine), toy_text, "fake") as server:
        answers = asyncio.run(crowd(server))
        server.until_idle()
        stats = server.client.stats
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == LIMITS.num_blocks
    assert stats.generated_tokens < 32 * 100
    for seed, answer in enumerate(answers):
        alone = toy_text.tokenizer.decode(continuation(prompts[seed].encode(), 100, LIMITS.vocab))
        assert answer == (alone[: len(answer)] if seed % 3 == 0 else alone)
