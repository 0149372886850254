"""What to expect of a model before it is loaded: the memory it would take and the speed it would have, as it is and
quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.backend import QUANTIZATIONS, open_backend, resolve_defaults
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config, Device
from penstock.errors import ConfigError
from penstock.model.load import Checkpoint
from penstock.model.tensor import PLAIN
from penstock.planning.memory_plan import MemoryPlan, plan_memory
from penstock.planning.roofline import Demand, Machine, decode_time, demand_of, prefill_time

Rates = Callable[[Config, str, Sequence[str]], Machine | None]  # of a backend, by name, with weights stored so
ANSWER = 128  # tokens that were answered already, in the middle of what is expected
TOGETHER = (1, 8, 32, 64, 128, 256)  # sequences


class Speed(NamedTuple):
    prompt: int  # tokens
    first_token: float  # seconds, with nothing else to be done; of an encoder, to the embedding
    together: dict[int, float]  # tokens a second of so many sequences in all; empty where there are no answers

    @property
    def alone(self) -> float | None:
        return self.together.get(1)


@dataclass(frozen=True, slots=True)
class Outlook:
    quantize: str  # empty: as it is
    memory: MemoryPlan | None = None
    speed: Speed | None = None
    trouble: str = ""  # why it does not fit


def outlooks(config: Config, checkpoint: Checkpoint, prompt: int, rates: Rates) -> Iterator[Outlook]:
    """As the config says; where it does not, plain weights as they are, and as all that they could become."""
    config = resolve_defaults(config, checkpoint.float8, checkpoint.whole)
    plain = any(tensor.format.name in PLAIN for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    others = QUANTIZATIONS.get(Device.parse(config.device).kind, ()) if plain and not config.quantize else ()
    for quantize in (config.quantize, *others):
        complete = resolve_defaults(replace(config, quantize=quantize), checkpoint.float8, checkpoint.whole)
        yield outlook(complete, checkpoint, prompt, rates)


def outlook(config: Config, checkpoint: Checkpoint, prompt: int, rates: Rates) -> Outlook:
    backend, spec, tensors = open_backend(config), checkpoint.spec, quantized(checkpoint, config, silent).tensors
    footprint = backend.footprint(spec, tensors.values())
    try:
        memory = plan_memory(config, spec, footprint)
    except ConfigError as error:
        return Outlook(config.quantize, trouble=str(error))
    demand = demand_of(spec, tensors, backend.stored_as, footprint.kv_token)
    machine = rates(config, backend.name, demand.kinds)
    return Outlook(config.quantize, memory, machine and speed_of(machine, demand, memory, prompt))


def silent(_: str) -> None: ...


def speed_of(machine: Machine, demand: Demand, memory: MemoryPlan, prompt: int) -> Speed:
    limits = memory.limits
    prompt = min(prompt, limits.max_len)
    context = min(prompt + ANSWER, limits.max_len)
    room = limits.num_blocks // memory.sequence_blocks(context)
    counts = [count for count in TOGETHER if count == 1 or count <= min(room, limits.max_rows)]
    if limits.encoder:
        counts = []
    return Speed(
        prompt,
        prefill_time(machine, demand, prompt, limits.step_tokens),
        {count: count / decode_time(machine, demand, count, context) for count in counts},
    )
