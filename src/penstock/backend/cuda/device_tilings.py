"""Chooses the tilings of one GPU: measured ones (`penstock doctor --tune`) first, else the defaults of the source
code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from penstock.backend.cuda import quantized_tilings, tilings
from penstock.backend.cuda.device_properties import INTERPRETER, DeviceProperties
from penstock.backend.cuda.kernels.decode_attention import FEWEST_QUERIES
from penstock.backend.cuda.kernels.fixed_gemm import Tiling as FixedGemmTiling
from penstock.backend.cuda.kernels.fp8_blocks import Tiling as Fp8BlockTiling
from penstock.backend.cuda.kernels.gemv import Tiling as GemvTiling
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling
from penstock.backend.cuda.kernels.hopper_gemm import Tiling as HopperTiling
from penstock.backend.cuda.kernels.mla_attention import MlaTiling
from penstock.backend.cuda.kernels.quant_gemm import Tiling as QuantGemmTiling
from penstock.backend.cuda.kernels.quant_gemm_small import Tiling as SmallGemmTiling
from penstock.backend.cuda.kernels.quant_gemv import Tiling as QuantGemvTiling
from penstock.backend.cuda.kernels.skinny_gemm import Tiling as SkinnyTiling
from penstock.backend.cuda.kernels.split_k import MAX_PARTIALS
from penstock.backend.cuda.quantized_tilings import FIXED_ROWS
from penstock.backend.cuda.tilings import AttentionTiling
from penstock.backend.cuda.tuned_tilings import Product, TunedTilings, default_path, read_tuned

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def remembered(choose: Callable[Concatenate[Tilings, P], T]) -> Callable[Concatenate[Tilings, P], T]:
    """Makes a choice once for each set of arguments: products ask for it at every launch."""
    name = choose.__name__

    def chosen(self: Tilings, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = name, args, *kwargs.items()
        if key not in self._chosen:
            self._chosen[key] = choose(self, *args, **kwargs)
        return self._chosen[key]  # type: ignore[no-any-return]

    return chosen


class Tilings:
    """Returns the tiling of every product on one GPU, and of attention. Where they are `fixed`, no tiling and no choice
    of a kernel depends on the number of rows, so that a row's result does not depend on its batch."""

    def __init__(self, device: DeviceProperties, tuned: TunedTilings | None = None, *, fixed: bool = False) -> None:
        self.device = device
        self.fixed = fixed
        self._tuned = tuned or TunedTilings()
        self._chosen: dict[tuple[object, ...], Any] = {}

    @classmethod
    def of(cls, device: DeviceProperties, path: Path | None = None) -> Tilings:
        """Returns the tilings of a GPU, with those in the file of measured ones (by default the store's), and logs one
        line if none were ever measured on such a GPU."""
        tuned = read_tuned(path or default_path(), device.name)
        if not device.is_tuned and device is not INTERPRETER and not tuned.measured:
            log.warning(
                "no tilings were measured on %s (compute capability %d.%d): defaults are used; "
                "`penstock doctor --tune` measures and keeps better ones",
                device.name,
                *device.capability,
            )
        return cls(device, tuned)

    @remembered
    def gemv(self, rows: int, width: int) -> GemvTiling:
        found = self._tuned.find(Product("gemv", "16 bits", 1, rows, width))
        return GemvTiling(*found) if found else tilings.gemv_tiling(rows, width)

    @remembered
    def expert_gemv(self, itemsize: int, rows: int, width: int, gated: bool) -> GemvTiling:
        kind = "fp8" if itemsize == 1 else f"{8 * itemsize} bits"
        found = self._tuned.find(Product("expert_gemv", kind, 1, rows, width, gated))
        return GemvTiling(*found) if found else tilings.expert_gemv_tiling(itemsize, gated)

    @remembered
    def skinny(self, count: int, rows: int, width: int, itemsize: int, gated: bool = False) -> SkinnyTiling | None:
        usual = tilings.skinny_tiling(self.device, count, rows, width, itemsize, gated)
        found = self._tuned.find(Product("skinny", f"{8 * itemsize} bits", count, rows, width, gated))
        return SkinnyTiling(*found) if usual and found else usual

    @remembered
    def hopper_gemm(
        self, count: int, rows: int, width: int, itemsize: int, gated: bool = False, updated: bool = False
    ) -> HopperTiling:
        return tilings.hopper_gemm_tiling(self.device, count, rows, width, itemsize, gated, updated)

    @remembered
    def small_gemm(self, kind: str, count: int, rows: int, width: int, gated: bool = False) -> SmallGemmTiling:
        found = self._tuned.find(Product("small_gemm", kind, count, rows, width, gated))
        if found and not gated:
            return quantized_tilings.narrowed(SmallGemmTiling(*found), width)
        return quantized_tilings.small_gemm_tiling(kind, count, rows, width, gated)

    @remembered
    def quant_gemv(
        self, groups: int, rows: int, width: int, gated: bool = False, table: bool = False
    ) -> QuantGemvTiling:
        return quantized_tilings.quant_gemv_tiling(groups, rows, width, gated, table)

    @remembered
    def fixed_gemm(self, rows: int, width: int, itemsize: int) -> FixedGemmTiling:
        return tilings.fixed_gemm_tiling(self.device, rows, width, itemsize)

    @remembered
    def fixed_heads_gemm(self, rows: int, width: int, itemsize: int) -> FixedGemmTiling:
        """Returns the tiling of products with a matrix for each head, whose columns are not split."""
        return tilings.fixed_gemm_tiling(self.device, rows, width, itemsize)._replace(split=1)

    @remembered
    def quant_gemm(self, count: int, rows: int, width: int) -> QuantGemmTiling:
        count = FIXED_ROWS if self.fixed else count
        found = self._tuned.find(Product("quant_gemm", "4 bits", count, rows, width))
        if found:
            return bounded(QuantGemmTiling(*found), count, rows)
        return quantized_tilings.quant_gemm_tiling(self.device, count, rows, width)

    @remembered
    def fp8_gemm(self, count: int, rows: int, width: int) -> QuantGemmTiling:
        count = FIXED_ROWS if self.fixed else count
        found = self._tuned.find(Product("fp8_gemm", "fp8", count, rows, width))
        if found:
            return bounded(QuantGemmTiling(*found), count, rows)
        return quantized_tilings.fp8_gemm_tiling(self.device, count, rows, width)

    @remembered
    def fp8_block_gemm(self, count: int, rows: int, width: int) -> Fp8BlockTiling:
        count = FIXED_ROWS if self.fixed else count
        return quantized_tilings.fp8_block_gemm_tiling(self.device, count, rows, width)

    @remembered
    def prefill_attention(self, queries: int, dims: int, itemsize: int) -> AttentionTiling:
        return tilings.prefill_attention_tiling(self.device, queries, dims, itemsize)

    @remembered
    def hopper_attention(self, dims: int) -> HopperAttentionTiling | None:
        """Returns None where only the kernel for every GPU runs."""
        return tilings.hopper_attention_tiling(self.device, dims)

    @remembered
    def decode_attention(self, rows: int, dims: int, itemsize: int, queries: int = FEWEST_QUERIES) -> AttentionTiling:
        return tilings.decode_attention_tiling(self.device, rows, dims, itemsize, queries)

    @remembered
    def shared_prefix(self, dims: int, itemsize: int, queries: int) -> AttentionTiling:
        return tilings.shared_prefix_tiling(self.device, dims, itemsize, queries)

    @remembered
    def segmented_attention(self, dims: int, itemsize: int, queries: int) -> AttentionTiling:
        return tilings.segmented_attention_tiling(self.device, dims, itemsize, queries)

    @remembered
    def mla_prefill(self, dims: int, itemsize: int) -> MlaTiling:
        return tilings.mla_prefill_tiling(self.device, dims, itemsize)

    @remembered
    def mla_decode(self, heads: int, dims: int, itemsize: int) -> MlaTiling:
        return tilings.mla_decode_tiling(self.device, heads, dims, itemsize)

    @remembered
    def segmented_mla(self, dims: int, itemsize: int) -> MlaTiling:
        return tilings.segmented_mla_tiling(self.device, dims, itemsize)

    @remembered
    def hopper_mla(self, nope: int, rope: int, values: int) -> HopperAttentionTiling | None:
        return tilings.hopper_mla_tiling(self.device, nope, rope, values)

    @remembered
    def mla_expanded(self, nope: int, rope: int, values: int, itemsize: int) -> AttentionTiling:
        return tilings.mla_expanded_tiling(self.device, nope, rope, values, itemsize)

    @remembered
    def expand_latents(self, nope: int, values: int, itemsize: int) -> int:
        return tilings.expand_latents_stages(self.device, nope, values, itemsize)


def bounded(tiling: QuantGemmTiling, count: int, rows: int) -> QuantGemmTiling:
    """Returns the tiling with a split whose partial sums fit the scratch memory: it was measured with other rows."""
    most = max(MAX_PARTIALS // (count * rows), 1)
    return tiling._replace(split=min(tiling.split, 1 << (most.bit_length() - 1)))
