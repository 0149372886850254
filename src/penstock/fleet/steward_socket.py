"""The socket of a steward, and the gateways that use it."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from penstock.errors import ConfigError
from penstock.fleet.scale import MeasuredLoad
from penstock.fleet.steward_wire import (
    CommandRefused,
    DirectoryUpdate,
    FromSteward,
    GatewayBeat,
    ToSteward,
    WrongProtocol,
    decode_to_steward,
    encode,
)

log = logging.getLogger(__name__)

ABANDONED = 60.0  # seconds without a gateway after which the fleet ends
GATEWAY_SILENT = 5.0  # seconds after which a silent gateway is gone
MOST_STRANGERS = 32  # senders of another version that are logged


class StewardSocket:
    """Receives the messages of one fleet, and refuses all others."""

    def __init__(self, secret: str) -> None:
        self.refused = 0  # messages
        self._secret = secret.encode()
        self._strangers: set[tuple[str, int]] = set()  # senders that speak another protocol, and which
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)

    def bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"the steward cannot listen at {address}: {error}") from error

    async def messages(self) -> AsyncIterator[tuple[bytes, ToSteward | WrongProtocol]]:
        """Yields messages with the route of their sender, and senders of another version."""
        while True:
            route, *frames = await self._socket.recv_multipart()
            try:
                message = decode_to_steward(frames)
            except msgspec.DecodeError:
                self.refused += 1  # not a message of a fleet: no answer
            except WrongProtocol as error:
                self._refuse_version(route, error)
                yield route, error
            else:
                if hmac.compare_digest(message.secret.encode(), self._secret):
                    yield route, message
                else:
                    self.refused += 1
                    self.send(route, CommandRefused("wrong_secret", "the secret is not that of this fleet"))

    def _refuse_version(self, route: bytes, error: WrongProtocol) -> None:
        self.refused += 1
        if (error.sender, error.theirs) not in self._strangers and len(self._strangers) < MOST_STRANGERS:
            self._strangers.add((error.sender, error.theirs))
            log.error("%s", error)
        self.send(route, CommandRefused(error.code, error.message))

    def send(self, route: bytes, message: FromSteward) -> None:
        self._socket.send_multipart((route, *encode(message, "the steward")))

    def close(self, linger: int = 0) -> None:
        self._context.destroy(linger=linger)


@dataclass(slots=True)
class KnownGateway:
    route: bytes
    version: int  # its directory version
    heard: float
    measured: MeasuredLoad | None = None


class Gateways:
    """Keeps the gateways of a fleet. Times are seconds in which the steward was awake."""

    def __init__(self) -> None:
        self._known: dict[str, KnownGateway] = {}
        self._abandoned = ABANDONED  # when the fleet ends, unless a gateway comes
        self._pushed = 0  # version of the directory that all were sent

    def __len__(self) -> int:
        return len(self._known)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._known)

    def note(self, route: bytes, beat: GatewayBeat, now: float) -> None:
        self._known[beat.gateway] = KnownGateway(route, beat.version, now, beat.measured)
        self._abandoned = now + ABANDONED

    def leave(self, name: str) -> None:
        self._known.pop(name, None)

    def forget_silent(self, now: float) -> None:
        for name, gateway in list(self._known.items()):
            if now - gateway.heard > GATEWAY_SILENT:
                del self._known[name]

    def is_abandoned(self, now: float) -> bool:
        return now > self._abandoned

    @property
    def seen(self) -> int:
        return min((gateway.version for gateway in self._known.values()), default=2**62)

    @property
    def measured(self) -> list[MeasuredLoad]:
        return [each.measured for each in self._known.values() if each.measured is not None]

    def push(self, update: DirectoryUpdate, link: StewardSocket) -> None:
        if update.directory.version != self._pushed:
            self._pushed = update.directory.version
            for gateway in self._known.values():
                link.send(gateway.route, update)
