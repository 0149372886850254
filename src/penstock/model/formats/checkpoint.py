"""Quantized checkpoints of Hugging Face folders, one file for each format.

A format says what its `quantization_config` may hold, which tensors make up a quantized weight, and how they become one
tensor: in storage blocks that every backend has kernels for, where that loses nothing. modules.py finds the weights;
what is not quantized stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from penstock.errors import UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.formats import fp8_checkpoint
from penstock.model.formats.modules import Scheme, put_together
from penstock.model.open_files import read_json
from penstock.model.tensor import INTEGERS, Tensor

MODELOPT = "hf_quant_config.json"  # where older folders of modelopt say what a config.json says now
METHODS = {  # what quant_method calls a format: its file
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
}


def weights_of(tensors: Mapping[str, Tensor], config: ConfigReader, folder: Path) -> dict[str, Tensor]:
    """The tensors that are weights, by their names in the file."""
    scheme = read_scheme(config, folder)
    if scheme is None or isinstance(scheme, fp8_checkpoint.Scheme):
        found = fp8_checkpoint.with_scales(tensors, scheme)
    else:
        found = put_together(tensors, scheme)
    for tensor in found.values():
        if tensor.format.name in INTEGERS and tensor.scales is None:
            raise UnsupportedModel(
                f"tensor {tensor.name!r} is stored as {tensor.format.name}; config.json does not say how to read that"
            )
    return found


def read_scheme(config: ConfigReader, folder: Path) -> Scheme | fp8_checkpoint.Scheme | None:
    """None: the checkpoint is not quantized."""
    if "quantization" in config:
        return reader("mlx")(config.table("quantization"))
    key = "quantization_config" if "quantization_config" in config else "compression_config"
    if key not in config:
        return read_modelopt(folder)
    fields = config.table(key)
    if "quant_method" not in fields and "bits" in fields and "group_size" in fields:
        return reader("mlx")(fields)
    method = fields.text("quant_method", "")
    if method == "fp8":
        return fp8_checkpoint.read_fp8(fields)
    if method not in METHODS:
        raise fields.unsupported("quant_method", method, ("fp8", *METHODS))
    return reader(METHODS[method])(fields)


def read_modelopt(folder: Path) -> Scheme | fp8_checkpoint.Scheme | None:
    if not (folder / MODELOPT).exists():
        return None
    fields = ConfigReader(read_json(folder / MODELOPT), MODELOPT).table("quantization")
    return reader("modelopt")(fields)


def reader(file: str) -> Callable[[ConfigReader], Scheme | fp8_checkpoint.Scheme]:
    return cast(Format, import_module(f"penstock.model.formats.{file}")).read


class Format(Protocol):
    """What a format's file holds."""

    def read(self, config: ConfigReader) -> Scheme | fp8_checkpoint.Scheme: ...
