"""Reads modelopt: 4-bit (`NVFP4`) and 8-bit (`FP8`) floats, from config.json or hf_quant_config.json."""

from __future__ import annotations

from penstock.model.config_reader import ConfigReader
from penstock.model.formats.fp4 import NVFP4_GROUP, nvfp4
from penstock.model.formats.fp8_checkpoint import Fp8Scheme
from penstock.model.formats.grouped import plain_values
from penstock.model.formats.modules import ModuleScheme, ModuleTensors, Scheme
from penstock.model.tensor import Tensor

KEYS = {
    "config_groups",
    "exclude_modules",
    "group_size",
    "has_zero_point",
    "ignore",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "pre_quant_scale",
    "producer",
    "quant_algo",
    "quant_method",
}
UNUSED = ("input_scale", "k_scale", "v_scale", "q_scale", "kv_scale")


def weight(module: str, tensors: ModuleTensors) -> Tensor:
    return nvfp4(tensors["weight"], tensors["weight_scale"], plain_values(tensors["weight_scale_2"]))


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    config.require("quant_algo", ("NVFP4", "FP8"))
    config.require("has_zero_point", (False,), False)
    config.require("pre_quant_scale", (False,), False)
    if config.text("quant_algo") == "FP8":
        return Fp8Scheme(None)
    config.require("group_size", (NVFP4_GROUP,), NVFP4_GROUP)
    return ModuleScheme(weight, "weight_scale_2", needed=("weight", "weight_scale", "weight_scale_2"), unused=UNUSED)
