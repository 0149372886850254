"""Blocks of a real model on the CPU move between engine processes, and the answers stay the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.ipc import wire
from penstock.ipc.spawn import ProcessClient
from penstock.types import BlockOffer, Finished, Offered, PeerCounts, Report, Request, SamplingParams, Stats
from penstock.types.messages import Add, Message, Offer, Prefill, Release
from tests.engine.test_carriers import NEEDS_NIXL
from tests.engine.test_ipc import events_of, run, tokens_of

MODELS = Path(__file__).parents[1] / "models"
PROMPT = tuple(range(3, 40))
OFFER = BlockOffer(b"i" * 16, 2**62, b"d" * 16, ("shm:x", "tcp:h:1"), 3, (b"h" * 16,), (1,), 5.0)
REQUEST = Request(9, PROMPT, SamplingParams(), 4, pull=OFFER)


def config(model: str, listen: str) -> Config:
    values: dict[str, Any] = {"block_size": 4, "kv_memory": 2**20, "device": "cpu", "threads": 1, "packed_cache": 0}
    return Config(model=model, post_mortem="off", speculation="off", offers=(listen,), **values)


async def answer(
    client: ProcessClient, pull: BlockOffer | None = None, prompt: tuple[int, ...] = PROMPT
) -> tuple[list[int], Report]:
    sampling = SamplingParams(temperature=1.0, seed=5)
    events = await events_of(client, Request(client.next_id(), prompt, sampling, 20, pull=pull))
    [report] = [event.report for event in events if isinstance(event, Finished)]
    assert report is not None
    return tokens_of(events), report


async def read_once(clients: list[ProcessClient]) -> int:
    """Has the second engine read what the first has of a prompt; returns how many tokens. So small a model computes a
    prompt in a few milliseconds: a busy machine gives reading up, and another prompt is tried."""
    for first in range(3, 43):
        prompt = (first, *PROMPT[1:])
        said, _ = await answer(clients[0], None, prompt)
        again, report = await answer(clients[1], (await clients[0].ask(Offer(prompt))).offer, prompt)
        assert again == said
        if dict(report.reused).get("peer", 0) == len(PROMPT) - 1:
            break
    counts = clients[1].stats.peers
    assert {reason for reason, _ in counts.failures} <= {"slow"}
    return dict(report.reused).get("peer", 0)


@pytest.mark.parametrize(
    ("model", "listen"), [("llama3", "shm"), ("llama3", "tcp:127.0.0.1:0"), ("gemma3", "shm")], ids=str
)
def test_another_process_reads_what_one_has_computed(model: str, listen: str) -> None:
    async def scenario() -> None:
        clients = [ProcessClient(config(str(MODELS / "goldens" / model), listen)) for _ in range(2)]
        await asyncio.gather(*(client.start() for client in clients))
        try:
            assert await read_once(clients) == 36
            assert [name for name, _ in clients[1].stats.peers.carriers] == [listen.partition(":")[0]]
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    run(scenario())


@NEEDS_NIXL
def test_nixl_brings_the_same_blocks() -> None:
    async def scenario() -> None:
        clients = [ProcessClient(config(str(MODELS / "goldens" / "llama3"), "nixl:127.0.0.1:0")) for _ in range(2)]
        await asyncio.gather(*(client.start() for client in clients))
        try:
            assert await read_once(clients) == 36
            counts = clients[1].stats.peers
            assert ([name for name, _ in counts.carriers], counts.passed_over) == (["nixl"], ())
        finally:
            await asyncio.gather(*(client.close() for client in clients))

    run(scenario())


@pytest.mark.parametrize(
    "message", [Offer((1, 2), "salt", 3, 1.5, id=5), Release(b"x" * 16), Prefill(REQUEST, 1, 2.0, id=6), Add(REQUEST)]
)
def test_messages_survive_the_wire(message: Message) -> None:
    assert wire.decode_message(wire.encode_message(message)) == message


def test_answers_survive_the_wire() -> None:
    stats = Stats(peers=PeerCounts(1, 2, 3, 0.5, (("slow", 1),), refusals=(("used", 2),)))
    step = wire.step([Offered(1, OFFER), Offered(2)], stats)
    arrived = wire.decode_answer(wire.encode_answer(step))
    assert isinstance(arrived, wire.Step)
    assert list(arrived.events()) == [Offered(1, OFFER), Offered(2)]
    assert arrived.stats == stats
