"""Remembers the prompts that a fleet was asked lately, for replicas that come new."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from penstock.types import Request

MOST = 32  # prompts
ALIKE = 256  # tokens: of prompts that begin with the same ones, the last is remembered
SHORT = 64  # tokens: it takes no longer to compute fewer


class RecentPrompt(NamedTuple):
    """A request whose prompt may come again."""

    request: Request
    salt: str  # salt of its blocks


class RecentPrompts:
    """Keeps the last prompts that differ in their beginning."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, tuple[int, ...]], RecentPrompt] = OrderedDict()

    def note(self, request: Request, salt: str) -> None:
        if len(request.prompt) < SHORT or request.pooling or request.sampling.prompt_logprobs is not None:
            return
        key = salt, request.prompt[:ALIKE]
        self._prompts[key] = RecentPrompt(request, salt)
        self._prompts.move_to_end(key)
        if len(self._prompts) > MOST:
            self._prompts.popitem(last=False)

    def newest_first(self) -> list[RecentPrompt]:
        return list(reversed(self._prompts.values()))
