"""Runs models on a GPU: steps are queued on one stream and nothing waits until an answer is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from penstock.backend.base import (
    AdapterSlots,
    Batch,
    Bitmasks,
    BlockMemory,
    CacheSize,
    DeviceKeeper,
    Floats,
    Footprint,
    Ints,
    MemoryNeeds,
    Model,
    Sleeper,
    StoredAs,
    Ticket,
)
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.backend.cuda.arena import Arena
from penstock.backend.cuda.blocks import CudaStates
from penstock.backend.cuda.compiling import tell_of_compiling
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import checked_device, device_properties
from penstock.backend.cuda.exchange import CudaUpdate
from penstock.backend.cuda.flight import Flights, Unconstrained
from penstock.backend.cuda.gpu import Gpu
from penstock.backend.cuda.graphs import step_rows
from penstock.backend.cuda.hidden_states import HiddenStates
from penstock.backend.cuda.input_buffer import InputBuffer
from penstock.backend.cuda.inputs import Shape
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.kv_cache import layout_of
from penstock.backend.cuda.kv_expansion import VALUE_BYTES
from penstock.backend.cuda.packer import CudaPacker
from penstock.backend.cuda.preparation import Preparation
from penstock.backend.cuda.program import ActivationMemory, SharedMemory, StepSizes
from penstock.backend.cuda.programs import Programs
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.sharing import CudaSharing
from penstock.backend.cuda.sleeper import CudaSleeper, LastMemory
from penstock.backend.cuda.steps import Steps
from penstock.backend.cuda.weights import PackTarget, Weight
from penstock.backend.synchronous import program_of, time_step
from penstock.backend.weight_exchange import PackedWeight
from penstock.config.values import kv_parts
from penstock.errors import ConfigError
from penstock.model.ops import ExpertWeights
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult

log = logging.getLogger(__name__)


class CudaBackend:
    """Runs steps of at most `max_tokens` tokens and `max_rows` rows. On device "cpu" the same kernels run in Triton's
    interpreter: slow, and only for tests. `tilings`: by default those measured on this GPU, from the store; `arena`:
    the place of weights and caches. `deterministic`: a token's result depends only on its own context, at the price of
    slower kernels (segments.py, `Tilings.fixed`)."""

    depth = 1
    own_memory = True

    def __init__(
        self,
        max_tokens: int = 2048,
        max_rows: int = 256,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        quantize: str = "",
        kv: str = "auto",
        prefill_budget: int = 0,
        deterministic: bool = False,
        tilings: Tilings | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._gpu = gpu = Gpu(checked_device(device))
        tilings = tilings or tilings_of(gpu.device, deterministic)
        check_formats(quantize, kv, tilings)
        self.name = tilings.device.name
        self.device = device
        rows = step_rows(max_rows)
        sizes = StepSizes(max(max_tokens, rows), rows)
        arena = arena or Arena.on(gpu.device)
        workspace = Workspace(SplitKScratch.on(gpu.device), sizes.tokens, tilings, arena)
        layout = layout_of(kv, dtype)
        shared = SharedMemory(
            gpu.device,
            dtype,
            sizes,
            tilings,
            arena,
            tokens=torch.zeros(sizes.tokens, dtype=torch.int32, device=gpu.device),
            activations=ActivationMemory(arena),
            hidden=HiddenStates(dtype, arena),
            expands_kv=layout.is_kv8 and dtype.itemsize == VALUE_BYTES,
        )
        self._packer = CudaPacker(PackTarget(workspace, dtype, quantize), gpu.reserving)
        inputs = InputBuffer(gpu.device, sizes, gpu.event)
        self._programs = Programs(gpu, shared, layout, inputs)
        self._steps = Steps(self._programs, inputs, workspace, sizes, capture=gpu.stream is not None)
        self._preparation = Preparation(gpu, self._programs, self._steps, (max_rows, max_tokens, prefill_budget))
        self._flights = Flights()
        self.padded_sizes: Sequence[int] = ()  # once program 0 is loaded: see `load`
        self.kv: BlockMemory = self._programs.blocks
        self.states: BlockMemory = CudaStates(self._programs, gpu.device, gpu.on_stream, fixed=tilings.fixed)
        self.adapters: AdapterSlots = self._programs.adapters
        self._last_memory = LastMemory(gpu.device)
        arena.share(workspace, tilings, tilings.device)
        self.sleeper: Sleeper | None = CudaSleeper.of(arena, workspace.transfer, self._last_memory)
        self.sharing: DeviceSharing | None = CudaSharing.of(gpu.device, self._programs.blocks.rows)

    @property
    def keeper(self) -> DeviceKeeper | None:
        return self._programs.keeper

    # -- loading -------------------------------------------------------------------------------------------------

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        return self._packer.pack_matrix(parts, bias)

    def pack_vector(self, tensor: Tensor) -> Any:
        return self._packer.pack_vector(tensor)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> ExpertWeights:
        return self._packer.pack_experts(up, down, choice_bias)

    def pack_heads(self, tensor: Tensor) -> Any:
        return self._packer.pack_heads(tensor)

    def stored_as(self, tensor: Tensor) -> StoredAs:
        return self._packer.stored_as(tensor)

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        loaded = self._programs.load(model, program, token_ids, capture=self._steps.capture)
        if program == 0 and self._steps.capture:
            self.padded_sizes = loaded.verified_sizes

    def begin_update(self, loaded: Sequence[PackedWeight]) -> CudaUpdate:
        packer, program = CudaPacker.on_host(self._packer.target), self._programs[0].program.recorded
        drop_kept = self._programs.drop_kept_weights
        return CudaUpdate(packer, loaded, program, self._gpu.device, self._gpu.on_stream, drop_kept)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        return self._programs.footprint(spec, tensors, self._packer.target.rules)

    def memory_needs(self) -> MemoryNeeds:
        return self._programs.memory_needs()

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        self._programs.reserve_kv(CacheSize(num_blocks, block_size, states), groups)
        self._preparation.restart()
        self._last_memory.hold()
        self._gpu.synchronize()

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats:
        with self._programs.other_kv(kv, size):
            return np.concatenate([self.logits(batch) for batch in batches])

    # -- getting ready -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        self._preparation.warm_up(self._packer.target.workspace.transfer)

    def tell_of_compiling(self, tell: Callable[[bool], None]) -> None:
        tell_of_compiling(tell)

    def prepare_in_idle(self) -> bool:
        self._last_memory.hold()
        try:
            return self._preparation.advance()
        except Exception:
            if self.is_lost():
                raise
            log.exception("no more shapes are made ready ahead")
            return False

    def prepare(self, rows: int, prompts: int = 0, program: int = 0, run: int = 0) -> None:
        """Captures a program's graph of steps with `rows` decoding rows and `prompts` tokens of prompts. With `run`,
        rows verify drafts and attend in runs of at most that many tokens."""
        shape = Shape(rows + prompts, rows, rows, rows, prompts and 1, run=run)
        self._preparation.capture(self._programs[program], shape)

    # -- steps ---------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Ticket:
        """Queues the forward pass and, unless bitmasks are still to come, what chooses tokens."""
        program = program_of(self._programs, batch)
        self._flights.unconstrained = None
        with self._gpu.shortage(f"a step of {len(batch.tokens)} tokens"), self._gpu.on_stream():
            logits = self._steps.forward(program, batch)
            if len(batch.constrained):
                self._flights.unconstrained = Unconstrained(batch, chain([next(logits)], logits))
            else:
                self._flights.launched[batch.step] = program.sample(batch, logits, None, self._gpu.fetch)
        return batch.step

    def constrain(self, ticket: Ticket, words: Ints) -> None:
        step = self._flights.take_unconstrained(ticket)
        with self._gpu.shortage(f"a step of {len(step.batch.tokens)} tokens"), self._gpu.on_stream():
            program, masks = program_of(self._programs, step.batch), Bitmasks(step.batch.constrained, words)
            self._flights.launched[ticket] = program.sample(step.batch, step.logits, masks, self._gpu.fetch)

    def wait(self, ticket: Ticket) -> StepResult:
        return self._flights.launched.pop(ticket).wait()

    def free_memory(self) -> None:
        """Drops all graphs. They come back one by one, as shapes do."""
        self._last_memory.give_back()
        if self._gpu.stream is not None:
            self._gpu.synchronize()
            self._programs.forget_graphs()
            self._gpu.release_cached()

    def is_lost(self) -> bool:
        return self._gpu.is_lost()

    def logits(self, batch: Batch) -> Floats:
        """Returns the logits of the sampled positions: [S, vocab]."""
        program = program_of(self._programs, batch)
        with self._gpu.on_stream():
            computed = self._steps.forward(program, batch)
            found = [np.array(logits[: len(rows.target)].float().cpu()) for logits, _, rows, *_ in computed]
        return np.concatenate(found)

    def time_step(self, batch: Batch, times: int) -> float:
        """Times the forward pass over and over: only its graph, where it has one."""
        for _ in range(3):  # compiled, captured, run
            self.wait(self.launch(batch))
        if self._gpu.stream is None:
            return time_step(self.launch, self.wait, batch, times)
        program = program_of(self._programs, batch)
        work = self._steps.plan(program, batch)
        with self._gpu.on_stream():
            step = self._steps.send(program, batch, work)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
            for mark in marks:
                program.graphs.run(work.shape, step)
                mark.record()
            marks[-1].synchronize()
        return float(min(first.elapsed_time(last) for first, last in pairwise(marks))) / 1e3

    def close(self) -> None:
        self._gpu.synchronize()
        self._preparation.close()
        self._programs.close()


def tilings_of(device: torch.device, deterministic: bool) -> Tilings:
    """Returns the tilings of a device: fixed ones, or those that were measured."""
    properties = device_properties(device)
    return Tilings(properties, fixed=True) if deterministic else Tilings.of(properties)


def check_formats(quantize: str, kv: str, tilings: Tilings) -> None:
    """Raises ConfigError for formats that the device does not compute with."""
    if quantize not in ("", "fp8", "int4"):
        raise ConfigError(f"weights can be quantized to fp8 or int4; got {quantize!r}")
    if "fp8" in (quantize, *kv_parts(kv)) and not tilings.device.has_fp8:
        raise ConfigError("fp8 needs compute capability 8.9 or more: use int4 for weights, int8 for the KV cache")
