"""Reads model specs from the contents of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.model.config_reader import ConfigReader
from penstock.model.load import CONFIG, read_fields
from penstock.model.spec import ModelSpec


def read_config(values: Mapping[str, Any]) -> ModelSpec:
    return read_fields(ConfigReader(values, CONFIG))
