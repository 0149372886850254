"""Speeds before anything is loaded: what a model asks for, over what a machine does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backend.base import StoredAs
from penstock.backend.device import Calibration, LayerShape
from penstock.backend.devices import device_kind
from penstock.config import Config
from penstock.model.load import Checkpoint
from penstock.model.random_tensor import random_tensor
from penstock.model.roles import Role
from penstock.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec
from penstock.planning import calibration, forecast
from penstock.planning.forecast import make_forecasts
from penstock.planning.roofline import (
    MachineProfile,
    MatmulTimes,
    ModelCosts,
    WeightGroup,
    attention_pairs,
    decode_time,
    model_costs,
    prefill_time,
)

MATMUL = MatmulTimes((1, 11, 100), (0.1, 0.1, 1.0))
PROFILE = MachineProfile(step=1.0, layer=0.5, cache=10.0, scores=100.0, matmuls={"Q8_0": MATMUL})
WEIGHT_GROUPS = (WeightGroup("Q8_0", weights=100), WeightGroup("Q8_0", weights=50, sampled=True))
COSTS = ModelCosts(WEIGHT_GROUPS, kv_token=4, windows=(0, 8), q_width=3)


def test_one_row_reads_all_weights() -> None:
    cache = (20 + 8) / 2 * 4 / 10
    assert decode_time(PROFILE, COSTS, rows=1, context=20) == pytest.approx(2 * 0.5 + 15 + cache)


def test_many_rows_multiply_longer_than_they_read() -> None:
    no_context = COSTS._replace(kv_token=0)
    assert decode_time(PROFILE, no_context, rows=100, context=20) == pytest.approx(1 + 150)
    assert decode_time(PROFILE, no_context, rows=5, context=20) == pytest.approx(1 + 15)
    assert decode_time(PROFILE, no_context, rows=300, context=20) == pytest.approx(1 + 3 * 150)
    between = 0.1 + 0.9 * (50 - 11) / (100 - 11)
    assert decode_time(PROFILE, no_context, rows=50, context=20) == pytest.approx(1 + between * 150)


def test_a_prompt_takes_steps_and_only_its_end_is_sampled() -> None:
    products = (2 * 4.0 + 2.0) * 100 + 0.1 * 50
    scores = 2 * 3 * (attention_pairs(1000, 0) + attention_pairs(1000, 8)) / 100
    assert prefill_time(PROFILE, COSTS, tokens=1000, step_tokens=400) == pytest.approx(1 + 3 * 1 + products + scores)


def test_a_state_is_read_and_written_for_every_token() -> None:
    hybrid = COSTS._replace(recurrent=3, state=40)
    assert decode_time(PROFILE, hybrid, 2, 20) - decode_time(PROFILE, COSTS, 2, 20) == pytest.approx(1.5 + 2 * 8)
    assert prefill_time(PROFILE, hybrid, 10, 20) - prefill_time(PROFILE, COSTS, 10, 20) == pytest.approx(1.5 + 3)


def test_no_step_is_shorter_than_what_the_host_does_for_it() -> None:
    assert decode_time(PROFILE._replace(step=1000.0), COSTS, rows=1, context=20) == 1000


@pytest.mark.parametrize(("tokens", "window"), [(1, 0), (7, 0), (7, 7), (7, 3), (7, 1), (3, 100)])
def test_pairs(tokens: int, window: int) -> None:
    assert attention_pairs(tokens, window) == sum(min(i + 1, window or tokens) for i in range(tokens))


def test_experts_are_read_as_far_as_rows_need_them() -> None:
    quarter = ModelCosts((WeightGroup("Q8_0", 100, share=0.25),), kv_token=0, windows=(0,), q_width=1)
    fixed = 0.5
    assert decode_time(PROFILE, quarter, 1, 1) == pytest.approx(fixed + 2.5)
    assert decode_time(PROFILE, quarter, 2, 1) == pytest.approx(fixed + 10 * (1 - 0.75**2))
    assert decode_time(PROFILE, quarter, 800, 1) == pytest.approx(fixed + 100 * 2.0)  # 200 rows for each


# -- of a model ---------------------------------------------------------------------------------------------------

SPEC = ModelSpec("llama", 1, 64, 64, 96, 128, 1e-5, AttentionSpec(2, 1, 32, RopeSpec((1.0,), interleaved=False)))


def checkpoint(tied: bool, format: str = "F16") -> Checkpoint:
    rng = np.random.default_rng(1)
    shapes = {"embed": (96, 64), "layers.0.q": (64, 64), "layers.0.attn_norm": (64,), "norm": (64,)}
    shapes |= {} if tied else {"head": (96, 64)}
    tensors = {name: random_tensor(rng, format if len(shape) > 1 else "F32", *shape) for name, shape in shapes.items()}
    return Checkpoint(replace(SPEC, tied=tied), tensors, "one", Path("one"), {})


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_multiplied_with_counts_and_the_head_for_sampled_rows(tied: bool) -> None:
    one = checkpoint(tied)
    costs = model_costs(one.spec, one.tensors, lambda tensor: StoredAs("fp8", 8), kv_token=7)
    assert set(costs.weight_groups) == {WeightGroup("fp8", 4096), WeightGroup("fp8", 6144, sampled=True)}
    assert (costs.kv_token, costs.windows, costs.q_width, costs.kinds) == (7, (0,), 64, ["fp8"])


def test_a_row_needs_some_of_the_experts() -> None:
    one = checkpoint(tied=True)
    expert = replace(one.tensors["layers.0.q"], role=Role.EXPERT_IN)
    tensors = {f"layers.0.experts.{i}.up": expert for i in range(4)}
    spec = replace(one.spec, experts=ExpertSpec(count=4, top_k=1, hidden=64))
    costs = model_costs(spec, tensors, StoredAs.in_file, kv_token=7)
    assert costs.weight_groups == (WeightGroup("F16", 4 * 4096, share=0.25),)


def test_the_outlook_of_plain_weights_tells_of_all_that_they_could_become(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(device_kind("ref"), quantizations={"": ""}, calibration=device_kind("cpu").calibration)
    monkeypatch.setattr(forecast, "device_kind", lambda device: kind)
    asked: list[list[str]] = []

    def rates(config: Config, name: str, kinds: list[str]) -> MachineProfile:
        asked.append(kinds)
        return PROFILE._replace(matmuls={"F32": MatmulTimes((1, 64), (1e-6, 2e-6))})

    config = Config(model="one", device="ref")
    both = list(make_forecasts(config, checkpoint(tied=True), 100, rates))
    assert asked == [["F32"], ["F32"]]
    assert both[0].speed is not None
    assert both[0].speed.together.keys() == {1, 8, 32, 64}
    assert both[0].speed.alone == pytest.approx(1 / (0.5 + 10240 / 1e6 + 128 * 256 / 10), rel=1e-3)
    assert len(list(make_forecasts(config, checkpoint(tied=True, format="Q8_0"), 100, rates))) == 1


def test_what_does_not_fit_has_no_speed() -> None:
    found, *_ = make_forecasts(
        Config(model="one", device="ref", kv_memory=1), checkpoint(tied=True), 1, lambda *_: None
    )
    assert (found.memory, found.speed) == (None, None)
    assert "KV cache" in found.problem


# -- measuring ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Calibration(LayerShape(256, 256, 4, 2, 64), LayerShape(64, 64, 1, 1, 64), 1 << 18, 64, (1, 4), ())
    monkeypatch.setattr(calibration, "calibration_of", lambda config: sizes)


@pytest.mark.usefixtures("small")
def test_a_machine_is_measured_once_and_added_to() -> None:
    config = Config(model="", device="cpu", step_tokens=64, max_rows=4, threads=2)
    told: list[str] = []
    profile = calibration.measure(config, ["Q8_0"], log=told.append)
    assert told == ["steps and layers", "attention", "products with Q8_0"]
    assert profile.step >= 0
    assert profile.layer >= 0
    assert min(profile.cache, profile.scores, *profile.matmuls["Q8_0"].seconds) > 0
    assert profile.matmuls["Q8_0"].rows == (1, 4, 64)
    more = calibration.measure(config, ["F16", "EXL3-3"], profile, told.append)
    assert told[3:] == ["products with F16", "products with EXL3-3"]
    assert more.matmuls.keys() == {"Q8_0", "F16", "EXL3-3"}
    assert more._replace(matmuls={}) == profile._replace(matmuls={})
