"""Weights that are replaced in place: a backend answers as one that was loaded with the new ones, and nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.backend.cuda import CudaBackend
from penstock.backend.cuda.exchange import copies, leaves
from penstock.backend.weight_exchange import KeepingPacker
from penstock.engine.assemble import assemble
from penstock.errors import WeightsError
from penstock.model.load import load_model, open_checkpoint
from penstock.types import Finished, Limits, Request, SamplingParams, TokenLogprob, Tokens
from tests.cuda.device import DEVICE, HALF
from tests.engine.changed_weights import change_weights

MODELS = Path(__file__).parents[1] / "models"
PROMPT = (3, 4, 5, 6, 7)


def loaded(path: Path, dtype: torch.dtype, quantize: str) -> tuple[CudaBackend, KeepingPacker]:
    backend = CudaBackend(32, 4, device=DEVICE, dtype=dtype, quantize=quantize)
    packer = KeepingPacker(backend)
    backend.load(load_model(open_checkpoint(path), packer))
    backend.reserve_kv(16, 8, 16)
    return backend, packer


def answer(backend: CudaBackend, count: int = 2) -> list[TokenLogprob]:
    vocab = backend._programs[0].program.answer.width
    engine = assemble(backend, Limits(60, 4, 32, 8, num_blocks=16, vocab=vocab, states=4), depth=backend.depth)
    engine.add(Request(1, PROMPT, SamplingParams(temperature=0, logprobs=3), count))
    events: list[Any] = []
    while not any(isinstance(event, Finished) for event in events):
        events += engine.step()
    return [one for event in events if isinstance(event, Tokens) for one in event.logprobs]


CASES = [
    ("goldens/mixtral", torch.float32, ""),
    ("goldens/llama3", HALF, "int4"),
    ("goldens/qwen2", HALF, ""),
    ("goldens/llama3", torch.float32, ""),
    ("goldens/deepseek_v3", torch.float32, ""),
    ("goldens/bamba", torch.float32, ""),
    ("goldens/mixtral", HALF, "fp8"),
]


@pytest.mark.parametrize(("name", "dtype", "quantize"), CASES)
def test_replaced_weights_answer_as_loaded_ones_and_stay_in_place(
    name: str, dtype: torch.dtype, quantize: str, tmp_path: Path
) -> None:
    other = change_weights(MODELS / name, tmp_path / "other")
    (backend, packer), (fresh, _) = (loaded(path, dtype, quantize) for path in (MODELS / name, other))
    before, expected = answer(backend), answer(fresh)
    places = [leaf.data_ptr() for leaf in leaves(packer.kept) if isinstance(leaf, torch.Tensor)]
    update = backend.begin_update(packer.kept)
    update.prepare(load_model(open_checkpoint(other), update.packer))
    assert answer(backend) == before, "nothing changes before the exchange"
    update.exchange()
    assert answer(backend) == expected != before
    assert places == [leaf.data_ptr() for leaf in leaves(packer.kept) if isinstance(leaf, torch.Tensor)]


def test_what_graphs_would_not_notice_is_refused() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    assert [copied[0] is one for copied in copies((one, 2.0), (other, 2.0))] == [True]
    with pytest.raises(WeightsError, match=r"factor 3.0; the loaded one has 2.0"):
        list(copies((one, 2.0), (other, 3.0)))
    with pytest.raises(WeightsError, match="another layout"):
        list(copies(one, torch.zeros(5)))
