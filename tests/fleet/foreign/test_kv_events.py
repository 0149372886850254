"""KV events as vLLM and SGLang publish them, over a real socket, and the index that is made of them."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.core.hashing import chain
from penstock.fleet.foreign.kv_events import BlockTranslator, KvSubscriber
from penstock.fleet.holders import DEVICE, HOST, REMOVED
from penstock.fleet.index import BlockIndex
from tests.fleet.foreign.scripted import engine, gateway, metric
from tests.server.conftest import WAIT

SIZE = 4
TOKENS = list(range(100, 120))


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


def stored(
    tokens: list[int], parent: int | bytes | None = None, first: int = 1, *, named: bool = False, **more: Any
) -> Any:
    """An event as vLLM encodes it: by place, as it did at first, or by name. Hashes are its own business."""
    hashes = [first + at for at in range(len(tokens) // SIZE)]
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE}
    fields |= {"lora_id": None, "medium": "GPU", "lora_name": None} | more
    return {"type": "BlockStored", **fields} if named else ["BlockStored", *fields.values()]


def removed(*hashes: int) -> Any:
    return ["BlockRemoved", list(hashes), "GPU"]


class Publisher:
    """Publishes events as vLLM's engine does."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._replay = self._context.socket(zmq.ROUTER)
        self.replay = f"tcp://127.0.0.1:{self._replay.bind_to_random_port('tcp://127.0.0.1')}"
        self.number = 0
        self._sent: list[bytes] = []

    def publish(self, *events: Any, lose: bool = False) -> None:
        payload = msgspec.msgpack.encode(Batch(time.time(), list(events), 0))
        self._sent.append(payload)
        if not lose:
            self._socket.send_multipart((b"kv-events", self.number.to_bytes(8, "big"), payload))
        self.number += 1

    def serve_replay(self) -> None:
        """Answers one request for events that were lost."""
        assert self._replay.poll(WAIT * 1000)
        client, _, first = self._replay.recv_multipart()
        for number in range(int.from_bytes(first, "big"), len(self._sent)):
            self._replay.send_multipart((client, b"", number.to_bytes(8, "big"), self._sent[number]))
        self._replay.send_multipart((client, b"", struct.pack(">q", -1), b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


@pytest.mark.parametrize("named", [False, True])
def test_blocks_get_our_own_chain_hashes(named: bool) -> None:
    translator = BlockTranslator()
    ours = chain("", TOKENS, SIZE)
    first = translator.changes([stored(TOKENS[:8], named=named)])
    rest = translator.changes([stored(TOKENS[8:], parent=2, first=3, named=named, medium="CPU")])
    assert first == [(DEVICE, ours[0]), (DEVICE, ours[1])]
    assert rest == [(HOST, block) for block in ours[2:]]
    assert translator.block_size == SIZE
    assert translator.changes([removed(5, 77)]) == [(REMOVED, ours[4])]
    assert sorted(translator.changes([["AllBlocksCleared"]])) == sorted((REMOVED, block) for block in ours[:4])
    assert len(translator) == 0


def test_adapters_have_chains_of_their_own_and_what_tokens_do_not_tell_is_skipped() -> None:
    translator = BlockTranslator()
    assert translator.changes([stored(TOKENS[:4], lora_name="lora")]) == [(DEVICE, chain("lora", TOKENS, SIZE)[0])]
    assert translator.changes([stored(TOKENS[:4], first=50, extra_keys=[["image"]])]) == []
    assert translator.changes([stored(TOKENS[:4], parent=999, first=60)]) == []
    assert translator.changes([["SomethingNew", 1], 7, {}]) == []
    assert translator.skipped == 2


def follow(publisher: Publisher, replay: bool, script: Any) -> KvSubscriber:
    """Runs a subscriber while a script publishes, until all that was published has arrived."""
    index = BlockIndex()
    epochs = [0, 0]

    def apply(changes: Any) -> None:
        index.apply(0, epochs[0], epochs[1], changes)
        epochs[1] += len(changes)

    def forget() -> None:
        epochs[:] = [epochs[0] + 1, 0]
        index.restore(0, epochs[0], 0, ())

    subscriber = KvSubscriber(publisher.endpoint, publisher.replay if replay else "", apply, forget)

    async def run() -> None:
        task = asyncio.create_task(subscriber.run())
        if replay:
            await asyncio.to_thread(publisher.serve_replay)
        deadline = time.monotonic() + WAIT
        while not subscriber.batches:  # until it has subscribed
            publisher.publish()
            await asyncio.sleep(0.02)
        await asyncio.to_thread(script)
        while subscriber.next_number != publisher.number:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    subscriber.held = {block for _, block in index.held_by(0)}  # type: ignore[attr-defined]
    return subscriber


def test_events_come_over_a_socket(publisher: Publisher) -> None:
    def script() -> None:
        publisher.publish(stored(TOKENS))
        publisher.publish(removed(5))

    assert follow(publisher, False, script).held == set(chain("", TOKENS, SIZE)[:4])  # type: ignore[attr-defined]


def test_a_gap_without_a_replay_forgets_what_is_not_sure(publisher: Publisher) -> None:
    def script() -> None:
        publisher.publish(stored(TOKENS[:8]))
        publisher.publish(removed(1), lose=True)
        publisher.publish(stored(TOKENS[8:12], first=30))

    subscriber = follow(publisher, False, script)
    assert subscriber.gaps == 1
    assert subscriber.held == {chain("", TOKENS[8:12], SIZE)[0]}  # type: ignore[attr-defined]


def test_a_gap_is_filled_by_a_replay(publisher: Publisher) -> None:
    def script() -> None:
        publisher.publish(stored(TOKENS[:8]))
        publisher.publish(removed(2), lose=True)
        publisher.publish(stored(TOKENS[4:12], parent=1, first=20))
        publisher.serve_replay()

    subscriber = follow(publisher, True, script)
    assert subscriber.gaps == 1
    assert subscriber.held == set(chain("", [*TOKENS[:4], *TOKENS[4:12]], SIZE))  # type: ignore[attr-defined]


def test_malformed_events_harm_nobody(publisher: Publisher) -> None:
    def script() -> None:
        publisher.publish(["BlockStored", 1])
        publisher.publish(stored(TOKENS[:4]))

    subscriber = follow(publisher, False, script)
    assert subscriber.malformed == 1
    assert len(subscriber.held) == 1  # type: ignore[attr-defined]


def test_a_prompt_goes_to_the_engine_whose_events_tell_that_it_holds_it() -> None:
    text = "a" * 64
    one, two = Publisher(), Publisher()
    with (
        engine(kind="vllm") as first,
        engine(kind="vllm") as second,
        gateway(
            f"{first.url},name=first,events={one.endpoint}", f"{second.url},name=second,events={two.endpoint}"
        ) as server,
    ):
        while metric(server, "penstock_foreign_blocks") < 64 // SIZE + 1:
            one.publish(stored(list(b"zzzz"), first=900))
            two.publish(stored(list(text.encode())))
            time.sleep(0.05)
        for _ in range(4):
            asked = {"model": "m", "messages": [{"role": "user", "content": text}]}
            route = server.post("/v1/chat/completions", **asked).headers["x-penstock-route"]
            assert route.startswith("second:")
        assert "64 cached" in route or "63 cached" in route
        assert first.tokenized
        assert first.tokenized[0]["messages"] == asked["messages"]
    one.close()
    two.close()
