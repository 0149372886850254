"""Guesses the contents of an engine's prefix cache from the text of the requests that it was sent.

The cached tokens in an answer's usage correct the guess. If an expected prompt was not cached, everything used before
it has been evicted too, which shows how much the cache holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from penstock.fleet.holders import DEVICE, REMOVED, BlockChange

CHUNK = 256  # characters of a block
CHUNK_TOKENS = 64  # tokens in a chunk, roughly
FIRST_CAPACITY = 4096  # blocks that an engine is believed to hold, until it turns out otherwise
MOST_CAPACITY = 2**18
GROWTH = 1.02  # growth of the capacity per right guess


def prompt_text(body: Mapping[str, Any]) -> str:
    if (prompt := body.get("prompt") or body.get("input")) is not None:
        return prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
    parts = [msgspec.json.encode(body["tools"]).decode()] if body.get("tools") else []
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
            calls = msgspec.json.encode(message["tool_calls"]).decode() if message.get("tool_calls") else ""
            parts.append(f"\0{message.get('role')}\0{text}{calls}")
    return "".join(parts)


def chunk_hashes(text: str) -> list[bytes]:
    hashes, parent = [], b""
    for at in range(0, len(text) - CHUNK + 1, CHUNK):
        parent = blake2b(parent + text[at : at + CHUNK].encode("utf-8", "replace"), digest_size=16).digest()
        hashes.append(parent)
    return hashes


class GuessedCache:
    """The blocks that one engine is believed to hold: the most recently used ones that fit."""

    def __init__(self) -> None:
        self.capacity = float(FIRST_CAPACITY)
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()  # the one that was used longest ago first

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, hashes: Sequence[Hashable]) -> int:
        return next((at for at, block in enumerate(hashes) if block not in self._blocks), len(hashes))

    def served(self, hashes: Sequence[Hashable], cached: float | None = None) -> list[BlockChange]:
        """Adds a prompt that the engine has computed; `cached` is the share that was cached, if the answer has it.
        Returns the changes."""
        changes = [] if cached is None else self._correct(hashes, int(cached * len(hashes)))
        for block in reversed(hashes):  # the beginning is used last, so that it is evicted last
            if block not in self._blocks:
                changes.append((DEVICE, block))
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        return changes + self._shrink()

    def clear(self) -> list[BlockChange]:
        """Forgets everything: the engine has started again."""
        changes = [(REMOVED, block) for block in self._blocks]
        self._blocks.clear()
        return changes

    def _correct(self, hashes: Sequence[Hashable], cached: int) -> list[BlockChange]:
        believed = self.depth(hashes)
        if cached > believed:  # it holds more than was believed
            self.capacity = min(max(self.capacity, len(self._blocks) + cached), MOST_CAPACITY)
            return []
        if cached >= believed // 2:  # templates and tokens make the shares differ a little
            self.capacity = min(self.capacity * (GROWTH if believed else 1.0), MOST_CAPACITY)
            return []
        gone = hashes[cached]
        changes: list[BlockChange] = []
        while self._blocks:
            block, _ = self._blocks.popitem(last=False)
            changes.append((REMOVED, block))
            if block == gone:
                break
        self.capacity = float(len(self._blocks))
        return changes

    def _shrink(self) -> list[BlockChange]:
        changes: list[BlockChange] = []
        while len(self._blocks) > self.capacity:
            changes.append((REMOVED, self._blocks.popitem(last=False)[0]))
        return changes
