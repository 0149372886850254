"""Detects a Hugging Face folder's quantization format, and reads its weights as one tensor each.

A format's file defines the valid fields of `quantization_config`, the tensors of a quantized weight, and how to combine
them: into storage blocks that every backend has kernels for, if that is lossless. Unquantized weights are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats.modules import Scheme, Unquantized
from penstock.model.open_files import read_json
from penstock.model.tensor import FP8, INTEGERS, Tensor

MODELOPT = "hf_quant_config.json"  # older modelopt folders use it instead of config.json
METHODS = {  # quant_method: format file
    "fp8": "fp8_checkpoint",
    "awq": "awq",
    "gptq": "gptq",
    "auto-round": "autoround",
    "intel/auto-round": "autoround",
    "compressed-tensors": "compressed",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "exl3": "exl3",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
}


class FormatFile(Protocol):
    """Describes a format's module."""

    def read(self, config: ConfigReader) -> Scheme:
        """Checks the quantization_config and returns the storage scheme."""


def weights_of(tensors: Mapping[str, Tensor], config: ConfigReader, folder: Path) -> dict[str, Tensor]:
    found = read_scheme(config, folder).weights(tensors)
    for tensor in found.values():
        if tensor.scales is None and tensor.format.name in INTEGERS:
            raise UnsupportedModel(
                f"tensor {tensor.name!r} is stored as {tensor.format.name}; config.json does not say how to read that"
            )
        if tensor.scales is None and tensor.format.name in FP8:
            raise MalformedFile(f"tensor {tensor.name!r} is stored as {tensor.format.name} without a scale")
    return found


def read_scheme(config: ConfigReader, folder: Path) -> Scheme:
    if "quantization" in config:
        return reader("mlx")(config.table("quantization"))
    key = "quantization_config" if "quantization_config" in config else "compression_config"
    if key not in config:
        return read_modelopt(folder)
    quantization = config.table(key)
    if "quant_method" not in quantization and "bits" in quantization and "group_size" in quantization:
        return reader("mlx")(quantization)
    method = quantization.text("quant_method", "")
    if method not in METHODS:
        raise quantization.unsupported("quant_method", method, METHODS)
    return reader(METHODS[method])(quantization)


def read_modelopt(folder: Path) -> Scheme:
    if not (folder / MODELOPT).exists():
        return Unquantized()
    return reader("modelopt")(ConfigReader(read_json(folder / MODELOPT), MODELOPT).table("quantization"))


def reader(file: str) -> Callable[[ConfigReader], Scheme]:
    return cast(FormatFile, import_module(f"penstock.model.formats.{file}")).read
