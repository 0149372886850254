"""A server that cannot open another file says so once, and goes on."""

from __future__ import annotations

import asyncio
import errno
import resource

import pytest

from penstock.server.access import open_files
from penstock.server.access.open_files import FullTable, raise_limit


def test_a_full_table_of_files_is_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, full = asyncio.new_event_loop(), FullTable()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "too many")}
    for _ in range(3):
        full(loop, context)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -n" in caplog.text
    full(loop, {"message": "a bug", "exception": ValueError("x")})
    assert "a bug" in caplog.text
    loop.close()


@pytest.mark.parametrize(
    ("limits", "left"),
    [((1024, 4096), 4096 - 128), ((64, 64), 32), ((64, resource.RLIM_INFINITY), 2**16 - 128), ((-1, -1), 2**16 - 128)],
)
def test_connections_leave_room_for_files(limits: tuple[int, int], left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda *_: None)
    assert raise_limit() == left
