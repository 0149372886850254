"""Reads the LoRA adapters of a call's prompts, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.llm.engine_options import adapter_text
from penstock.store import find_derived
from penstock.types import AdapterUse


class LoRARequest(NamedTuple):
    """Names an adapter and its path. Without a path it must be registered already."""

    lora_name: str
    lora_int_id: int = 0  # no effect: adapters are identified by name
    lora_path: str = ""
    scale: float = 1.0


OneLora = LoRARequest | AdapterUse | str  # a string names a registered adapter
LoraLike = OneLora | tuple[OneLora, ...] | None  # several adapters of one prompt add up
LoraArgument = LoraLike | Sequence[LoraLike]


def lora_list(given: LoraArgument, count: int) -> list[tuple[OneLora, ...]]:
    if not isinstance(given, list):
        return [several(given)] * count  # type: ignore[arg-type]
    if len(given) != count:
        raise InvalidRequest(
            f"there are {count} prompts and {len(given)} LoRA requests: give one for all, or a list with one for each",
            param="lora_request",
        )
    return [several(each) for each in given]


def several(given: LoraLike) -> tuple[OneLora, ...]:
    if given is None:
        return ()
    one = isinstance(given, LoRARequest | AdapterUse | str)
    return (given,) if one else tuple(given)  # type: ignore[return-value, arg-type]


def use_of(one: OneLora) -> AdapterUse:
    use = AdapterUse(one.lora_name, one.scale) if isinstance(one, LoRARequest) else one
    try:
        name, scale = (use, 1.0) if isinstance(use, str) else use
        return AdapterUse(str.__str__(name), float(scale))
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"lora_request takes the name of an adapter and a number as its scale; got {one!r:.100}",
            param="lora_request",
        ) from None


def modelfile_adapters(model: str) -> dict[str, str]:
    """Returns the registration options of a derived model's adapters, by name."""
    derived = find_derived(model)
    paths = [] if derived is None else derived.adapters
    names = [f"Modelfile's adapter {number}" for number in range(1, len(paths) + 1)]
    return {name: adapter_text(name, (path, 1.0)) for name, path in zip(names, paths, strict=True)}
