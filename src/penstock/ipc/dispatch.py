"""Defines a placement as a value: which engine gets a request, which blocks it reads first, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.ipc.placement import RequestPlacement
from penstock.types import Request
from penstock.types.messages import Message


class RequestEngine(Protocol):
    """Answers requests."""

    def send(self, message: Message) -> None: ...


class Pull(NamedTuple):
    """KV blocks of a prompt that an engine reads from another one before it answers."""

    source: RequestEngine
    salt: str  # salt of the block hashes
    first: int  # the first block that the reader lacks
    device: str  # the reader's
    compute: bool = False  # the source computes the blocks first


class Dispatch(NamedTuple):
    """The decision where a request goes."""

    engine: RequestEngine
    pull: Pull | None = None
    why: RequestPlacement | None = None  # None: there is one engine only
    promised: int | None = None  # prompt tokens that the engine should reuse; None: no promise is counted
    waited: float = 0.0  # seconds in the gateway's queue


class EngineChoice(Protocol):
    """Chooses among the engines of a client."""

    def place(
        self, request: Request, avoid: RequestEngine | None, source: RequestEngine | None = None
    ) -> Dispatch | None:
        """Returns where a request goes, other than to `avoid`. `source` still has its blocks. None: the request waits
        until the dispatcher is called again. Raises EngineUnavailable if there will be no engine."""

    def quietest(self) -> RequestEngine | None:
        """Returns the engine whose death would do the least harm: a doubted request is tried there."""

    def trial(self, engine: RequestEngine) -> Dispatch:
        """Returns the placement of a doubted request on the quietest engine."""

    @property
    def in_line(self) -> int:
        """Returns how many requests wait in a queue of this choice, which starts them itself."""

    def forget(self, id: int, generated: int) -> None:
        """Removes a request that has ended with `generated` tokens."""


class DispatchObserver(Protocol):
    """Counts what several engines are sent and answer."""

    def sent(self, dispatch: Dispatch, *, resumed: bool) -> None: ...

    def answered(self, engine: RequestEngine, promised: int, cached: int) -> None:
        """Notes that an engine has reused `cached` tokens of a prompt, of which it was believed to hold `promised`."""


class OnlyEngine:
    """Chooses the only engine of a client."""

    in_line = 0

    def __init__(self, present: Callable[[], RequestEngine | None]) -> None:
        """`present` returns None while requests wait, and raises EngineUnavailable if there will be no engine."""
        self._present = present

    def place(
        self, request: Request, avoid: RequestEngine | None, source: RequestEngine | None = None
    ) -> Dispatch | None:
        engine = self._present()
        return None if engine is None or engine is avoid else Dispatch(engine)

    def quietest(self) -> RequestEngine | None:
        return self._present()

    def trial(self, engine: RequestEngine) -> Dispatch:
        return Dispatch(engine)

    def forget(self, id: int, generated: int) -> None:
        pass
