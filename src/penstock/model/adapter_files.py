"""Reads LoRA adapters from PEFT folders and GGUF files. A tensor that Penstock would not apply is an error.

An adapter changes a weight W [out, in] to W + scale * B @ A, where A is [rank, in] and B is [out, rank]. Tensors are
mapped to weights by the naming tables of the model's family (names.py), so fused tensors are split as in a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import AdapterError, ModelError, UnsupportedModel
from penstock.model import names
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.tensor_order import REORDER, rows_in
from penstock.model.load import Checkpoint
from penstock.model.low_rank import Floats, LowRankPart, LowRankUpdate, Placement
from penstock.model.open_files import read_json
from penstock.model.peft_config import PeftConfig, read_peft_config
from penstock.model.registry import GGUF, family
from penstock.model.roles import EXPERTS, MLA, Role
from penstock.model.safetensors import read_safetensors
from penstock.model.spec import ModelSpec
from penstock.model.split_fused import split_fused
from penstock.model.tensor import FORMATS, Tensor

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"
PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
GGUF_NAME = re.compile(r"(.+)\.lora_([ab])")
MAX_CONFIG = 1 << 20  # bytes of adapter_config.json
METADATA = "the adapter's GGUF metadata"
REFUSED_TENSORS = {  # part of a tensor name: why it is refused
    "lora_magnitude_vector": "it belongs to DoRA, which is not supported: merge the adapter into its model",
    "lora_embedding_": "adapters of embeddings are not supported: train one without them",
    "lora_B.bias": "a bias of an adapter (lora_bias) is not supported",
    "base_layer.": "it is a weight of the base model itself: save the adapter with save_embedding_layers=False",
    "modules_to_save": "whole modules (modules_to_save) are not supported: train the adapter without them",
}
IN_ORDER = ("q", "k", "v", "o", "gate", "up", "down")  # parts without an entry in REORDER
# Families whose GGUF files order the rows of q and k differently from Hugging Face folders; in the second set, RoPE
# pairs are interleaved in both.
REORDERED_PAIRS = frozenset(("llama", "mixtral", "granite", "granitehybrid", "granitemoe", "minicpm", "smollm3"))
SAME_PAIRS = frozenset(("cohere", "cohere2", "deepseek2", "ernie45", "glm", "glm4", "llama4"))


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """Describes the model that adapters change."""

    spec: ModelSpec
    gguf: bool  # tensors have GGUF row order
    shapes: Mapping[str, tuple[int, ...]]  # canonical name: matrix
    placements: Sequence[Placement]
    adaptable: frozenset[str]  # names of weights that products use

    @classmethod
    def of(cls, checkpoint: Checkpoint, placements: Sequence[Placement]) -> AdapterBase:
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        roles = {name: tensor.role for name, tensor in checkpoint.tensors.items()}
        placed = {part.name for placement in placements for part in placement.parts}
        tables = (Role.EMBEDDING, Role.POSITIONS)
        adaptable = frozenset(name for name in placed if roles.get(name) not in tables)
        return cls(checkpoint.spec, not checkpoint.path.is_dir(), shapes, placements, adaptable)


class LowRank(NamedTuple):
    """Holds the two matrices that change one tensor of a model."""

    name: str  # canonical
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """Describes an adapter whose files are opened and checked against its base, but not read yet."""

    path: Path
    matrices: Mapping[str, LowRank]  # canonical name: matrix

    @property
    def rank(self) -> int:
        return max(matrix.rank for matrix in self.matrices.values())

    def digest(self) -> str:
        state = blake2b(digest_size=16)
        for name in sorted(self.matrices):
            matrix = self.matrices[name]
            state.update(repr((name, matrix.scale, matrix.a.shape, matrix.a.format, matrix.b.format)).encode())
            state.update(np.ascontiguousarray(matrix.a.data).data)
            state.update(np.ascontiguousarray(matrix.b.data).data)
        return state.hexdigest()


def tensors_of(path: Path) -> Path:
    return path / PEFT_TENSORS if path.is_dir() else path


def adapter_bytes(path: Path) -> int:
    """Returns the size of an adapter's file; raises AdapterError if there is none."""
    try:
        return tensors_of(path).stat().st_size
    except OSError:
        raise AdapterError(missing_text(path)) from None


def missing_text(path: Path) -> str:
    """Returns the error text for a missing file. Clients may see it, so it names no other files."""
    if not path.exists():
        return f"there is no adapter at {path}: give a folder that PEFT saved, or a GGUF file"
    missing = " and ".join(name for name in (PEFT_CONFIG, PEFT_TENSORS) if not (path / name).exists())
    return f"{path} has no {missing}: give a folder that PEFT saved, or a GGUF file"


def read_adapter(path: Path, base: AdapterBase) -> LoraAdapter:
    """Opens an adapter; raises AdapterError naming the tensors that change no weight of the model."""
    try:
        if path.is_dir():
            if not (path / PEFT_CONFIG).exists() or not (path / PEFT_TENSORS).exists():
                raise AdapterError(missing_text(path))
            found = list(read_peft(path, base))
        else:
            adapter_bytes(path)
            found = list(read_gguf_adapter(path, base))
    except (ModelError, OSError) as error:
        raise AdapterError(f"the adapter at {path} cannot be used: {error}") from None
    except AdapterError as error:
        raise AdapterError(f"the adapter at {path} cannot be used: {error.message}") from None
    if not found:
        raise AdapterError(f"the adapter at {path} has no LoRA tensors")
    return LoraAdapter(path, {matrix.name: matrix for matrix in found})


# ---- PEFT ----


def read_peft(path: Path, base: AdapterBase) -> Iterator[LowRank]:
    config = read_peft_config(read_json(path / PEFT_CONFIG, MAX_CONFIG))
    naming = family(base.spec.arch).HUGGING_FACE
    for module, (a, b) in pairs(read_safetensors(path / PEFT_TENSORS), PEFT_NAME).items():
        identity = identity_in_folder(module, naming)
        check_pair(module, a, b)
        rank = a.shape[0]
        check_rank(module, rank, config)
        yield from placed(identity, LowRank(identity.name, a, b, config.scale_of(module, rank)), base, in_gguf=False)


def identity_in_folder(module: str, naming: names.Naming) -> names.Identity:
    """Returns the weight that a Hugging Face module name refers to, with or without the "model." prefix of a full
    model.
    """
    try:
        return names.identify(f"{module}.weight", naming)
    except UnsupportedModel:
        pass
    try:
        return names.identify(f"model.{module}.weight", naming)
    except UnsupportedModel:
        raise AdapterError(
            f"it changes {module!r}, which this model does not have: it was trained on another base"
        ) from None


def check_rank(module: str, rank: int, config: PeftConfig) -> None:
    """Raises if a module's rank differs from the config's, because the scale would be wrong."""
    stated = config.rank_of(module)
    if rank != stated:
        raise AdapterError(
            f"the matrices of {module!r} have rank {rank}; r and rank_pattern of {PEFT_CONFIG} say {stated}"
        )


def read_gguf_adapter(path: Path, base: AdapterBase) -> Iterator[LowRank]:
    file = read_gguf(path)
    metadata = ConfigReader(file.metadata, METADATA)
    kind = metadata.text("general.type", "model")
    if kind != "adapter" or metadata.text("adapter.type", "lora") != "lora":
        raise AdapterError(f"{path.name} is no LoRA adapter: general.type is {kind!r}")
    arch = metadata.text("general.architecture")
    if GGUF.get(arch) != {"mixtral": "llama"}.get(base.spec.arch, base.spec.arch):
        raise AdapterError(f"it was made for the architecture {arch!r}; this model is {base.spec.arch!r}")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise AdapterError("it is an activated LoRA (aLoRA), which is not supported")
    alpha = metadata.number("adapter.lora.alpha", 0.0)
    naming = family(base.spec.arch).GGUF
    for tensor, (a, b) in pairs(file.tensors, GGUF_NAME).items():
        check_pair(tensor, a, b)
        scale = alpha / a.shape[0] if alpha else 1.0
        identity = names.identify(tensor, naming)
        yield from placed(identity, LowRank(identity.name, a, b, scale), base, in_gguf=True)


# ---- both ----


def pairs(tensors: Mapping[str, Tensor], pattern: re.Pattern[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs A and B by module; raises for unpaired and unknown tensors."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        refuse_tensor(name)
        match = pattern.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"tensor {name!r} is no LoRA matrix; an adapter that also changes biases or whole modules is not "
                "supported: merge it into its model"
            )
        found.setdefault(match[1], {})[match[2].lower()] = tensor
    for module, both in found.items():
        if both.keys() != {"a", "b"}:
            raise AdapterError(
                f"{module!r} has a matrix {next(iter(both)).upper()} without its pair; the file may be truncated"
            )
    return {module: (both["a"], both["b"]) for module, both in found.items()}


def refuse_tensor(name: str) -> None:
    """Raises for tensors of unsupported adapter kinds."""
    for part, reason in REFUSED_TENSORS.items():
        if part in name:
            raise AdapterError(f"tensor {name!r}: {reason}")


def check_pair(module: str, a: Tensor, b: Tensor) -> None:
    for tensor in (a, b):
        if tensor.format.name not in FORMATS:
            raise AdapterError(f"tensor {tensor.name!r} is in {tensor.format.name}; supported: {', '.join(FORMATS)}")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"the matrices of {module!r} have shapes {a.shape} and {b.shape}, where (rank, in) and (out, rank) are "
            "needed"
        )


def placed(identity: names.Identity, matrix: LowRank, base: AdapterBase, *, in_gguf: bool) -> Iterator[LowRank]:
    refuse_role(identity, base)
    for name, b in split_fused({matrix.name: matrix.b.with_role(identity.role)}, base.spec).items():
        one = matrix._replace(name=name, b=in_order(name, b, base, in_gguf))
        shape = (one.b.shape[0], one.a.shape[1])
        if name not in base.shapes:
            raise AdapterError(f"it changes {name!r}, which this model does not have: it was trained on another base")
        if base.shapes[name] != shape:
            raise AdapterError(
                f"it changes {name!r} with matrices for a weight of shape {shape}; this model's is "
                f"{base.shapes[name]}: it was trained on another base"
            )
        if name not in base.adaptable:
            raise AdapterError(f"it changes {name!r}, which this engine cannot compute with an adapter")
        yield one


def refuse_role(identity: names.Identity, base: AdapterBase) -> None:
    """Raises for weights that cannot be adapted."""
    if identity.role in EXPERTS:
        raise AdapterError(f"it changes experts ({identity.name!r}), which is not supported")
    if identity.role in (Role.EMBEDDING, Role.POSITIONS):
        raise AdapterError(f"it changes the embedding ({identity.name!r}), which is not supported")
    if identity.role is Role.HEAD and base.spec.tied:
        raise AdapterError("it changes the output head, which this model shares with its embedding: not supported")
    if identity.role in MLA:
        raise AdapterError(
            f"it changes {identity.name!r}, which is absorbed into the attention of this model (MLA): not supported"
        )


def in_order(name: str, b: Tensor, base: AdapterBase, in_gguf: bool) -> Tensor:
    if base.gguf == in_gguf:
        return b
    arch, part = base.spec.arch, name.rpartition(".")[2]
    if arch in REORDER and part not in IN_ORDER:
        raise AdapterError(f"the rows of {name!r} have another order in GGUF files of {arch}: use the folder as base")
    if part not in ("q", "k") or arch in SAME_PAIRS:
        return b
    if arch in REORDERED_PAIRS:
        order = pair_order(b.shape[0], base.spec)
        return rows_in(b, order if base.gguf else np.argsort(order))
    if base.gguf and base.spec.attn.rope.interleaved:
        raise AdapterError(f"it is not known how GGUF files of {arch} order {name!r}: use the folder as base")
    return b


def pair_order(rows: int, spec: ModelSpec) -> Any:
    """Returns the permutation from Hugging Face to GGUF rows of q or k, for interleaved RoPE pairs."""
    rotated = max(2 * len(attn.rope.inv_freq) for attn in (spec.attn, *spec.layer_attn))
    if not rotated:
        return np.arange(rows)
    order = np.arange(rows).reshape(-1, spec.attn.head_dim)
    halves = order[:, :rotated].reshape(len(order), 2, -1)
    order[:, :rotated] = halves.swapaxes(1, 2).reshape(len(order), -1)
    return order.reshape(-1)


# ---- for backends ----


def updates_of(uses: Iterable[tuple[LoraAdapter, float]], placements: Sequence[Placement]) -> list[LowRankUpdate]:
    """Combines several adapters, each with its own extra scale, into one update per packed weight; ranks add up."""
    given = list(uses)
    updates = []
    for placement in placements:
        parts, first = [], 0
        for part in placement.parts:
            found = [(adapter.matrices[part.name], scale) for adapter, scale in given if part.name in adapter.matrices]
            if found:
                a = np.concatenate([dequantize(matrix.a) for matrix, _ in found])
                b = np.concatenate([scaled_b(matrix, scale) for matrix, scale in found], axis=1)
                parts.append(LowRankPart(first, a, part.take(b)))
            first += part.packed_rows
        if parts:
            updates.append(LowRankUpdate(placement.weight, tuple(parts)))
    return updates


def scaled_b(matrix: LowRank, scale: float) -> Floats:
    return dequantize(matrix.b) * np.float32(matrix.scale * scale)


def merged(tensor: Tensor, matrix: LowRank, scale: float) -> Floats:
    return dequantize(tensor) + scaled_b(matrix, scale) @ dequantize(matrix.a)
