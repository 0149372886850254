"""Loading a model yields to those who compute, and the engine computes at its own priority afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.engine import low_priority
from penstock.engine.low_priority import NICE, run_yielding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_and_its_threads_have_a_low_priority_and_others_keep_theirs() -> None:
    before = own_nice()

    def work() -> list[int]:
        found = [own_nice()]
        helper = threading.Thread(target=lambda: found.append(own_nice()))
        helper.start()
        helper.join()
        return found

    assert run_yielding(work) == [NICE, NICE]
    assert own_nice() == before


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_yielding(lambda: 1 // 0)


def test_work_that_takes_long_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_priority, "LONGEST", 0.01)
    ended = threading.Event()
    threading.Timer(0.2, ended.set).start()
    assert run_yielding(lambda: ended.wait(10)) is True


def test_a_session_of_its_own_gets_its_priority_back() -> None:
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel has no autogroups")
    program = """
from pathlib import Path
from penstock.engine.low_priority import run_yielding
print(run_yielding(lambda: Path("/proc/self/autogroup").read_text()), Path("/proc/self/autogroup").read_text())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True)
    assert found.stdout.split()[-1] == "0", found
