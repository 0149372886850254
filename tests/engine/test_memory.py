"""Memory before and while steps run: the plan, what a shortage makes of it, and steps that find none."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backend.base import Batch, Footprint, Ticket
from penstock.backend.fake import FakeBackend, continuation
from penstock.config import Config, configure
from penstock.engine.assemble import assemble
from penstock.engine.build import open_engine
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.errors import ConfigError, OutOfMemory
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec, all_but_each
from penstock.planning.memory_plan import plan_memory
from penstock.types import Event, Failed, Limits, Request, SamplingParams, Tokens

GB = 10**9
SPEC = ModelSpec("llama", 32, 4096, 14336, 128256, 131072, 1e-5, AttentionSpec(32, 8, 128, RopeSpec((1.0,), False)))
CONFIG = Config(model="m", device="cuda", max_rows=256, step_tokens=2048)
LIMITS = Limits(max_len=64, max_rows=4, step_tokens=16, block_size=4, num_blocks=40, vocab=100)


def device(free: int, weights: int = 16 * GB) -> Footprint:
    return Footprint("a GPU", 24 * GB, free, weights, GB, GB, 131072)


# -- the plan -----------------------------------------------------------------------------------------------------


def test_the_cache_takes_what_the_rest_leaves() -> None:
    plan = plan_memory(CONFIG, SPEC, device(22 * GB))
    assert plan.limits.num_blocks == 4 * GB // (131072 * 16)
    assert 0 <= 4 * GB - plan.cache < 131072 * 16
    table = "\n".join(plan.lines())
    for told in ("a GPU", "22.00 GB free of 24.00 GB", "16.00 GB", "4.00 GB", "30,512 tokens"):
        assert told in table


def test_adapters_have_their_part(tmp_path: Path) -> None:
    sizes = {"small": GB // 10, "large": GB, "larger": 2 * GB}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    config = replace(CONFIG, adapter=tuple(f"{name}={tmp_path / name}:0.5" for name in sizes))
    without = plan_memory(CONFIG, SPEC, device(22 * GB))
    plan = plan_memory(replace(config, max_adapters=2), SPEC, device(22 * GB))
    assert plan.adapters == 3 * GB
    assert without.cache - 3 * GB <= plan.cache + 131072 * 16
    assert plan.cache < GB
    assert "adapters             3.00 GB" in "\n".join(plan.lines())
    assert "adapters" not in "\n".join(without.lines())
    assert plan_memory(replace(config, adapter_memory=GB // 2), SPEC, device(22 * GB)).adapters == GB // 2
    twice = tuple(f"{name}={tmp_path / 'larger'}" for name in "ab")
    with pytest.raises(ConfigError, match=r"4\.00 GB for adapters"):
        plan_memory(replace(config, adapter=twice), SPEC, device(22 * GB))


def test_a_shorter_context_is_told() -> None:
    plan = plan_memory(CONFIG, SPEC, device(22 * GB))
    assert plan.limits.max_len == 30512
    assert plan.whole_sequences == 1
    assert plan.notes == ("prompt and answer have 30512 tokens at most, not 131072: the cache holds no more",)
    roomy = plan_memory(
        Config(model="m", device="cpu", max_rows=4, step_tokens=512, max_len=4096), SPEC, device(22 * GB)
    )
    assert roomy.notes == ()
    assert roomy.whole_sequences == 4


def test_a_cache_larger_than_the_device_is_made_smaller() -> None:
    asked = Config(model="m", device="cuda", max_rows=8, step_tokens=512, max_len=4096, kv_memory=100 * GB)
    plan = plan_memory(asked, SPEC, device(22 * GB))
    assert plan.cache <= 4 * GB
    assert plan.notes == ("the KV cache gets 4.00 GB, not the 100.00 GB asked for",)


def test_a_cpu_has_the_cache_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine takes as much, too: memory is given as it is used, up to that of the machine."""
    monkeypatch.setattr("penstock.planning.memory_plan.total_memory", lambda: 64 * GB)
    asked = Config(model="m", device="cpu", max_rows=64, step_tokens=512, kv_memory=20 * GB, kv_ram="0")
    plan = plan_memory(asked, SPEC, device(22 * GB))
    assert 20 * GB - 131072 * 16 < plan.cache <= 20 * GB
    assert plan.notes[0].startswith("4.00 GB are free for the KV cache of 20.00 GB")
    with pytest.raises(ConfigError, match=r"a KV cache of .* is more than this machine has, 64\.00 GB: lower"):
        plan_memory(replace(asked, kv_memory=100 * GB), SPEC, device(22 * GB))


def test_a_smaller_cache_is_what_was_asked_for() -> None:
    plan = plan_memory(
        Config(model="m", device="cpu", max_rows=8, step_tokens=512, max_len=4096, kv_memory=GB), SPEC, device(22 * GB)
    )
    assert 0 <= GB - plan.cache < 131072 * 16
    assert plan.notes == ()


def test_weights_that_do_not_fit_are_an_error_with_all_numbers() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_memory(CONFIG, SPEC, device(12 * GB))
    for told in (
        "16.00 GB for weights",
        "1.00 GB for workspace",
        "12.00 GB free of 24.00 GB",
        "--quantize fp8 or int4",
    ):
        assert told in refusal.value.message


GEMMA = ModelSpec(  # of 270M parameters
    "gemma3", 18, 640, 2048, 262144, 32768, 1e-6, AttentionSpec(4, 1, 256, RopeSpec((1.0,), False))
).with_windows(all_but_each(6, 18), 512)


def test_a_cache_of_a_size_that_is_asked_for_takes_what_a_machine_keeps_free_by_default() -> None:
    asked = Config(model="m", max_rows=64, step_tokens=512, max_len=4096, kv_memory=4 * GB, device="cpu", kv_ram="0")
    machine = device(22 * GB)._replace(reserve=4 * GB, reserve_share=0.75)
    assert plan_memory(replace(asked, kv_memory=0), SPEC, machine).cache <= GB
    plan = plan_memory(asked, SPEC, machine)
    assert 0.99 * 4 * GB < plan.cache <= 4 * GB
    assert plan.notes == ()
    reserve = next(line for line in plan.lines() if "reserve" in line)
    assert reserve.endswith(" 1.00 GB  left to others, unless --kv-memory takes it")
    assert plan_memory(asked, SPEC, machine._replace(reserve_share=0.0)).notes  # what a GPU keeps free is needed


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_host_memory_for_kv_that_the_machine_has_not_is_refused(device: str) -> None:
    golden = Path(__file__).parents[1] / "models" / "goldens" / "llama3"
    with pytest.raises(ConfigError, match=r"1000000.00 GB of host memory .* than this machine has, .*: lower kv_ram"):
        open_engine(configure(golden, {"device": device, "kv_ram": "1000TB"}))


def test_a_cache_larger_than_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = Path(__file__).parents[1] / "models" / "goldens" / "llama3"
    monkeypatch.setattr("penstock.planning.memory_plan.total_memory", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"more than this machine has, .*: lower kv_memory"):
        open_engine(configure(golden, {"device": "cpu", "kv_memory": "1T"}))


def test_the_plan_tells_what_windows_save() -> None:
    token = 18 * 2 * 256 * 2
    has = Footprint("a GPU", 24 * GB, 22 * GB, GB, GB, GB, token)
    plan = plan_memory(Config(model="m", device="cpu", max_rows=8, step_tokens=512, max_len=8192), GEMMA, has)
    assert plan.group_token == token // 6
    assert plan.cache == plan.limits.num_blocks * 16 * token // 6
    assert plan.whole_sequences == 8
    assert 4 * plan.sequence_bytes(8192) <= 8192 * token
    assert "8 x 8,192 tokens of 33.3 MB each (151.0 MB without windows)" in "\n".join(plan.lines())


# -- steps that find no memory ------------------------------------------------------------------------------------


class Short(FakeBackend):
    """Has no memory for the steps named."""

    def __init__(self, *steps: int) -> None:
        super().__init__(LIMITS.vocab)
        self.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
        self.steps = set(steps)
        self.freed = 0

    def free_memory(self) -> None:
        self.freed += 1

    def launch(self, batch: Batch) -> Ticket:
        if batch.step in self.steps:
            raise OutOfMemory("no memory")
        return super().launch(batch)


class Moody(Short):
    """Has no memory now and then, but never twice in a row."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self._failed = False

    def launch(self, batch: Batch) -> Ticket:
        self._failed = not self._failed and self._dice.random() < 0.5
        if self._failed:
            raise OutOfMemory("no memory")
        return super().launch(batch)


def request(id: int, *prompt: int, max_tokens: int = 5) -> Request:
    return Request(id, prompt, SamplingParams(temperature=0), max_tokens)


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


def told(events: list[Event], id: int) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) and event.seq == id for token in event.tokens]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("step", range(1, 7))
def test_a_step_without_memory_is_computed_again(step: int, depth: int, drafts: bool) -> None:
    backend = Short(step)
    engine = assemble(backend, LIMITS, depth=depth, drafting=Drafting() if drafts else None)
    prompts = {1: (1, 2, 3), 2: tuple(range(30))}
    for id, prompt in prompts.items():
        engine.add(request(id, *prompt))
    events = drain(engine)
    for id, prompt in prompts.items():
        assert told(events, id) == continuation(prompt, 5, LIMITS.vocab)
        assert (id, "length") in [event[:2] for event in events]
    assert backend.freed == 1
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_where_relief_is_not_enough_the_steps_requests_fail_and_no_others(depth: int) -> None:
    backend = Short(*range(3, 100))
    engine = assemble(backend, LIMITS, depth=depth)
    engine.add(request(1, 1, 2, 3))
    events = drain(engine)
    backend.steps.clear()
    engine.add(request(2, 7, 8, 9))
    events += drain(engine)
    ends = {event.seq: event for event in events if not isinstance(event, Tokens)}
    failed = ends[1]
    assert isinstance(failed, Failed)
    assert failed.code == "out_of_memory"
    assert ends[2][:2] == (2, "length")
    assert told(events, 2) == continuation((7, 8, 9), 5, LIMITS.vocab)
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_requests_answer_as_if_alone_however_often_memory_is_short(seed: int) -> None:
    dice = random.Random(seed)
    engine = assemble(Moody(dice), LIMITS, depth=dice.choice([0, 1]))
    shared = [dice.randrange(100) for _ in range(12)]
    prompts = {id: (*shared[: dice.randrange(13)], *(dice.randrange(100) for _ in range(4))) for id in range(12)}
    events: list[Event] = []
    for id, prompt in prompts.items():
        engine.add(request(id, *prompt, max_tokens=id + 1))
        for _ in range(dice.randrange(4)):
            events += engine.step()
    events += drain(engine)
    for id, prompt in prompts.items():
        assert told(events, id) == continuation(prompt, id + 1, LIMITS.vocab)
    assert engine.stats().blocks_used == 0


def test_blocks_that_leave_the_cache_take_host_memory() -> None:
    config = Config(model="m", max_rows=8, step_tokens=512, max_len=4096, kv_memory=GB, device="cpu")
    plan = plan_memory(config, SPEC, device(22 * GB))
    block = config.block_size * plan.group_token
    assert plan.kv_ram == plan.cache  # as much as the cache
    assert next(line for line in plan.lines() if "KV in RAM" in line).split()[3] == f"{plan.cache / 1e9:.2f}"
    scarce = plan_memory(replace(config, kv_memory=4 * GB), SPEC, device(22 * GB))
    assert scarce.kv_ram <= 22 * GB // 8 < scarce.cache  # an eighth of what is free
    asked = plan_memory(replace(config, kv_ram=str(3 * block + 1)), SPEC, device(22 * GB))
    assert asked.limits.host_places == 3
    on_gpu = replace(config, device="cuda")
    assert plan_memory(on_gpu, SPEC, device(22 * GB)).kv_ram == 0
    both = plan_memory(replace(on_gpu, kv_ram=str(GB)), SPEC, device(22 * GB))
    assert 0 < both.kv_ram <= GB
    assert "of the host" in "".join(both.lines())
    assert both.cache == plan_memory(on_gpu, SPEC, device(22 * GB)).cache  # a GPU's own memory is not concerned
