"""Reserves the KV cache of an engine, and resolves its limits by the memory that there is."""

from __future__ import annotations

from dataclasses import replace

from penstock.backend.base import Backend
from penstock.config import Config, available_memory, log_to_stderr
from penstock.errors import OutOfMemory
from penstock.model.classifier import limits_of_labels
from penstock.model.load import Checkpoint
from penstock.planning.limits import resolve
from penstock.planning.memory_plan import (
    adapter_memory,
    all_states,
    block_token,
    check_machine,
    gigabytes,
    host_tier,
    missing_tiers,
)
from penstock.types import Limits, blocks_for

TRIES = 4  # attempts to reserve a cache: others may take memory meanwhile


def reserve_kv(
    config: Config, checkpoint: Checkpoint, backend: Backend, draft: Checkpoint | None
) -> tuple[Limits, int, int]:
    """Reserves the KV cache, for a draft model too if there is one. Returns the limits, the bytes of a token in one
    layer group and those that KV and states might take in all. The cache is a little smaller than planned where there
    turns out to be less memory than a moment ago."""
    spec, adapters = checkpoint.spec, adapter_memory(config)
    if config.max_len > spec.max_len and config.max_len_for_all:
        log_to_stderr(
            f"{config.name or checkpoint.name}: a sequence has at most {spec.max_len} tokens, which is this model's "
            f"context; --max-len is {config.max_len}"
        )
    draft_token = 0
    if draft is not None:
        draft_token = backend.footprint(spec, ()).with_draft(backend.footprint(draft.spec, ())).draft_token
    for left in reversed(range(TRIES)):
        needs = backend.memory_needs()
        group_token = block_token(spec, needs.kv_bytes_per_token, draft_token)
        room = needs.kv_memory - adapters
        if backend.own_memory:
            room = needs.kv_memory - (config.adapter_memory or adapters)
            config = replace(config, kv_memory=min(config.kv_memory or room, room))
        limits = resolve(
            config,
            context=spec.max_len,
            vocab=spec.token_ids,
            kv_bytes=group_token,
            memory=room,
            windows=spec.windows,
            encoder=spec.encoder,
            state_bytes=needs.state_bytes,
        )._replace(dim=checkpoint.embedding_width, pooling=spec.pooling, **limits_of_labels(spec))
        check_machine(config, limits.num_blocks * limits.block_size * group_token)
        try:
            backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits), spec.kv_groups)
        except OutOfMemory:
            if not left:
                raise
            config = replace(config, kv_memory=config.kv_memory * 7 // 8)
        else:
            break
    kept = limits.num_blocks * limits.block_size * group_token + all_states(limits) * needs.state_bytes
    weights = sum(weight_bytes(each, backend) for each in (checkpoint, draft) if each is not None)
    block_bytes = limits.block_size * group_token
    tier = host_tier(config, limits, block_bytes, needs.state_bytes, available_memory())
    if not backend.own_memory:
        kept += tier.blocks * block_bytes + tier.states * needs.state_bytes
        for line in missing_tiers(config, limits):  # on a GPU the plan has said so
            log_to_stderr(line)
    limits = limits._replace(memory=weights + kept, host_places=tier.blocks, host_states=tier.states)
    return limits, group_token, config.kv_memory or room


def described_cache(limits: Limits, group_token: int) -> str:
    tokens = limits.num_blocks * limits.block_size
    size = gigabytes(tokens * group_token)
    if not any(limits.windows):
        return f"{tokens:,} tokens in {size} of KV cache"
    sequences = limits.num_blocks // blocks_for(limits.max_len, limits.windows, limits.block_size)
    return f"{sequences:,} x {limits.max_len:,} tokens, with windows, in {size} of KV cache"


def weight_bytes(checkpoint: Checkpoint, backend: Backend) -> int:
    tensors = checkpoint.tensors.values()
    return int(sum(backend.stored_as(tensor).bytes(tensor) for tensor in tensors))
