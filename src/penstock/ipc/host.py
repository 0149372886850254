"""Runs the engine process: `python -m penstock.ipc.host ADDRESS`, with its config as a line of JSON on standard input.

Standard input stays open as long as the parent lives. When it ends, this process ends.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from penstock.config import Config
from penstock.engine.engine import Engine
from penstock.engine.loop import Message, run
from penstock.errors import PenstockError
from penstock.ipc import wire
from penstock.ipc.engine_folder import SOCKET, STACK, engine_file, open_flight
from penstock.ipc.inprocess_engine import hello_of
from penstock.ipc.loading_pulse import LoadingPulse

OpenEngine = Callable[[Config], Engine]

STDIN, STDOUT, STDERR = 0, 1, 2


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
    """Serves one client until it sends Close or ends. An engine that cannot start sends the reason and exits."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    _host(open, sys.argv[1], config, _until_stdin_ends)


def serve_forked(address: str, config: bytes) -> None:
    """Serves one client in a forked process, as `host` does in a program of its own."""
    from penstock.engine.build import open_engine

    os.setsid()  # an interrupt of the terminal is the server's
    os.dup2(STDERR, STDOUT)
    given = msgspec.json.decode(config, type=Config)
    _host(lambda config: open_engine(config, log_line), address, given, _until_parent_ends)


def _host(open: OpenEngine, address: str, config: Config, until_parent_ends: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    _write_stacks(address)
    threading.Thread(target=_exit_with_parent, args=[address, until_parent_ends], daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        flight = open_flight(address)
        try:
            with LoadingPulse(flight):
                engine = open(config)
        except PenstockError as error:
            socket.send(wire.encode_answer(wire.Refused(error.code, error.message)))
            return
        engine.record_flight(flight)
        _serve(engine, config.name or Path(config.model).stem, socket)


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
    """Has the stacks of all threads written to a file of the engine's folder when a signal ends this process, and when
    the parent asks for them because the engine hangs."""
    file = engine_file(address, STACK).open("w")
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)


def _until_stdin_ends() -> None:
    while os.read(STDIN, 4096):
        pass


def _until_parent_ends() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()


def _exit_with_parent(address: str, until_parent_ends: Callable[[], None]) -> None:
    """Exits when the parent has ended, and removes the socket's folder: a killed parent could not."""
    until_parent_ends()
    shutil.rmtree(engine_file(address, SOCKET).parent, ignore_errors=True)
    os._exit(0)


def log_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    from penstock.engine.build import open_engine

    host(lambda config: open_engine(config, log_line))
