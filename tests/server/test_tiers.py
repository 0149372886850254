"""Tests what clients and operators are told of the host tier: where reused tokens came from, and what was copied."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backend.fake import FakeBackend
from penstock.core.step_cost import PromptCost
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.ipc.client import EngineState
from penstock.ipc.inprocess import InProcessClient
from penstock.server.telemetry.metrics import EngineCollector
from penstock.types import Stats
from tests.server import toys
from tests.server.conftest import serving

MODEL = "toy/small"
TOLD = Stats(reused=(("device", 5), ("ram", 7)), host_blocks=3, host_places=8, copied_in=2, copied_out=4)


def open_small() -> Engine:
    """Returns an engine whose cache holds one of the prompts below."""
    limits = toys.LIMITS._replace(max_len=128, max_rows=1, num_blocks=8, block_size=16, host_places=64)
    backend = FakeBackend(limits.vocab)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    return assemble(backend, limits)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(PromptCost, "FEW", 10**9)  # a fake computes faster than anything is copied
    with serving(InProcessClient(open_small, "small"), toys.ToyText(), MODEL) as server:
        yield server


def reused(server: Any, prompt: str) -> dict[str, int]:
    """Returns where the reused tokens of a prompt came from, as its report says."""
    answer = server.post("/v1/completions", model=MODEL, prompt=prompt, max_tokens=2, penstock=True).json()
    cache = answer["penstock"]["choices"][0]["cache"]
    assert sum(cache["reused_from"].values()) == cache["reused_tokens"]
    return dict(cache["reused_from"])


def test_a_report_tells_the_tier_of_each_reuse(small: Any) -> None:
    one, other = "one " * 25, "two " * 25
    assert reused(small, one) == {}
    assert reused(small, one) == {"device": 96}
    assert reused(small, other) == {}
    assert reused(small, one) == {"device": 16, "ram": 80}  # the first block had not left
    small.until_idle()
    text = small.get("/metrics").text
    for line in (
        'penstock_reused_tokens_total{tier="device"} 112.0',
        'penstock_reused_tokens_total{tier="ram"} 80.0',
        'penstock_kv_blocks_copied_total{direction="in"} 5.0',
    ):
        assert line in text


def test_what_several_engines_tell_is_added_up() -> None:
    client = SimpleNamespace(stats=TOLD, restarts=0, state=EngineState.READY, hello=None)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in EngineCollector(lambda: [("one", client), ("two", client)]).collect()  # type: ignore[list-item]
        for sample in family.samples
    }
    assert found["penstock_reused_tokens_total", "device"] == 10
    assert found["penstock_reused_tokens_total", "ram"] == 14
    assert found["penstock_kv_blocks_copied_total", "in"] == 4
    assert found["penstock_kv_blocks_copied_total", "out"] == 8
    assert found["penstock_host_kv_blocks", "used"] == 6
    assert found["penstock_host_kv_blocks", "free"] == 10
