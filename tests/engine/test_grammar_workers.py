"""Threads compile grammars beside the steps, and none of them is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.engine.grammars import grammar as grammar_module
from penstock.engine.grammars.grammar import Compiled, Compiling, Grammars
from penstock.errors import Overloaded
from penstock.server.chat import schema_check
from penstock.system.runtime import large_stacks
from penstock.types import Grammar


class Vocabulary:
    """A token for each byte, and one that ends answers."""

    vocab_size = 257
    bos_id = None
    eos_ids = special_ids = frozenset({256})

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b"<end>"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def lark(word: str) -> Grammar:
    return Grammar("lark", f'start: "{word}"')


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def compiled(compiling: Compiling) -> Compiled:
    compiling.wait(30)
    return compiling.result()


def test_workers_end_when_all_is_compiled_and_come_back_for_more() -> None:
    """An engine that is given up would leave its threads behind, with a GB of addresses each."""
    grammars, before = Grammars(Vocabulary, 257), set(threading.enumerate())
    for round in range(3):
        for compiling in [grammars.compile(lark(f"{round}-{word}")) for word in range(20)]:
            compiled(compiling)
        wait_until(lambda: set(threading.enumerate()) <= before)  # of others some may end meanwhile


def test_a_worker_is_at_hand_for_each_of_two_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that come while others compile wait for no more than the two before them."""
    both, matcher = threading.Barrier(2, timeout=30), grammar_module._matcher

    def meet(*given: Any) -> Any:
        both.wait()
        return matcher(*given)

    monkeypatch.setattr(grammar_module, "_matcher", meet)
    grammars = Grammars(Vocabulary, 257)
    for compiling in [grammars.compile(lark(word)) for word in ("yes", "no", "so", "on")]:
        compiled(compiling)


def test_without_a_thread_one_request_is_refused_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, usual = Grammars(Vocabulary, 257), threading.stack_size()
    monkeypatch.setattr(grammar_module, "STACK_BYTES", 1 << 50)  # more addresses than there are
    with pytest.raises(Overloaded, match="for want of a thread"):
        grammars.compile(lark("yes"))
    assert threading.stack_size() == usual
    monkeypatch.undo()
    assert compiled(grammars.compile(lark("yes"))).matcher


def test_without_a_thread_a_schema_is_refused_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = threading.stack_size()
    monkeypatch.setattr(schema_check, "STACK_BYTES", 1 << 50)  # more addresses than there are
    with ThreadPoolExecutor(1) as workers:
        monkeypatch.setattr(schema_check, "_workers", workers)
        with pytest.raises(Overloaded, match="the JSON schema cannot be read, for want of a thread"):
            asyncio.run(schema_check._off_loop("{}"))
        assert threading.stack_size() == usual
        monkeypatch.setattr(schema_check, "STACK_BYTES", 1 << 30)
        assert asyncio.run(schema_check._off_loop('{"const": 1}')).schema


def test_whoever_starts_threads_at_once_leaves_the_size_of_stacks_alone() -> None:
    """Engines compile grammars and a server rewrites schemas, each in threads of its own."""
    usual = threading.stack_size()
    engines = [Grammars(Vocabulary, 257) for _ in range(8)]
    starters = [threading.Thread(target=lambda each=each: compiled(each.compile(lark("yes")))) for each in engines]
    for number in range(8):
        text = json.dumps({"const": number})
        starters.append(threading.Thread(target=lambda text=text: asyncio.run(schema_check._off_loop(text))))
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert threading.stack_size() == usual


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_meanwhile_has_stacks_of_the_usual_size() -> None:
    usual, inside = threading.stack_size(), threading.Event()

    def hold() -> None:
        with large_stacks(2**30):
            inside.set()
            time.sleep(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    if (pid := os.fork()) == 0:
        signal.alarm(10)  # ends it if it waits for ever
        with large_stacks(2**30):
            pass
        os._exit(threading.stack_size() != usual)
    holder.join()
    assert os.waitpid(pid, 0)[1] == 0
