"""Reads the KV events that vLLM and SGLang publish over ZeroMQ, as block changes with our own chain hashes.

A message has three frames: topic, sequence number (8 bytes, big-endian), and msgpack of [time, events, rank]. Events
carry the tokens of their blocks, so that the engines' own hashes only serve to find a block's parent. An event is an
array whose first item is its name or, in newer versions, a map whose `type` is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from penstock.core.hashing import extend, root
from penstock.fleet.holders import DEVICE, HOST, REMOVED, BlockChange

log = logging.getLogger(__name__)

FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
DEVICES = (None, "GPU")  # media whose blocks a step reads directly
REPLAY_SECONDS = 2.0


class BlockTranslator:
    """Translates one engine's events. It knows our hash of every block that the engine holds, by the engine's."""

    def __init__(self) -> None:
        self.block_size = 0  # tokens; 0: no event has told
        self.skipped = 0  # blocks whose parent is not known, or that depend on more than tokens
        self._ours: dict[Hashable, bytes] = {}

    def __len__(self) -> int:
        return len(self._ours)

    def changes(self, events: Sequence[Any]) -> list[BlockChange]:
        """Returns the changes of a batch of events. Unknown events are skipped."""
        changes: list[BlockChange] = []
        for event in events:
            name, fields = _read(event)
            if name == "BlockStored":
                changes += self._stored(fields)
            elif name == "BlockRemoved":
                changes += self._removed(fields)
            elif name == "AllBlocksCleared":
                changes += [(REMOVED, block) for block in self.forget()]
        return changes

    def forget(self) -> list[bytes]:
        known = list(self._ours.values())
        self._ours.clear()
        return known

    def _stored(self, fields: dict[str, Any]) -> list[BlockChange]:
        hashes, tokens, size = fields["block_hashes"], fields["token_ids"], fields["block_size"]
        parent = fields.get("parent_block_hash")
        ours = root(fields.get("lora_name") or "") if parent is None else self._ours.get(_key(parent))
        more = fields.get("extra_keys") or ()
        if ours is None or any(_more_than_adapter(each, fields.get("lora_name")) for each in more):
            self.skipped += len(hashes)
            return []
        self.block_size = size
        tier = DEVICE if fields.get("medium") in DEVICES else HOST
        changes: list[BlockChange] = []
        for at, block in enumerate(hashes):
            ours = extend(ours, tokens[at * size : (at + 1) * size])
            self._ours[_key(block)] = ours
            changes.append((tier, ours))
        return changes

    def _removed(self, fields: dict[str, Any]) -> list[BlockChange]:
        found = (self._ours.pop(_key(block), None) for block in fields["block_hashes"])
        return [(REMOVED, ours) for ours in found if ours is not None]


def _key(block: Any) -> Hashable:
    return bytes(block) if isinstance(block, bytearray | memoryview) else block


def _more_than_adapter(keys: Any, adapter: str | None) -> bool:
    """Returns whether a block depends on images, salts or the like: tokens do not tell who holds such a block."""
    return bool(keys) and list(keys) != [adapter]


def _read(event: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type", "")), event
    if not isinstance(event, list) or not event or event[0] not in FIELDS:
        return "", {}
    return event[0], dict(zip(FIELDS[event[0]], event[1:], strict=False))


class KvSubscriber:
    """Follows one engine's events and passes the changes on. A replay fills gaps, if the engine offers one; otherwise
    its blocks are forgotten and learned again."""

    def __init__(
        self, endpoint: str, replay: str, apply: Callable[[list[BlockChange]], None], forget: Callable[[], None]
    ) -> None:
        self.translator = BlockTranslator()
        self.batches = self.gaps = self.malformed = 0
        self._endpoint, self._replay = endpoint, replay
        self._apply, self._forget = apply, forget
        self.next_number: int | None = None  # number of the next message

    async def run(self) -> None:
        """Receives events until it is cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._endpoint)
            if self._replay:
                await self._replayed(context, 0)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3:
                    await self._take(context, int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close(linger=0)
            context.term()

    async def _take(self, context: zmq.asyncio.Context, number: int, payload: bytes) -> None:
        if self.next_number is not None and number < self.next_number and number != 0:
            return  # a replay has had it
        if self.next_number is not None and number != self.next_number:
            self.gaps += 1
            filled = number > self.next_number and self._replay and await self._replayed(context, self.next_number)
            if filled and self.next_number == number + 1:
                return
            if not filled or self.next_number != number:
                self.forget()
        self.next_number = number + 1
        self._read(payload)

    def forget(self) -> None:
        """Forgets what the engine holds: it has started again, or events were lost."""
        self.translator.forget()
        self._forget()

    def _read(self, payload: bytes) -> None:
        try:
            batch = msgspec.msgpack.decode(payload)
            events = batch["events"] if isinstance(batch, dict) else batch[1]
            changes = self.translator.changes(events)
        except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError) as error:
            self.malformed += 1
            log.warning("KV events from %s cannot be read: %s", self._endpoint, error)
            return
        self.batches += 1
        if changes:
            self._apply(changes)

    async def _replayed(self, context: zmq.asyncio.Context, first: int) -> bool:
        """Asks for events again, from a number on; returns whether they came without a gap."""
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(self._replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            async with asyncio.timeout(REPLAY_SECONDS):
                return await self._read_replay(socket, first)
        except TimeoutError:
            return False
        finally:
            socket.close(linger=0)

    async def _read_replay(self, socket: zmq.asyncio.Socket, first: int) -> bool:
        """Reads events up to the end of a replay. Some versions send the topic in front of the number."""
        expected = first
        while True:
            *_, number, payload = await socket.recv_multipart()
            if not payload:
                return expected > first or first == 0
            if int.from_bytes(number, "big") != expected:
                return False  # what is missing has left the engine's buffer
            self._read(payload)
            expected += 1
            self.next_number = expected
