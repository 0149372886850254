"""Keeps adapters (LoRA) on the device, in slots that kernels find through a table of addresses.

A thread packs an adapter and copies it to the device on a stream of its own. Putting it into a slot is a copy of a few
kilobytes between two steps, so that nobody waits for another's adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.backend.cuda.adapter_tiles import DECODE_ROWS, PROMPT_ROWS
from penstock.backend.cuda.kernels.fp8_activations import Fp8Activations, fp8_view, quantize_activations
from penstock.backend.cuda.kernels.hopper_low_rank import MAX_WIDTH, ProductUpdates, shrink_few
from penstock.backend.cuda.kernels.low_rank import (
    RECORD,
    AdaptedWeight,
    RowTiles,
    expand,
    shrink,
    values_needed,
)
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.pack_low_rank import PackedUpdate, UpdateSizes, pack_update
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.backend.cuda.transfer import CHUNK, Lane
from penstock.errors import AdapterError, OutOfMemory
from penstock.model.low_rank import LowRankUpdate

FIRST_SLOTS = 32  # in the table at first
PRODUCT_ROWS = (8, 16, 32, 64)  # row counts for which products with updates are compiled


@dataclass(slots=True)
class CudaAdapter:
    """Holds an adapter on the device."""

    memory: Any  # all matrices, then the blocks that `expand` reads
    records: Any  # [weights, RECORD] on the host
    sizes: dict[int, UpdateSizes]  # key: weight number

    @property
    def nbytes(self) -> int:
        return int(self.memory.nbytes)


@dataclass(slots=True)
class WeightSizes:
    """Says how large the updates of one weight are."""

    weight: Any  # kept, so that no other has its identity
    gated: bool
    sampled: bool  # it multiplies only sampled positions
    chunks: int = 0  # the most that a slot had so far
    blocks: int = 0
    aligned: bool = True
    depth: int = 0
    tiled: bool = True

    def grow(self, sizes: UpdateSizes) -> bool:
        """Makes launches large enough for an update; returns whether they were not."""
        before = self.chunks, self.blocks, self.aligned, self.depth, self.tiled
        self.chunks, self.blocks = max(self.chunks, sizes.chunks), max(self.blocks, sizes.blocks)
        self.aligned, self.tiled = self.aligned and sizes.aligned, self.tiled and sizes.tiled
        self.depth = max(self.depth, sizes.depth)
        return before != (self.chunks, self.blocks, self.aligned, self.depth, self.tiled)


class CudaAdapters:
    """Keeps adapters in slots: see AdapterSlots. `sizes` are the most rows and the most tokens of a step; `on_stream`
    makes the stream that steps run on the current one. `fixed`: a row's update does not depend on its batch, nor on
    which other adapters there are."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        sizes: tuple[int, int],
        on_stream: Callable[[], AbstractContextManager[Any]],
        *,
        fixed: bool = False,
    ) -> None:
        self._device = device
        self._fixed = fixed
        self._dtype = dtype
        self._sizes = sizes
        self._on_stream = on_stream
        self._weights: dict[int, int] = {}  # numbers by identity
        self._known: list[WeightSizes] = []
        self._loaded: dict[int, CudaAdapter] = {}  # key: slot
        self._records: Any = None  # [slots, weights, RECORD]
        self._low_rank: Any = None  # what `shrink` leaves for `expand`
        self._lane: Lane | None = None
        self._compiled = False
        self.forget_graphs: Callable[[], None] = lambda: None

    # -- in any thread -------------------------------------------------------------------------------------------

    def pack(self, updates: Sequence[LowRankUpdate]) -> CudaAdapter:
        packed = {self._number(update): update for update in updates}
        sent = self._sent({number: self._packed(update, number) for number, update in packed.items()})
        if self._lane is not None and not self._compiled:
            with torch.cuda.stream(self._lane.stream):
                self._compile(torch.zeros((1, len(self._known), RECORD), dtype=torch.int64, device=self._device))
            self._compiled = True
        return sent

    def _compile(self, records: Any) -> None:
        """Launches all kernels for rows that are not there, so that no step has to wait until they are compiled."""
        order = torch.zeros(1, dtype=torch.int32, device=self._device)
        nowhere, room = torch.full((1, 4), -1, dtype=torch.int32, device=self._device), self._empty(1, 1).float()
        sampled = RowTiles(nowhere[0, :1], None, DECODE_ROWS)
        sizes = (DECODE_ROWS,) if self._fixed else (DECODE_ROWS, PROMPT_ROWS)
        tokens = [RowTiles(nowhere, order, size) for size in sizes]
        for known in self._known:
            weight = AdaptedWeight(records, 0, 1, 1, not self._fixed, self._dtype)
            x = self._empty(1, known.weight.width)
            y = self._empty(1, known.weight.rows).to(torch.float32 if known.sampled else self._dtype)
            for rows in [sampled] if known.sampled else tokens:
                shrink(x, rows, weight, room)
                if known.weight.takes_fp8(rows.size):
                    shrink(fp8_view(x), rows, weight, room)
                expand(room, 1, rows, weight, y, y[:, : y.shape[1] // 2] if known.gated else y, known.gated)
        self._compile_products(records, nowhere, room)

    def _compile_products(self, records: Any, nowhere: Any, h: Any) -> None:
        """Does the same for products that add updates themselves, once for all weights of a size. It has
        its own scratch memory, because steps run meanwhile."""
        taken = [known for i, known in enumerate(self._known) if not known.sampled and self.takes_few(i)]
        for (rows, width), known in {(known.weight.rows, known.weight.width): known for known in taken}.items():
            workspace = copy(known.weight.workspace)
            workspace.scratch = SplitKScratch.on(self._device)
            weight = replace(known.weight, workspace=workspace)
            for count in PRODUCT_ROWS:
                x = self._empty(count, width)
                out = self._empty(count, rows // 2 if known.gated else rows)
                slots = torch.full((count,), -1, dtype=torch.int32, device=self._device)
                inputs = fp8_view(x) if weight.takes_fp8(count) else x
                shrink_few(
                    inputs, RowTiles(nowhere, slots, DECODE_ROWS), AdaptedWeight(records, 0, 1, 1, True, self._dtype), h
                )
                weight.updated(inputs, out, ProductUpdates(nowhere, slots, records, h, 1, 1, 1), known.gated)

    def _empty(self, rows: int, width: int) -> Any:
        return torch.empty((rows, width), dtype=self._dtype, device=self._device)

    def _sent(self, packed: Mapping[int, PackedUpdate]) -> CudaAdapter:
        """Copies updates of weights to the device: the matrices of all, then the blocks of all."""
        item = self._dtype.itemsize
        below = sum(update.values for update in packed.values()) * item  # where blocks begin
        host = torch.zeros(below + sum(update.blocks.nbytes for update in packed.values()), dtype=torch.uint8)
        memory, at = self._reserve(len(host)), 0
        records = torch.zeros((len(self._known), RECORD), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for number, update in packed.items():
            size, end = update.values * item, below + update.blocks.nbytes
            update.write(host[at : at + size].view(self._dtype))
            host[below:end].numpy()[:] = update.blocks.reshape(-1).view(np.uint8)
            places = torch.tensor([at, at + update.b_at * item, below]) + memory.data_ptr()
            records[number, :3], records[number, 3:5] = places, torch.tensor(update.sizes[:2])
            at, below = at + size, end
        self._send(host, memory)
        return CudaAdapter(memory, records, {number: update.sizes for number, update in packed.items()})

    def _number(self, update: LowRankUpdate) -> int:
        if id(update.weight) not in self._weights:
            raise AdapterError("the adapter changes a weight that no product of this model uses on a GPU")
        return self._weights[id(update.weight)]

    def _packed(self, update: LowRankUpdate, number: int) -> PackedUpdate:
        return pack_update(update, self._known[number].gated)

    def _reserve(self, size: int) -> Any:
        if self._device.type != "cuda":
            return torch.empty(size, dtype=torch.uint8)
        if self._lane is None:
            with torch.cuda.device(self._device):
                self._lane = Lane(self._device)
        try:
            with torch.cuda.stream(self._lane.stream):
                return torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError:
            raise OutOfMemory(
                f"the device has no memory for an adapter of {size} bytes: leave more with a smaller --kv-memory"
            ) from None

    def _send(self, host: Any, memory: Any) -> None:
        """Copies bytes to the device and returns when they are there. Only this thread waits."""
        if self._lane is None:
            memory.copy_(host)
            return
        reserved = self._lane.stream.record_event()
        for first in range(0, len(host), CHUNK):
            part = slice(first, first + CHUNK)
            self._lane.send(host[part].numpy(), memory[part], reserved)
        self._lane.stream.synchronize()

    # -- between steps -------------------------------------------------------------------------------------------

    def load(self, slot: int, packed: CudaAdapter) -> None:
        self._grow(slot, packed)
        with self._on_stream():
            self._records[slot].copy_(packed.records, non_blocking=True)
            if self._device.type == "cuda":
                packed.memory.record_stream(torch.cuda.current_stream())
        self._loaded[slot] = packed

    def drop(self, slot: int) -> None:
        with self._on_stream():
            self._records[slot].zero_()
        del self._loaded[slot]

    def _grow(self, slot: int, packed: CudaAdapter) -> None:
        """Makes room for the slot, and for updates larger than those before. Graphs that read what moves are dropped,
        after all launched steps."""
        grown = [self._known[number].grow(sizes) for number, sizes in packed.sizes.items()]
        slots = 0 if self._records is None else len(self._records)
        if slot < slots and not any(grown):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.forget_graphs()
        rows, tokens = self._sizes
        chunks = max(known.chunks for known in self._known)
        needed = values_needed(tokens if self._fixed else rows, tokens, chunks)
        with self._on_stream():
            if self._low_rank is None or len(self._low_rank) < needed:
                self._low_rank = torch.empty(needed, device=self._device)
            if slot >= slots:
                size = max(2 * slots, slot + 1, FIRST_SLOTS), len(self._known), RECORD
                records = torch.zeros(size, dtype=torch.int64, device=self._device)
                if slots:
                    records[:slots] = self._records
                self._records = records

    # -- in steps ------------------------------------------------------------------------------------------------

    def product(self, weight: Any, *, gated: bool, sampled: bool) -> AdaptedProduct:
        number = self._weights.setdefault(id(weight), len(self._known))
        if number == len(self._known):
            self._known.append(WeightSizes(weight, gated and not self._fixed, sampled))
        return AdaptedProduct(self, number, sampled)

    def weight(self, number: int) -> AdaptedWeight:
        """Locates the updates of a weight; no chunks: none."""
        known = self._known[number]
        aligned = known.aligned and not self._fixed  # which depends on other adapters, and compiles another kernel
        return AdaptedWeight(self._records, number, known.chunks, known.blocks, aligned, self._dtype)

    def takes_few(self, number: int) -> bool:
        """Returns whether the kernels that only Hopper runs take few rows of a product with a weight."""
        weight = self._known[number].weight
        fits = weight.width % 8 == 0 and weight.width <= MAX_WIDTH and self._dtype.itemsize == 2
        return fits and bool(weight.workspace.has_hopper_gemm)

    def updates(self, number: int, step: DeviceInputs) -> ProductUpdates | None:
        """Returns the updates of a weight for a product that adds them itself, after `shrink`; None if none can."""
        known = self._known[number]
        if not known.tiled or len(step.tiles) or self._fixed:
            return None
        rows, records = (step.adapter_tiles, step.adapter_slots), self._records[:, number:]
        return ProductUpdates(*rows, records, self._low_rank, len(self._known), known.chunks, known.depth)

    @property
    def low_rank(self) -> Any:
        return self._low_rank


class AdaptedProduct:
    """Adds the updates of rows' adapters to products with one weight. A step without adapters launches nothing."""

    def __init__(self, adapters: CudaAdapters, number: int, sampled: bool) -> None:
        self._adapters = adapters
        self._number = number
        self._sampled = sampled

    def shrink(self, step: DeviceInputs, x: Any) -> bool:
        """Begins, before the product itself; returns whether any row may have an update."""
        weight = self._adapters.weight(self._number)
        if not len(step.adapter_tiles) or not weight.chunks:
            return False
        few = not (self._sampled or len(step.tiles)) and self._adapters.takes_few(self._number)
        launch = shrink_few if few else shrink
        launch(x, self._rows(step), weight, self._adapters.low_rank)
        return True

    def updates(self, step: DeviceInputs) -> ProductUpdates | None:
        return None if self._sampled else self._adapters.updates(self._number, step)

    def expand(self, step: DeviceInputs, width: int, out: Any) -> None:
        expand(self._adapters.low_rank, width, self._rows(step), self._adapters.weight(self._number), out, out)

    def expand_gated(
        self, step: DeviceInputs, width: int, product: Any, out: Any, fp8_out: Fp8Activations | None
    ) -> None:
        """Writes silu(left half) * right half of the product with its updates, quantized into `fp8_out` if there is
        one. The product is overwritten."""
        weight, target = self._adapters.weight(self._number), out if fp8_out is None else product[:, : out.shape[1]]
        expand(self._adapters.low_rank, width, self._rows(step), weight, product, target, gated=True)
        if fp8_out is not None:
            quantize_activations(target, *fp8_out)

    def _rows(self, step: DeviceInputs) -> RowTiles:
        if self._sampled:
            return RowTiles(step.sampled_adapters, None, DECODE_ROWS)
        return RowTiles(step.adapter_tiles, step.adapter_order, PROMPT_ROWS if len(step.tiles) else DECODE_ROWS)
