"""How much memory a model will take on a GPU, from its headers alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.backend.base import StoredAs
from penstock.backend.quantize_at_load import may_quantize
from penstock.model.formats.int8_rows import as_q8_0
from penstock.model.roles import EXPERTS, MLA
from penstock.model.spec import ModelSpec
from penstock.model.tensor import PLAIN, Tensor

# bits of one value, its share of scales included: of formats that stay quantized, and of what plain ones become
KEPT = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5, "NVFP4": 5.0, "NF4": 4.5,
    "IQ1_S": 4.3125, "IQ1_M": 4.5625, "IQ2_XXS": 4.3125, "IQ2_XS": 4.5625, "IQ2_S": 4.5625, "IQ3_XXS": 4.3125,
    "IQ3_S": 4.3125, "TQ1_0": 4.3125, "TQ2_0": 4.3125, "F8_E4M3": 8.0,
}  # fmt: skip
BITS = {"fp8": 8.0, "int4": 4.5}
PACKING_OVERHEAD = 1.02  # scales of rows, and matrices rounded up to whole tiles


def weight_bytes(tensors: Iterable[Tensor], quantize: str) -> int:
    return int(sum(tensor_bytes(tensor, quantize) for tensor in tensors))


def tensor_bytes(tensor: Tensor, quantize: str) -> float:
    return (1 if len(tensor.shape) == 1 else PACKING_OVERHEAD) * stored_as(tensor, quantize).bytes(tensor)


def stored_as(tensor: Tensor, quantize: str) -> StoredAs:
    """Returns the format that a GPU stores the tensor in, if plain weights become `quantize`."""
    if len(tensor.shape) == 1:
        return StoredAs("F32", 32)
    tensor = as_q8_0(tensor) or tensor
    name = tensor.format.name
    widened = tensor.role in MLA or (tensor.role in EXPERTS and (name == "F8_E4M3" or tensor.scales is not None))
    if name in KEPT and not widened:
        return StoredAs(name, KEPT[name])
    if quantize and name in PLAIN and may_quantize(tensor, quantize, "cuda"):
        return StoredAs(quantize, BITS[quantize])
    return StoredAs("BF16", 16)


def workspace_bytes(spec: ModelSpec, tokens: int, rows: int, unpacks: bool) -> int:
    """Of the largest step: a buffer for each value that is alive at once, logits, and what sampling cuts them with.
    `unpacks`: products of many rows have a matrix of 16 bits made of a quantized one."""
    attn = spec.attn
    widths = 4 * spec.dim + (3 if attn.v_dim else 2) * attn.q_width + 2 * attn.kv_width + 3 * spec.hidden
    if spec.experts is not None:
        e = spec.experts
        widths += e.top_k * (3 * e.hidden + spec.dim + 4) + 2 * e.count + 3 * spec.shared_hidden
    if spec.delta:
        widths += 3 * spec.delta.width + 4 * spec.delta.v_width  # some of it in 32 bits
    scratch = 2 * spec.dim * max(2 * spec.hidden, spec.vocab) if unpacks else 0
    return 2 * tokens * widths + tokens * spec.hidden + rows * (3 * spec.vocab * 4 + 2 * spec.dim) + scratch
