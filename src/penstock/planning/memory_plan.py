"""Decides what memory is for before anything is loaded: a shortage shrinks the cache, or is an error now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from penstock.backend.base import Footprint, Tuner
from penstock.backend.devices import device_kind
from penstock.config import AUTO, Config, parse_adapter, total_memory
from penstock.errors import ConfigError
from penstock.model.adapter_files import adapter_bytes
from penstock.model.load import Checkpoint
from penstock.model.spec import ModelSpec
from penstock.planning.limits import resolve
from penstock.types import Limits, blocks_for

KV_RAM_SHARE = 8  # blocks that have left the cache may take an eighth of the free memory
ADVICE = "--quantize fp8 or int4 makes plain weights smaller, lower --step-tokens and --max-rows the workspace"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Says how a device's memory will be divided among weights, workspace, KV cache, states and adapters."""

    footprint: Footprint
    limits: Limits
    group_token: int  # bytes of one token in one KV layer group
    adapters: int = 0  # bytes of those in memory at once
    on_host: bool = True  # the device's memory is the host's
    notes: tuple[str, ...] = ()  # differences from the request

    @property
    def cache(self) -> int:
        return self.limits.num_blocks * self.limits.block_size * self.group_token

    @property
    def kv_ram(self) -> int:
        """Returns the bytes of host memory for blocks and saved states that have left the cache."""
        blocks = self.limits.host_places * self.limits.block_size * self.group_token
        return blocks + self.limits.host_states * self.footprint.state

    @property
    def states(self) -> int:
        return all_states(self.limits) * self.footprint.state

    def sequence_blocks(self, tokens: int) -> int:
        return blocks_for(tokens, self.limits.windows, self.limits.block_size)

    def sequence_bytes(self, tokens: int) -> int:
        return self.sequence_blocks(tokens) * self.limits.block_size * self.group_token

    @property
    def whole_sequences(self) -> int:
        return max(self.limits.num_blocks // self.sequence_blocks(self.limits.max_len), 1)

    def lines(self) -> Iterator[str]:
        has, limits = self.footprint, self.limits
        yield f"memory of {has.device}: {gigabytes(has.free)} free of {gigabytes(has.total)}"
        for name, size, remark in (
            ("weights", has.weights, self._weights_remark()),
            ("workspace", has.workspace, f"steps of {limits.step_tokens} tokens, {limits.max_rows} rows"),
            ("reserve", self._reserve, "left to others, unless --kv-memory takes it" if has.reserve_share else ""),
            ("KV cache", self.cache, self._cache_remark()),
            (
                "states",
                self.states,
                f"{limits.max_rows} rows and {limits.states} saved, of {has.state / 1e6:.1f} MB",
            ),
            ("adapters", self.adapters, "the size of their files"),
            ("KV in RAM", self.kv_ram, "at most, taken as it is used" if self.on_host else "of the host, pinned"),
            ("left over", self._left_over, ""),
        ):
            if size or name not in ("states", "adapters", "KV in RAM"):
                yield f"  {name:<18}{gigabytes(size):>10}  {remark}".rstrip()
        yield from (f"  note: {note}" for note in self.notes)

    def _weights_remark(self) -> str:
        drafting = self.footprint.draft_weights
        return f"{gigabytes(drafting)} of them for drafts" if drafting else ""

    @property
    def _left_over(self) -> int:
        has = self.footprint
        taken = has.weights + has.workspace + self._reserve + self.cache + self.states + self.adapters
        return has.free - taken - (self.kv_ram if self.on_host else 0)

    @property
    def _reserve(self) -> int:
        """Returns the bytes that stay free. Blocks that leave a cache in host memory take from them."""
        return max(self.footprint.reserve - (self.kv_ram if self.on_host else 0), 0)

    def _cache_remark(self) -> str:
        limits, token = self.limits, self.footprint.kv_token
        fit = f"{self.whole_sequences} x {limits.max_len:,}"
        if not any(limits.windows):
            return f"{limits.num_blocks * limits.block_size:,} tokens of {token / 1e3:.1f} kB: {fit}"
        held, without = self.sequence_bytes(limits.max_len), limits.max_len * token
        return f"{fit} tokens of {held / 1e6:.1f} MB each ({without / 1e6:.1f} MB without windows)"


def footprint_of(backend: Tuner, stored: Checkpoint, draft: Checkpoint | None) -> Footprint:
    alone = backend.footprint(stored.spec, stored.tensors.values())
    return alone if draft is None else alone.with_draft(backend.footprint(draft.spec, draft.tensors.values()))


def plan_memory(config: Config, spec: ModelSpec, has: Footprint) -> MemoryPlan:
    """Divides the memory for a config with resolved defaults. Raises ConfigError if weights leave too little for even a
    small cache."""
    adapters = adapter_memory(config)
    room = has.free - has.weights - has.workspace - adapters
    if config.kv_memory and has.reserve_share:  # a share is kept free by default only
        has = has._replace(reserve=max(min(has.reserve, room - config.kv_memory), 0))
    room -= has.reserve
    group_token = block_token(spec, has.kv_token, has.draft_token)
    if room < 2 * len(spec.windows) * config.block_size * group_token:
        raise ConfigError(
            f"the model needs {gigabytes(has.weights)} for weights, {gigabytes(has.workspace)} for workspace, "
            f"{gigabytes(adapters)} for adapters and {gigabytes(has.reserve)} in reserve, beside its KV cache; "
            f"{has.device} has {gigabytes(has.free)} free of {gigabytes(has.total)}: {ADVICE}"
        )
    on_host = not device_kind(config.device).own_memory
    notes = []
    if config.kv_memory > room and not on_host:
        notes.append(f"the KV cache gets {gigabytes(room)}, not the {gigabytes(config.kv_memory)} asked for")
        config = replace(config, kv_memory=0)
    limits = resolve(
        config,
        context=spec.max_len,
        vocab=spec.vocab,
        kv_bytes=group_token,
        memory=room,
        windows=spec.windows,
        encoder=spec.encoder,
        state_bytes=has.state,
    )
    cache = limits.num_blocks * config.block_size * group_token
    check_machine(config, cache)
    if cache > room:
        notes.append(
            f"{gigabytes(room)} are free for the KV cache of {gigabytes(cache)}: it takes memory as it is used, and "
            "other programs may have to swap"
        )
    tier = host_tier(config, limits, config.block_size * group_token, has.state, has.free)
    limits = limits._replace(host_places=tier.blocks, host_states=tier.states)
    notes += missing_tiers(config, limits)
    if limits.max_rows < config.max_rows:
        notes.append(f"{limits.max_rows} rows in a step, not {config.max_rows}: their states take half of the memory")
    wanted = config.max_len or spec.max_len
    if limits.max_len < wanted:
        short = "a step" if limits.max_len == limits.step_tokens and spec.encoder else "the cache"
        notes.append(f"prompt and answer have {limits.max_len} tokens at most, not {wanted}: {short} holds no more")
    return MemoryPlan(has, limits, group_token, adapters, on_host, tuple(notes))


def check_machine(config: Config, cache: int) -> None:
    """Refuses a cache that was asked for and is larger than the machine: its memory is taken as it is used, so it would
    be reserved, and the process killed later."""
    on_host = not device_kind(config.device).own_memory
    if on_host and config.kv_memory and cache > total_memory():
        raise ConfigError(
            f"a KV cache of {gigabytes(cache)} is more than this machine has, {gigabytes(total_memory())}: "
            "lower kv_memory, max_rows or max_len"
        )


def missing_tiers(config: Config, limits: Limits) -> Iterator[str]:
    if not limits.encoder:
        return
    if config.kv_ram not in (AUTO, "0"):
        yield "--kv-ram has no effect on this model: it has no KV to keep"
    if config.kv_disk:
        yield "--kv-disk has no effect on this model: it has no KV to keep"


class HostPlaces(NamedTuple):
    """Says how many blocks and saved states host memory keeps that have left the cache."""

    blocks: int = 0
    states: int = 0


def host_tier(config: Config, limits: Limits, block_bytes: int, state_bytes: int, free: int) -> HostPlaces:
    """Divides the host memory for blocks and states that leave the cache; `free` bytes are free. States take at most
    half, but at least one if it fits. Raises ConfigError for more memory than the machine has."""
    unused = device_kind(config.device).own_memory and not config.kv_disk and config.kv_ram == AUTO
    if unused or limits.encoder:
        return HostPlaces()
    cache = limits.num_blocks * block_bytes + limits.states * state_bytes
    room = min(cache, free // KV_RAM_SHARE) if config.kv_ram == AUTO else int(config.kv_ram)
    if config.kv_ram != AUTO and room > total_memory():
        raise ConfigError(
            f"{gigabytes(room)} of host memory for KV is more than this machine has, {gigabytes(total_memory())}: "
            "lower kv_ram"
        )
    states = max(room // 2 // state_bytes, min(room // state_bytes, 1)) if limits.states else 0
    return HostPlaces((room - states * state_bytes) // block_bytes, states)


def adapter_memory(config: Config) -> int:
    """Returns the memory of a config's adapters: the files of the largest ones, one for each slot, within
    --adapter-memory."""
    sizes = sorted(adapter_bytes(Path(parse_adapter(text).path).expanduser()) for text in config.adapter)
    total = sum(sizes[-config.max_adapters :])
    return min(total, config.adapter_memory or total)


def block_token(spec: ModelSpec, kv_token: int, draft_token: int) -> int:
    """Returns the bytes of a token in a KV block, given those in all layers and, of these, the draft model's. Blocks of
    all layer groups have room for the draft model's layers."""
    return spec.kv_group_bytes(kv_token - draft_token) + draft_token


def all_states(limits: Limits) -> int:
    return limits.max_rows + limits.states if limits.states else 0


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
