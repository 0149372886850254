"""Reads VaultGemma: Gemma 2 without the norms after attention and MLP. llama.cpp does not support it, so there are no
GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.errors import UnsupportedModel
from penstock.model import names
from penstock.model.config_reader import ConfigReader
from penstock.model.families import gemma2, llama
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

HUGGING_FACE = names.HUGGING_FACE.but(mlp_norm="pre_feedforward_layernorm")
GGUF = names.GGUF
build = llama.build


def read_hf(config: ConfigReader) -> ModelSpec:
    return replace(gemma2.read_hf(config), arch="vaultgemma")


def read_gguf(config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
    raise UnsupportedModel("VaultGemma is read from Hugging Face folders only: GGUF has no such architecture")
