"""Adapters (LoRA) on the GPU: rows with different adapters, or none, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.backend.base import Batch
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.adapter_tiles import adapter_tiles
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.inputs import Shape
from penstock.backend.cuda.pack_low_rank import UpdateSizes, pack_update
from penstock.backend.ref import RefBackend
from penstock.backend.ref.cases import difference
from penstock.model.adapter_files import AdapterBase, read_adapter, updates_of
from penstock.model.families.llama import build
from penstock.model.load import load_placed, open_checkpoint
from penstock.model.low_rank import LowRankPart, LowRankUpdate, Placement
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor
from tests.cuda.device import DEVICE, HALF
from tests.cuda.small import SMALL, tensors
from tests.cuda.test_engine import Rounded

MODELS = Path(__file__).parents[1] / "models"
NAMES = sorted(folder.name for folder in (MODELS / "adapters").iterdir())
BLOCK_SIZE = 4
NONE = np.zeros(0, np.int32)
UNEVEN = replace(SMALL, hidden=160)  # no multiple of the columns of a block


class Adapter(NamedTuple):
    """Describes a random adapter: the rank of each tensor that it changes."""

    ranks: dict[str, int]
    seed: int = 0

    def matrices(self, name: str, shape: tuple[int, ...]) -> tuple[Any, Any] | None:
        """Returns A and B for a tensor; None if the adapter does not change it."""
        rank = self.ranks.get(name.rpartition(".")[2], 0)
        if not rank:
            return None
        rng, (rows, width) = np.random.default_rng([self.seed, *name.encode()]), shape
        a = rng.normal(0, width**-0.5, (rank, width)).astype(np.float32)
        return a, rng.normal(0, rank**-0.5, (rows, rank)).astype(np.float32)


ALL = Adapter(dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 8))
SOME = Adapter({"k": 16, "up": 4, "head": 2}, seed=1)  # parts of fused weights, and the output head
LARGE = Adapter({"q": 40, "v": 3, "gate": 17, "down": 33}, seed=2)


class Small(NamedTuple):
    """Holds a small model on some backend, with its tensors and what its weights are made of."""

    backend: Any
    tensors: dict[str, Tensor]
    placements: Sequence[Placement]

    def load(self, slot: int, *adapters: Adapter) -> None:
        """Puts adapters together into a slot."""
        slots, updates = self.backend.adapters, [self.update_of(place, adapters) for place in self.placements]
        slots.load(slot, slots.pack([update for update in updates if update.parts]))

    def update_of(self, place: Placement, adapters: Sequence[Adapter]) -> LowRankUpdate:
        """Returns what random adapters change about a weight; the same for every backend."""
        parts, first = [], 0
        for part in place.parts:
            shape = self.tensors[part.name].shape
            if found := [pair for adapter in adapters if (pair := adapter.matrices(part.name, shape))]:
                a, b = zip(*found, strict=True)
                parts.append(LowRankPart(first, np.concatenate(a), np.concatenate(b, axis=1)))
            first += part.rows
        return LowRankUpdate(place.weight, tuple(parts))


def small(backend: Any, format: str = "F32", spec: ModelSpec = UNEVEN) -> Small:
    found = tensors(np.random.default_rng(0), spec, format)
    packer = Packer(found, backend)
    backend.load(build(spec, packer))
    backend.reserve_kv(64, BLOCK_SIZE)
    return Small(backend, found, packer.placements)


def cuda(dtype: torch.dtype = torch.float32, **options: Any) -> CudaBackend:
    return CudaBackend(96, 8, device=DEVICE, dtype=dtype, **options)


def step_of(counts: Sequence[int], slots: Sequence[int], starts: Sequence[int] | None = None) -> Batch:
    """Returns a step whose rows have so many tokens each, from these positions on, and these adapter slots."""
    rng = np.random.default_rng(counts)
    chunks = [
        Chunk(rng.integers(0, 40, count).tolist(), start, range(8 * row, 8 * row + 8), row)
        for row, (count, start) in enumerate(zip(counts, starts or [0] * len(counts), strict=True))
    ]
    return replace(greedy_batch(chunks), adapters=np.array(slots, np.int32))


def check(exact: Small, fast: Small, steps: Sequence[Batch], tolerance: float) -> None:
    """Asserts that the logits of steps are those of the reference, and would be others without adapters."""
    for step in steps:
        plain, wanted = exact.backend.logits(replace(step, adapters=NONE)), exact.backend.logits(step)
        assert difference(fast.backend.logits(step), wanted) < tolerance
        assert difference(plain, wanted) > 0.2


# -- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["f32", "half"])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_prompts_and_answers_are_those_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    both = small(RefBackend()), small(cuda(dtype))
    for one in both:
        one.load(0, ALL)
        one.load(2, SOME)
        one.load(40, LARGE, ALL)
    slots, counts = [0, -1, 2, 40, 0, 40, -1, 2][:rows], [20, 1, 7, 5, 2, 20, 30, 1][:rows]
    check(*both, [step_of(counts, slots), step_of([1] * rows, slots, counts)], 1e-5 if dtype == torch.float32 else 3e-2)


def test_sampled_positions_that_do_not_fit_at_once_keep_their_adapters() -> None:
    both = small(RefBackend()), small(cuda())
    for one in both:
        one.load(1, SOME)  # which changes the output head
    check(*both, [step_of([20, 9], [-1, 1])], 1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "int4", "fp8"])
def test_quantized_bases_have_adapters_too(kind: str) -> None:
    """The weights are rounded on both sides; with FP8, activations are rounded too."""
    quantize, format = ("", kind) if kind == "Q4_0" else (kind, "F32")
    both = small(Rounded(quantize), format, SMALL), small(cuda(HALF, quantize=quantize), format, SMALL)
    for one in both:
        one.load(0, ALL)
        one.load(1, SOME)
    steps = [step_of([20, 5, 9], [0, -1, 1]), step_of([1] * 3, [0, -1, 1], [20, 5, 9])]
    check(*both, steps, 0.3 if kind == "fp8" else 3e-2)


def test_slots_are_dropped_and_used_again() -> None:
    both = small(RefBackend()), small(cuda())
    for adapter in (SOME, LARGE, ALL):  # the second needs more room than the first
        for one in both:
            one.load(5, adapter)
        check(*both, [step_of([3, 2], [5, -1])], 1e-5)
        for one in both:
            one.backend.adapters.drop(5)


def test_a_step_without_adapters_launches_nothing_for_them(launched: set[str]) -> None:
    model = small(cuda())
    model.load(0, ALL)
    launched -= {"_shrink", "_expand"}
    for slots in ([-1, -1], []):
        model.backend.logits(replace(step_of([3, 2], [0, 0]), adapters=np.array(slots, np.int32)))
    assert not launched & {"_shrink", "_expand"}
    model.backend.logits(step_of([3, 2], [0, -1]))
    assert launched >= {"_shrink", "_expand"}


def test_an_adapter_says_how_many_bytes_it_takes() -> None:
    model = small(cuda(HALF))
    updates = [model.update_of(place, [ALL]) for place in model.placements]
    packed = model.backend.adapters.pack([update for update in updates if update.parts])
    values = sum(16 * (part.a.shape[1] + -(-len(part.b) // 128) * 128) for update in updates for part in update.parts)
    assert 2 * values <= packed.nbytes < 2.1 * values


# -- real files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_merged_model(name: str) -> None:
    checkpoint = open_checkpoint(MODELS / "goldens" / name)
    backend = cuda()
    model, placements = load_placed(checkpoint, backend)
    backend.load(model)
    backend.reserve_kv(32, BLOCK_SIZE, 9)
    adapter = read_adapter(MODELS / "adapters" / name, AdapterBase.of(checkpoint, placements))
    backend.adapters.load(0, backend.adapters.pack(updates_of([(adapter, 1.0)], placements)))
    with np.load(MODELS / "goldens" / name / "expected.npz") as file:
        tokens = file["tokens"][:8].tolist()  # the interpreter is slow
    with np.load(MODELS / "adapters" / name / "expected.npz") as file:
        wanted = file["logits"][:8]
    step = greedy_batch([Chunk(tokens, 0, range(16))])
    np.testing.assert_allclose(backend.logits(replace(step, adapters=np.zeros(1, np.int32))), wanted, atol=1e-3)
    assert np.abs(backend.logits(step) - wanted).max() > 0.1


# -- tiles --------------------------------------------------------------------------------------------------------


def test_every_token_is_in_one_tile_of_its_adapter() -> None:
    rng = np.random.default_rng(0)
    for size in (16, 64):
        counts, slots = rng.integers(1, 40, 12), rng.integers(-1, 4, 12)
        tiles, order, by_token, sampled = adapter_tiles(step_of(counts.tolist(), slots.tolist()), size)
        wanted = np.repeat(slots, counts)
        assert sorted(order) == list(range(len(wanted)))
        assert tiles[:, 2].sum() == len(wanted)
        assert tiles[:, 2].min() > 0
        assert tiles[:, 2].max() <= size
        for slot, first, count, _ in tiles.tolist():
            assert (wanted[order[first : first + count]] == slot).all()
        np.testing.assert_array_equal(sampled, wanted)
        np.testing.assert_array_equal(by_token, wanted)
        in_use = sorted(set(wanted.tolist()) - {-1})
        assert tiles[:, 3].tolist() == in_use + [-1] * (len(tiles) - len(in_use))
    assert len(adapter_tiles(step_of([3, 1], [-1, -1]), 16).tiles) == 0


def test_blocks_of_an_update_lie_as_tiles_of_a_product_do() -> None:
    """A product that adds updates finds the block of a tile by the tile's number."""
    rng = np.random.default_rng(0)

    def sizes(first: int, rows: int, rank: int) -> UpdateSizes:
        part = LowRankPart(first, rng.normal(size=(rank, 64)), rng.normal(size=(rows, rank)))
        return pack_update(LowRankUpdate(object(), (part,)), gated=False).sizes

    assert sizes(256, 128, 40) == UpdateSizes(chunks=3, blocks=3, aligned=True, depth=3, tiled=True)
    assert not sizes(96, 128, 16).tiled


@pytest.mark.parametrize(("tiles", "tokens", "room"), [(0, 64, 0), (1, 1, 1), (1, 64, 4), (5, 64, 16), (40, 48, 48)])
def test_graphs_have_room_for_all_tiles(tiles: int, tokens: int, room: int) -> None:
    shape = padded(Shape(tokens, tokens, tokens, tokens, 0, tiles))
    assert shape.adapter_tiles == room
    assert padded(shape) == shape
