"""The seam between the engine and whatever computes: a batch of arrays in, a step's result out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.config import available_memory, total_memory
from penstock.model.spec import KvGroup, ModelSpec
from penstock.model.tensor import Stack, Tensor
from penstock.types import StepResult

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

LAST_SAMPLED = -1  # in Batch.tokens: the token this row's slot sampled in the step before, still on the device


@dataclass(frozen=True, slots=True)
class SampleRows:
    """How to answer each of the S positions whose logits are wanted."""

    target: Ints  # [S] -1: sample; else score this known token and sample nothing
    temperature: Floats  # [S] 0: greedy
    top_p: Floats  # [S]
    top_k: Ints  # [S] 0: off
    min_p: Floats  # [S]
    seed: NDArray[np.uint64]  # [S] already mixed with the position: one number decides one draw
    logprobs: Ints  # [S] -1: none; else how many alternatives
    edits: tuple[LogitEdit | None, ...]  # [S] penalties, biases and bans, for the rows that have any


class Mask(Protocol):
    """The tokens that a grammar allows. A backend that computes beside the host asks for it last: it is worked out when
    it is asked for, once."""

    def words(self) -> Ints:
        """A bit for each token of the vocabulary: [ceil(vocab / 32)], the lowest bit first."""


@dataclass(frozen=True, slots=True)
class LogitEdit:
    """Changes to one row of logits, applied in this order: repetition, then add, then ban, then allow."""

    seen: Ints  # distinct tokens of prompt and answer
    repetition: float  # logits of `seen` above 0 are divided by it, below 0 multiplied
    add_ids: Ints  # logits[add_ids] += add_values: biases, presence and frequency penalties
    add_values: Floats
    ban: Ints  # logits[ban] = -inf
    allow: Mask | None = None  # logits of all other tokens = -inf


class Pool(NamedTuple):
    """Hidden states that are added up for a row: those of its tokens[first:last]."""

    row: int
    first: int
    last: int
    begins: bool  # nothing was added up for its slot before
    divisor: int  # 0: more will follow; else the row's answer is the sum so far, divided by this


class StateMove(NamedTuple):
    """A row whose state (of models that have any) begins elsewhere than where it stands, or is saved. No state is both
    begun with and saved to in one step."""

    row: int
    begin: int  # the state that it begins with; -1: its slot's own
    save: int  # the state that its own is copied to; -1: none
    after: int  # so many of its tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as arrays. R rows, T tokens, S sampled positions."""

    step: int
    tokens: Ints  # [T]
    positions: Ints  # [T]
    row_start: Ints  # [R + 1] row r owns tokens[row_start[r]:row_start[r + 1]]
    slots: Ints  # [R] the row's place for life: its state, for one; at position 0 that is nothing yet
    tables: Ints  # [G, R, W] block ids by KV layer group; entries behind a window or past a row's context are undefined
    sampled: Ints  # [S] indices into tokens, ascending
    sample_start: Ints  # [R + 1] row r owns sampled[sample_start[r]:sample_start[r + 1]]
    sample: SampleRows
    pools: tuple[Pool, ...] = ()
    moves: tuple[StateMove, ...] = ()
    program: int = 0  # which of the loaded programs runs


class StoredAs(NamedTuple):
    """Names the format that a weight is stored in once it is packed."""

    kind: str  # a format's name, or what weights are quantized to at load
    bits: float  # of one value, its share of scales included

    @classmethod
    def in_file(cls, tensor: Tensor) -> StoredAs:
        """Returns the format that the tensor has in its file."""
        return cls(tensor.format.name, 8 * tensor.format.bytes / tensor.format.values)

    def bytes(self, tensor: Tensor) -> float:
        """Returns what the tensor takes in this format."""
        return prod(tensor.shape) * self.bits / 8


class Footprint(NamedTuple):
    """What a model will take on a device, in bytes."""

    device: str  # its name
    total: int
    free: int
    weights: int
    workspace: int  # for the largest step
    reserve: int  # for what is not counted
    kv_token: int  # one token in the cache
    state: int = 0  # one sequence's, besides its tokens

    @classmethod
    def on_host(cls, weights: int, kv_token: int, state: int = 0) -> Footprint:
        """In this machine's own memory, of which the cache takes a quarter of what weights leave."""
        free = available_memory()
        return cls("this machine", total_memory(), free, weights, 0, max(free - weights, 0) * 3 // 4, kv_token, state)


class Model(Protocol):
    """A packed model: see model/families/llama.py."""

    def forward(self, ops: Any) -> Any: ...


Ticket = int


class Backend(Protocol):
    """Steps run in the order they were launched; what a launched step reads was written by those before it."""

    name: str  # of what computes
    depth: int  # steps that it pays to have in flight while the next one is planned

    def pack_matrix(self, parts: Sequence[Tensor], bias: Sequence[Tensor | None]) -> Any:
        """One weight [out, in] made of parts stacked along `out`, in the layout this backend computes with."""

    def pack_vector(self, tensor: Tensor) -> Any: ...

    def pack_experts(self, up: Sequence[Stack], down: Sequence[Stack], choice_bias: Tensor | None) -> Any:
        """The matrices of each expert, `up` of two parts (a gate and what it gates), and what is added to the scores
        that choose among them."""

    def pack_heads(self, tensor: Tensor) -> Any:
        """A matrix for each head: [heads, out, in]."""

    def load(self, model: Model) -> None:
        """Takes the packed model and gets ready to run its forward pass."""

    def stored_as(self, tensor: Tensor) -> StoredAs:
        """Returns the format that packing would store the tensor in."""

    def footprint(self, spec: ModelSpec, tensors: Iterable[Tensor]) -> Footprint:
        """Told before anything is loaded."""

    def kv_bytes_per_token(self) -> int:
        """What one token costs in the cache reserve_kv would make."""

    def kv_memory(self) -> int:
        """Bytes that the cache may take where nobody says how many."""

    def state_bytes(self) -> int:
        """What the state of one sequence costs; 0 for models that have none."""

    def reserve_kv(self, num_blocks: int, block_size: int, states: int = 0, groups: Sequence[KvGroup] = ()) -> None:
        """Makes room for so many blocks, each of which holds `block_size` tokens of the layers of one group, and for so
        many states: those of the slots and, after them, saved ones. Without groups all layers are one."""

    def warm_up(self) -> None:
        """Called once, before the first step: what that would wait for otherwise."""

    def settle(self) -> bool:
        """Does a little of what makes later steps faster, some milliseconds of it; False when nothing is left. Called
        again and again while there is nothing to compute."""

    def launch(self, batch: Batch) -> Ticket:
        """Starts a step. The batch's arrays are never written to again: a backend may keep them until `wait`. Raises
        OutOfMemory where there is none for it; it may be launched again then, as another step."""

    def relieve(self) -> None:
        """Gives back memory that can be had again later: a step found too little."""

    def wait(self, ticket: Ticket) -> StepResult:
        """The step's answer; every ticket is waited for once, in launch order."""

    def time_step(self, batch: Batch, times: int) -> float:
        """Seconds of such a step by itself, the least of so many: what computes is timed, not what launches it. To be
        called while no step is in flight."""

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks (source, target) after every launched step."""

    def close(self) -> None: ...
