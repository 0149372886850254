"""Lists the messages from a client to an engine. This is the one table of them: the wire encodes and decodes by it, and
the engine finds the feature that answers by the type."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, TypeVar

from penstock.types.events import PAUSE_KEEP, AdapterList, MemoryUse, Offered, WeightState
from penstock.types.request import Request

LEASE = 5.0  # default seconds of an offer

Answer = TypeVar("Answer", bound=AdapterList | MemoryUse | Offered | WeightState, covariant=True)


class Control(Protocol[Answer]):
    """Is answered by an event of one type, or a Failed, with the message's id. Ids are unique among requests and
    control messages; the client sets them when it sends a message."""

    @property
    def id(self) -> int: ...

    @property
    def answer(self) -> type[Answer]: ...

    def _replace(self, *, id: int) -> Self: ...


class Add(NamedTuple):
    """Sends a request."""

    request: Request


class Abort(NamedTuple):
    """Ends a request."""

    id: int


class FlushCache(NamedTuple):
    """Clears the prefix cache."""


class Release(NamedTuple):
    """Ends an offer of KV blocks. Ended offers are ignored."""

    offer: bytes


class Close(NamedTuple):
    """Ends the engine's loop."""


class RegisterAdapter(NamedTuple):
    """Registers an adapter."""

    name: str
    path: str
    scale: float = 1.0
    replace: bool = False  # an adapter of the same name is forgotten, once this one was found to fit
    id: int = 0

    @property
    def answer(self) -> type[AdapterList]:
        return AdapterList


class UnregisterAdapter(NamedTuple):
    """Removes an adapter. Requests that have begun keep it."""

    name: str
    id: int = 0

    @property
    def answer(self) -> type[AdapterList]:
        return AdapterList


class ListAdapters(NamedTuple):
    """Asks for all registered adapters."""

    id: int = 0

    @property
    def answer(self) -> type[AdapterList]:
        return AdapterList


class Pause(NamedTuple):
    """Stops all steps. New requests wait. By `mode`, running requests are kept, waited for, or aborted."""

    mode: str = PAUSE_KEEP
    id: int = 0

    @property
    def answer(self) -> type[WeightState]:
        return WeightState


class Resume(NamedTuple):
    """Ends a pause."""

    id: int = 0

    @property
    def answer(self) -> type[WeightState]:
        return WeightState


class AbortAll(NamedTuple):
    """Ends all requests. New ones run as usual."""

    id: int = 0

    @property
    def answer(self) -> type[WeightState]:
        return WeightState


class UpdateWeights(NamedTuple):
    """Replaces the loaded weights by weights from a folder or file, between two steps."""

    path: str
    version: str = ""  # empty: the number of the update
    recompute: bool = True  # recompute the KV of running requests; False: keep the KV that the old weights computed
    number: int = 0  # number of the update, if another engine had it before; 0: the next one
    id: int = 0

    @property
    def answer(self) -> type[WeightState]:
        return WeightState


class DescribeWeights(NamedTuple):
    """Asks which weights are loaded, and whether the engine is paused."""

    id: int = 0

    @property
    def answer(self) -> type[WeightState]:
        return WeightState


class Sleep(NamedTuple):
    """Gives the device's memory back once all requests have ended."""

    id: int = 0

    @property
    def answer(self) -> type[MemoryUse]:
        return MemoryUse


class Wake(NamedTuple):
    """Takes the memory again that Sleep gave back."""

    id: int = 0

    @property
    def answer(self) -> type[MemoryUse]:
        return MemoryUse


class Offer(NamedTuple):
    """Asks for the cached blocks of a prompt to be offered, from block `first` on."""

    prompt: tuple[int, ...]
    salt: str = ""
    first: int = 0
    seconds: float = LEASE  # time that the blocks are kept for a reader
    device: str = ""  # the reader's device, as in its Hello
    id: int = 0

    @property
    def answer(self) -> type[Offered]:
        return Offered


class Prefill(NamedTuple):
    """Computes the prompt of a request and then offers its blocks. The request's own id, sampling and length do not
    matter: another engine answers it."""

    request: Request
    first: int = 0
    seconds: float = LEASE
    device: str = ""
    id: int = 0

    @property
    def answer(self) -> type[Offered]:
        return Offered


Message = Add | Abort | FlushCache | Release | Close | Control[Any]
MESSAGES: tuple[type, ...] = (
    *(Add, Abort, FlushCache, Release, Close),
    *(RegisterAdapter, UnregisterAdapter, ListAdapters),
    *(Pause, Resume, AbortAll, UpdateWeights, DescribeWeights),
    *(Sleep, Wake),
    *(Offer, Prefill),
)
