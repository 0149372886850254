"""Prompts on disk: a server that was restarted reads them, answers the same, and never serves what was damaged."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.backend.fake import FakeBackend, continuation
from penstock.config import configure
from penstock.core import check, hashing
from penstock.core.kvcache import KvCache
from penstock.core.step_cost import PromptCost
from penstock.core.tiers import CopyCosts
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.engine import Engine
from penstock.engine.host_blocks import HostBlocks
from penstock.engine.kv_disk import loading
from penstock.engine.kv_disk.prefixes import DiskPrefixes
from penstock.engine.kv_disk.rates import Rates, read_rates, write_rates
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore, StoredBlock
from penstock.errors import ConfigError
from penstock.planning.memory_plan import all_states
from penstock.types import (
    Aborted,
    Event,
    Finished,
    Limits,
    Report,
    Request,
    SamplingParams,
    Tokens,
)
from tests.engine.one_head import ONE_HEAD

LIMITS = Limits(
    max_len=128, max_rows=4, step_tokens=16, block_size=4, num_blocks=64, vocab=100, host_places=64, windows=(0,)
)
PROMPT = tuple(range(1, 42))  # 10 full blocks
FREE = 1 << 40


class Slow(SegmentStore):
    """Reads a block when it is allowed to."""

    def __init__(self, folder: Path, layout: BlockLayout, limit: int) -> None:
        super().__init__(folder, layout, limit, free=lambda _: FREE)
        self.allowed = threading.Semaphore(0)
        self.asked = 0  # blocks, by one thread

    def read(self, block: StoredBlock, targets: loading.Targets) -> bool:
        self.asked += 1
        self.allowed.acquire()
        return super().read(block, targets)


class Server:
    """Is one life of an engine with the fake backend, whose answers show what its KV holds."""

    def __init__(
        self,
        folder: Path,
        windows: tuple[int, ...] = (0,),
        slow: bool = False,
        places: int = 64,
        states: int = 0,
        host_states: int = 4,
    ) -> None:
        self.limits = LIMITS._replace(windows=windows, host_places=places, states=states, host_states=host_states)
        backend = FakeBackend(LIMITS.vocab, windows=windows)
        backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size, all_states(self.limits))
        sizes = len(windows), len(backend.kv.export_blocks([0])), 8 if states else 0
        layout = BlockLayout(b"f" * 16, LIMITS.block_size, *sizes)
        self.store = (
            Slow(folder, layout, 1 << 20) if slow else SegmentStore(folder, layout, 1 << 20, free=lambda _: FREE)
        )
        self.store.open()
        self.engine = assemble(backend, self.limits, kv_store=self.store)
        self._id = 0

    def add(self, *prompt: int, max_tokens: int = 6, **options: object) -> int:
        self._id += 1
        sampling = SamplingParams(temperature=0)
        self.engine.add(Request(self._id, prompt, sampling, max_tokens)._replace(**options))
        return self._id

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while not self.engine.idle:
            events += self.engine.step()
            check(self.engine.scheduler)
        while self.engine.use_idle_moment():
            pass
        return events

    def answer(self, *prompt: int, **options: object) -> Report:
        """Answers a prompt, sees that the answer is right, and returns its report."""
        id = self.add(*prompt, **options)
        events = self.drain()
        expected = continuation(prompt, 6, LIMITS.vocab, self.limits.states > 0, self.limits.windows)
        assert list(tokens_of(events, id)) == expected
        return report_of(events, id)

    def close(self) -> None:
        self.engine.close()


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes computing to be slower than copying, and waits for slow machines: the fake's time means nothing."""
    monkeypatch.setattr(loading, "LEAST", 5.0)
    monkeypatch.setattr(PromptCost, "FEW", 1 << 30)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    servers: list[Server] = []

    def start(**options: object) -> Server:
        servers.append(Server(tmp_path, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def tokens_of(events: list[Event], id: int) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, Tokens) and event.seq == id for token in event.tokens)


def report_of(events: list[Event], id: int) -> Report:
    [report] = [event.report for event in events if isinstance(event, Finished) and event.seq == id]
    assert report is not None
    return report


def restart(serve, server: Server, **options: object) -> Server:
    server.close()
    return serve(**options)


def test_a_restarted_server_reads_what_it_computed(serve) -> None:
    server = serve()
    assert server.answer(*PROMPT).cached == 0
    server = restart(serve, server)
    report = server.answer(*PROMPT)
    assert report.reused == (("disk", 40),)
    assert "kv" in dict(report.waited)
    assert server.answer(*PROMPT).reused == (("device", 40),)
    counts = server.engine.stats().disk
    assert (counts.read, counts.skipped) == (10, ())
    assert counts.blocks >= 11  # with what follows the prompt
    assert counts.bytes == counts.blocks * server.store.layout.record_bytes


def test_a_longer_prompt_computes_only_what_is_new(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server)
    assert server.answer(*PROMPT[:30], 7, 7, 7, 7, 7).reused == (("disk", 28),)
    assert server.answer(*PROMPT, 8, 8, 8, 8).reused == (("device", 28), ("disk", 12))


def test_an_answer_is_kept_for_the_next_turn(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    answer = continuation(PROMPT, 6, LIMITS.vocab)
    server = restart(serve, server)
    assert server.answer(*PROMPT, *answer, 9, 9).reused == (("disk", 44),)


@pytest.mark.parametrize("windows", [(6,), (0, 6), (0, 9, 23)])
def test_windows(serve, windows: tuple[int, ...]) -> None:
    server = serve(windows=windows)
    server.answer(*PROMPT)
    server = restart(serve, server, windows=windows)
    report = server.answer(*PROMPT)
    assert (report.cached, "disk" in dict(report.reused)) == (40, True)
    server = restart(serve, server, windows=windows)
    assert server.answer(*PROMPT, 5, 5, 5, 5, 5).cached >= 40
    server.answer(*PROMPT[:20], 3, 3, 3, 3)  # the windows there are gone: it is right in any case


def test_salts_are_apart_and_unwanted_prompts_are_not_kept(serve) -> None:
    server = serve()
    server.answer(*PROMPT, salt="a")
    server.answer(*range(50, 80), durable=False)
    server.close()
    assert server.engine.stats().disk.written == 11
    server = restart(serve, server)
    assert server.answer(*PROMPT).cached == 0
    assert server.answer(*PROMPT, salt="b").cached == 0
    assert server.answer(*PROMPT, salt="a", durable=False).cached == 0
    assert server.answer(*PROMPT, salt="a").reused == (("device", 40),)
    server = restart(serve, server)
    assert server.answer(*PROMPT, salt="a").reused == (("disk", 40),)


def test_scored_prompts_are_computed(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server)
    id = server.add(*PROMPT, sampling=SamplingParams(temperature=0, prompt_logprobs=0))
    assert report_of(server.drain(), id).cached == 0


def test_two_requests_wait_for_one_reading(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server)
    ids = [server.add(*PROMPT), server.add(*PROMPT)]
    events = server.drain()
    assert [sum(tokens for _, tokens in report_of(events, id).reused) for id in ids] == [40, 40]
    assert server.engine.stats().disk.read == 10


def test_others_run_while_one_waits_and_a_slow_disk_is_given_up(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST", 60.0)
    monkeypatch.setattr(loading, "THREADS", 1)
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server, slow=True)
    slow = server.add(*PROMPT)
    other = server.add(5, 6, 7, 8, 9, 10)
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        events += server.engine.step()
    assert tokens_of(events, other)
    assert not tokens_of(events, slow)
    server.store.allowed.release(4)
    while server.store.asked < 5:  # then four are read
        time.sleep(0.001)
    monkeypatch.setattr(loading, "LEAST", 0.2)
    events += server.drain()
    assert tokens_of(events, slow) == tuple(continuation(PROMPT, 6, LIMITS.vocab))
    assert report_of(events, slow).reused == (("disk", 16),)
    assert dict(report_of(events, slow).waited)["kv"] > 0.1
    assert server.engine.stats().disk.given_up == 1
    reserved = server.engine.scheduler.cache.host.reserved
    assert reserved  # a thread may still write to these
    server.store.allowed.release(100)
    while reserved:
        time.sleep(0.01)
        server.answer(1, 2, 3)
        server.engine.use_idle_moment()
    server.answer(*PROMPT)


def test_a_request_that_is_aborted_while_it_waits(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server, slow=True)
    first, second = server.add(*PROMPT), server.add(*PROMPT)
    server.engine.step()
    server.engine.abort(first)
    server.store.allowed.release(100)
    events = server.drain()
    assert [event.seq for event in events if isinstance(event, Aborted)] == [first]
    assert report_of(events, second).reused == (("disk", 40),)
    server = restart(serve, server, slow=True)
    server.engine.abort(server.add(*PROMPT))
    server.store.allowed.release(100)
    assert isinstance(server.drain()[0], Aborted)
    while server.engine.scheduler.cache.host.reserved:
        time.sleep(0.01)
        server.engine.use_idle_moment()
    server.answer(*PROMPT)


def test_too_few_places_are_not_waited_for(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server, places=4)
    assert server.answer(*PROMPT).cached == 0


def test_a_flush_forgets_the_disk_too(serve, tmp_path: Path) -> None:
    server = serve()
    server.answer(*PROMPT)
    server.engine.flush_cache()
    assert not list(tmp_path.glob("*/*.kv"))
    assert server.answer(*PROMPT).cached == 0
    server = restart(serve, server)
    assert server.answer(*PROMPT).cached == 40


def test_updated_weights_use_no_files(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server)
    server.engine.weights = server.engine.weights._replace(updates=1, version="2")
    assert server.answer(*PROMPT).cached == 0
    server.close()
    assert server.store.written == 0


def test_damaged_files_are_never_served(serve, tmp_path: Path) -> None:
    """Flips bits anywhere in the files between two lives: answers stay right, and nothing raises. The bench repeats it
    100,000 times."""
    chance = random.Random(1)
    server = serve()
    wrong = 0
    for turn in range(60):
        server.answer(*PROMPT)
        server.close()
        for path in tmp_path.glob("*/*.kv"):
            data = bytearray(path.read_bytes())
            for _ in range(chance.choice((1, 2, 40))):
                at = chance.randrange(len(data))
                data[at] ^= 1 << chance.randrange(8)
            path.write_bytes(data[: chance.randrange(len(data)) if turn % 7 == 0 else len(data)])
        server = serve()
        report = server.answer(*PROMPT)
        wrong += server.engine.stats().disk.skipped != ()
        assert report.cached <= 40
    assert wrong > 10


def test_reading_that_would_take_longer_than_computing_is_not_begun(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.answer(*PROMPT)
    server = restart(serve, server)
    monkeypatch.setattr(PromptCost, "FEW", 0)
    loader = server.engine.find(DiskPrefixes)._reads.loader
    loader.observe(1, 1.0)  # a byte in a second
    for _ in range(3):
        report = server.answer(*PROMPT)
        assert "kv" not in dict(report.waited)
        server.engine.scheduler.cache.flush()
    assert server.engine.stats().disk.read == 0
    assert loader.rate > 1.0  # so that it is tried again some time


# -- real backends -----------------------------------------------------------------------------------------------------

GOLDENS = Path(__file__).parents[1] / "models" / "goldens"
OPTIONS = {"threads": 1, "max_rows": 2, "max_len": 64, "block_size": 8, "speculation": "off", "kv_ram": 1 << 20}
TEXT = tuple((7 * at * at + 3 * at) % 29 + 2 for at in range(45))


def answer_once(name: str, text: tuple[int, ...] = TEXT, **options: object) -> tuple[list[object], Report, Engine]:
    """Starts an engine, has it answer once and stops it. Returns the answer's logprobs and report, and the engine."""
    engine = open_engine(configure(GOLDENS / name, OPTIONS | options))
    engine.add(Request(1, text, SamplingParams(temperature=0, logprobs=3), 8))
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    engine.close()
    told = [each for event in events if isinstance(event, Tokens) for each in event.logprobs]
    return told, report_of(events, 1), engine


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", {"device": "cpu"}),
        ("llama3", {"device": "ref"}),
        ("llama3", {"device": "cpu", "kv": "int8"}),
        ("untied", {"device": "cpu", "kv": "int8:int4", "config": ONE_HEAD}),
        ("untied", {"device": "ref", "kv": "int4", "config": ONE_HEAD}),
        ("gemma3", {"device": "cpu"}),
        ("deepseek_v3", {"device": "cpu"}),
        ("qwen3next", {"device": "cpu"}),
        ("qwen3next", {"device": "ref"}),
        ("bamba", {"device": "cpu"}),
        ("lfm2", {"device": "cpu"}),
        ("kimi_linear", {"device": "cpu"}),
    ],
)
def test_an_answer_after_a_restart_is_the_same_to_the_bit(
    tmp_path: Path, name: str, options: dict[str, object]
) -> None:
    options = options | {"kv_disk": str(tmp_path)}
    first, before, _ = answer_once(name, **options)
    again, after, _ = answer_once(name, **options)
    assert (before.cached, after.cached) == (0, 40)
    assert "disk" in dict(after.reused)
    if options["device"] == "cpu":  # the reference's sums depend on how prompts are cut
        assert again == first
    else:
        assert [each.token for each in again] == [each.token for each in first]


def test_other_weights_types_and_layouts_are_apart(tmp_path: Path) -> None:
    disk = {"device": "cpu", "kv_disk": str(tmp_path)}
    answer_once("llama3", **disk)
    assert answer_once("llama3", **disk, kv="int8")[1].cached == 0
    assert answer_once("llama3", **disk, kv="int8:f16")[1].cached == 0
    assert answer_once("llama3", **disk, kv="f16:int8")[1].cached == 0
    assert answer_once("llama3", **disk, block_size=16)[1].cached == 0
    copied = tmp_path / "model"
    shutil.copytree(GOLDENS / "llama3", copied)
    assert answer_once(str(copied), **disk)[1].cached == 0
    assert answer_once("llama3", **disk)[1].cached == 40


# -- recurrent states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_a_restarted_server_reads_the_state_with_the_blocks(serve, windows: tuple[int, ...]) -> None:
    server = serve(states=4, windows=windows)
    server.answer(*PROMPT)
    server = restart(serve, server, states=4, windows=windows)
    assert server.answer(*PROMPT).reused == (("disk", 40),)
    assert server.answer(*PROMPT).reused == (("device", 40),)


def test_a_conversation_goes_on_from_the_state_of_its_answer(serve) -> None:
    server = serve(states=4)
    prompt = PROMPT[:30]
    answer = continuation(prompt, 20, LIMITS.vocab, True)
    server.add(*prompt, max_tokens=20)
    server.drain()
    server = restart(serve, server, states=4)
    assert server.answer(*prompt, *answer, 7, 8, 9).reused == (("disk", 48),)


def test_where_prompts_part_the_state_is_written_too(serve) -> None:
    server = serve(states=8)
    for last in (70, 80, 90):
        server.answer(*PROMPT[:22], *range(last, last + 9))
    server = restart(serve, server, states=8)
    assert server.answer(*PROMPT[:22], 33, 33, 33).reused == (("disk", 20),)


def test_a_state_alone_is_read_where_the_blocks_are_known(serve) -> None:
    server = serve(states=4)
    server.answer(*PROMPT)
    while len(server.store) < 11 or not server.store.has_state(hashing.chain("", PROMPT, LIMITS.block_size)[-1]):
        time.sleep(0.01)  # a thread writes
    server.engine.scheduler.cache.states.clear()
    assert server.answer(*PROMPT).cached == 40
    assert server.engine.stats().disk.read == 0  # all blocks were there
    assert server.engine.stats().disk.skipped == ()


def test_without_a_place_for_the_state_nothing_is_read(serve) -> None:
    server = serve(states=4)
    server.answer(*PROMPT)
    server = restart(serve, server, states=4, host_states=1)
    place = server.engine.scheduler.cache.states.reserve()
    assert server.answer(*PROMPT).cached == 0
    server.engine.scheduler.cache.states.unreserve(place)
    assert server.engine.scheduler.cache.host.reserved == set()


def test_a_request_that_gives_up_leaves_the_place_of_its_state(serve) -> None:
    server = serve(states=4)
    server.answer(*PROMPT)
    server = restart(serve, server, states=4, slow=True)
    id = server.add(*PROMPT)
    server.engine.step()
    assert len(server.engine.scheduler.cache.states.host.reserved) == 1
    server.engine.abort(id)
    server.store.allowed.release(99)
    while server.engine.scheduler.cache.states.host.reserved:
        server.drain()
    assert len(server.engine.scheduler.cache.states.host.free()) == 4
    server.answer(*PROMPT)


def test_host_memory_that_holds_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_ram to a number of bytes of at least"):
        answer_once("qwen3next", device="cpu", kv_disk=str(tmp_path), kv_ram=2000)


def test_without_host_memory_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_ram"):
        answer_once("llama3", device="cpu", kv_disk=str(tmp_path), kv_ram=0)


def test_rates_outlive_a_server(tmp_path: Path) -> None:
    assert read_rates(tmp_path) == Rates()
    write_rates(tmp_path, Rates(1e-3, 1e-6, 2e9))
    assert read_rates(tmp_path) == Rates(1e-3, 1e-6, 2e9)
    assert read_rates(tmp_path).seconds(100, 50) == pytest.approx(0.11)
    for text in ("", "{}", "[1]", '{"token": -1, "pair": 0, "read": 0}', '{"token": "x", "pair": 0, "read": 0}'):
        (tmp_path / "rates.json").write_text(text)
        assert read_rates(tmp_path) == Rates()


def test_blocks_that_are_in_use_at_the_start_are_left_alone(serve) -> None:
    server = serve()
    server.answer(*PROMPT)
    server.close()
    server.store.open()
    memory, cache = FakeBackend(LIMITS.vocab), KvCache(LIMITS)
    memory.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    used = cache.pool.take()
    memory.kv.import_blocks([used], bytes(range(len(memory.kv.export_blocks([used])))))
    before = memory.kv.export_blocks([used])
    host = HostBlocks(LIMITS, memory.kv, CopyCosts())
    DiskPrefixes(server.store, cache, host, None, memory.kv, LIMITS, PromptCost(), hashing.chain).close()
    assert memory.kv.export_blocks([used]) == before
    assert not any(memory.kv.export_blocks([cache.pool.take()]))


def test_a_chain_that_is_read_does_not_wait_for_a_thread_that_is_busy() -> None:
    class Whole:
        def read(self, *_: object) -> bool:
            return True

    chain = loading.Loading([None] * 3, [()] * 3, lambda _: 0.0)  # type: ignore[list-item]
    chain.run(Whole())  # type: ignore[arg-type]  # the other thread hangs with the disk
    assert chain.ready
    assert (chain.usable, chain.finished, chain.given_up) == (3, False, False)


def test_in_idle_the_blocks_that_come_next_are_touched_and_no_others(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    touched: list[int] = []
    kv = server.engine.backend.kv
    touch = kv.touch_blocks
    monkeypatch.setattr(kv, "touch_blocks", lambda blocks: (touched.extend(blocks), touch(blocks)))
    while server.engine.use_idle_moment():
        pass
    assert not touched, "nothing is on disk that could be read"
    before = server.engine.scheduler.cache.pool.snapshot()
    server.answer(*PROMPT)
    while len(server.store) < 10:  # a thread writes
        time.sleep(0.01)
    while server.engine.use_idle_moment():
        pass
    free = server.engine.scheduler.cache.pool
    assert 10 <= len(touched) <= len(server.store)
    assert touched == free.upcoming(len(touched)), "what the prompt holds is left alone"
    assert free.snapshot() < before
    assert dict(server.answer(*PROMPT).reused) == {"device": 40}
