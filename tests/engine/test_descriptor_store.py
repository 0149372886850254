"""A store keeps the files of processes that die: all of a name, or none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.system import descriptor_store
from penstock.system.descriptor_store import DescriptorStore, get_descriptors, put_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")
MANY = 2 * descriptor_store.MOST_AT_ONCE + 1


@pytest.fixture
def store() -> Iterator[DescriptorStore]:
    store = DescriptorStore()
    yield store
    store.close()


def file_with(text: str) -> int:
    file = os.memfd_create("stored")
    os.write(file, text.encode())
    return file


def texts(address: str, name: str) -> list[str]:
    """Returns the contents of the files that a store has."""
    found = []
    for each in get_descriptors(address, name):
        found.append(os.pread(each, 100, 0).decode())
        os.close(each)
    return found


def stored_files() -> int:
    return sum("memfd:stored" in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())


def test_files_come_back_in_order_and_end_with_the_store(store: DescriptorStore) -> None:
    before = stored_files()
    address = store.open()
    files = [file_with(str(number)) for number in range(MANY)]
    put_descriptors(address, "many", files)
    put_descriptors(address, "one", files[:1])
    for file in files:
        os.close(file)
    for _ in range(2):
        assert texts(address, "many") == [str(number) for number in range(MANY)]
    assert stored_files() == before + MANY + 1
    put_descriptors(address, "many", [])
    assert texts(address, "many") == []
    assert stored_files() == before + 1
    store.close()
    assert stored_files() == before
    with pytest.raises(OSError, match="refused"):
        get_descriptors(address, "one")
    assert texts(store.open(), "one") == []


WRITER = """
import os, signal, socket, sys
from penstock.system import descriptor_store as module
files = [os.memfd_create("stored") for _ in range(3 * module.MOST_AT_ONCE)]
for file in files:
    os.write(file, b"new")
sent = []
send_fds = socket.send_fds
def send(*arguments):
    if len(sent) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    sent.append(send_fds(*arguments))
socket.send_fds = send
module.put_descriptors(sys.argv[1], "it", files)
"""


@pytest.mark.parametrize("messages", [0, 1, 2, 3])
def test_a_process_that_is_killed_while_it_stores_files_changes_nothing(store: DescriptorStore, messages: int) -> None:
    address = store.open()
    old = file_with("old")
    put_descriptors(address, "it", [old])
    os.close(old)
    writer = subprocess.run([sys.executable, "-c", WRITER, address, str(messages)])
    whole = messages == 3
    assert writer.returncode == (0 if whole else -signal.SIGKILL)
    assert set(texts(address, "it")) == ({"new"} if whole else {"old"})


def test_nonsense_does_not_end_the_store(store: DescriptorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor_store, "PATIENCE", 0.2)
    address = store.open()
    for message in (b"", b"{", b"[]", b'{"put": "it"}', b'{"put": "it", "count": 2}', b'{"get": []}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(address.replace("@", "\0"))
            connection.send(message)
    file = file_with("it")
    put_descriptors(address, "it", [file])
    os.close(file)
    assert texts(address, "it") == ["it"]


def test_other_users_get_nothing(store: DescriptorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    address = store.open()
    file = file_with("it")
    put_descriptors(address, "it", [file])
    os.close(file)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(ConnectionError):
        get_descriptors(address, "it")
    with pytest.raises(ConnectionError):
        put_descriptors(address, "it", [])
    monkeypatch.undo()
    assert texts(address, "it") == ["it"]
