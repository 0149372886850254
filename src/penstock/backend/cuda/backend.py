"""Runs models on a GPU: steps are queued on one stream and nothing waits until an answer is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.base import (
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    CacheSize,
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
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.backend.cuda import inputs
from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.blocks import CudaBlocks, CudaStates
from penstock.backend.cuda.compiling import tell_of_compiling
from penstock.backend.cuda.device_properties import DeviceProperties
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import checked_device, device_properties
from penstock.backend.cuda.exchange import CudaUpdate, HostPacker
from penstock.backend.cuda.experts import pack_matrices
from penstock.backend.cuda.flight import Flight, SampledTokens, Sampling, Unconstrained
from penstock.backend.cuda.footprint import expands, stored_as, weight_bytes, workspace_bytes
from penstock.backend.cuda.graphs import (
    common_shapes,
    draft_shapes,
    in_segments,
    of_each_kind,
    padded,
    step_rows,
    verified_sizes,
)
from penstock.backend.cuda.hidden_states import HiddenStates
from penstock.backend.cuda.input_buffer import InputBuffer
from penstock.backend.cuda.inputs import AttentionPlan, DeviceInputs, Shape
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.kv_cache import layout_of
from penstock.backend.cuda.kv_expansion import VALUE_BYTES, kv_expansion_of
from penstock.backend.cuda.loaded_program import LoadedProgram
from penstock.backend.cuda.lost_device import cannot_go_on
from penstock.backend.cuda.precompile import Compiler
from penstock.backend.cuda.program import ActivationMemory, SharedMemory, StepSizes
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.segments import plan_segments
from penstock.backend.cuda.sharing import CudaIpcMemory, CudaSharing, device_name
from penstock.backend.cuda.sleeper import CudaSleeper, LastMemory
from penstock.backend.cuda.weights import Weight, pack, stacked_values
from penstock.backend.synchronous import program_of, time_step
from penstock.backend.weight_exchange import PackedWeight
from penstock.config.kv_formats import kv_parts
from penstock.errors import ConfigError, OutOfMemory
from penstock.model.dequantize import dequantize
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult

if TYPE_CHECKING:
    from penstock.backend.cuda.keeper import CudaKeeper

log = logging.getLogger(__name__)
SPARE_MEMORY = 3 << 29  # for graphs, kernels and the library's own buffers
NO_MEMORY = 32 << 20  # with less than this free, whatever goes wrong in the driver is a shortage


class CudaBackend:
    """Runs steps of at most `max_tokens` tokens and `max_rows` rows. On device "cpu" the same kernels run in Triton's
    interpreter: slow, and for tests alone. `tuned`: a file of measured tilings, by default the store's; `arena`: where
    weights and caches are kept. `deterministic`: a token's result depends on its own context alone, at the price of
    slower kernels (segments.py, `Tilings.fixed`)."""

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
        deterministic: bool = False,
        properties: DeviceProperties | None = None,
        tuned: Path | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._device = checked_device(device)
        self._properties, on_gpu = properties or device_properties(self._device), self._device.type == "cuda"
        if quantize not in ("", "fp8", "int4"):
            raise ConfigError(f"weights can be quantized to fp8 or int4; got {quantize!r}")
        if "fp8" in (quantize, *kv_parts(kv)) and not self._properties.has_fp8:
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
        self.padded_sizes: Sequence[int] = ()  # once program 0 is loaded: see `load`
        self._arena = arena or Arena.on(self._device)
        tilings = partial(Tilings, fixed=True) if deterministic else partial(Tilings.of, path=tuned)
        self._tilings = tilings(self._properties)
        self._workspace = Workspace(SplitKScratch.on(self._device), self._sizes.tokens, self._tilings, self._arena)
        tokens = torch.zeros(self._sizes.tokens, dtype=torch.int32, device=self._device)
        self._hidden = HiddenStates(dtype, self._arena)
        about = self._tilings, self._arena, tokens, ActivationMemory(self._arena), self._hidden, self._expands_kv
        self._shared = SharedMemory(self._device, dtype, self._sizes, *about)
        self._inputs = InputBuffer(self._device, self._sizes, self._event)
        self._programs: dict[int, LoadedProgram] = {}
        where = self._device, self._on_stream
        self._blocks = CudaBlocks(self._programs, self._hidden, *where, fixed=deterministic)
        self.kv: BlockMemory = self._blocks
        self.states: BlockMemory = CudaStates(self._programs, *where, fixed=deterministic)
        self._adapters = self._new_adapters()
        self.adapters: AdapterSlots = self._adapters
        self._flights: dict[Ticket, Flight] = {}
        self._unconstrained: Unconstrained | None = None
        self._last_memory = LastMemory(self._device)
        self._arena.share(self._workspace, self._tilings, self._tilings.device)
        self.sleeper: Sleeper | None = CudaSleeper.of(self._arena, self._workspace.transfer, self._last_memory)
        name = device_name(self._device)
        self.sharing: DeviceSharing | None = (
            CudaSharing(name, self._blocks.rows, lambda: CudaIpcMemory(self._device)) if name else None
        )
        self._preparing = self._prepare_shapes()

    @property
    def keeper(self) -> CudaKeeper | None:
        return self._arena.keeper

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

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        adapters = self._new_adapters() if program else self._adapters
        with self._on_device(), self._shortage(f"the workspace of {self._sizes}"):
            loaded = LoadedProgram(model, self._shared, adapters, token_ids, capture=self._capture)
        self._programs[program] = loaded
        adapters.forget_graphs = loaded.graphs.forget_adapters
        if program == 0 and self._capture:
            self.padded_sizes = verified_sizes(self._sizes.rows, loaded.program.run_sizes)

    def _new_adapters(self) -> CudaAdapters:
        sizes = self._sizes.rows, self._sizes.tokens
        return CudaAdapters(self._device, self._dtype, sizes, self._on_stream, fixed=self._tilings.fixed)

    def begin_update(self, loaded: Sequence[PackedWeight]) -> CudaUpdate:
        packer = HostPacker(self._dtype, self._tilings, self._quantize)
        before = self.keeper.change_weights if self.keeper else lambda: None
        return CudaUpdate(packer, loaded, self._programs[0].program.recorded, self._device, self._on_stream, before)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return stored_as(tensor, self._quantize, self._properties.has_fp8)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        listed = list(tensors)
        weights = weight_bytes(listed, self._quantize, self._properties.has_fp8)
        unpacks = self._quantize == "int4" or any(map(expands, listed))
        workspace = workspace_bytes(spec, self._sizes.tokens, self._sizes.rows, unpacks)
        if self._expands_kv:
            copies = kv_expansion_of(spec.cached_attention, self._sizes.tokens, self._tilings)
            workspace += copies.bytes if copies else 0
        costs = sum(map(self._kv_layout.bytes_per_token, spec.cached_attention)), spec.state_bytes
        hidden = spec.hidden_values * self._dtype.itemsize
        if self._stream is None:
            return Footprint("the interpreter", 1 << 30, 1 << 30, weights, workspace, 0, *costs).with_hidden(hidden)
        free, total = torch.cuda.mem_get_info(self._device)
        free += self.keeper.waiting_bytes if self.keeper else 0
        return Footprint(self.name, total, free, weights, workspace, SPARE_MEMORY, *costs).with_hidden(hidden)

    @property
    def _expands_kv(self) -> bool:
        """Returns whether prompts may attend to copies in 16 bits of what the cache holds in 8."""
        return self._kv_layout.is_kv8 and self._dtype.itemsize == VALUE_BYTES

    def memory_needs(self) -> MemoryNeeds:
        programs = self._programs.values()
        kv = sum(program.bytes_per_token(self._kv_layout) for program in programs) + self._hidden.bytes_per_token
        return MemoryNeeds(kv, sum(int(program.memory.states.bytes) for program in programs), self._free_for_kv())

    def _free_for_kv(self) -> int:
        """Returns the bytes that weights and buffers have left, as if no cache were reserved."""
        if self._stream is None:
            return 1 << 28
        with self._on_device():
            torch.cuda.empty_cache()
        own = self._blocks.nbytes + sum(program.state_bytes for program in self._programs.values())
        kept, room = (self.keeper.waiting_bytes, self.keeper.kv_room) if self.keeper else (0, 0)
        return max(int(torch.cuda.mem_get_info(self._device)[0]) + own + kept - SPARE_MEMORY, room)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        """Reserves one block more than asked for: rows that only pad a step write there."""
        for number, program in self._programs.items():
            program.check_groups(() if number else groups)  # refused before anything is freed
        self._free_kv(groups)
        layers = [program.program.layers for program in self._programs.values()]
        about = num_blocks, block_size, states, groups, self._kv_layout, layers
        keeping = self.keeper.kv(repr(about), self._free_for_kv()) if self.keeper else nullcontext()
        try:
            with self._on_device(), self._shortage(f"a cache of {num_blocks} blocks"), keeping:
                self._inputs.reserve(num_blocks, block_size, max(len(groups), 1))
                size, layout = (num_blocks + 1, block_size), self._kv_layout
                for number, program in self._programs.items():
                    program.reserve_kv(layout, size, states, () if number else groups)
                self._hidden.reserve(size)
        except OutOfMemory:
            self._free_kv(groups)
            raise
        self._preparing = self._prepare_shapes()
        if self._stream is not None:
            self._last_memory.hold()
            torch.cuda.synchronize(self._device)

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats:
        own, self._kv_layout = self._kv_layout, layout_of(kv, self._dtype)
        keeper, self._arena.keeper = self._arena.keeper, None
        try:
            self.reserve_kv(*size)
            return np.concatenate([self.logits(batch) for batch in batches])
        finally:
            self._kv_layout, self._arena.keeper = own, keeper
            self._free_kv(())

    def _free_kv(self, groups: Sequence[KvGroup]) -> None:
        self._hidden.free()
        for number, program in self._programs.items():
            program.free_kv(() if number else groups)

    # -- getting ready -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles what answers need while weights are still on their way, and waits for both. What first answers need
        is run too."""
        if self._stream is None:
            return
        shapes = [Shape(128, 1, 0, 0, 1), Shape(1, 1, 1, 1, 0)]
        with self._on_device(), closing(Compiler()) as compiler:
            with compiler.watching():
                self._rehearse_all(shapes)
                for program, shape in self._of_each_kind():
                    self._rehearse(program, shape)
            self._workspace.transfer.close()
            compiler.done()
        self._rehearse_all(shapes)
        torch.cuda.synchronize(self._device)

    def tell_of_compiling(self, tell: Callable[[bool], None]) -> None:
        tell_of_compiling(tell)

    def prepare_in_idle(self) -> bool:
        """Gets one more of the common shapes ready: kernels first, then graphs."""
        self._last_memory.hold()
        try:
            with self._on_device():
                return next(self._preparing, False)
        except Exception:
            if self.is_lost():
                raise
            log.exception("no more shapes are made ready ahead")
            return False

    def _prepare_shapes(self) -> Generator[bool, None, None]:
        if not self._capture:
            return
        work = self._shapes_ahead()
        with closing(Compiler()) as compiler:
            for program, shape in work:
                with compiler.watching():
                    self._rehearse(program, shape)
                yield True
            while not compiler.done(0.005):
                yield True
        for program, shape in [*work, *work]:  # once without a graph, to capture no loading of kernels
            if not program.graphs.has(shape):
                self._rehearse(program, shape, graph=True)
                yield True

    def _of_each_kind(self) -> list[tuple[LoadedProgram, Shape]]:
        """Returns the shapes that launch all kernels which those made ready in idle moments launch."""
        ahead = self._shapes_ahead()
        return [
            (program, shape)
            for program in self._programs.values()
            for shape in of_each_kind([shape for each, shape in ahead if each is program])
        ]

    def _shapes_ahead(self) -> list[tuple[LoadedProgram, Shape]]:
        """Returns the shapes of steps that are made ready before they are needed, each once."""
        common = (
            (program, shape)
            for number, program in self._programs.items()
            for shape in (draft_shapes if number else common_shapes)(*self._step_sizes, *program.program.split_sizes)
            if self._fits(shape) and shape == self._pad(program, shape) and (program.sharing or not shape.shared)
        )
        return list(dict.fromkeys((program, self._shape_for(program, shape)) for program, shape in common))

    def prepare(self, rows: int, prompts: int = 0, program: int = 0, run: int = 0) -> None:
        """Captures a program's graph of steps of so many rows, and of so many tokens of prompts beside them; of `rows`
        tokens that attend in runs of at most `run`, if drafts are verified."""
        loaded = self._programs[program]
        shape = self._shape_for(loaded, Shape(rows + prompts, rows, rows, rows, prompts and 1, run=run))
        for _ in range(2):
            self._rehearse(loaded, shape, graph=True)

    def _rehearse_all(self, shapes: Sequence[Shape]) -> None:
        for program in self._programs.values():
            for shape in shapes:
                self._rehearse(program, self._shape_for(program, shape), sampling=True)

    def _rehearse(self, program: LoadedProgram, shape: Shape, *, graph: bool = False, sampling: bool = False) -> None:
        """Runs a step that only pads."""
        nothing = replace(greedy_batch([]), tables=np.zeros((program.groups, 0, 0), np.int32))
        work = inputs.plan_attention(nothing, program.tile_tokens, lambda _: shape)
        with self._on_stream():
            program.rehearse(shape, self._send(program, nothing, work), graph=graph, sampling=sampling)

    # -- steps ---------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Ticket:
        """Queues the forward pass and, unless bitmasks are still to come, what chooses tokens."""
        program = program_of(self._programs, batch)
        self._unconstrained = None
        with self._shortage(f"a step of {len(batch.tokens)} tokens"), self._on_stream():
            logits = self._forward(program, batch)
            if len(batch.constrained):
                self._unconstrained = Unconstrained(batch, chain([next(logits)], logits))
            else:
                self._flights[batch.step] = program.sample(batch, logits, None, self._fetch)
        return batch.step

    def constrain(self, ticket: Ticket, words: Ints) -> None:
        step, self._unconstrained = self._unconstrained, None
        if step is None or step.batch.step != ticket:
            raise ValueError(f"step {ticket} waits for no bitmasks: constrain follows the launch of its step at once")
        with self._shortage(f"a step of {len(step.batch.tokens)} tokens"), self._on_stream():
            program, masks = program_of(self._programs, step.batch), Bitmasks(step.batch.constrained, words)
            self._flights[ticket] = program.sample(step.batch, step.logits, masks, self._fetch)

    def free_memory(self) -> None:
        """Drops all graphs. They come back one by one, as shapes do."""
        self._last_memory.give_back()
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
            self._forget_graphs()
            with self._on_device():
                torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        return self._stream is not None and cannot_go_on(partial(torch.cuda.synchronize, self._device))

    def _forget_graphs(self) -> None:
        for program in self._programs.values():
            program.graphs.forget()

    def _fetch(self, sampled: SampledTokens | None, count: int) -> tuple[Any, Any | None]:
        """Queues the copy of sampled tokens to the host beside the next step, which need not wait for it."""
        event = self._event()
        if sampled is None:
            return None, event
        if event is None:
            return sampled.fetch(count), None
        with torch.cuda.stream(self._answering):
            self._answering.wait_event(event)
            return sampled.fetch(count), self._answering.record_event()

    def wait(self, ticket: Ticket) -> StepResult:
        return self._flights.pop(ticket).wait()

    def logits(self, batch: Batch) -> Floats:
        """Returns what the forward pass gives for the sampled positions: [S, vocab]."""
        program = program_of(self._programs, batch)
        with self._on_stream():
            computed = self._forward(program, batch)
            found = [np.array(logits[: len(rows.target)].float().cpu()) for logits, _, rows, *_ in computed]
        return np.concatenate(found)

    def time_step(self, batch: Batch, times: int) -> float:
        """Times the forward pass over and over: its graph alone, where it has one."""
        for _ in range(3):  # compiled, captured, run
            self.wait(self.launch(batch))
        if self._stream is None:
            return time_step(self.launch, self.wait, batch, times)
        program = program_of(self._programs, batch)
        work = self._plan(program, batch)
        with self._on_stream():
            step = self._send(program, batch, work)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
            for mark in marks:
                program.graphs.run(work.shape, step)
                mark.record()
            marks[-1].synchronize()
        return float(min(first.elapsed_time(last) for first, last in pairwise(marks))) / 1e3

    def close(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self._preparing.close()
        self._free_kv(())
        self._programs.clear()

    # -- one step ------------------------------------------------------------------------------------------------

    def _forward(self, program: LoadedProgram, batch: Batch) -> Iterator[Sampling]:
        self._workspace.transfer.finish()
        work = self._plan(program, batch)
        return program.forward(batch, work.shape, self._send(program, batch, work))

    def _plan(self, program: LoadedProgram, batch: Batch) -> AttentionPlan:
        sizes, pad = (self._sizes.rows, program.program.run_sizes), partial(self._pad, program)
        if self._tilings.fixed:
            run, whole_rows = program.program.run_sizes[-1], program.program.sees_whole_rows
            return plan_segments(batch, run, pad, whole_rows=whole_rows)
        given = batch, program.tile_tokens, pad, *sizes
        return inputs.plan_attention(*given, program.sharing, program.expansion, program.program.spare_splits)

    def _send(self, program: LoadedProgram, batch: Batch, work: AttentionPlan) -> DeviceInputs:
        """Queues the copy of the step's numbers to the device; returns where they will be."""
        shape = work.shape
        if shape.tokens > self._sizes.tokens or shape.decodes > self._sizes.rows:
            raise ValueError(f"a step of {shape.tokens} tokens and {shape.decodes} rows is larger than {self._sizes}")
        if len(batch.tables) != program.groups:
            raise ValueError(f"the cache has {program.groups} layer groups; got block tables for {len(batch.tables)}")
        if self._inputs.grow(batch):
            self._forget_graphs()
        return self._inputs.send(batch, work, program.memory)

    def _pad(self, program: LoadedProgram, shape: Shape) -> Shape:
        """Returns the shape of a graph that the shape fits in, or the shape itself."""
        if (shape.tiles or shape.tokens > shape.decodes) and not self._capture:
            return shape
        larger = padded(shape, program.program.spare_splits)
        return larger if self._fits(larger) else shape

    def _fits(self, shape: Shape) -> bool:
        """Returns whether steps may be of this shape."""
        return shape.tokens <= self._sizes.tokens and shape.sampled <= self._sizes.rows

    def _shape_for(self, program: LoadedProgram, shape: Shape) -> Shape:
        """Returns the shape of a graph that a step of this shape fits in, as the program's steps are planned."""
        if self._tilings.fixed:
            return self._pad(program, in_segments(shape, program.program.run_sizes[-1]))
        return program.usual(self._pad(program, shape))

    def _event(self) -> Any | None:
        """Returns an event that happens when all that is queued now for steps has."""
        return self._stream.record_event() if self._stream is not None else None

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
            full = self._stream is not None and torch.cuda.mem_get_info(self._device)[0] < NO_MEMORY
            if not isinstance(error, torch.cuda.OutOfMemoryError) and not full:
                raise
            raise OutOfMemory(f"the device has no memory for {what}: {str(error).splitlines()[0]}") from error
