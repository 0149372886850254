"""Runs models on a GPU: steps are queued on one stream and nothing waits until an answer is asked for."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.backend.base import (
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    Floats,
    Footprint,
    Ints,
    MemoryNeeds,
    Model,
    Sleeper,
    StoredAs,
    Ticket,
)
from penstock.backend.batches import greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.blocks import CudaBlocks
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import checked_device, device_properties
from penstock.backend.cuda.exchange import CudaUpdate, HostPacker
from penstock.backend.cuda.experts import pack_matrices
from penstock.backend.cuda.flight import Flight, Sampling, Unconstrained
from penstock.backend.cuda.footprint import STORED_BITS, stored_as, weight_bytes, workspace_bytes
from penstock.backend.cuda.graphs import Graphs, common_shapes, padded, step_rows, verified_sizes
from penstock.backend.cuda.inputs import AttentionPlan, DeviceInputs, Shape
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kernels.select_positions import LINES
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.kv_cache import layout_of, places_of, reserve_caches
from penstock.backend.cuda.launchers import Memory
from penstock.backend.cuda.pooling import PoolingSums, read
from penstock.backend.cuda.precompile import Compiler
from penstock.backend.cuda.program import CudaProgram, StepSizes
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.recurrent_states import words
from penstock.backend.cuda.sampler import DeviceSampler, sampling_kinds
from penstock.backend.cuda.sleeper import CudaSleeper, LastMemory
from penstock.backend.cuda.staging import Staging
from penstock.backend.cuda.weights import Weight, pack, stacked_values
from penstock.backend.exchange import PackedWeight
from penstock.backend.pooling import with_pooled
from penstock.backend.sample import answers
from penstock.backend.sampler_chain import with_chains
from penstock.backend.synchronous import time_step
from penstock.errors import ConfigError, OutOfMemory
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult

log = logging.getLogger(__name__)
IN_FLIGHT = 3  # host buffers: one is written while those of the steps before may still be read
TABLE_WORDS = 1 << 20
SPARE_TILES = 64  # that only pad
SPARE_MEMORY = 3 << 29  # for graphs, kernels and the library's own buffers
NO_MEMORY = 32 << 20  # with less than this free, whatever goes wrong in the driver is a shortage
SAMPLING = ("sampled", "target", "sample_slots", "temperature", "top_p", "top_k", "min_p", "seeds", "sampled_adapters")


class CudaBackend:
    """Runs steps of at most `max_tokens` tokens and `max_rows` rows. On device "cpu" the same kernels run in Triton's
    interpreter: slow, and for tests alone. `tuned`: a file of measured tilings, by default the store's; `arena`: where
    weights and caches are kept."""

    depth = 1

    def __init__(
        self,
        max_tokens: int = 2048,
        max_rows: int = 256,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        graphs: bool = True,
        quantize: str = "",
        kv: str = "auto",
        prefill_budget: int = 0,
        properties: DeviceProperties | None = None,
        tuned: Path | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._device = checked_device(device)
        self._properties, on_gpu = properties or device_properties(self._device), self._device.type == "cuda"
        if quantize not in ("", "fp8", "int4"):
            raise ConfigError(f"weights can be quantized to fp8 or int4; got {quantize!r}")
        if "fp8" in (quantize, kv) and not self._properties.has_fp8:
            raise ConfigError("fp8 needs compute capability 8.9 or more: use int4 for weights, int8 for the KV cache")
        self.name = self._properties.name
        self.device = device
        self._dtype = dtype
        self._quantize = quantize
        self._kv_layout = layout_of(kv, dtype)
        rows = step_rows(max_rows)
        self._sizes = StepSizes(max(max_tokens, rows), rows)
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._answering: Any = torch.cuda.Stream(self._device) if on_gpu else None
        self._capture = graphs and self._stream is not None
        self._step_sizes = max_rows, max_tokens, prefill_budget
        self.padded_sizes: Sequence[int] = ()  # once a program is loaded: see `load`
        ints = {"dtype": torch.int32, "device": self._device}
        last, tokens = torch.zeros(rows + 1, **ints), torch.zeros(self._sizes.tokens, **ints)
        self._arena = arena or Arena.on(self._device)
        adapters = CudaAdapters(self._device, dtype, (rows, self._sizes.tokens), self._on_stream)
        self._memory = Memory(last, tokens, self._arena, adapters)
        self._tilings = Tilings.of(self._properties, tuned)
        self._workspace = Workspace(SplitKScratch.on(self._device), self._sizes.tokens, self._tilings, self._arena)
        self._chosen = [torch.zeros(self._sizes.tokens, **ints) for _ in range(IN_FLIGHT)]
        self._sampler = DeviceSampler(self._device, rows)
        self._pools = PoolingSums(rows)
        self._blocks = CudaBlocks(self._memory, self._device, self._on_stream)
        self.kv: BlockMemory = self._blocks
        self.adapters: AdapterSlots = adapters
        self._flights: dict[Ticket, Flight] = {}
        self._unconstrained: Unconstrained | None = None
        self._last_memory = LastMemory(self._device)
        self.sleeper: Sleeper | None = CudaSleeper.of(self._arena, self._workspace.transfer, self._last_memory)
        self._preparing = self._prepare_shapes()
        self._groups = 1  # KV layer groups

    # -- loading -------------------------------------------------------------------------------------------------

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        with self._on_device(), self._shortage(f"the weight {parts[0].name}"):
            return pack(parts, bias, self._device, self._dtype, self._workspace, self._quantize)

    def pack_vector(self, tensor: Tensor) -> Any:
        return torch.from_numpy(dequantize(tensor).copy()).to(self._device)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        about = self._device, self._dtype, self._workspace, self._quantize
        with self._on_device(), self._shortage(f"the experts of {up[0].parts[0].name}"):
            bias = None if choice_bias is None else self.pack_vector(choice_bias)
            return ExpertWeights(pack_matrices(up, *about), pack_matrices(down, *about), bias)

    def pack_heads(self, tensor: Tensor) -> Any:
        """Returns values of 16 bits (or 32, in tests) in any case: they are a small part of a model."""
        heads, rows, width = tensor.shape
        flat = replace(tensor, shape=(heads * rows, width))
        with self._on_device(), self._shortage(f"the weight {tensor.name}"):
            return stacked_values([flat], self._dtype, self._workspace).view(heads, rows, width)

    def load(self, model: Model, program: int = 0) -> None:
        if program:
            raise ConfigError(f"a GPU runs one program; got program {program}: use --device cpu for several")
        with self._on_device(), self._shortage(f"the workspace of {self._sizes}"):
            self._program = CudaProgram(model, self._memory, self._sizes, self._device, self._dtype, self._tilings)
            self._graphs = Graphs(self._program, self._capture)
            self._memory.adapters.forget_graphs = self._graphs.forget_adapters
            self._sampler.reserve(self._program.answer.width)
            self._reserve_inputs(TABLE_WORDS)
        layers = self._program.layers.values()
        self._tile_tokens = tokens_per_tile(max([spec.heads // spec.kv_heads for spec in layers], default=1))
        self.padded_sizes = verified_sizes(self._sizes.rows, self._program.run_sizes) if self._capture else ()

    def begin_update(self, loaded: Sequence[PackedWeight]) -> CudaUpdate:
        packer = HostPacker(self._dtype, self._tilings, self._quantize)
        return CudaUpdate(packer, loaded, self._program.recorded, self._device, self._on_stream)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return stored_as(tensor, self._quantize, self._properties.has_fp8)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        listed = list(tensors)
        weights = weight_bytes(listed, self._quantize, self._properties.has_fp8)
        unpacks = self._quantize == "int4" or any(tensor.format.name in STORED_BITS for tensor in listed)
        workspace = workspace_bytes(spec, self._sizes.tokens, self._sizes.rows, unpacks)
        costs = sum(map(self._kv_layout.bytes_per_token, spec.cached_attention)), spec.state_bytes
        if self._stream is None:
            return Footprint("the interpreter", 1 << 30, 1 << 30, weights, workspace, 0, *costs)
        free, total = torch.cuda.mem_get_info(self._device)
        return Footprint(self.name, total, free, weights, workspace, SPARE_MEMORY, *costs)

    def memory_needs(self) -> MemoryNeeds:
        kv = sum(self._kv_layout.bytes_per_token(spec) for spec in self._program.layers.values())
        return MemoryNeeds(kv, int(self._memory.states.bytes), self._free_for_kv())

    def _free_for_kv(self) -> int:
        """Returns the bytes that weights and buffers have left, as if no cache were reserved."""
        if self._stream is None:
            return 1 << 28
        with self._on_device():
            torch.cuda.empty_cache()
        own = self._blocks.nbytes + sum(int(states.nbytes) for states in self._memory.states.layers.values())
        return max(int(torch.cuda.mem_get_info(self._device)[0]) + own - SPARE_MEMORY, 0)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        """Reserves one block more than asked for: rows that only pad a step write there."""
        layers = self._program.layers
        places_of(layers, groups)  # refused before anything is freed
        self._block_size, self._num_blocks, self._groups = block_size, num_blocks, max(len(groups), 1)
        self._free_kv()
        self._memory.groups = dict.fromkeys(layers, 0) | {
            layer: number for number, group in enumerate(groups) for layer in group.layers
        }
        try:
            with self._on_device(), self._shortage(f"a cache of {num_blocks} blocks"):
                self._reserve_inputs(self._table_words)
                self._reserve_caches(groups)
                self._memory.states.reserve(states, self._arena)
        except OutOfMemory:
            self._free_kv()
            raise
        self._preparing = self._prepare_shapes()
        if self._stream is not None:
            self._last_memory.hold()
            torch.cuda.synchronize(self._device)

    def _reserve_caches(self, groups: Sequence[KvGroup]) -> None:
        layers, memory = self._program.layers, self._memory
        size = self._num_blocks + 1, self._block_size
        memory.caches, memory.planes = reserve_caches(self._kv_layout, layers, groups, size, self._arena)
        if any(spec.index_dim for spec in layers.values()):
            lines = max(LINES, self._tile_tokens), self._num_blocks * self._block_size
            memory.index_scores = self._arena.zeros(lines)
        heads = max([spec.kv_heads for spec in layers.values()], default=1)
        memory.reserve_arrivals((self._sizes.rows + inputs.SPARE_SPLITS) * heads)

    def _free_kv(self) -> None:
        self._graphs.forget()
        self._memory.caches.clear()
        self._memory.planes.clear()
        self._memory.index_scores = None
        self._memory.states.layers.clear()

    # -- getting ready -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles what first answers need while weights are still on their way, and waits for both."""
        if self._stream is None:
            return
        shapes = [self._pad(Shape(128, 1, 0, 0, 1)), self._pad(Shape(1, 1, 1, 1, 0))]
        with self._on_device(), closing(Compiler()) as compiler:
            with compiler.watching():
                for shape in shapes:
                    self._rehearse(shape, sampling=True)
            self._workspace.transfer.close()
            compiler.done()
        for shape in shapes:
            self._rehearse(shape, sampling=True)
        torch.cuda.synchronize(self._device)

    def prepare_in_idle(self) -> bool:
        """Gets one more of the common shapes ready: kernels first, then graphs."""
        self._last_memory.hold()
        try:
            with self._on_device():
                return next(self._preparing, False)
        except Exception:
            log.exception("no more shapes are made ready ahead")
            return False

    def _prepare_shapes(self) -> Generator[bool, None, None]:
        if not self._capture:
            return
        common = common_shapes(*self._step_sizes, self._program.run_sizes)
        shapes = [shape for shape in common if shape == self._pad(shape)]
        with closing(Compiler()) as compiler:
            for shape in shapes:
                with compiler.watching():
                    self._rehearse(shape)
                yield True
            while not compiler.done(0.005):
                yield True
        for shape in [*shapes, *shapes]:  # once without a graph, to capture no loading of kernels
            if not self._graphs.has(shape):
                self._rehearse(shape, graph=True)
                yield True

    def prepare(self, rows: int, prompts: int = 0, run: int = 0) -> None:
        """Captures the graph of steps of so many rows, and of so many tokens of prompts beside them; of `rows` tokens
        that attend in runs of at most `run`, if drafts are verified."""
        shape = self._pad(Shape(rows + prompts, rows, rows, rows, prompts and 1, run=run))
        for _ in range(2):
            self._rehearse(shape, graph=True)

    def _rehearse(self, shape: Shape, *, graph: bool = False, sampling: bool = False) -> None:
        """Runs a step that only pads."""
        nothing = replace(greedy_batch([]), tables=np.zeros((self._groups, 0, 0), np.int32))
        work = inputs.plan_attention(nothing, self._tile_tokens, lambda _: shape)
        with self._on_stream():
            step = self._send(nothing, work)
            logits = self._graphs.run(shape, step) if graph else self._graphs.launch(step)
            for rows, masks in sampling_kinds(logits.shape[1]) if sampling else ():
                self._sampler.sample(logits, step, rows, self._memory.last, self._chosen[0][: shape.sampled], masks)

    # -- steps ---------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Ticket:
        """Queues the forward pass and, unless bitmasks are still to come, what chooses tokens."""
        self._check_program(batch)
        self._unconstrained = None
        with self._shortage(f"a step of {len(batch.tokens)} tokens"), self._on_stream():
            logits = self._forward(batch)
            if len(batch.constrained):
                self._unconstrained = Unconstrained(batch, chain([next(logits)], logits))
            else:
                self._sample(batch, logits, None)
        return batch.step

    def constrain(self, ticket: Ticket, words: Ints) -> None:
        step, self._unconstrained = self._unconstrained, None
        if step is None or step.batch.step != ticket:
            raise ValueError(f"step {ticket} waits for no bitmasks: constrain follows the launch of its step at once")
        with self._shortage(f"a step of {len(step.batch.tokens)} tokens"), self._on_stream():
            self._sample(step.batch, step.logits, Bitmasks(step.batch.constrained, words))

    def free_memory(self) -> None:
        """Drops all graphs. They come back one by one, as shapes do."""
        self._last_memory.give_back()
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
            self._graphs.forget()
            with self._on_device():
                torch.cuda.empty_cache()

    def _sample(self, batch: Batch, computed: Iterator[Sampling], masks: Bitmasks | None) -> None:
        """Queues what chooses tokens from logits, and puts the step in flight."""
        asked, chained = [], []
        for logits, step, rows, first, chosen in computed:
            if rows.chains:  # before these are edited in place
                chained.append(self._sampler.copy_chained(logits, rows))
            some = masks.between(first, first + len(rows.target)) if masks else None
            entry = self._sampler.sample(logits, step, rows, self._memory.last, chosen, some)
            asked += [entry] if entry else []
        pooled = self._pools.take(batch, self._program.states_of(len(batch.tokens))) if batch.pools else {}
        tokens, done = self._fetch(len(batch.sampled), self._event())
        self._flights[batch.step] = Flight(batch, tokens, asked, pooled, done, chained, masks)

    def _fetch(self, count: int, sampled: Any | None) -> tuple[Any, Any | None]:
        """Queues the copy of the sampled tokens to the host beside the next step, which need not wait for it."""
        tokens, chosen = self._answers[self._staging.turn][:count], self._chosen[self._staging.turn][:count]
        if sampled is None:
            return tokens.copy_(chosen), None
        with torch.cuda.stream(self._answering):
            self._answering.wait_event(sampled)
            tokens.copy_(chosen, non_blocking=True)
            return tokens, self._event()

    def wait(self, ticket: Ticket) -> StepResult:
        flight = self._flights.pop(ticket)
        if flight.done is not None:
            flight.done.synchronize()
        logprobs = [entry for asked in flight.asked for entry in asked.read()]
        result = answers(flight.batch, flight.tokens.tolist(), logprobs)
        if flight.chained:
            logits = np.concatenate([rows.numpy() for rows in flight.chained])
            result = with_chains(result, flight.batch, logits, flight.masks)
        return with_pooled(result, read(flight.pooled)) if flight.pooled else result

    def logits(self, batch: Batch) -> Floats:
        """Returns what the forward pass gives for the sampled positions: [S, vocab]."""
        self._check_program(batch)
        with self._on_stream():
            found = [np.array(logits[: len(rows.target)].float().cpu()) for logits, _, rows, *_ in self._forward(batch)]
        return np.concatenate(found)

    def time_step(self, batch: Batch, times: int) -> float:
        """Times the forward pass over and over: its graph alone, where it has one."""
        for _ in range(3):  # compiled, captured, run
            self.wait(self.launch(batch))
        if self._stream is None:
            return time_step(self.launch, self.wait, batch, times)
        work = self._plan(batch)
        with self._on_stream():
            step = self._send(batch, work)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
            for mark in marks:
                self._graphs.run(work.shape, step)
                mark.record()
            marks[-1].synchronize()
        return float(min(first.elapsed_time(last) for first, last in pairwise(marks))) / 1e3

    def close(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._preparing.close()
        self._graphs.forget()
        self._memory.caches.clear()
        del self._program

    # -- one step ------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> Iterator[Sampling]:
        """Yields logits, and what is asked of them, for as many positions at a time as there is room for."""
        self._workspace.transfer.finish()
        work = self._plan(batch)
        step = self._send(batch, work)
        chosen = self._chosen[self._staging.turn]
        room, wanted = self._sizes.rows, work.shape.sampled
        if wanted <= room:
            yield self._graphs.run(work.shape, step), step, batch.sample, 0, chosen[:wanted]
            return
        self._program.run_tokens(step)
        for first in range(0, wanted, room):
            part = slice(first, min(first + room, wanted))
            some = replace(step, **{name: getattr(step, name)[part] for name in SAMPLING})
            logits = self._program.run_sampled(some, part.stop - first)
            yield logits, some, batch.sample.between(part.start, part.stop), first, chosen[part]

    def _plan(self, batch: Batch) -> AttentionPlan:
        run_sizes = self._program.run_sizes
        return inputs.plan_attention(batch, self._tile_tokens, self._pad, self._sizes.rows, run_sizes)

    def _check_program(self, batch: Batch) -> None:
        if batch.program:
            raise ValueError(f"one program is loaded on this GPU; got a batch for program {batch.program}")

    def _send(self, batch: Batch, work: AttentionPlan) -> DeviceInputs:
        """Queues the copy of the step's numbers to the device; returns where they will be."""
        shape = work.shape
        if shape.tokens > self._sizes.tokens or shape.decodes > self._sizes.rows:
            raise ValueError(f"a step of {shape.tokens} tokens and {shape.decodes} rows is larger than {self._sizes}")
        if batch.tables.size > self._table_words:
            self._reserve_inputs(2 * batch.tables.size)
        if len(batch.tables) != self._groups:
            raise ValueError(f"the cache has {self._groups} layer groups; got block tables for {len(batch.tables)}")
        staged = self._staging.take()
        count = inputs.fill(staged.numpy(), batch, work, self._block_size, self._num_blocks, self._sizes.rows)
        self._inbox[:count].copy_(staged[:count], non_blocking=True)
        if self._memory.states:
            self._memory.states.send(batch, self._row_words[self._staging.turn])
        self._staging.queued()
        return self._fields(shape)

    def _pad(self, shape: Shape) -> Shape:
        """Returns the shape of a graph that the shape fits in, or the shape itself."""
        if shape.tiles and not self._capture:
            return shape
        larger = padded(shape)
        fits = larger.tokens <= self._sizes.tokens and larger.sampled <= self._sizes.rows
        return larger if fits else shape

    def _reserve_inputs(self, table_words: int) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # steps in flight read what is given up here
        t, r = self._sizes.tokens, self._sizes.rows
        most = inputs.words(Shape(t, t, r, r + inputs.SPARE_SPLITS, t + SPARE_TILES, t), self._groups) + table_words
        pinned = self._stream is not None
        self._table_words = table_words
        self._inbox = torch.zeros(most, dtype=torch.int32, device=self._device)
        staged = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._staging = Staging(staged, self._event)
        self._answers = [torch.zeros(t, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._row_words = [torch.zeros(words(r, t), dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._fields = lru_cache(256)(
            partial(
                inputs.device_inputs, self._inbox, as_float=lambda view: view.view(torch.float32), groups=self._groups
            )
        )
        self._graphs.forget()

    def _event(self) -> Any | None:
        """Returns an event that happens when all that is queued now has."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Makes the backend's stream, and with it its device, the current one."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device) if self._stream is not None else nullcontext()

    @contextmanager
    def _shortage(self, what: str) -> Iterator[None]:
        """Raises OutOfMemory for an error that a shortage of memory explains."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.cuda.OutOfMemoryError) and not self._is_full():
                raise
            raise OutOfMemory(f"the device has no memory for {what}: {str(error).splitlines()[0]}") from error

    def _is_full(self) -> bool:
        return self._stream is not None and bool(torch.cuda.mem_get_info(self._device)[0] < NO_MEMORY)
