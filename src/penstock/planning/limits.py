"""Resolves a config into `Limits`: the sizes of the KV cache and of steps for one model on one device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.types import Limits, blocks_for

SAVED_PER_ROW = 4  # states, where there is room: of its system prompt, its conversation and some others'
BLOCK_ID = 4  # bytes of an entry of a block table
TABLES_SHARE = 8  # block tables may take an eighth of the memory for KV


def resolve(
    config: Config,
    *,
    context: int,
    vocab: int,
    kv_bytes: int,
    memory: int,
    windows: tuple[int, ...] = (0,),
    encoder: bool = False,
    state_bytes: int = 0,
) -> Limits:
    """Returns the limits of a config with all defaults filled in, for a model with `context` positions, where KV and
    states may take `memory` bytes. A token costs `kv_bytes` in one layer group, `windows` has each group's window, and
    a sequence also has `state_bytes`. An `encoder` computes its whole prompt in one step and needs room for the results
    of two steps."""
    if config.max_len > context and not config.max_len_for_all:
        raise ConfigError(f"max_len {config.max_len} is beyond the model's context of {context} tokens: lower max_len")
    max_len = min(config.max_len or context, context)
    block_bytes = kv_bytes * config.block_size
    budget = config.kv_memory or memory
    rows, saved = _states(config.max_rows, state_bytes, budget // 2)
    step_tokens = max(config.step_tokens, rows)
    needed = partial(blocks_for, windows=windows, block_size=config.block_size)
    if windows and all(windows):
        tables = len(windows) * max(rows, 1)
        max_len = min(max_len, _longest_in_tables(budget // TABLES_SHARE, tables, config.block_size))
    if encoder:
        max_len = min(max_len, step_tokens)
        wanted = 2 * (needed(step_tokens) + rows)
    else:
        wanted = (rows - 1) * needed(max_len) + needed(max_len, chunk=step_tokens)
    fewest = 2 * len(windows)
    num_blocks = min(max(wanted, fewest), (budget - (rows + saved) * state_bytes) // block_bytes)
    if num_blocks < fewest or not rows:
        least = 2 * max(len(windows) * block_bytes, 2 * state_bytes)
        raise ConfigError(
            f"the KV cache needs at least {least} bytes; got {budget}: raise kv_memory or free some memory"
        )
    return Limits(
        max_len=_longest(max_len, num_blocks, partial(needed, chunk=step_tokens)),
        max_rows=rows,
        step_tokens=step_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        vocab=vocab,
        prefill_budget=config.prefill_budget,
        encoder=encoder,
        generates=not encoder,
        states=saved,
        windows=windows,
    )


def _longest(most: int, num_blocks: int, needed: Callable[[int], int]) -> int:
    return bisect_right(range(1, most + 1), num_blocks, key=needed)


def _longest_in_tables(memory: int, tables: int, block_size: int) -> int:
    """Returns the longest context for which there is room for this number of block tables. Blocks behind a window are
    freed, so if every layer has one, only the tables grow with the context: a file may state 2 billion tokens."""
    return max(memory // (BLOCK_ID * tables), 1) * block_size


def _states(max_rows: int, size: int, memory: int) -> tuple[int, int]:
    """Returns the numbers of rows and of saved states. If memory is short, at least one state is saved for each row."""
    if not size:
        return max_rows, 0
    rows = min(max_rows, memory // size // 2)
    return rows, min(SAVED_PER_ROW * rows, memory // size - rows)
