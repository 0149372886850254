"""Defines the seam between the engine and a backend: a batch of arrays goes in, the result of a step comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.backend.blocks.sharing import DeviceSharing
from penstock.config import available_memory, total_memory
from penstock.model.low_rank import LowRankUpdate
from penstock.model.packer import Packs
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import SamplerChain, StepResult

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# In Batch.tokens: the token that this row's slot sampled in the step before, still on the device. Tokens of chains are
# never there: chains run on the host.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Holds the changes to one row of logits, applied in this order: repetition, then add, then ban."""

    seen: Ints  # distinct tokens of prompt and answer
    repetition: float  # logits of `seen` above 0 are divided by it, below 0 multiplied
    add_ids: Ints  # logits[add_ids] += add_values: biases, presence and frequency penalties
    add_values: Floats
    ban: Ints  # logits[ban] = -inf


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Holds the edits of E of a step's S positions as flat arrays: edit e has seen[seen_start[e] : seen_start[e + 1]],
    and so on."""

    rows: Ints  # [E] indices into S, ascending
    repetition: Floats  # [E]
    seen: Ints
    seen_start: Ints  # [E + 1]
    add_ids: Ints
    add_values: Floats
    add_start: Ints  # [E + 1]
    ban: Ints
    ban_start: Ints  # [E + 1]

    @classmethod
    def of(cls, edits: Sequence[tuple[int, LogitEdit]]) -> LogitEdits:
        """Packs (position, edit) pairs, whose positions ascend."""
        if not edits:
            return NO_EDITS
        changes = [edit for _, edit in edits]
        return cls(
            np.array([row for row, _ in edits], np.int32),
            np.array([edit.repetition for edit in changes], np.float32),
            *_ragged([edit.seen for edit in changes]),
            np.concatenate([edit.add_ids for edit in changes]),
            *_ragged([edit.add_values for edit in changes]),
            *_ragged([edit.ban for edit in changes]),
        )

    def edit(self, e: int) -> LogitEdit:
        """Returns edit e by itself."""
        added = slice(*self.add_start[e : e + 2])
        return LogitEdit(
            self.seen[slice(*self.seen_start[e : e + 2])],
            float(self.repetition[e]),
            self.add_ids[added],
            self.add_values[added],
            self.ban[slice(*self.ban_start[e : e + 2])],
        )

    def between(self, first: int, last: int) -> LogitEdits:
        """Returns the edits of positions first:last, counted from `first`."""
        chosen = range(*np.searchsorted(self.rows, (first, last)))
        return LogitEdits.of([(int(self.rows[e]) - first, self.edit(e)) for e in chosen])


def _ragged(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], Ints]:
    """Returns the arrays one after the other, and where each begins."""
    return np.concatenate(arrays), np.cumsum([0, *map(len, arrays)], dtype=np.int32)


def no_ints() -> Ints:
    return np.zeros(0, np.int32)


def _no_edits() -> LogitEdits:
    none, start = no_ints(), np.zeros(1, np.int32)
    return LogitEdits(none, none.view(np.float32), none, start, none, none.view(np.float32), start, none, start)


NO_EDITS = _no_edits()


class ChainRow(NamedTuple):
    """Asks for one of a step's S positions to be sampled on the host, by a chain of samplers (sampler_chain.py)."""

    row: int  # index into S
    chain: SamplerChain
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    mu: float = 0.0  # bits: what mirostat takes for the largest surprise now


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Says how to answer each of the S positions whose logits are wanted."""

    target: Ints  # [S] -1: sample; else score this known token and sample nothing
    temperature: Floats  # [S] 0: greedy
    top_p: Floats  # [S]
    top_k: Ints  # [S] 0: off
    min_p: Floats  # [S]
    seed: NDArray[np.uint64]  # [S] already mixed with the position: one number decides one draw
    logprobs: Ints  # [S] -1: none; else how many alternatives
    edits: LogitEdits = NO_EDITS  # penalties, biases and bans, for the positions that have any
    chains: tuple[ChainRow, ...] = ()  # ascending positions; the fields above are greedy there

    def between(self, first: int, last: int) -> SampleRows:
        """Returns the fields of positions first:last, counted from `first`."""
        part = slice(first, last)
        return SampleRows(
            self.target[part],
            self.temperature[part],
            self.top_p[part],
            self.top_k[part],
            self.min_p[part],
            self.seed[part],
            self.logprobs[part],
            self.edits.between(first, last),
            tuple(chain._replace(row=chain.row - first) for chain in self.chains if first <= chain.row < last),
        )


class Bitmasks(NamedTuple):
    """Says which tokens grammars allow at C of a step's S positions; logits of all others become -inf, after edits."""

    rows: Ints  # [C] indices into S, ascending: see Batch.constrained
    words: Ints  # [C, ceil(vocab / 32)] a bit for each token, the lowest bit first

    def between(self, first: int, last: int) -> Bitmasks:
        """Returns the masks of positions first:last, counted from `first`."""
        chosen = slice(*np.searchsorted(self.rows, (first, last)))
        return Bitmasks(self.rows[chosen] - np.int32(first), self.words[chosen])


class Pool(NamedTuple):
    """Asks for the hidden states of a row's tokens[first:last] to be added up."""

    row: int
    first: int
    last: int
    begins: bool  # nothing was added up for its slot before
    divisor: int  # 0: more will follow; else the row's answer is the sum so far, divided by this


class StateMove(NamedTuple):
    """Says that a row's recurrent state begins elsewhere than in its slot, or is saved. No state is both begun with and
    saved to in one step."""

    row: int
    begin: int  # the state that it begins with; -1: its slot's own
    save: int  # the state that its own is copied to; -1: none
    after: int  # how many of the row's tokens the saved state covers


@dataclass(frozen=True, slots=True)
class Batch:
    """Describes one step as arrays and plain numbers: R rows, T tokens, S sampled positions, G KV layer groups. It
    holds no object, so it can be sent to another process (codec.py)."""

    step: int
    tokens: Ints  # [T]
    positions: Ints  # [T]
    row_start: Ints  # [R + 1] row r owns tokens[row_start[r]:row_start[r + 1]]
    slots: Ints  # [R] the row's place for life: its recurrent state, for one; at position 0 that is nothing yet
    tables: Ints  # [G, R, W] block ids; entries behind a group's window or past a row's context are undefined
    sampled: Ints  # [S] indices into tokens, ascending
    sample_start: Ints  # [R + 1] row r owns sampled[sample_start[r]:sample_start[r + 1]]
    sample: SampleRows
    constrained: Ints = field(default_factory=no_ints)  # [C] indices into S, ascending, whose token a grammar restricts
    pools: tuple[Pool, ...] = ()
    moves: tuple[StateMove, ...] = ()
    program: int = 0  # which of the loaded programs runs
    adapters: Ints = field(default_factory=no_ints)  # [R] each row's adapter slot, -1: none; [0]: no row has one

    @property
    def adapter_rows(self) -> Ints:
        """Returns the adapter slot of each token: [T]."""
        return np.repeat(self.adapters, np.diff(self.row_start))


class StoredAs(NamedTuple):
    """Names the format that a weight is stored in once it is packed."""

    kind: str  # a format's name, or what weights are quantized to at load
    bits: float  # per value, including scales
    size: int = 0  # bytes of the packed tensor; 0: exactly its values

    @classmethod
    def in_file(cls, tensor: Tensor) -> StoredAs:
        """Returns the format that the tensor has in its file."""
        return cls(tensor.format.name, 8 * tensor.format.bytes / tensor.format.values)

    def bytes(self, tensor: Tensor) -> float:
        """Returns the tensor's size in this format."""
        return self.size or prod(tensor.shape) * self.bits / 8


class Footprint(NamedTuple):
    """Holds the predicted memory of a model on a device, in bytes."""

    device: str  # its name
    total: int
    free: int
    weights: int
    workspace: int  # scratch memory of the largest step
    reserve: int  # kept free for everything else
    kv_token: int  # one token in the cache
    state: int = 0  # one sequence's recurrent state, besides its tokens
    draft_weights: int = 0  # the part of `weights` of a draft model or head
    draft_token: int = 0  # the part of `kv_token` that all layer groups have: a draft model's KV, hidden states
    reserve_share: float = 0.0  # the part of the memory beyond weights that is in `reserve`

    def with_hidden(self, token: int) -> Footprint:
        """Adds hidden states for a head: `token` bytes per token."""
        return self._replace(kv_token=self.kv_token + token, draft_token=self.draft_token + token)

    def with_draft(self, draft: Footprint) -> Footprint:
        """Adds a draft model. Its steps and the target's run one after the other in the same workspace."""
        return self._replace(
            weights=self.weights + draft.weights,
            workspace=max(self.workspace, draft.workspace),
            reserve=max(self.reserve - int(self.reserve_share * draft.weights), 0),
            kv_token=self.kv_token + draft.kv_token,
            draft_weights=draft.weights,
            draft_token=self.draft_token + draft.kv_token,
        )

    @classmethod
    def on_host(cls, weights: int, kv_token: int, state: int = 0) -> Footprint:
        """Returns the footprint in this machine's own memory, of which the cache takes a quarter of what weights
        leave."""
        free, share = available_memory(), 3 / 4
        reserve = int(max(free - weights, 0) * share)
        return cls("this machine", total_memory(), free, weights, 0, reserve, kv_token, state, reserve_share=share)


class MemoryNeeds(NamedTuple):
    """States what the loaded programs need, in bytes, and how much memory their KV cache may take."""

    kv_bytes_per_token: int  # keys and values of one token in all layers of all programs, and hidden states
    state_bytes: int  # one sequence's recurrent state; 0 for models that have none
    kv_memory: int  # default size of the cache and the states


class Model(Protocol):
    """Runs the forward pass of a packed model on any backend's ops: see model/families/llama.py."""

    def forward(self, ops: Any) -> Any: ...


Ticket = int


class WeightPacker(Protocol):
    """Turns tensors into weights in the layout that a backend computes with."""

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        """Returns one weight [out, in] made of parts stacked along `out`."""

    def pack_vector(self, tensor: Tensor) -> Any: ...

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        """Packs the matrices of all experts, `up` in two parts (gate and up), and the bias of the router's choice."""

    def pack_heads(self, tensor: Tensor) -> Any:
        """Returns a matrix for each head: [heads, out, in]."""

    def stored_as(self, tensor: Tensor) -> StoredAs:
        """Returns the format that packing would store the tensor in."""


class Runner(Protocol):
    """Runs batches. Steps run in the order of their launch, and each reads the results of all steps before it.

    Several programs (a draft and a target, an encoder and a decoder) can be loaded. Every program has KV arrays of its
    own for the same block ids, and recurrent states and last sampled tokens of its own for the same slots. All
    share the hidden states, which one program stores for another in the same blocks.
    """

    def load(self, model: Model, program: int = 0, token_ids: Sequence[int] = ()) -> None:
        """Takes a packed model and gets ready to run its forward pass for batches with this program number. All
        programs are loaded before `reserve_kv`. Where a model samples from another vocabulary than it reads,
        `token_ids` has the token that each sampled one is read as when it comes back as LAST_SAMPLED."""

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        """Reserves the KV cache of every program. `states` counts recurrent states: one for each slot and, after them,
        saved ones. `groups` are the KV layer groups of program 0; without them, and in all other programs, all layers
        are one group."""

    def launch(self, batch: Batch) -> Ticket:
        """Starts a step. The batch's arrays are never written to again: a backend may keep them until `wait`. Raises
        OutOfMemory where there is none for it; it may be launched again then, as another step. Where the batch has
        constrained positions, `constrain` must follow before anything else is launched."""

    def constrain(self, ticket: Ticket, words: Ints) -> None:
        """Gives a launched step the bitmasks of its constrained positions, [C, ceil(vocab / 32)], lowest bit first.
        They come after the launch so that the host can work them out while a device computes the logits. Raises what
        `launch` does."""

    def wait(self, ticket: Ticket) -> StepResult:
        """Returns the step's answer; every ticket is waited for once, in launch order of its program's steps."""

    def close(self) -> None: ...


class Tuner(Protocol):
    """Predicts a backend's memory, and makes it faster or smaller."""

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        """Predicts a model's memory before anything is loaded."""

    def memory_needs(self) -> MemoryNeeds:
        """Returns the memory that the loaded programs need and may take. Call it before `reserve_kv`."""

    def warm_up(self) -> None:
        """Does what the first step would otherwise wait for; called once, before it."""

    def prepare_in_idle(self) -> bool:
        """Does a little of what makes later steps faster, some milliseconds of it; returns False when nothing is left.
        Called again and again while there is nothing to compute."""

    def free_memory(self) -> None:
        """Gives back memory that can be had again later: a step found too little."""

    def time_step(self, batch: Batch, times: int) -> float:
        """Returns the seconds of such a step by itself, the least of `times` runs. What computes is timed, not what
        launches it. To be called while no step is in flight."""


class CopyTiming(NamedTuple):
    """Says how long blocks took to be copied in or out, by themselves."""

    direction: str  # "in" or "out", as in BlockCopy
    blocks: int
    seconds: float


class HostRoom(Protocol):
    """Is host memory with places for blocks that have left the device. Copies happen in the order in which they are
    asked for, after all launched steps and before those that are launched next; they may do so later than the call."""

    array: NDArray[np.uint8]  # [places, bytes of a block]; empty once it is closed

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Queues the copy of blocks to places."""

    def copy_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Queues the copy of places to blocks."""

    def finish(self) -> None:
        """Waits until the host may read and write all places."""

    def timings(self) -> list[CopyTiming]:
        """Returns the times of copies that have ended since the last call."""

    def close(self) -> None:
        """Gives the memory back."""


class BlockMemory(Protocol):
    """Copies KV blocks within a backend, and out of it and back. Every call happens after all launched steps."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (source, target)."""

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """Returns the contents of the blocks, one after the other, each with the layers of every program and, last,
        hidden states."""

    def import_blocks(self, blocks: Sequence[int], data: bytes | memoryview) -> None:
        """Writes blocks that `export_blocks` returned, here or on a backend with the same fingerprint."""

    def host_room(self, places: int) -> HostRoom:
        """Returns room in host memory for `places` blocks, each as `export_blocks` returns it."""

    def touch_blocks(self, blocks: Sequence[int]) -> None:
        """Makes the system back blocks with memory now, because the first write would be slow. Their contents are
        lost."""

    def fingerprint(self) -> str:
        """Names the layout of a block: type, block size, layers, heads. Blocks may be exchanged if it is the same."""


class PackedAdapter(Protocol):
    """Is an adapter in the layout that a backend computes with, in no slot yet."""

    @property
    def nbytes(self) -> int:
        """Returns the bytes that it takes in a slot."""


class AdapterSlots(Protocol):
    """Keeps adapters for the rows of batches, numbered from 0 (Batch.adapters). Only program 0 has adapters.

    A row's answer depends only on the adapter in its slot when its step was launched, not on other rows of the step.
    """

    def pack(self, updates: Sequence[LowRankUpdate]) -> Any:
        """Returns a PackedAdapter. It may be called in any thread while steps run."""

    def load(self, slot: int, packed: Any) -> None:
        """Puts a packed adapter into a slot that is free, for steps launched from now on."""

    def drop(self, slot: int) -> None:
        """Frees a slot after all launched steps."""


class WeightUpdate(Protocol):
    """Replaces the weights of program 0. They are packed and prepared in any thread while steps run, and exchanged
    between two steps."""

    @property
    def packer(self) -> Any:
        """Returns the packer of the new weights, with which the model is built."""

    def prepare(self, model: Model) -> None:
        """Gets everything ready for the exchange. Raises WeightsError if the weights cannot be exchanged; nothing has
        changed then."""

    def exchange(self) -> None:
        """Replaces the old weights after all launched steps. KV, recurrent states, last sampled
        tokens and adapters stay."""


class Sleeper(Protocol):
    """Gives a backend's device memory back while nothing is computed, and keeps what takes long to make: compiled
    kernels, tunings, graphs. All calls happen while no step is in flight."""

    def sleep(self) -> int:
        """Moves weights to host memory and drops the contents of the KV cache and of recurrent states; returns the
        bytes that this takes in host memory. Nothing may be launched or prepared until `wake`. Raises OutOfMemory,
        still awake, where the host has too little memory."""

    def wake(self) -> None:
        """Takes the memory again and brings the weights back. Raises OutOfMemory, still asleep, where there is too
        little."""


class DeviceKeeper(Protocol):
    """Keeps weights and KV cache in the device's memory for the next engine process."""

    @property
    def kv_id(self) -> bytes:
        """Names the memory of the KV cache; empty: it ends with this process."""

    def packer(self, identity: str, packer: Packs) -> Packs:
        """Returns a packer that reuses weights kept under the same identity; without any, it packs with `packer`."""

    def keep(self) -> None:
        """Leaves weights and KV cache to the next engine, once both are complete."""

    def synchronize(self) -> None:
        """Waits for all queued work of the device."""


class CacheSize(NamedTuple):
    """Says how much a KV cache holds."""

    blocks: int
    block_size: int
    states: int = 0  # recurrent ones


class Backend(WeightPacker, Runner, Tuner, Protocol):
    """Packs weights, runs batches and tunes itself, on one device."""

    name: str  # the hardware's
    device: str  # as a config names it: cpu, cuda:1, ref
    own_memory: bool  # separate from the host's, and with room for one engine
    depth: int  # steps that it pays to have in flight while the next one is planned
    padded_sizes: Sequence[int]  # the numbers of tokens that steps with drafts are padded to; empty: to none
    kv: BlockMemory
    states: BlockMemory  # recurrent states, each as if it were a block; of use if its model has any
    adapters: AdapterSlots
    sleeper: Sleeper | None  # None: memory comes back when the process ends
    sharing: DeviceSharing | None  # None: blocks reach other processes through host memory

    @property
    def keeper(self) -> DeviceKeeper | None:
        """Returns the keeper of the device's memory; None: the memory ends with this process."""

    def begin_update(self, loaded: Sequence[Any]) -> WeightUpdate:
        """Begins to replace the weights that were `loaded` (see exchange.py); one update at a time."""

    def tell_of_compiling(self, tell: Callable[[bool], None]) -> None:
        """Calls `tell` with True when a step begins to compile a kernel, and with False when the step continues.
        Call this in the thread that launches steps."""

    def is_lost(self) -> bool:
        """Returns whether this process can compute nothing more after an error. Most errors harm only one step."""

    def trial_logits(self, model: Model, kv: str, batches: Sequence[Batch], size: CacheSize) -> Floats | None:
        """Returns the logits of the sampled positions of all batches, [S, vocab], computed one after the other with an
        empty KV cache of another type; None if there is but one type. `model` is loaded as program 0. To be called
        before `reserve_kv`."""
