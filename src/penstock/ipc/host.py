"""Runs the engine process: `python -m penstock.ipc.host ADDRESS`, with its config as a line of JSON on standard input.

Standard input stays open as long as the parent lives. When it ends, this process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import zmq

from penstock.config import LOG_FORMAT, TOKENS, Config, log_to_stderr
from penstock.engine.engine import Engine
from penstock.engine.flight_recorder import RECORD_BYTES
from penstock.engine.loop import run
from penstock.errors import ConfigError, PenstockError
from penstock.ipc import wire
from penstock.ipc.engine_folder import CLIENTS, FLIGHT, REQUESTS, SOCKET, STACK, connect, engine_file, open_memory
from penstock.ipc.inprocess_engine import hello_of
from penstock.ipc.loading_pulse import LoadingPulse
from penstock.ipc.orphans import STDIN, fork_parent, until_ended
from penstock.types.messages import Message

UntilNeeded = Callable[[], None]  # returns when a standby is to take over
OpenEngine = Callable[[Config, UntilNeeded], Engine]

STDOUT, STDERR = 1, 2


class SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def take(self, wait: bool) -> list[Message]:
        messages = [wire.decode_message(self._socket.recv())] if wait else []
        try:
            while True:
                messages.append(wire.decode_message(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


def host(open: OpenEngine) -> None:
    """Serves until the client sends Close or, if the engine is not shared, ends. An engine that cannot start sends the
    reason and exits."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    _host(open, sys.argv[1], config, STDIN)


def serve_forked(address: str, config: bytes, parent: int | None = None) -> None:
    """Serves in a forked process, as `host` does in a program of its own. `parent` is a file that ends with the process
    which wanted this one; by default, with the server."""
    os.setsid()  # an interrupt of the terminal is the server's
    os.dup2(STDERR, STDOUT)
    given = msgspec.json.decode(config, type=Config)
    _host(open_logging, address, given, fork_parent() if parent is None else parent)


def _host(open: OpenEngine, address: str, config: Config, parent: int) -> None:
    for ending in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager may send one to every process
        signal.signal(ending, signal.SIG_IGN)  # the server decides when to stop
    if LOG_FORMAT in os.environ:
        from penstock.ipc.host_log import log_as_the_server  # an engine's start need not wait for logging

        log_as_the_server()
    _write_stacks(address)
    orphaned = threading.Event()
    ended = orphaned.set if config.listen else partial(_exit, address)
    threading.Thread(target=_watch_parent, args=[parent, ended], daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        connect(socket, address)
        flight = open_memory(address, FLIGHT, RECORD_BYTES)
        turn = Turn(socket, config.standby)
        try:
            with LoadingPulse(flight):
                engine = open(config, turn.wait)
            turn.wait()
        except PenstockError as error:
            socket.send(wire.encode_answer(wire.Refused(error.code, error.message)))
            return
        engine.record_flight(flight)
        model = config.name or Path(config.model).stem
        with _stack_of_errors(address):
            if config.listen:
                _serve_shared(engine, model, socket, config, address, orphaned)
            else:
                _serve(engine, model, socket)


def _serve_shared(
    engine: Engine, model: str, keeper: zmq.Socket[bytes], config: Config, address: str, orphaned: threading.Event
) -> None:
    """Serves all clients that join, even after the keeper has ended."""
    from penstock.ipc.flight_requests import REQUESTS_BYTES, FlightRequests, keeps_requests
    from penstock.ipc.shared_host import LINGER_MS, SharedHost, Sockets, listen

    gc.freeze()
    keeper.setsockopt(zmq.LINGER, LINGER_MS)  # a keeper that has died reads nothing more
    try:
        router = listen(keeper.context, config.listen, engine_file(address, CLIENTS))
    except zmq.ZMQError as error:
        reason = f"the engine cannot listen at {config.listen}: {error}; give another address"
        return keeper.send(wire.encode_answer(wire.Refused(ConfigError.code, reason)))
    requests = None
    if keeps_requests(config):
        requests = FlightRequests(open_memory(address, REQUESTS, REQUESTS_BYTES), tokens=config.post_mortem == TOKENS)
    with router:
        shared = SharedHost(engine, model, Sockets(keeper, router), config.secret, orphaned.is_set, requests)
        try:
            run(engine, shared, shared.send)
            shared.say_farewell()
        finally:
            engine.close()
    if orphaned.is_set():
        _remove_folder(address)


class Turn:
    """Waits until a standby is to take over. Other engines do not wait."""

    def __init__(self, socket: zmq.Socket[bytes], standby: bool) -> None:
        self._socket = socket
        self._waits = standby

    def wait(self) -> None:
        if self._waits:
            assert self._socket.recv() == wire.TAKE_OVER
        self._waits = False


def _serve(engine: Engine, model: str, socket: zmq.Socket[bytes]) -> None:
    def send(answer: wire.Answer) -> None:
        socket.send(wire.encode_answer(answer))

    gc.freeze()  # what exists now stays: scanning it again would delay steps
    send(wire.Ready(hello_of(engine, model)))
    send(wire.step([], engine.stats()))
    try:
        run(engine, SocketInbox(socket), lambda *happened: send(wire.step(*happened)))
    finally:
        engine.close()


def _write_stacks(address: str) -> None:
    """Writes the stacks of all threads to a file of the engine's folder when a signal ends this process, and when the
    parent asks for them because the engine hangs."""
    file = engine_file(address, STACK).open("a")
    faulthandler.enable(file)
    if hasattr(faulthandler, "register"):  # Windows lacks these signals
        faulthandler.register(signal.SIGUSR1, file)


@contextmanager
def _stack_of_errors(address: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        import traceback  # is seldom needed

        with engine_file(address, STACK).open("a") as file:
            traceback.print_exc(file=file)
        raise


def _watch_parent(parent: int, ended: Callable[[], None]) -> None:
    until_ended(parent)
    ended()


def _exit(address: str) -> None:
    """Exits because the parent has ended, and removes the socket's folder: a killed parent could not."""
    _remove_folder(address)
    os._exit(0)


def _remove_folder(address: str) -> None:
    shutil.rmtree(engine_file(address, SOCKET).parent, ignore_errors=True)


def open_logging(config: Config, until_needed: UntilNeeded) -> Engine:
    from penstock.engine.build import open_engine

    return open_engine(config, log_to_stderr, until_needed)


if __name__ == "__main__":
    host(open_logging)
