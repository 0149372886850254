"""Holds the programs that are loaded on a GPU, and the KV cache that they have together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from penstock.backend.base import CacheSize, Footprint, MemoryNeeds, Model
from penstock.backend.cuda.adapters import CudaAdapters
from penstock.backend.cuda.blocks import CudaBlocks
from penstock.backend.cuda.footprint import expands, weight_bytes, workspace_bytes
from penstock.backend.cuda.gpu import Gpu
from penstock.backend.cuda.input_buffer import InputBuffer
from penstock.backend.cuda.keeper import CudaKeeper
from penstock.backend.cuda.kv_cache import KvLayout, layout_of
from penstock.backend.cuda.kv_expansion import kv_expansion_of
from penstock.backend.cuda.loaded_program import LoadedProgram
from penstock.backend.cuda.program import SharedMemory
from penstock.backend.cuda.storage import StorageRules
from penstock.errors import OutOfMemory
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Tensor

SPARE_MEMORY = 3 << 29  # graphs, kernels and library buffers
INTERPRETER_CACHE = 1 << 28  # bytes of a KV cache in tests


class Programs(Mapping[int, LoadedProgram]):
    """Maps numbers to loaded programs. Program 0 has the adapters."""

    def __init__(self, gpu: Gpu, shared: SharedMemory, layout: KvLayout, inputs: InputBuffer) -> None:
        self._gpu = gpu
        self._shared = shared
        self._layout = layout
        self._inputs = inputs
        self._loaded: dict[int, LoadedProgram] = {}
        self.adapters = self._new_adapters()
        self.blocks = CudaBlocks(self._loaded, shared.hidden, gpu.device, gpu.on_stream, fixed=shared.tilings.fixed)

    def __getitem__(self, number: int) -> LoadedProgram:
        return self._loaded[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, model: Model, number: int, token_ids: Sequence[int], *, capture: bool) -> LoadedProgram:
        adapters = self._new_adapters() if number else self.adapters
        with self._gpu.reserving(f"the workspace of {self._shared.sizes}"):
            loaded = LoadedProgram(model, self._shared, adapters, token_ids, capture=capture)
        self._loaded[number] = loaded
        adapters.forget_graphs = loaded.graphs.forget_adapters
        return loaded

    def _new_adapters(self) -> CudaAdapters:
        shared = self._shared
        sizes = shared.sizes.rows, shared.sizes.tokens
        return CudaAdapters(shared.device, shared.dtype, sizes, self._gpu.on_stream, fixed=shared.tilings.fixed)

    @property
    def keeper(self) -> CudaKeeper | None:
        return self._shared.arena.keeper

    def drop_kept_weights(self) -> None:
        if self.keeper is not None:
            self.keeper.change_weights()

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor], rules: StorageRules) -> Footprint:
        """Predicts a model's memory: see `Tuner.footprint`."""
        listed, sizes = list(tensors), self._shared.sizes
        unpacks = rules.quantize == "int4" or any(map(expands, listed))
        workspace = workspace_bytes(spec, sizes.tokens, sizes.rows, unpacks)
        if self._shared.expands_kv:
            copies = kv_expansion_of(spec.cached_attention, sizes.tokens, self._shared.tilings)
            workspace += copies.bytes if copies else 0
        memory, on_gpu = self._gpu.memory(), self._gpu.stream is not None
        waiting = self.keeper.waiting_bytes if self.keeper else 0
        made = Footprint(
            self._shared.tilings.device.name if on_gpu else "the interpreter",
            memory.total,
            min(memory.free + waiting, memory.total),
            weight_bytes(listed, rules),
            workspace,
            SPARE_MEMORY if on_gpu else 0,
            sum(map(self._layout.bytes_per_token, spec.cached_attention)),
            spec.state_bytes,
        )
        return made.with_hidden(spec.hidden_values * self._shared.dtype.itemsize)

    def memory_needs(self) -> MemoryNeeds:
        kv = sum(program.bytes_per_token(self._layout) for program in self.values())
        states = sum(int(program.memory.states.bytes) for program in self.values())
        return MemoryNeeds(kv + self._shared.hidden.bytes_per_token, states, self._free_for_kv())

    def _free_for_kv(self) -> int:
        """Returns the bytes that weights and buffers have left, as if no cache were reserved."""
        if self._gpu.stream is None:
            return INTERPRETER_CACHE
        self._gpu.release_cached()
        own = self.blocks.nbytes + sum(program.state_bytes for program in self.values())
        waiting, room = (self.keeper.waiting_bytes, self.keeper.kv_room) if self.keeper else (0, 0)
        return max(self._gpu.memory().free + own + waiting - SPARE_MEMORY, room)

    def reserve_kv(self, size: CacheSize, groups: Sequence[KvGroup] = ()) -> None:
        """Reserves one block more than asked for: rows that only pad a step write there."""
        of = {number: () if number else groups for number in self}
        for number, program in self.items():
            program.check_groups(of[number])  # refused before anything is freed
        self.free_kv(groups)
        try:
            with self._gpu.reserving(f"a cache of {size.blocks} blocks"), self._kept_kv(size, groups):
                self._inputs.reserve(size.blocks, size.block_size, max(len(groups), 1))
                whole = size.blocks + 1, size.block_size
                for number, program in self.items():
                    program.reserve_kv(self._layout, whole, size.states, of[number])
                self._shared.hidden.reserve(whole)
        except OutOfMemory:
            self.free_kv(groups)
            raise

    def _kept_kv(self, size: CacheSize, groups: Sequence[KvGroup]) -> AbstractContextManager[None]:
        """Allocates KV caches and states where they outlive this process, if there is a keeper."""
        if self.keeper is None:
            return nullcontext()
        layers = [program.program.layers for program in self.values()]
        return self.keeper.kv(repr((*size, groups, self._layout, layers)), self._free_for_kv())

    def free_kv(self, groups: Sequence[KvGroup] = ()) -> None:
        """Gives the KV cache and the recurrent states back. The next ones of program 0 have these layer groups."""
        self._shared.hidden.free()
        for number, program in self.items():
            program.free_kv(() if number else groups)

    @contextmanager
    def other_kv(self, kv: str, size: CacheSize) -> Iterator[None]:
        """Gives all programs an empty KV cache in another format, for a moment. It is not kept."""
        own, self._layout = self._layout, layout_of(kv, self._shared.dtype)
        keeper, self._shared.arena.keeper = self.keeper, None
        try:
            self.reserve_kv(size)
            yield
        finally:
            self._layout, self._shared.arena.keeper = own, keeper
            self.free_kv()

    def forget_graphs(self) -> None:
        for program in self.values():
            program.graphs.forget()

    def close(self) -> None:
        self.free_kv()
        self._loaded.clear()
