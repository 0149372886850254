"""Says which adapters (LoRA) the prompts of a call are computed with, in the shape of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import InvalidRequest
from penstock.llm.engine_options import adapter_text
from penstock.store import find_derived
from penstock.types import AdapterUse


class LoRARequest(NamedTuple):
    """Names an adapter and where it is. Without a path it must be registered already."""

    lora_name: str
    lora_int_id: int = 0  # has no effect: an adapter is known by its name
    lora_path: str = ""
    scale: float = 1.0


OneLora = LoRARequest | AdapterUse | str  # a text is the name of a registered adapter
LoraLike = OneLora | tuple[OneLora, ...] | None  # those of a tuple add up
LoraArgument = LoraLike | Sequence[LoraLike]


def lora_list(given: LoraArgument, count: int) -> list[tuple[OneLora, ...]]:
    """Returns the adapters of each of `count` prompts, given as those for all or as a list with those for each."""
    if not isinstance(given, list):
        return [several(given)] * count  # type: ignore[arg-type]
    if len(given) != count:
        raise InvalidRequest(
            f"there are {count} prompts and {len(given)} LoRA requests: give one for all, or a list with one for each",
            param="lora_request",
        )
    return [several(each) for each in given]


def several(given: LoraLike) -> tuple[OneLora, ...]:
    """Returns the adapters of one prompt: none, one or several."""
    if given is None:
        return ()
    one = isinstance(given, LoRARequest | AdapterUse | str)
    return (given,) if one else tuple(given)  # type: ignore[return-value, arg-type]


def use_of(one: OneLora) -> AdapterUse:
    """Returns how a request names an adapter, with the types that an engine reads."""
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
    """Returns the adapters that a derived model is always computed with: by name, the option that registers each."""
    derived = find_derived(model)
    paths = [] if derived is None else derived.adapters
    names = [f"Modelfile's adapter {number}" for number in range(1, len(paths) + 1)]
    return {name: adapter_text(name, (path, 1.0)) for name, path in zip(names, paths, strict=True)}
