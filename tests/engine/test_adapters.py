"""Requests with adapters: each is computed with its own, whatever runs beside it, and nobody waits for another's."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.backend.fake import FakeAdapter, FakeBackend, continuation
from penstock.config import parse_adapter
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.loop import advance
from penstock.engine.lora import adapters as adapters_module
from penstock.engine.lora.adapters import MAX_PASSED, Adapters
from penstock.engine.lora.feature import AdapterControl
from penstock.errors import AdapterError, AdapterNotFound, ConfigError, InvalidRequest
from penstock.ipc import wire
from penstock.llm.engine_options import read_options
from penstock.llm.lora import LoRARequest, lora_list, use_of
from penstock.model.low_rank import LowRankPart, LowRankUpdate
from penstock.types import (
    AdapterInfo,
    AdapterList,
    AdapterUse,
    Event,
    Failed,
    Finished,
    Grammar,
    Limits,
    Request,
    SamplingParams,
    Tokens,
)
from penstock.types.messages import ListAdapters, RegisterAdapter, Sleep, UnregisterAdapter

VOCAB = 1000
LIMITS = Limits(max_len=200, max_rows=8, step_tokens=32, block_size=4, num_blocks=120, vocab=VOCAB)
BYTES = 1000  # of each adapter of these tests


class FileAdapter:
    """Stands for an adapter of one weight, whose value (see FakeAdapter) is the number in its file."""

    rank = 1

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        if not self.text.isdigit():
            raise AdapterError(f"the adapter at {path} cannot be used: {self.text}")

    def digest(self) -> str:
        return f"digest of {self.text}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has adapters of numbers in files, in place of real ones."""

    def updates_of(uses: Any, placements: Any) -> list[LowRankUpdate]:
        parts = [
            LowRankPart(0, np.ones((1, 1), np.float32), np.full((1, 1), float(one.text) * scale, np.float32))
            for one, scale in uses
        ]
        return [LowRankUpdate(None, tuple(parts))]

    monkeypatch.setattr(adapters_module, "read_adapter", lambda path, base: FileAdapter(path))
    monkeypatch.setattr(adapters_module, "updates_of", updates_of)
    monkeypatch.setattr(adapters_module, "adapter_bytes", lambda path: BYTES)
    for name, value in (("one", 11), ("two", 222), ("three", 333), ("four", 4), ("bad", "nonsense")):
        (tmp_path / name).write_text(str(value))
    return tmp_path


def engine_with(
    folder: Path,
    most: int = 8,
    memory: int = 1 << 20,
    limits: Limits = LIMITS,
    backend: FakeBackend | None = None,
    **options: Any,
) -> Engine:
    backend = backend or FakeBackend(VOCAB)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    base: Any = SimpleNamespace(placements=())
    adapters = Adapters(backend.adapters, base, most, memory)
    for name in ("one", "two", "three", "four"):
        adapters.register(name, folder / name)
    return assemble(backend, limits, adapters=adapters, **options)


def request(id: int, *uses: AdapterUse, prompt: Any = range(20), max_tokens: int = 8, **fields: Any) -> Request:
    return Request(id, tuple(prompt), SamplingParams(temperature=0), max_tokens, adapters=uses, **fields)


def run(engine: Engine, steps: int = 2000) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for _ in range(steps):
        if engine.idle:
            return found
        for event in engine.step():
            found.setdefault(event.seq, []).append(event)
    raise AssertionError("requests are still waiting")


def until(engine: Engine, kind: type[Event], id: int) -> list[Event]:
    """Steps until a request has an event of this kind; returns all events up to then."""
    found: list[Event] = []
    for _ in range(2000):
        found += engine.step()
        if any(isinstance(event, kind) and event.seq == id for event in found):
            return found
    raise AssertionError("the event does not come")


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def cached_of(events: list[Event]) -> int:
    assert isinstance(events[-1], Finished)
    assert events[-1].report
    return events[-1].report.cached


def test_rows_of_one_step_have_their_own_adapters(folder: Path):
    engine = engine_with(folder)
    uses = [(), (AdapterUse("one"),), (AdapterUse("two"),), (AdapterUse("one"), AdapterUse("two", 2.0))]
    for id, chosen in enumerate(uses):
        engine.add(request(id, *chosen))
    found = run(engine)
    for id, value in enumerate((0, 11, 222, 11 + 444)):
        assert tokens_of(found[id]) == continuation(range(20), 8, VOCAB, adapter=value)


def test_the_report_says_that_a_request_waited_for_its_adapter(folder: Path):
    engine = engine_with(folder)
    engine.add(request(1, AdapterUse("one")))
    (last,) = [event for event in run(engine)[1] if isinstance(event, Finished)]
    assert last.report
    assert [reason for reason, _ in last.report.waited] == ["adapter"]
    engine.add(request(2, AdapterUse("one")))
    (last,) = [event for event in run(engine)[2] if isinstance(event, Finished)]
    assert last.report
    assert not last.report.waited


def test_prefixes_are_shared_by_requests_of_the_same_adapters_only(folder: Path):
    engine = engine_with(folder)
    for id, uses in enumerate(
        [(AdapterUse("one"),), (), (AdapterUse("two"),), (AdapterUse("one", 0.5),), (AdapterUse("one"),), ()]
    ):
        engine.add(request(id, *uses))
        events = run(engine)[id]
        value = round(sum({"one": 11, "two": 222}[use.name] * use.scale for use in uses))
        assert tokens_of(events) == continuation(range(20), 8, VOCAB, adapter=value)
        assert (cached_of(events) > 0) == (id >= 4)


def test_other_contents_under_the_same_name_share_nothing(folder: Path):
    engine = engine_with(folder, most=1)
    for id, text in enumerate(["11", "12", "12"]):
        (folder / "one").write_text(text)
        engine.add(request(id, AdapterUse("one")))
        events = run(engine)[id]
        assert tokens_of(events) == continuation(range(20), 8, VOCAB, adapter=int(text))
        assert (cached_of(events) > 0) == (id == 2)
        engine.add(request(100 + id, AdapterUse("two")))  # takes the only slot
        run(engine)


def test_a_scale_of_zero_is_no_adapter(folder: Path):
    engine = engine_with(folder)
    engine.add(request(1, AdapterUse("one", 0.0)))
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB)


@pytest.mark.parametrize(("most", "memory"), [(1, 1 << 20), (2, 1 << 20), (8, BYTES), (8, 2 * BYTES + 100)])
def test_more_adapters_than_slots_take_turns(folder: Path, most: int, memory: int):
    engine = engine_with(folder, most, memory)
    names = ["one", "two", "three", "four"] * 3
    for id, name in enumerate(names):
        engine.add(request(id, AdapterUse(name)))
        engine.add(request(100 + id))
    found = run(engine)
    for id, name in enumerate(names):
        value = int((folder / name).read_text())
        assert tokens_of(found[id]) == continuation(range(20), 8, VOCAB, adapter=value)
        assert tokens_of(found[100 + id]) == continuation(range(20), 8, VOCAB)


def test_a_slot_in_use_is_kept_and_the_least_recent_one_is_taken(folder: Path):
    engine = engine_with(folder, most=2)
    engine.add(request(1, AdapterUse("one")))
    run(engine)
    held = engine.find(AdapterControl).adapters.hold([AdapterUse("one")])
    for id, name in ((2, "two"), (3, "three"), (4, "two")):
        engine.add(request(id, AdapterUse(name), max_tokens=2))
        run(engine)
        assert {info.name for info in engine.find(AdapterControl).listed() if info.loaded} == {"one", name}
    engine.find(AdapterControl).adapters.release(held)
    engine.add(request(5, AdapterUse("three")))
    run(engine)
    assert {info.name for info in engine.find(AdapterControl).listed() if info.loaded} == {
        "two",
        "three",
    }  # "one" was used before "two"


@pytest.mark.parametrize(("most", "memory"), [(2, 1 << 20), (8, 2 * BYTES + 100)])
def test_a_request_gets_a_slot_while_others_keep_all_of_them_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: int, memory: int
):
    monkeypatch.setattr(FakeAdapter, "nbytes", BYTES)
    engine = engine_with(folder, most, memory)
    busy = ("one", "two")
    for id, name in enumerate(busy):
        engine.add(request(id, AdapterUse(name), max_tokens=30))
        until(engine, Tokens, id)
    engine.add(request(1000, AdapterUse("three")))
    found: dict[int, list[Event]] = {}
    for step in range(MAX_PASSED + 200):  # a new request comes long before the last one of its adapter has ended
        for number, name in enumerate(busy):
            if step % 10 == 5 * number:
                engine.add(request(2 + 2 * step + number, AdapterUse(name), max_tokens=30))
        for event in engine.step():
            found.setdefault(event.seq, []).append(event)
        if any(isinstance(event, Finished) for event in found.get(1000, ())):
            break
    else:
        raise AssertionError("the request never got a slot")
    assert step >= MAX_PASSED
    assert tokens_of(found[1000]) == continuation(range(20), 8, VOCAB, adapter=333)
    for id, events in run(engine).items():
        found.setdefault(id, []).extend(events)
    for id, events in found.items():
        if id not in (0, 1, 1000):
            value = (11, 222)[id % 2]
            assert tokens_of(events) == continuation(range(20), 30, VOCAB, adapter=value)


def test_statistics_tell_who_runs_and_who_waits(folder: Path):
    engine = engine_with(folder, most=1)
    stats = engine.stats()
    assert (stats.adapter_slots, stats.adapter_bytes, stats.adapters) == (1, 0, ())
    engine.add(request(1, AdapterUse("one"), max_tokens=40))
    until(engine, Tokens, 1)
    for id in (2, 3):
        engine.add(request(id, AdapterUse("two")))
    engine.add(request(4))
    engine.step()
    assert set(engine.stats().adapters) == {("one", 1, 0), ("two", 0, 2)}
    assert engine.stats().adapter_bytes > 0
    run(engine)
    assert not engine.stats().adapters


@pytest.mark.usefixtures("overcommitted")
def test_preempted_requests_keep_their_adapter(folder: Path):
    engine = engine_with(folder, limits=LIMITS._replace(num_blocks=24, max_len=80))
    names = ["one", "two", "three", "four"]
    for id, name in enumerate(names):
        engine.add(request(id, AdapterUse(name), prompt=range(id, id + 20), max_tokens=30))
    found = run(engine)
    assert engine.stats().preemptions
    for id, name in enumerate(names):
        value = int((folder / name).read_text())
        assert tokens_of(found[id]) == continuation(range(id, id + 20), 30, VOCAB, adapter=value)


def test_others_go_on_while_an_adapter_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine, gate = engine_with(folder), threading.Event()

    def slow(path: Path, base: Any) -> FileAdapter:
        assert gate.wait(30)
        return FileAdapter(path)

    monkeypatch.setattr(adapters_module, "read_adapter", slow)
    engine.add(request(1, AdapterUse("one")))
    engine.add(request(2))
    found = until(engine, Finished, 2)
    assert {event.seq for event in found} == {2}
    gate.set()
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB, adapter=11)


def test_a_request_that_waits_for_its_adapter_can_be_aborted(folder: Path):
    engine = engine_with(folder, most=1)
    engine.add(request(1, AdapterUse("one"), max_tokens=40))
    engine.add(request(2, AdapterUse("two")))
    engine.step()
    engine.abort(2)
    found = run(engine)
    assert len(tokens_of(found[1])) == 40
    assert not tokens_of(found[2])
    engine.add(request(3, AdapterUse("two")))
    assert tokens_of(run(engine)[3]) == continuation(range(20), 8, VOCAB, adapter=222)


def test_an_adapter_that_has_become_unreadable_fails_its_requests_alone(folder: Path):
    engine = engine_with(folder)
    (folder / "one").write_text("damaged")
    engine.add(request(1, AdapterUse("one")))
    engine.add(request(2, AdapterUse("two")))
    found = run(engine)
    (failed,) = found[1]
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_adapter"
    assert "damaged" in failed.message
    assert tokens_of(found[2]) == continuation(range(20), 8, VOCAB, adapter=222)
    (folder / "one").write_text("5")
    engine.add(request(3, AdapterUse("one")))
    assert tokens_of(run(engine)[3]) == continuation(range(20), 8, VOCAB, adapter=5)


def test_an_adapter_larger_than_the_memory_is_refused(folder: Path):
    engine = engine_with(folder, memory=4)
    engine.add(request(1, AdapterUse("one")))
    (failed,) = run(engine)[1]
    assert isinstance(failed, Failed)
    assert "--adapter-memory" in failed.message


def test_where_memory_is_short_adapters_are_evicted_and_else_the_request_fails(folder: Path):
    free = 10 * BYTES
    engine = engine_with(folder)
    engine.find(AdapterControl).adapters._available = lambda: free
    engine.add(request(1, AdapterUse("one")))
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB, adapter=11)
    free = BYTES  # less than reading another one takes
    engine.add(request(2, AdapterUse("two")))
    engine.add(request(3))
    found = run(engine)
    (failed,) = found[2]
    assert isinstance(failed, Failed)
    assert failed.code == "overloaded"
    assert "memory are free: unload a model" in failed.message
    assert len(tokens_of(found[3])) == 8
    assert not any(info.loaded for info in engine.find(AdapterControl).listed())  # that might have been enough
    free = 10 * BYTES
    engine.add(request(4, AdapterUse("two")))
    assert tokens_of(run(engine)[4]) == continuation(range(20), 8, VOCAB, adapter=222)


def test_an_unknown_adapter_is_refused_at_once(folder: Path):
    engine = engine_with(folder)
    with pytest.raises(AdapterNotFound, match="no adapter is registered as 'five'; registered: one, two"):
        engine.add(request(1, AdapterUse("one"), AdapterUse("five")))
    with pytest.raises(Exception, match="without a tokenizer"):
        engine.add(request(2, AdapterUse("one"))._replace(sampling=SamplingParams(grammar=Grammar("regex", "a"))))
    assert engine.idle


def test_embeddings_are_computed_with_adapters(folder: Path):
    engine = engine_with(folder)
    pooled = []
    for id, uses in enumerate([(), (AdapterUse("one"),), (AdapterUse("one"),)]):
        engine.add(request(id, *uses, max_tokens=0, pooling="last"))
        (last,) = [event for event in run(engine)[id] if isinstance(event, Finished)]
        pooled.append(last.pooled)
    assert pooled[0] != pooled[1] == pooled[2]


# ---- control messages ----


def control(engine: Engine, message: Any) -> Event:
    """Sends a message as it comes over the wire, and returns its answer as it goes back."""
    found = advance(engine, [wire.decode_message(wire.encode_message(message))])
    for _ in range(1000):
        if found:
            break
        found = engine.step()
    answer = wire.decode_answer(wire.encode_answer(wire.step(found, engine.stats())))
    assert isinstance(answer, wire.Step)
    (event,) = answer.events()
    return event


def test_adapters_are_registered_listed_and_unregistered_by_messages(folder: Path):
    engine = engine_with(folder)
    shutil.copy(folder / "one", folder / "five")
    info = AdapterInfo("five", str(folder / "five"), 0.5, 1)
    assert control(engine, RegisterAdapter("five", str(folder / "five"), 0.5, id=7)) == AdapterList(7, (info,))
    assert control(engine, RegisterAdapter("five", str(folder / "five"), 0.5, id=8)) == AdapterList(8, (info,))
    engine.add(request(1, AdapterUse("five", 2.0)))
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB, adapter=11)
    listed = control(engine, ListAdapters(id=9))
    assert isinstance(listed, AdapterList)
    assert [one.name for one in listed.adapters] == ["one", "two", "three", "four", "five"]
    assert listed.adapters[-1] == info._replace(digest="digest of 11", loaded=True)
    control(engine, UnregisterAdapter("five", id=10))
    with pytest.raises(AdapterNotFound):
        engine.add(request(2, AdapterUse("five")))


def test_messages_that_cannot_be_followed_say_why(folder: Path):
    engine = engine_with(folder)
    in_use = control(engine, RegisterAdapter("one", str(folder / "two"), id=7))
    assert isinstance(in_use, Failed)
    assert (in_use.seq, in_use.code) == (7, "invalid_adapter")
    assert "an adapter named 'one' is registered already" in in_use.message
    bad = control(engine, RegisterAdapter("bad", str(folder / "bad"), id=8))
    assert isinstance(bad, Failed)
    assert bad.code == "invalid_adapter"
    assert "nonsense" in bad.message
    unknown = control(engine, UnregisterAdapter("bad", id=9))
    assert isinstance(unknown, Failed)
    assert unknown.code == "adapter_not_found"


def test_an_adapter_is_replaced_by_a_message(folder: Path):
    """One that does not fit replaces nothing."""
    engine = engine_with(folder)
    engine.add(request(1, AdapterUse("one")))
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB, adapter=11)
    assert isinstance(control(engine, RegisterAdapter("one", str(folder / "two"), replace=True, id=7)), AdapterList)
    assert isinstance(control(engine, RegisterAdapter("one", str(folder / "bad"), replace=True, id=8)), Failed)
    engine.add(request(2, AdapterUse("one")))
    assert tokens_of(run(engine)[2]) == continuation(range(20), 8, VOCAB, adapter=222)


def test_thousands_of_registered_adapters_take_no_slot(folder: Path):
    engine = engine_with(folder)
    adapters = engine.find(AdapterControl).adapters
    for number in range(5000):
        adapters.register(f"a{number}", folder / "one")
    assert not any(info.loaded for info in engine.find(AdapterControl).listed())
    engine.add(request(1, AdapterUse("a4321")))
    assert tokens_of(run(engine)[1]) == continuation(range(20), 8, VOCAB, adapter=11)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a=/x/y", ("a", "/x/y", 1.0)),
        ("a=/x/y:0.5", ("a", "/x/y", 0.5)),
        ("a=C:/x", ("a", "C:/x", 1.0)),
        ('{"name": "a", "path": "/x:2", "base_model_name": "m"}', ("a", "/x:2", 1.0)),
    ],
)
def test_adapters_are_written_as_name_and_path(text: str, parsed: tuple[str, str, float]):
    assert parse_adapter(text) == parsed


@pytest.mark.parametrize("text", ["a", "=x", "a=", '{"name": "a"}', "{"])
def test_what_names_no_adapter_is_refused(text: str):
    with pytest.raises(ConfigError):
        parse_adapter(text)


def test_calls_name_adapters_as_vllm_does():
    lora = LoRARequest("one", 1, "/x")
    assert lora_list(None, 2) == [(), ()]
    assert lora_list(lora, 2) == [(lora,), (lora,)]
    assert lora_list((lora, "two"), 1) == [(lora, "two")]
    assert lora_list([lora, None, ("two", AdapterUse("three", 0.5))], 3) == [
        (lora,),
        (),
        ("two", AdapterUse("three", 0.5)),
    ]
    assert [use_of(one) for one in (lora, "two", AdapterUse("three", 0.5))] == [
        AdapterUse("one"),
        AdapterUse("two"),
        AdapterUse("three", 0.5),
    ]
    with pytest.raises(InvalidRequest, match="3 prompts and 2 LoRA requests"):
        lora_list([lora, None], 3)


def test_options_of_vllm_about_adapters_are_read():
    adapters = {"a": "/x", "b": ("/y", 2)}
    read = read_options({"enable_lora": True, "max_loras": 4, "max_lora_rank": 64, "adapters": adapters})
    assert read.engine == {"max_adapters": 4, "adapter": ("a=/x:1.0", "b=/y:2")}
    assert [parse_adapter(text) for text in read.engine["adapter"]] == [("a", "/x", 1.0), ("b", "/y", 2.0)]


def test_an_engine_that_sleeps_gives_the_memory_of_adapters_back(folder: Path) -> None:
    backend = FakeBackend(VOCAB)
    engine = engine_with(folder, backend=backend, sleeper=backend.sleeper)
    engine.add(request(0, AdapterUse("one")))
    first = tokens_of(run(engine)[0])
    assert [info.loaded for info in engine.find(AdapterControl).listed()] == [True, False, False, False]
    engine.handle(Sleep(id=1))
    engine.step()
    assert not any(info.loaded for info in engine.find(AdapterControl).listed())
    engine.add(request(2, AdapterUse("one")))
    assert tokens_of(run(engine)[2]) == first
