"""Lists the kinds of devices: each folder of this package that has a `device.py`, and entry points of other packages.

`--device auto` chooses among the kinds of this package: a search for entry points takes long.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from penstock.backend.device import Device, DeviceKind
from penstock.config import AUTO, ConfigOption
from penstock.errors import ConfigError
from penstock.plugins import plugins

GROUP = "penstock.backends"  # each entry point is a DeviceKind


@cache
def kinds() -> Mapping[str, DeviceKind]:
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/device.py"))
    declared: list[DeviceKind] = [import_module(f"penstock.backend.{name}.device").DEVICE for name in folders]
    return {kind.name: kind for kind in declared}


@cache
def other_kinds() -> Mapping[str, DeviceKind]:
    return {plugin.name: plugin.load(DeviceKind) for plugin in plugins(GROUP)}


def in_order() -> list[DeviceKind]:
    return sorted(kinds().values(), key=lambda kind: kind.order)


def parse_device(text: str) -> Device:
    name, colon, number = text.partition(":")
    kind = kinds().get(name) or other_kinds().get(name)
    if kind is None or (colon and not (kind.indexed and number.isascii() and number.isdigit())):
        known = [*kinds().values(), *other_kinds().values()]
        indexed = (f"{kind.name}:N for {kind.noun.split()[-1]} number N" for kind in known if kind.indexed)
        names = ", ".join([AUTO, *(kind.name for kind in known)])
        raise ConfigError(f"unknown device {text!r}: use one of {', or '.join([names, *indexed])}")
    return Device(kind, int(number or 0))


def device_kind(text: str) -> DeviceKind:
    if text == AUTO:
        raise ConfigError(f"device {AUTO!r} is not decided yet: resolve_defaults comes first")
    return parse_device(text).kind


def possible_kinds(text: str) -> list[DeviceKind]:
    """Returns the kinds of this package that a value of `--device` can mean on this machine; empty: unknown."""
    if text == AUTO:
        return [kind for kind in in_order() if kind.is_present()]
    kind = kinds().get(text.partition(":")[0])
    return [] if kind is None else [kind]


def may_own_memory(text: str) -> bool:
    return any(kind.own_memory for kind in possible_kinds(text))


def quantizations() -> set[str]:
    return {quantize for kind in kinds().values() for quantize in kind.quantizations}


def option_help(name: str, option: ConfigOption) -> str:
    if name == "device":
        *first, last = (kind.help for kind in kinds().values())
        return f"{option.help[:-1]}: {', '.join([AUTO, *first])} or {last}."
    host = [kind for kind in kinds().values() if not kind.noun]
    if name not in host[0].defaults:
        return option.help
    others = "".join(_default_on(kind, name) for kind in kinds().values() if kind.noun)
    return f"{option.help} 0: {host[0].defaults[name]}{others}."


def _default_on(kind: DeviceKind, name: str) -> str:
    fp8 = f", with FP8 weights {kind.fp8_defaults[name]}" if name in kind.fp8_defaults else ""
    return f"; on {kind.noun} {kind.defaults[name]}{fp8}"
