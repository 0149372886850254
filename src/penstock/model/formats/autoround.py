"""Reads AutoRound: GPTQ or AWQ tensors, selected by `packing_format`, with optional sizes per module."""

from __future__ import annotations

import re

from penstock.errors import MalformedFile
from penstock.model.config_reader import ConfigReader, size_or_all
from penstock.model.formats import awq, gptq
from penstock.model.formats.modules import Scheme

ZERO_OFFSET = {  # added to a stored zero point
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round:gptqmodel": 0,
    "auto_round": 0,
}
AWQ = ("auto_round:auto_awq", "auto_round:awq")
KEYS = {  # unread ones only concern the quantizer
    "act_bits",
    "act_data_type",
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "bits",
    "block_name_to_quantize",
    "damp_percent",
    "data_type",
    "dataset",
    "desc_act",
    "enable_alg_ext",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "extra_config",
    "gradient_accumulate_steps",
    "group_size",
    "iters",
    "low_cpu_mem_usage",
    "low_gpu_mem_usage",
    "lr",
    "minmax_lr",
    "nsamples",
    "packing_format",
    "quant_block_list",
    "quant_method",
    "scale_dtype",
    "seqlen",
    "static_groups",
    "super_bits",
    "super_group_size",
    "sym",
    "to_quant_block_names",
    "train_bs",
    "true_sequential",
}


def read_sizes(config: ConfigReader, module: str) -> tuple[int, int]:
    """Returns a module's bits and group size (0: all columns)."""
    bits, group = config.size("bits"), size_or_all(config, "group_size")
    exceptions = config.table("extra_config")
    for name in exceptions.names():
        if name == module or matches(name, module):
            own = exceptions.table(name)
            bits, group = own.size("bits", bits), size_or_all(own, "group_size", group or -1)
    return bits, group


def matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise MalformedFile(
            f"extra_config in quantization_config has {pattern!r}, which is not a regular expression: {error}"
        ) from error


def read(config: ConfigReader) -> Scheme:
    config.refuse_others(KEYS)
    packing = config.text("packing_format", config.text("backend", "auto_round:auto_gptq"))
    config.require("data_type", ("int", "int_sym"), "int")
    config.require("act_bits", (16, 32), 16)
    if packing in AWQ:
        config.require("bits", (4,))
        return awq.scheme(lambda module: read_sizes(config, module)[1])
    if packing not in ZERO_OFFSET:
        raise config.unsupported("packing_format", packing, (*ZERO_OFFSET, *AWQ))
    config.require("bits", gptq.BITS)
    return gptq.scheme(lambda module: gptq.GptqPacking(*read_sizes(config, module), ZERO_OFFSET[packing]))
