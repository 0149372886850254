"""Defines the messages between a steward, its keepers, the gateways and the commands, as msgpack. Every message to the
steward carries the fleet's secret."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.fleet.directory import Death, Directory, ReplicaInfo
from penstock.fleet.scale import MeasuredLoad
from penstock.fleet.split import SplitOptions
from penstock.ipc.placement import ScaleStatus
from penstock.service_levels import NO_TARGETS, Targets


class ScaleSpec(msgspec.Struct, frozen=True):
    """Says within which bounds a fleet's replicas follow its load, and for which targets."""

    least: int
    most: int  # the same: the number of replicas is changed by hand only
    ttft: float = 2000.0  # milliseconds
    itl: float = 0.0  # 0: no target
    patience: float = 300.0  # seconds for which fewer have to suffice before one leaves


class FleetSpec(msgspec.Struct, frozen=True):
    """The wanted state of a fleet, and the addresses of its parts. The run file has it, for the commands."""

    name: str
    folder: str  # the sockets' folder, private to this user
    address: str  # the steward's socket
    secret: str
    run_file: str
    config: Config  # every engine's config
    replicas: int  # wanted replicas
    ground: str = "local"
    ray: str = ""  # address of the Ray cluster
    drain_seconds: float = 30.0  # grace for answers on a draining replica before they move
    host_command: tuple[str, ...] = ()  # the program that serves an engine; empty: a fork
    revision: int = 0  # the config's revision; an upgrade increments it
    next_number: int = 0  # the next replica's number
    adopt: bool = False  # keepers are there already, and will say who they are
    steward_pid: int = 0
    host: str = ""  # the steward's machine
    scaling: ScaleSpec | None = None  # how the number of replicas follows from the load; None: it does not
    split: SplitOptions = SplitOptions()  # prefill/decode split of every gateway
    targets: Targets = NO_TARGETS  # the first gateway's targets, the default for others


class KeeperSpec(msgspec.Struct, frozen=True):
    """Describes the replica of one keeper."""

    name: str
    steward: str  # address
    secret: str
    folder: str
    forks: str  # socket of the process that forks engines
    config: Config
    revision: int
    host_command: tuple[str, ...] = ()
    tcp: bool = False  # gateways are on other machines


class StartFailure(msgspec.Struct, frozen=True, array_like=True):
    """Carries an error to another process."""

    code: str
    message: str


class GatewayBeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is sent by every gateway once a second."""

    secret: str
    gateway: str
    version: int  # its directory version
    measured: MeasuredLoad | None = None  # its requests of the last minute, once there were any


class GatewayLeave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Says that a gateway ends."""

    secret: str
    gateway: str


class KeeperReport(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Is sent by every keeper once a second, and when something has changed."""

    secret: str
    replica: ReplicaInfo
    keeper: int  # process id
    revision: int
    in_flight: int = 0
    restarts: int = 0
    attempts: int = 0  # failed starts since an engine was ready
    failure: StartFailure | None = None  # why the engine cannot be started
    deaths: tuple[Death, ...] = ()  # the last few


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a `FleetStatus`."""

    secret: str


class DrainReplica(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a replica once it has finished its requests."""

    secret: str
    replica: str


class ScaleFleet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sets the number of replicas: a fixed one, or from `replicas` to `most` by the load."""

    secret: str
    replicas: int
    most: int = 0


class UpgradeFleet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Replaces every replica, one after the other, by one with this config."""

    secret: str
    config: Config


ToSteward = GatewayBeat | GatewayLeave | KeeperReport | AskStatus | DrainReplica | ScaleFleet | UpgradeFleet
Command = AskStatus | DrainReplica | ScaleFleet | UpgradeFleet


class DirectoryUpdate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tells a gateway of the replicas."""

    steward: int  # process id
    host: str  # the steward's machine
    directory: Directory
    failure: StartFailure | None = None  # what keeps every replica from starting
    scale: ScaleStatus | None = None


class KeeperOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers a keeper's report."""

    end: bool


class MemberStatus(msgspec.Struct, frozen=True, array_like=True):
    """Describes a replica to the commands."""

    info: ReplicaInfo
    keeper: int
    revision: int
    in_flight: int
    restarts: int


class FleetStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers a command."""

    name: str
    steward: int
    replicas: int  # wanted replicas
    revision: int
    gateways: tuple[str, ...]
    members: tuple[MemberStatus, ...]
    upgrade_failure: StartFailure | None = None  # why the last upgrade was taken back
    scale: ScaleStatus | None = None
    refused: int = 0  # messages that could not be read, or had another secret


class CommandRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers a command that cannot be carried out."""

    code: str
    message: str


FromSteward = DirectoryUpdate | KeeperOrder | FleetStatus | CommandRefused

PROTOCOL = 1  # version of the steward's messages
LONGEST_NUMBER, LONGEST_NAME = 6, 200  # bytes of a protocol's number, and those of a sender's name that are read

_encoder = msgspec.msgpack.Encoder()
_to_steward: msgspec.msgpack.Decoder[ToSteward] = msgspec.msgpack.Decoder(ToSteward)
_from_steward: msgspec.msgpack.Decoder[FromSteward] = msgspec.msgpack.Decoder(FromSteward)


class WrongProtocol(ConfigError):
    """Says that a part of a fleet is of another version, whose messages cannot be read."""

    code = "wrong_protocol"

    def __init__(self, theirs: int, sender: str) -> None:
        self.theirs, self.sender = theirs, sender
        super().__init__(
            f"{sender or 'the sender'} speaks protocol {theirs} of fleets and this process {PROTOCOL}: use one version "
            "of Penstock for all parts of a fleet; to change it, start a new fleet"
        )


def encode(message: ToSteward | FromSteward, sender: str) -> tuple[bytes, bytes]:
    """Returns the frames of a message: the protocol and who sends it, which every version can read, and the message."""
    return f"{PROTOCOL} {sender}".encode(), _encoder.encode(message)


def decode_to_steward(frames: Sequence[bytes]) -> ToSteward:
    """Returns a message to a steward; raises WrongProtocol, or msgspec's DecodeError for other bytes."""
    return _to_steward.decode(_payload(frames))


def decode_from_steward(frames: Sequence[bytes]) -> FromSteward:
    """Returns a steward's message; raises WrongProtocol, or msgspec's DecodeError for other bytes."""
    return _from_steward.decode(_payload(frames))


def _payload(frames: Sequence[bytes]) -> bytes:
    protocol, _, sender = frames[0].partition(b" ") if len(frames) == 2 else (b"", b"", b"")
    if not 0 < len(protocol) <= LONGEST_NUMBER or not protocol.isdigit():
        raise msgspec.DecodeError("a message has two frames, and the first one begins with a protocol's number")
    if int(protocol) != PROTOCOL:
        name = sender[:LONGEST_NAME].decode(errors="replace")
        raise WrongProtocol(int(protocol), name if name.isprintable() else repr(name))
    return frames[1]
