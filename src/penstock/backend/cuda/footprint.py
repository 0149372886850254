"""Predicts how much memory a model takes on a GPU, from its file headers alone. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.backend.base import StoredAs
from penstock.backend.cuda.device import DEVICE
from penstock.backend.quantize_at_load import may_quantize
from penstock.model.formats.near_blocks import as_near_blocks
from penstock.model.formats.trellis import trellis_of
from penstock.model.roles import EXPERTS, MLA
from penstock.model.spec import ModelSpec
from penstock.model.tensor import AFFINE, PLAIN, Tensor, factor_of

# Bits of one value, its share of scales included, in formats that stay quantized on a GPU.
STORED_BITS = {
    "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 5.125, "Q3_K": 4.5625, "Q4_K": 4.625,
    "Q5_K": 5.625, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.25, "NVFP4": 4.5, "NF4": 4.5,
    "IQ1_S": 4.3125, "IQ1_M": 4.5625, "IQ2_XXS": 4.3125, "IQ2_XS": 4.5625, "IQ2_S": 4.5625, "IQ3_XXS": 4.3125,
    "IQ3_S": 4.3125, "TQ1_0": 4.3125, "TQ2_0": 4.3125, "F8_E4M3": 8.0,
    **{name: affine.bits + 32 / affine.values for name, affine in AFFINE.items()},
}  # fmt: skip
QUANTIZED_BITS = {"fp8": 8.0, "int4": 4.5}  # the same for what plain weights become at load
FP8_COLUMNS = 128  # that share a scale, in kernels that read FP8
PACKING_OVERHEAD = 1.02  # scales of rows, and matrices rounded up to whole tiles


def weight_bytes(tensors: Iterable[Tensor], quantize: str, has_fp8: bool = True) -> int:
    """Returns the bytes of all packed weights."""
    return int(sum(tensor_bytes(tensor, quantize, has_fp8) for tensor in tensors))


def tensor_bytes(tensor: Tensor, quantize: str, has_fp8: bool = True) -> float:
    """Returns the bytes of one packed weight."""
    return (1 if len(tensor.shape) == 1 else PACKING_OVERHEAD) * stored_as(tensor, quantize, has_fp8).bytes(tensor)


def stored_as(tensor: Tensor, quantize: str, has_fp8: bool = True) -> StoredAs:
    """Returns the format that a GPU stores the tensor in, if plain weights become `quantize`. Without FP8 tensor cores
    (`has_fp8`), FP8 weights become 16 bits."""
    if len(tensor.shape) == 1:
        return StoredAs("F32", 32)
    if tensor.role not in EXPERTS and (trellis := trellis_of(tensor)):
        return StoredAs(trellis.name, trellis.bits_with_vectors)
    tensor = as_near_blocks(tensor) or tensor
    name = tensor.format.name
    widened = tensor.role in MLA or (name == "F8_E4M3" and not has_fp8)
    if tensor.scales is not None and name == "F8_E4M3":
        columns = tensor.scales.columns
        widened |= columns < tensor.shape[1] and columns % FP8_COLUMNS != 0
    widened |= name != "F8_E4M3" and factor_of(tensor) is None
    if name in STORED_BITS and not widened:
        return StoredAs(name, STORED_BITS[name])
    if quantize and name in PLAIN and may_quantize(tensor, DEVICE):
        return StoredAs(quantize, QUANTIZED_BITS[quantize])
    return StoredAs("BF16", 16)


def expands(tensor: Tensor) -> bool:
    """Returns whether large products with this matrix first expand it to 16 bits."""
    return tensor.format.name in STORED_BITS or trellis_of(tensor) is not None


def workspace_bytes(spec: ModelSpec, tokens: int, rows: int, unpacks: bool) -> int:
    """Returns the bytes that the largest step needs: a buffer for each value that is alive at once, logits, and scratch
    of the sampler. `unpacks`: large products first expand a quantized matrix to 16 bits."""
    attn = max((spec.attn, *spec.layer_attn), key=lambda attn: attn.q_width)
    widths = 4 * spec.dim + (3 if attn.v_dim else 2) * attn.q_width + 2 * attn.kv_width + 3 * spec.hidden
    if spec.experts is not None:
        e = spec.experts
        widths += e.top_k * (3 * e.hidden + spec.dim + 4) + 2 * e.count + 3 * spec.shared_hidden
    if spec.per_layer:
        widths += 2 * spec.layers * spec.per_layer.width
    if spec.observed:
        streams = len(spec.observed.layers)  # each is kept, and they are joined one by one
        widths += (streams + sum(range(2, streams + 1))) * spec.dim + spec.observed.width
    if spec.altup:
        widths += 3 * spec.altup.streams * spec.dim
    if attn.index:
        widths += attn.index.heads * (attn.index.head_dim + 2) + 2 * (attn.index.head_dim + attn.index.top_k)
    if spec.recurrence:
        widths += spec.recurrence.workspace
    scratch = 2 * spec.dim * max(2 * spec.hidden, spec.vocab) if unpacks else 0
    return 2 * tokens * widths + tokens * spec.hidden + rows * (3 * spec.vocab * 4 + 2 * spec.dim) + scratch
