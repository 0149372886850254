"""The backend seam over a GPU: steps are queued on one stream and nothing waits until an answer is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.backend.base import Batch, Floats, Footprint, Held, Ints, LogitEdit, Model, SampleRows, Ticket
from penstock.backend.cuda import inputs
from penstock.backend.cuda.experts import Bank, pack_matrices
from penstock.backend.cuda.footprint import KEPT, held, weight_bytes, workspace_bytes
from penstock.backend.cuda.graphs import Graphs, common_shapes, few_or_many, padded
from penstock.backend.cuda.inputs import Fields, Plan, Shape
from penstock.backend.cuda.kernels.prefill_attention import tokens_per_tile
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.backend.cuda.kv_cache import layout_of
from penstock.backend.cuda.nodes import Memory
from penstock.backend.cuda.ops import Program, Sizes
from penstock.backend.cuda.pooling import PoolingSums, read
from penstock.backend.cuda.precompile import Compiler
from penstock.backend.cuda.quantized_weights import Workspace
from penstock.backend.cuda.recurrent_states import words
from penstock.backend.cuda.sampler import PendingLogprobs, Sampler
from penstock.backend.cuda.staging import Staging
from penstock.backend.cuda.transfer import transfer
from penstock.backend.cuda.weights import Weight, pack, stacked_values
from penstock.backend.pooling import with_pooled
from penstock.backend.ref.batches import greedy_batch, greedy_rows
from penstock.backend.sample import answers
from penstock.backend.timing import time_step
from penstock.errors import ConfigError, OutOfMemory
from penstock.model.dequantize import dequantize
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult

log = logging.getLogger(__name__)
IN_FLIGHT = 3  # host buffers: one is written while those of the steps before may still be read
TABLE_WORDS = 1 << 20
SPARE_TILES = 64  # that only pad
SPARE_MEMORY = 3 << 29  # for graphs, kernels and the library's own buffers
LAST_MEMORY = 128 << 20  # of it, held until a step finds none: kernels that are loaded then need some
NO_MEMORY = 32 << 20  # with less than this free, whatever goes wrong in the driver is a shortage
SAMPLING = ("sampled", "target", "sample_slots", "temperature", "top_p", "top_k", "min_p", "seeds")


@dataclass(slots=True)
class Flight:
    """A launched step: where its answer will be once `done` has happened."""

    batch: Batch
    tokens: Any  # [S] on the host
    asked: list[PendingLogprobs]
    pooled: dict[int, Any]  # [dim] on the host, by row
    done: Any | None


class CudaBackend:
    """Steps of at most `max_tokens` tokens and `max_rows` rows. On device "cpu" the same kernels run in Triton's
    interpreter: slow, and for tests alone."""

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
    ) -> None:
        if device == "cuda" and not finds_gpu():
            raise ConfigError("torch finds no CUDA device: use --device cpu, or look at `nvidia-smi`")
        if quantize not in ("", "fp8", "int4"):
            raise ConfigError(f"weights can be quantized to fp8 or int4; got {quantize!r}")
        if "fp8" in (quantize, kv) and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            raise ConfigError(
                "fp8 needs a GPU of compute capability 8.9 or more: use int4 for weights, int8 for the KV cache"
            )
        self.name = torch.cuda.get_device_name() if device == "cuda" else "the interpreter"
        self._device = torch.device(device)
        self._dtype = dtype
        self._quantize = quantize
        self._kv = layout_of(kv, dtype)
        rows = few_or_many(max_rows)
        self._sizes = Sizes(max(max_tokens, rows), rows)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._answering: Any = torch.cuda.Stream() if device == "cuda" else None
        self._capture = graphs and self._stream is not None
        self._step_sizes = max_rows, max_tokens, prefill_budget
        ints = {"dtype": torch.int32, "device": self._device}
        self._memory = Memory(last=torch.zeros(rows + 1, **ints), tokens=torch.zeros(self._sizes.tokens, **ints))
        self._workspace = Workspace(SplitKScratch.on(self._device), self._sizes.tokens)
        self._chosen = [torch.zeros(self._sizes.tokens, **ints) for _ in range(IN_FLIGHT)]
        self._sampler = Sampler(self._device, rows)
        self._pools = PoolingSums(rows)
        self._flights: dict[Ticket, Flight] = {}
        self._last_memory: Any | None = None
        self._settling = self._slices()

    # -- loading -------------------------------------------------------------------------------------------------

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Weight:
        with shortage(f"the weight {parts[0].name}"):
            return pack(parts, bias, self._device, self._dtype, self._workspace, self._quantize)

    def pack_vector(self, tensor: Tensor) -> Any:
        return torch.from_numpy(dequantize(tensor).copy()).to(self._device)

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        about = self._device, self._dtype, self._workspace, self._quantize
        with shortage(f"the experts of {up[0].parts[0].name}"):
            bias = None if choice_bias is None else self.pack_vector(choice_bias)
            return Bank(pack_matrices(up, *about), pack_matrices(down, *about), bias)

    def pack_heads(self, tensor: Tensor) -> Any:
        """Values of 16 bits (or 32, in tests) in any case: a small part of a model."""
        heads, rows, width = tensor.shape
        with shortage(f"the weight {tensor.name}"):
            return stacked_values([replace(tensor, shape=(heads * rows, width))], self._device, self._dtype).view(
                heads, rows, width
            )

    def load(self, model: Model) -> None:
        with shortage(f"the workspace of {self._sizes}"):
            self._program = Program(model, self._memory, self._sizes, self._device, self._dtype)
            self._graphs = Graphs(self._program, self._capture)
            self._sampler.reserve(self._program.answer.width)
            self._reserve_inputs(TABLE_WORDS)
        layers = self._program.layers.values()
        self._tile_tokens = tokens_per_tile(max([spec.heads // spec.kv_heads for spec in layers], default=1))

    def held(self, tensor: Tensor) -> Held:
        return held(tensor, self._quantize)

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        listed = list(tensors)
        weights = weight_bytes(listed, self._quantize)
        unpacks = self._quantize == "int4" or any(tensor.format.name in KEPT for tensor in listed)
        workspace = workspace_bytes(spec, self._sizes.tokens, self._sizes.rows, unpacks)
        costs = spec.kv_layers * self._kv.bytes_per_token(spec.attn), spec.state_bytes
        if self._stream is None:
            return Footprint("the interpreter", 1 << 30, 1 << 30, weights, workspace, 0, *costs)
        free, total = torch.cuda.mem_get_info()
        return Footprint(self.name, total, free, weights, workspace, SPARE_MEMORY, *costs)

    def kv_bytes_per_token(self) -> int:
        return sum(self._kv.bytes_per_token(spec) for spec in self._program.layers.values())

    def kv_memory(self) -> int:
        """Bytes a cache may take: what weights and buffers have left."""
        self._memory.caches.clear()
        self._memory.states.reserve(0)
        if self._stream is None:
            return 1 << 28
        torch.cuda.empty_cache()
        return max(int(torch.cuda.mem_get_info()[0]) - SPARE_MEMORY, 0)

    def state_bytes(self) -> int:
        return int(self._memory.states.bytes)

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0) -> None:
        """One block more than asked for: rows that only pad a step write there."""
        self._block_size, self._num_blocks = block_size, num_blocks
        self._graphs.forget()
        self._memory.caches.clear()
        with shortage(f"a cache of {num_blocks} blocks"):
            for layer, spec in self._program.layers.items():
                self._memory.caches[layer] = self._kv.reserve(spec, num_blocks + 1, block_size, self._device)
            self._memory.states.reserve(states)
        self._settling = self._slices()
        if self._stream is not None:
            self._hold_last()
            torch.cuda.synchronize()

    # -- getting ready -------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles what first answers need while weights are still on their way, and waits for both."""
        if self._stream is None:
            return
        shapes = [self._pad(Shape(128, 1, 0, 0, 1)), self._pad(Shape(1, 1, 1, 1, 0))]
        with closing(Compiler()) as compiler:
            with compiler.watching():
                for shape in shapes:
                    self._rehearse(shape, sampling=True)
            transfer.close()
            compiler.done()
        for shape in shapes:
            self._rehearse(shape, sampling=True)
        torch.cuda.synchronize()

    def settle(self) -> bool:
        """Gets one more of the common shapes ready: kernels first, then graphs."""
        self._hold_last()
        try:
            return next(self._settling, False)
        except Exception:
            log.exception("no more is made ready ahead")
            return False

    def _slices(self) -> Generator[bool, None, None]:
        if not self._capture:
            return
        shapes = [shape for shape in common_shapes(*self._step_sizes) if shape == self._pad(shape)]
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

    def prepare(self, rows: int, prompts: int = 0) -> None:
        """Captures the graph of steps of so many rows, and of so many tokens of prompts beside them."""
        shape = self._pad(Shape(rows + prompts, rows, rows, rows, prompts and 1))
        for _ in range(2):
            self._rehearse(shape, graph=True)

    def _rehearse(self, shape: Shape, *, graph: bool = False, sampling: bool = False) -> None:
        """A step that only pads."""
        nothing = greedy_batch([])
        work = inputs.plan(nothing, self._tile_tokens, lambda _: shape)
        with self._on_stream():
            step = self._send(nothing, work)
            logits = self._graphs.run(shape, step) if graph else self._graphs.launch(step)
            for rows in sampling_kinds(logits.shape[1]) if sampling else ():
                self._sampler.sample(logits, step, rows, self._memory.last, self._chosen[0][: shape.sampled])

    # -- steps ---------------------------------------------------------------------------------------------------

    def launch(self, batch: Batch) -> Ticket:
        with shortage(f"a step of {len(batch.tokens)} tokens"):
            return self._launch(batch)

    def relieve(self) -> None:
        """Graphs come back one by one, as shapes do."""
        self._last_memory = None
        if self._stream is not None:
            torch.cuda.synchronize()
            self._graphs.forget()
            torch.cuda.empty_cache()

    def _hold_last(self) -> None:
        if self._last_memory is None and self._stream is not None and torch.cuda.mem_get_info()[0] > 2 * LAST_MEMORY:
            self._last_memory = torch.empty(LAST_MEMORY, dtype=torch.uint8, device=self._device)

    def _launch(self, batch: Batch) -> Ticket:
        with self._on_stream():
            asked = []
            for logits, step, rows, chosen in self._forward(batch):
                entry = self._sampler.sample(logits, step, rows, self._memory.last, chosen)
                asked += [entry] if entry else []
            pooled = self._pools.take(batch, self._program.states_of(len(batch.tokens))) if batch.pools else {}
            sampled = self._event()
        tokens, done = self._fetch(len(batch.sampled), sampled)
        self._flights[batch.step] = Flight(batch, tokens, asked, pooled, done)
        return batch.step

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
        return with_pooled(result, read(flight.pooled)) if flight.pooled else result

    def logits(self, batch: Batch) -> Floats:
        """What the forward pass gives for the sampled positions: [S, vocab]."""
        with self._on_stream():
            found = [np.array(logits[: len(rows.target)].float().cpu()) for logits, _, rows, _ in self._forward(batch)]
        return np.concatenate(found)

    def time_step(self, batch: Batch, times: int) -> float:
        """Where it has a graph, that alone, over and over."""
        for _ in range(3):  # compiled, captured, run
            self.wait(self.launch(batch))
        if self._stream is None:
            return time_step(self, batch, times)
        work = inputs.plan(batch, self._tile_tokens, self._pad)
        with self._on_stream():
            step = self._send(batch, work)
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
            for mark in marks:
                self._graphs.run(work.shape, step)
                mark.record()
            marks[-1].synchronize()
        return float(min(first.elapsed_time(last) for first, last in pairwise(marks))) / 1e3

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        source, target = (torch.tensor(column, device=self._device) for column in zip(*pairs, strict=True))
        with self._on_stream():
            for cache in self._memory.caches.values():
                cache.copy_blocks(source, target)

    def close(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()
        self._settling.close()
        self._graphs.forget()
        self._memory.caches.clear()
        del self._program

    # -- one step ------------------------------------------------------------------------------------------------

    def _forward(self, batch: Batch) -> Any:
        """Yields logits, and what is asked of them, for as many positions at a time as there is room for."""
        transfer.arrived()
        work = inputs.plan(batch, self._tile_tokens, self._pad)
        step = self._send(batch, work)
        room, wanted = self._sizes.rows, work.shape.sampled
        if wanted <= room:
            yield self._graphs.run(work.shape, step), step, batch.sample, self._chosen[self._staging.turn][:wanted]
            return
        self._program.run_tokens(step)
        for first in range(0, wanted, room):
            part = slice(first, min(first + room, wanted))
            some = replace(step, **{name: getattr(step, name)[part] for name in SAMPLING})
            logits = self._program.run_sampled(some, part.stop - first)
            yield logits, some, slice_rows(batch.sample, part), self._chosen[self._staging.turn][part]

    def _send(self, batch: Batch, work: Plan) -> Fields:
        """Queues the copy of the step's numbers to the device; returns where they will be."""
        shape = work.shape
        if shape.tokens > self._sizes.tokens or shape.decodes > self._sizes.rows:
            raise ValueError(f"a step of {shape.tokens} tokens and {shape.decodes} rows is larger than {self._sizes}")
        if batch.tables.size > self._table_words:
            self._reserve_inputs(2 * batch.tables.size)
        staged = self._staging.take()
        count = inputs.fill(staged.numpy(), batch, work, self._block_size, self._num_blocks, self._sizes.rows)
        self._inbox[:count].copy_(staged[:count], non_blocking=True)
        if self._memory.states:
            self._memory.states.send(batch, self._row_words[self._staging.turn])
        self._staging.queued()
        return self._fields(shape)

    def _pad(self, shape: Shape) -> Shape:
        """To the shape of a graph, where one fits."""
        if shape.tiles and not self._capture:
            return shape
        larger = padded(shape)
        fits = larger.tokens <= self._sizes.tokens and larger.sampled <= self._sizes.rows
        return larger if fits else shape

    def _reserve_inputs(self, table_words: int) -> None:
        if self._stream is not None:
            torch.cuda.synchronize()  # steps in flight read what is given up here
        t, r = self._sizes.tokens, self._sizes.rows
        most = inputs.words(Shape(t, t, r, r + inputs.SPARE_PARTS, t + SPARE_TILES)) + table_words
        pinned = self._stream is not None
        self._table_words = table_words
        self._inbox = torch.zeros(most, dtype=torch.int32, device=self._device)
        staged = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._staging = Staging(staged, self._event)
        self._answers = [torch.zeros(t, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._row_words = [torch.zeros(words(r, t), dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._fields = lru_cache(256)(
            partial(inputs.fields, self._inbox, as_float=lambda view: view.view(torch.float32))
        )
        self._graphs.forget()

    def _event(self) -> Any | None:
        """Happens when all that is queued now has."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def finds_gpu() -> bool:
    return bool(torch.cuda.is_available())


@contextmanager
def shortage(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not (finds_gpu() and is_full()):
            raise
        raise OutOfMemory(f"the device has no memory for {what}: {str(error).splitlines()[0]}") from error


def is_full() -> bool:
    return bool(torch.cuda.mem_get_info()[0] < NO_MEMORY)


def sampling_kinds(vocab: int) -> Iterator[SampleRows]:
    """One row each: greedy, drawn from all, drawn from the likeliest, and of what a grammar allows."""
    greedy = greedy_rows(1)
    drawn = replace(greedy, temperature=np.ones(1, np.float32))
    yield from (greedy, drawn, replace(drawn, top_p=np.full(1, 0.9, np.float32)))
    none = np.zeros(0, np.int32)
    yield replace(greedy, edits=(LogitEdit(none, 1.0, none, none.view(np.float32), none, Everything(vocab)),))


class Everything(NamedTuple):
    """A mask that allows it."""

    vocab: int

    def words(self) -> Ints:
        return np.full(-(-self.vocab // 32), -1, np.int32)


def slice_rows(rows: SampleRows, part: slice) -> SampleRows:
    cut: Callable[[str], Any] = lambda name: getattr(rows, name)[part]  # noqa: E731
    return SampleRows(**{field.name: cut(field.name) for field in fields(SampleRows)})
