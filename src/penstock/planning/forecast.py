"""Forecasts the memory and the speed of a model before it is loaded, as it is and quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.backend import open_backend, resolve_defaults
from penstock.backend.devices import device_kind
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config
from penstock.errors import ConfigError
from penstock.model.draft import open_draft
from penstock.model.load import Checkpoint
from penstock.model.mtp_head import beside
from penstock.model.tensor import PLAIN
from penstock.planning.memory_plan import MemoryPlan, footprint_of, plan_memory
from penstock.planning.roofline import MachineProfile, ModelCosts, decode_time, model_costs, prefill_time

Profiler = Callable[[Config, str, Sequence[str]], MachineProfile | None]
"""Returns what the machine can do, given a config, the backend's name and the formats of weights; None: unknown."""

ANSWER = 128  # tokens before the one whose time is forecast: the middle of an answer
BATCH_SIZES = (1, 8, 32, 64, 128, 256)  # sequences


class Speed(NamedTuple):
    """Holds the forecast speed of a model."""

    prompt: int  # tokens
    first_token: float  # seconds when nothing else runs; of an encoder, to the embedding
    together: dict[int, float]  # sequences -> tokens per second of all of them; empty for an encoder

    @property
    def alone(self) -> float | None:
        return self.together.get(1)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecasts a model: `memory` if it fits, else `problem`."""

    quantize: str  # empty: weights as they are
    memory: MemoryPlan | None = None
    speed: Speed | None = None
    problem: str = ""  # why it does not fit
    profile: MachineProfile | None = None  # the machine's, if it is known
    costs: ModelCosts | None = None


def make_forecasts(config: Config, checkpoint: Checkpoint, prompt: int, profiler: Profiler) -> Iterator[Forecast]:
    """Yields the forecast for the config and, if it does not quantize plain weights, one for each way to do so."""
    config = resolve_defaults(config, checkpoint.fp8, checkpoint.whole)
    plain = any(tensor.format.name in PLAIN for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    kind = device_kind(config.device)
    others = kind.quantizations if kind.calibration and plain and not config.quantize else ()
    for quantize in (config.quantize, *others):
        resolved = resolve_defaults(replace(config, quantize=quantize), checkpoint.fp8, checkpoint.whole)
        yield make_forecast(resolved, checkpoint, prompt, profiler)


def make_forecast(config: Config, checkpoint: Checkpoint, prompt: int, profiler: Profiler) -> Forecast:
    draft = open_draft(config, checkpoint)
    checkpoint = beside(checkpoint, draft)
    backend, spec, stored = open_backend(config), checkpoint.spec, quantized(checkpoint, config, silent)
    footprint = footprint_of(backend, stored, draft and quantized(draft, config, silent))
    try:
        memory = plan_memory(config, spec, footprint)
    except ConfigError as error:
        return Forecast(config.quantize, problem=str(error))
    costs = model_costs(spec, stored.tensors, backend.stored_as, footprint.kv_token - footprint.draft_token)
    profile = profiler(config, backend.name, costs.kinds)
    speed = profile and forecast_speed(profile, costs, memory, prompt)
    return Forecast(config.quantize, memory, speed, profile=profile, costs=costs)


def silent(_: str) -> None: ...


def forecast_speed(profile: MachineProfile, costs: ModelCosts, memory: MemoryPlan, prompt: int) -> Speed:
    limits = memory.limits
    prompt = min(prompt, limits.max_len)
    context = min(prompt + ANSWER, limits.max_len)
    room = limits.num_blocks // memory.sequence_blocks(context)
    counts = [count for count in BATCH_SIZES if count == 1 or count <= min(room, limits.max_rows)]
    if limits.encoder:
        counts = []
    return Speed(
        prompt,
        prefill_time(profile, costs, prompt, limits.step_tokens),
        {count: count / decode_time(profile, costs, count, context) for count in counts},
    )
