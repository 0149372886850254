"""Architectures by name: a new one is a file beside llama.py and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from penstock.errors import UnsupportedModel
from penstock.model.ops import Ops, V
from penstock.model.spec import ModelSpec
from penstock.model.weights import Packer

MODULES = {"llama": "penstock.model.llama"}


class Model(Protocol):
    def forward(self, ops: Ops[V]) -> V: ...


class Architecture(Protocol):
    def build(self, spec: ModelSpec, pack: Packer) -> Model: ...


def architecture(name: str) -> Architecture:
    if name not in MODULES:
        raise UnsupportedModel(f"the architecture {name!r} is not supported; supported: {', '.join(MODULES)}")
    return cast(Architecture, import_module(MODULES[name]))
