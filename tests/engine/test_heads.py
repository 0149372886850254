"""A head drafts from the target's hidden states, which lie in KV blocks, and answers stay what they are without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from penstock.backend.base import Batch, Bitmasks
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.fake import FakeBackend, FakeHead, FakeHeadProgram, continuation
from penstock.backend.ref import RefBackend
from penstock.engine.assemble import assemble
from penstock.engine.drafts.draft_model import MTP_HEAD, DraftModel
from penstock.engine.engine import Engine
from penstock.model.families import llama, mtp
from penstock.model.mtp_head import ends_of, head_spec
from penstock.model.packer import Packer
from penstock.model.spec import AttentionSpec, ModelSpec, RopeSpec
from penstock.model.tensor import FORMATS, Tensor
from penstock.types import DraftCounts, Limits, StepResult
from tests.engine.test_draft_model import (
    LIMITS,
    VOCAB,
    FixedCosts,
    FixedDepths,
    RandomDepths,
    RandomLengths,
    answer_all,
    ask,
)


class OftenRightHead(FakeBackend):
    """Has a head that answers what it should in the given share of all cases."""

    def __init__(self, share: float, windows: Sequence[int] = (0,)) -> None:
        super().__init__(VOCAB, windows=windows)
        self._share, self._random = share, Random(5)
        self.tokens = 0  # that the head has computed
        self.load(FakeHead(), 1)

    @property
    def stale(self) -> set[int]:
        head = self._programs[1]
        assert isinstance(head, FakeHeadProgram)
        return head.stale

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        result = super()._compute(batch, masks)
        if not batch.program:
            return result
        self.tokens += len(batch.tokens)
        rows = []
        for slot, row in zip(batch.slots, result.rows, strict=True):
            wrong = self._random.random() >= self._share
            rows.append(row._replace(tokens=tuple((token + wrong) % VOCAB for token in row.tokens)))
            self._programs[1]._last[slot] = rows[-1].tokens[-1] if row.tokens else -1
        return StepResult(result.step, tuple(rows))


def engine_with_head(
    limits: Limits, share: float = 0.8, random: Random | None = None, depth: int = 0
) -> tuple[Engine, OftenRightHead]:
    """Returns an engine that drafts what pays with fixed costs or, if `random` is given, at random. It has `depth`
    steps in flight."""
    backend = OftenRightHead(share, limits.windows)
    backend.reserve_kv(limits.num_blocks, limits.block_size)
    depths, drafting = (RandomDepths(random), RandomLengths(random)) if random else (FixedDepths(), FixedCosts())
    group = limits.windows.index(0)
    head = DraftModel(backend, limits, limits.max_len, depths=depths, kind=MTP_HEAD, group=group, depth=depth)
    return assemble(backend, limits, depth=depth, drafting=drafting, draft_model=head), backend


def counts_of(engine: Engine) -> DraftCounts:
    """Returns what the head has drafted."""
    return next((each for each in engine.stats().drafts if each.source == "mtp"), DraftCounts("mtp"))


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize(
    ("num_blocks", "windows", "depth"),
    [(44, (0,), 0), (44, (6, 0), 0), (200, (6, 0), 0), (200, (0,), 0), (44, (0,), 1)],
)
def test_answers_stay_under_preemption_sharing_stops_and_aborts(
    num_blocks: int, windows: tuple[int, ...], depth: int
) -> None:
    random = Random(num_blocks)
    limits = LIMITS._replace(num_blocks=num_blocks * len(windows), windows=windows)
    engine, backend = engine_with_head(limits, random=random, depth=depth)
    answer_all(engine, random, windows)
    counts = counts_of(engine)
    assert counts.drafted > 100
    assert backend.stale <= {limits.block_size - 1}  # sequences that share a block may go on differently behind it
    if windows == (0,):  # the head knows nothing of others, so it cannot be right
        assert counts.accepted > counts.drafted / 3


def test_a_head_that_is_right_saves_steps() -> None:
    engine, backend = engine_with_head(LIMITS, share=1.0)
    assert ask(engine, 1, range(20), 100) == continuation(range(20), 100, VOCAB)
    counts = counts_of(engine)
    assert counts.accepted == counts.drafted > 60
    assert engine.stats().steps < 50
    assert not backend.stale


def test_a_shared_prefix_is_computed_once_for_all_who_share_it() -> None:
    """Shows that a shared block's last position is computed again: it was computed with another token behind it."""
    engine, backend = engine_with_head(LIMITS._replace(num_blocks=200), share=1.0)
    prompt = list(range(60))
    ask(engine, 1, prompt, 30)
    first = backend.tokens
    ask(engine, 2, [*prompt, 7], 30)
    assert first >= 60
    assert backend.tokens - first < 60
    assert counts_of(engine).accepted == counts_of(engine).drafted
    assert not backend.stale


def test_hidden_states_lie_in_exported_blocks() -> None:
    backend, other = OftenRightHead(1.0), OftenRightHead(1.0)
    plain = FakeBackend(VOCAB)
    for each in (backend, other, plain):
        each.reserve_kv(8, 4)
    _, kv, hidden = backend._block_arrays()
    kv[3], hidden[3] = [1, 2, 3, 4], [5, 6, 7, 8]
    other.kv.import_blocks([2], backend.kv.export_blocks([3]))
    other.kv.copy_blocks([(2, 6)])
    assert other._block_arrays()[2][6].tolist() == [5, 6, 7, 8]
    assert backend.kv.fingerprint() == other.kv.fingerprint() != plain.kv.fingerprint()


# -- real programs ------------------------------------------------------------------------------------------------

TOY = ModelSpec(
    arch="llama",
    layers=1,
    dim=64,
    hidden=32,
    vocab=64,
    max_len=160,
    eps=1e-6,
    attn=AttentionSpec(2, 1, 32, RopeSpec(tuple(0.5**i for i in range(16)), interleaved=False)),
    stores_hidden=True,
)
TOY_LIMITS = Limits(max_len=160, max_rows=4, step_tokens=48, block_size=16, num_blocks=24, vocab=64)


def toy_tensors(following: np.ndarray) -> dict[str, Tensor]:
    """Returns a model that answers with the token that follows the last one, because its layer adds nothing, and a head
    that does so by the hidden state alone: it is right only where that is the hidden state of the position before."""
    random, eye = np.random.default_rng(3), np.eye(64, dtype=np.float32)
    step = eye[:, following]  # times the embedding of a token: that of the token that follows it
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "gate": (32, 64), "up": (32, 64)}
    values = {f"layers.0.{part}": random.standard_normal(shape) for part, shape in shapes.items()}
    values |= {"embed": eye, "head": step, "layers.0.eh_proj": np.concatenate([np.zeros_like(eye), step], axis=1)}
    values |= {"layers.0.o": np.zeros((64, 64)), "layers.0.down": np.zeros((64, 32))}
    gains = ("norm", *(f"layers.0.{name}norm" for name in ("attn_", "mlp_", "embed_", "hidden_", "")))
    values |= dict.fromkeys(gains, np.ones(64))
    return {
        name: Tensor(
            name, FORMATS["F32"], array.shape, np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)
        )
        for name, array in values.items()
    }


MAKERS = pytest.mark.parametrize("make", [RefBackend, lambda: CpuBackend(1)], ids=["ref", "cpu"])
FOLLOWING = np.random.default_rng(1).permutation(64)


def with_toy(backend: Any, *, head: bool = True) -> Any:
    """Returns a backend with the toy model and its head."""
    spec = replace(TOY, stores_hidden=head)
    pack = Packer(toy_tensors(FOLLOWING), backend)
    model = llama.build(spec, pack)
    backend.load(model)
    if head:
        backend.load(mtp.build(head_spec(spec), pack, ends_of(model)), 1)
    backend.reserve_kv(TOY_LIMITS.num_blocks, TOY_LIMITS.block_size, 0, spec.kv_groups)
    return backend


@MAKERS
def test_blocks_take_hidden_states_with_them(make: Callable[[], Any]) -> None:
    here, there, plain = with_toy(make()), with_toy(make()), with_toy(make(), head=False)
    tokens = list(range(30))
    here.logits(greedy_batch([Chunk(tokens, 0, [5, 7])]))
    there.kv.import_blocks([2, 3], here.kv.export_blocks([5, 7]))
    there.kv.copy_blocks([(2, 9), (3, 1)])
    rows = replace(greedy_batch([Chunk(tokens[1:], 0, [9, 1])]), program=1)
    assert there.logits(rows).argmax(axis=1).tolist() == FOLLOWING[FOLLOWING[tokens[:-1]]].tolist()
    assert here.kv.fingerprint() == there.kv.fingerprint() != plain.kv.fingerprint()
    size = len(here.kv.export_blocks([0]))
    assert size > len(plain.kv.export_blocks([0]))
    copies = np.zeros((2, size), np.uint8)
    here.kv.copy_out([5, 7], copies, [0, 1])
    assert copies.tobytes() == here.kv.export_blocks([5, 7])


@MAKERS
def test_hidden_states_are_those_of_the_position_before(make: Callable[[], Any]) -> None:
    backend, random = with_toy(make()), Random(2)
    head = DraftModel(backend, TOY_LIMITS, 160, depths=RandomDepths(random), kind=MTP_HEAD)
    engine = assemble(backend, TOY_LIMITS, drafting=RandomLengths(random), draft_model=head)
    for id, length in enumerate((3, 40, 16, 17)):
        prompt = [random.randrange(64) for _ in range(length)]
        right = [prompt[-1]]
        while len(right) < 61:
            right.append(int(FOLLOWING[right[-1]]))
        assert ask(engine, id, prompt, 60) == right[1:]
    counts = counts_of(engine)
    assert counts.accepted == counts.drafted > 100
