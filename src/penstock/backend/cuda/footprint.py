"""Predicts how much memory a model takes on a GPU, only from its file headers. It imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.backend.cuda.storage import CODE_BITS, FP8, StorageRules, WeightLayout, storage_of
from penstock.model.formats.trellis import trellis_of
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor

ALLOCATION_OVERHEAD = 1.02  # the device gives memory in large pieces


def weight_bytes(tensors: Iterable[Tensor], rules: StorageRules) -> int:
    stored = (storage_of(tensor, rules) for tensor in tensors)
    return int(sum(each.bytes * (1 if each.layout is WeightLayout.VECTOR else ALLOCATION_OVERHEAD) for each in stored))


def expands(tensor: Tensor) -> bool:
    """Returns whether large products with this matrix first expand it to 16 bits."""
    return tensor.format.name in CODE_BITS.keys() | {FP8} or trellis_of(tensor) is not None


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
