from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

def isas() -> list[str]:
    """The instruction sets this CPU and this build have, the fastest first."""

def has_fast_crc32() -> bool:
    """Returns whether this CPU has instructions for CRCs; without them zlib is the faster one."""

def crc32(data: bytes | bytearray | memoryview | NDArray[np.uint8], start: int = 0) -> int:
    """Returns zlib.crc32(data, start)."""

def chain_hashes(parent: bytes, tokens: Sequence[int] | NDArray[np.int32], block_size: int) -> list[bytes]:
    """Returns a digest for each whole block of tokens: blake2b, 16 bytes, of the digest before it and of the block's
    tokens as little-endian int32. `parent` stands before the first block."""

class BlockTable:
    """Maps chain hashes to the replicas that hold a block: fleet/block_table.py defines it."""

    def get(self, block: bytes, otherwise: int) -> int: ...
    def write(self, replica: int, changes: Iterable[tuple[int, object]], bits: tuple[int, int, int]) -> None: ...
    def clear(self, replica: int) -> None: ...
    def held_by(self, replica: int) -> list[tuple[int, bytes]]: ...
    def __len__(self) -> int: ...

class SuffixAutomaton:
    """Indexes all substrings of a text that grows, of at most `capacity` tokens: core/suffixes.py defines it."""

    def __init__(self, capacity: int) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. A text that would become longer than the capacity starts anew, without the older tokens."""
    def continuation(self, most: int) -> tuple[list[int], int, list[int]]:
        """Returns what followed the latest known earlier occurrence of the longest suffix that has one, its length,
        and the agreement at each token."""
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class SuffixCursor:
    """Follows another stream through an automaton: the longest suffix of it that occurs in the automaton's text."""

    def __init__(self, automaton: SuffixAutomaton) -> None: ...
    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the stream that is followed."""
    def continuation(self, most: int) -> tuple[list[int], int, list[int]]:
        """Returns what followed the longest suffix of the stream that is followed by anything, its length, and the
        agreement at each token."""

class Weight:
    """A packed matrix [rows, width] made of parts stacked along its rows: (format, rows) of each."""

    def __init__(self, width: int, parts: list[tuple[str, int]]) -> None: ...
    def fill(self, part: int, row: int, rows: int, data: NDArray[np.uint8]) -> None:
        """Packs rows of one part, from `row` on, out of bytes as they lie in a checkpoint."""
    def set_bias(self, bias: NDArray[np.float32]) -> None: ...
    def set_factor(self, part: int, factor: float) -> None:
        """What all values of a part are multiplied with; only formats with a table have one."""
    def set_trellis(self, part: int, inputs: NDArray[np.float32], outputs: NDArray[np.float32]) -> None:
        """The factors of columns and rows of an EXL3 part."""
    def exchange(self, other: Weight) -> None:
        """Swaps the values, scales and biases of two weights that have the same layout."""
    @property
    def width(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def packed(self) -> NDArray[np.uint8]:
        """Returns a read-only view of its packed bytes, which keeps them alive."""
    @property
    def gateable(self) -> bool:
        """Whether a product with it can be gated at once: two equal halves of one quantized format, without a bias."""
    @property
    def coded(self) -> bool:
        """Whether some part is multiplied with quantized activations."""
    @property
    def precise(self) -> bool:
        """Whether all its parts are F32."""

class Adapter:
    """Thin matrices that change weights: F32 or F16, or quantized where x is anyway."""

    def __init__(self) -> None: ...
    def add(self, weight: Weight, a: Weight, parts: list[tuple[int, Weight]]) -> None:
        """Adds b . (a . x) to products with the weight, from a row of it on: (row, b) of each part. The parts share the
        rows of `a` out among them in this order."""
    @property
    def nbytes(self) -> int: ...

def packed_bits(format: str) -> float:
    """That a value takes once it is packed, its share of scales included."""

def fill_parts(parts: list[tuple[Weight, int, NDArray[np.uint8]]], threads: int) -> None:
    """Packs whole parts, (weight, part, bytes) of each, shared out among threads without the interpreter's lock."""

PIECE_BYTES: int  # of a weight, read and summed at once

def checksum(data: NDArray[np.uint8]) -> int:
    """Returns 64 bits that differ if any one word of the bytes does."""

def read_packed(file: int, offset: int, weights: list[Weight], checksum: int, threads: int) -> bool:
    """Fills weights, which lie in the open file one after the other from `offset` on. Returns False, with all of them
    zeroed, if the file is too short or the checksum of the checksums of all pieces differs."""

class MemoryFile:
    """A file that is nowhere but in memory, of which KV caches take one part after the other."""

    def __init__(self, descriptor: int, end: int) -> None:
        """What comes before `end` is taken already."""
    @property
    def end(self) -> int: ...

class HiddenRows:
    """Hidden states in KV blocks, which the programs beside each other share."""

    def reserve(self, blocks: int, block_size: int, file: MemoryFile | None = None) -> None: ...
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...
    def export_blocks(self, blocks: list[int]) -> bytes: ...
    def import_blocks(self, blocks: list[int], data: bytes | memoryview) -> None: ...
    def copy_out(
        self, blocks: list[int], rows: NDArray[np.uint8], places: list[int], offset: int, crcs: list[int]
    ) -> list[int]: ...
    def copy_in(
        self, blocks: list[int], rows: NDArray[np.uint8], places: list[int], offset: int, crcs: list[int]
    ) -> list[int]: ...
    @property
    def kv_bytes_per_token(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def kv_layout(self) -> str:
        """Names the layout of a block; empty where nothing is stored."""

class Program:
    """Phases over numbered buffers. Ops are added in the order in which they run; each writes `out`."""

    def __init__(self, isa: str, threads: int, kv: str, beside: Program | None = None) -> None:
        """Makes an empty program; one `beside` another runs on its threads and shares its hidden states."""
    def buffer(self, symbol: str, width: int, prepared: bool) -> int: ...
    def prepares(self, weight: Weight) -> bool:
        """Whether what the weight is multiplied with must lie in a prepared buffer."""
    def angles(self, inv_freq: NDArray[np.float64], scale: float) -> int: ...
    def embed(self, table: Weight, out: int, partial: bool = False) -> None: ...
    def add_norm(
        self, x: int, residual: int | None, gain: NDArray[np.float32], eps: float, out: int, total: int | None
    ) -> None: ...
    def linear(self, x: int, weight: Weight, out: int, gated: bool = False) -> None: ...
    def attend(
        self,
        qkv: int,
        out: int,
        *,
        layer: int,
        angles: int,
        numbers: dict[str, float],
        vectors: dict[str, NDArray[np.float32]],
    ) -> None:
        """Adds attention. `numbers` and `vectors` are an AttentionSpec's options by name; an unknown one is refused."""
    def norm_runs(self, x: int, parts: list[tuple[NDArray[np.float32], int]], eps: float, out: int) -> None:
        """Norms parts of each row, (gain, width) of each, in runs as long as the gain; a width of 0 means the rest of
        the row. What follows stays as it is."""
    def layer_norm_heads(
        self, x: int, q_gain: NDArray[np.float32], k_gain: NDArray[np.float32], dim: int, eps: float, out: int
    ) -> None:
        """Computes layer norms of q and k, of `dim` values at a time. Gains have a value for each of theirs."""
    def sparse_act_and_mul(self, x: int, out: int, act: str, cutoff: float) -> None: ...
    def gate_columns(self, x: int, y: int, first: int, out: int, act: str) -> None: ...
    def take_columns(self, x: int, first: int, gain: NDArray[np.float32], out: int) -> None:
        """`gain` has no values where there is none."""
    def concat(self, x: int, y: int, out: int) -> None: ...
    def match_rms(self, x: int, like: int, out: int) -> None: ...
    def mix_streams(self, x: int, coefficients: int, out: int) -> None: ...
    def correct_streams(self, x: int, new: int, coefficients: int, active: int, out: int) -> None: ...
    def add_to_streams(self, x: int, y: int, out: int) -> None: ...
    def act_and_mul(self, x: int, out: int, act: str) -> None: ...
    def add(self, x: int, y: int, out: int) -> None: ...
    def scale(self, x: int, factor: float, out: int) -> None: ...
    def soft_cap(self, x: int, cap: float, out: int) -> None: ...
    def take_sampled(self, x: int, out: int) -> None: ...
    def add_layer_norm(
        self,
        x: int,
        residual: int | None,
        gain: NDArray[np.float32],
        bias: NDArray[np.float32],
        eps: float,
        out: int,
        total: int | None,
    ) -> None: ...
    def activate(self, x: int, out: int, act: str) -> None: ...
    def embed_positions(self, table: Weight, out: int) -> None: ...
    def sigmoid_mul(self, x: int, gate: int, out: int) -> None: ...
    def delta_net(
        self,
        qkv: int,
        z: int,
        beta: int,
        alpha: int,
        mixed: int,
        out: int,
        *,
        layer: int,
        k_heads: int,
        v_heads: int,
        k_dim: int,
        v_dim: int,
        conv_width: int,
        tiled: bool,
        channel_decay: bool,
        gate: str,
        conv: NDArray[np.float32],
        decay: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        gain: NDArray[np.float32],
        eps: float,
    ) -> None:
        """`conv` is [conv_width, q + k + v], flat. `mixed` is a buffer as wide as that for what is convolved."""
    def causal_conv(
        self,
        x: int,
        product: int | None,
        out: int,
        *,
        layer: int,
        width: int,
        conv_width: int,
        conv: NDArray[np.float32],
        bias: NDArray[np.float32],
    ) -> None:
        """`conv` is [conv_width, width], flat; an empty `bias` stands for none. `product` is a buffer for what a gated
        convolution sees."""

    def selective_scan(
        self,
        x: int,
        dt: int,
        b: int,
        c: int,
        gate: int,
        out: int,
        *,
        layer: int,
        width: int,
        state_size: int,
        decay: NDArray[np.float32],
        skip: NDArray[np.float32],
    ) -> None: ...
    def mamba2(
        self,
        zxbcdt: int,
        mixed: int,
        out: int,
        *,
        layer: int,
        heads: int,
        head_dim: int,
        state_dim: int,
        groups: int,
        conv_width: int,
        norm_groups: int,
        z_scale: float,
        dt_scale: float,
        dt_min: float,
        dt_max: float,
        eps: float,
        conv: NDArray[np.float32],
        conv_bias: NDArray[np.float32],
        decay: NDArray[np.float32],
        dt_bias: NDArray[np.float32],
        skip: NDArray[np.float32],
        gain: NDArray[np.float32],
    ) -> None:
        """`conv` is [conv_width, x + B + C], flat; an empty `conv_bias` or `gain` stands for none. `mixed` is a buffer
        as wide as what is convolved."""

    def moe(
        self,
        x: int,
        router_logits: int,
        up: list[Weight],
        down: list[Weight],
        choice_bias: NDArray[np.float32],
        out: int,
        *,
        top_k: int,
        act: str,
        scoring: str,
        renormalize: bool,
        scale: float,
        groups: int,
        top_k_groups: int,
        group_score: str,
        weigh_inputs: bool = False,
        expert_scale: NDArray[np.float32] | None = None,
    ) -> None:
        """`choice_bias` has no values where there is none."""
    def per_head_linear(self, x: int, weight: Weight, heads: int, passthrough: int, out: int) -> None:
        """Multiplies each head by a part of the weight."""
    def attend_mla(
        self,
        q: int,
        kv: int,
        selected: int | None,
        out: int,
        *,
        layer: int,
        angles: int,
        numbers: dict[str, float],
        vectors: dict[str, NDArray[np.float32]],
    ) -> None: ...
    def select_positions(
        self,
        q: int,
        k: int,
        weights: int,
        out: int,
        *,
        layer: int,
        angles: int,
        interleaved: bool,
        heads: int,
        head_dim: int,
        top_k: int,
        numbers: dict[str, float],
    ) -> None:
        """Selects the positions that attend_mla attends to. The numbers are those of the layer's attention."""
    def store_hidden(self, number: int, x: int, ahead: int) -> None: ...
    def load_hidden(self, number: int, out: int) -> None: ...
    def keep(self, buffer: int) -> None:
        """The buffer's rows can be read after a step: whoever adds ops after this leaves it alone."""
    def answer(self, buffer: int) -> None: ...
    def read_tokens_as(self, ids: list[int]) -> None:
        """Says which token each one that it samples is when a step reads it as the last sampled; none: the same."""
    def reserve_kv(
        self,
        blocks: int,
        block_size: int,
        states: int = 0,
        groups: list[list[int]] = ...,
        file: MemoryFile | None = None,
    ) -> None:
        """Makes room for so many blocks and states. `groups` has the layers of each layer group; none: all are one. The
        blocks take the next part of the file, if there is one."""
    def take_over(self, other: Program) -> None:
        """Takes over the KV cache, states, last tokens and adapters of a program with the same layers and weights."""
    def move_states(self, moves: list[tuple[int, int, int, int]]) -> None:
        """In the next step; (row, begin, save, after) as a StateMove has them."""
    def load_adapter(self, slot: int, adapter: Adapter) -> None: ...
    def drop_adapter(self, slot: int) -> None: ...
    def choose_adapters(self, slots: NDArray[np.int32]) -> None:
        """Says which adapter's slot each row of the next step has, -1: none."""
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, given as (source, target)."""
    def export_blocks(self, blocks: list[int]) -> bytes:
        """Returns the contents of blocks, one after the other."""
    def import_blocks(self, blocks: list[int], data: bytes | memoryview) -> None:
        """Writes the contents of blocks, as export_blocks of a cache with the same layout has returned them."""
    def copy_out(
        self, blocks: list[int], rows: NDArray[np.uint8], places: list[int], offset: int, crcs: list[int]
    ) -> list[int]:
        """Copies blocks to rows, each to its place, at an offset. Returns the CRC of each copy, with which that of what
        comes before it goes on."""
    def copy_in(
        self, blocks: list[int], rows: NDArray[np.uint8], places: list[int], offset: int, crcs: list[int]
    ) -> list[int]:
        """Copies rows to blocks, as copy_out has written them. Returns the CRC of what each block has got."""
    def export_states(self, states: list[int]) -> bytes:
        """Returns recurrent states, one after the other."""
    def import_states(self, states: list[int], data: bytes | memoryview) -> None:
        """Writes recurrent states, as export_states of a program with the same layout has returned them."""
    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        row_start: NDArray[np.int32],
        slots: NDArray[np.int32],
        tables: NDArray[np.int32],
        sampled: NDArray[np.int32],
        out: NDArray[np.float32],
    ) -> None:
        """One step, without the interpreter's lock; the answer's rows go to `out`."""
    def sample(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        row_start: NDArray[np.int32],
        slots: NDArray[np.int32],
        tables: NDArray[np.int32],
        sampled: NDArray[np.int32],
        target: NDArray[np.int32],
        temperature: NDArray[np.float32],
        top_p: NDArray[np.float32],
        top_k: NDArray[np.int32],
        min_p: NDArray[np.float32],
        seed: NDArray[np.uint64],
        logprobs: NDArray[np.int32],
        edits: tuple[
            NDArray[np.int32],
            NDArray[np.float32],
            NDArray[np.int32],
            NDArray[np.int32],
            NDArray[np.int32],
            NDArray[np.float32],
            NDArray[np.int32],
            NDArray[np.int32],
            NDArray[np.int32],
        ],
        constrained: NDArray[np.int32],
        words: NDArray[np.int32],
    ) -> tuple[list[int], list[tuple[int, float, list[tuple[int, float]]]]]:
        """Runs one step without the interpreter's lock. Returns the token of each sampled position, and (token,
        logprob, alternatives) of those that asked for it. `edits` are the fields of a LogitEdits; `words` [C, width]
        are the bitmasks of the `constrained` positions."""
    def read_kept(self, first: int, out: NDArray[np.float32]) -> None:
        """The last step's rows of the buffer that is kept, from `first` on, to `out`: [rows, width]."""
    def read_answers(self, rows: NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Copies rows of the last step's answer, before any edit, to `out`: [rows, width]."""
    @property
    def hidden(self) -> HiddenRows: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token in all layers."""
    @property
    def block_bytes(self) -> int:
        """The bytes of one block, once the cache is reserved."""
    @property
    def kv_layout(self) -> str:
        """Describes how blocks are laid out: caches with equal layouts can exchange them."""
    @property
    def state_bytes(self) -> int: ...
    @property
    def state_layout(self) -> str:
        """Describes how states are laid out: programs with equal layouts can exchange them."""

def quantize(
    source: str, values: NDArray[np.uint8], target: str, out: NDArray[np.uint8], threads: int, isa: str = "auto"
) -> bool:
    """Plain values as a quantized format; False where one is not finite, or beyond what float16 holds."""
