"""Tests prompts on disk over HTTP: a restarted server reuses them for the key that sent them, tells so in the report,
and never for another key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from penstock.backend.fake import FakeBackend
from penstock.core.step_cost import PromptCost
from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.engine.kv_disk import loading
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import changing
from penstock.planning.memory_plan import all_states
from penstock.server.access.guard import Rules
from penstock.service_levels import ServiceTerms
from tests.server import toys
from tests.server.conftest import serving
from tests.server.test_keys import Locked

MODEL = "toy/disk"
LIMITS = toys.LIMITS._replace(max_len=256, num_blocks=64, host_places=64)
PROMPT = "one " * 25  # 6 full blocks
FULL = 96  # tokens of them


def open_with_disk(folder: Path) -> Engine:
    """Returns an engine that keeps prompts in the folder, as with --kv-disk."""
    backend = FakeBackend(LIMITS.vocab)
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size, all_states(LIMITS))
    layout = BlockLayout(b"f" * 16, LIMITS.block_size, 1, len(backend.kv.export_blocks([0])), 0)
    store = SegmentStore(folder, layout, 1 << 20, free=lambda _: 1 << 40)
    store.open()
    return assemble(backend, LIMITS, kv_store=store)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes computing to be slower than reading, and waits for slow machines: the fake's time means nothing."""
    monkeypatch.setattr(loading, "LEAST", 30.0)
    monkeypatch.setattr(PromptCost, "FEW", 1 << 30)


class Life:
    """Is one run of a server that has keys and a disk."""

    def __init__(self, locked: Locked) -> None:
        self.locked = locked

    def reused(self, key: str) -> dict[str, int]:
        """Sends the prompt with a key; returns where its reused tokens came from, as the report says."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "penstock": True}
        answer = self.locked.server.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        assert answer.status_code == 200, answer.text
        cache = answer.json()["penstock"]["choices"][0]["cache"]
        assert sum(cache["reused_from"].values()) == cache["reused_tokens"]
        return dict(cache["reused_from"])

    def wait_for_disk(self, blocks: int) -> None:
        """Waits until so many blocks are written, behind the answers. An engine tells of it with its next step."""
        headers = {"x-api-key": self.locked.key("nudge")}

        def written() -> bool:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            self.locked.server.http.post("/v1/completions", json=body, headers=headers)
            return bool(self.locked.server.client.stats.disk.blocks >= blocks)

        self.locked.server.until(written)


@contextmanager
def living(tmp_path: Path, **terms: bool) -> Iterator[Life]:
    file = tmp_path / "keys.json"
    with changing(file):
        pass
    client = InProcessClient(partial(open_with_disk, tmp_path / "kv"), "disk")
    rules = Rules(keys=file, terms=ServiceTerms(**terms))
    with serving(client, toys.ToyText(), MODEL, rules=rules) as server:
        yield Life(Locked(server, file))


def test_after_a_restart_a_key_reuses_its_own_prompts_and_no_others(tmp_path: Path) -> None:
    with living(tmp_path) as first:
        alice = first.locked.key("alice")
        assert first.reused(alice) == {}
        assert first.reused(alice) == {"device": FULL}
        first.wait_for_disk(FULL // LIMITS.block_size)
    with living(tmp_path) as second:
        mallory = second.locked.key("mallory")
        assert second.reused(mallory) == {}
        assert second.reused(alice) == {"disk": FULL}
        assert second.reused(mallory) == {"device": FULL}  # its own, computed above
        headers = {"x-api-key": second.locked.key("watcher", monitor=True)}
        text = second.locked.server.http.get("/metrics", headers=headers).text
        assert f'penstock_reused_tokens_total{{tier="disk"}} {FULL}.0' in text


def test_keys_that_share_prefixes_share_them_on_disk_too(tmp_path: Path) -> None:
    with living(tmp_path, share_prefixes=True) as first:
        assert first.reused(first.locked.key("alice")) == {}
        first.wait_for_disk(FULL // LIMITS.block_size)
    with living(tmp_path, share_prefixes=True) as second:
        assert second.reused(second.locked.key("bob")) == {"disk": FULL}
