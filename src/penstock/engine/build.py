"""Builds an engine that is ready to step from a config."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend import open_backend, resolve_defaults
from penstock.backend.base import Backend
from penstock.backend.packed_cache import packed_caches_of
from penstock.backend.quantize_at_load import quantized
from penstock.config import (
    Config,
    draft_limit,
    log_to_stderr,
)
from penstock.config.values import is_kv_quantized
from penstock.engine.assemble import MOST_DRAFTED, assemble
from penstock.engine.chain_hash import chain_hash
from penstock.engine.control.weight_reader import WeightReader, open_update
from penstock.engine.drafts.open import cost_model, load_draft, open_copying, open_drafting
from penstock.engine.grammars.constraints import open_grammars
from penstock.engine.kv_disk.prefixes import open_store
from penstock.engine.kv_handover.identity import kv_identity
from penstock.engine.kv_handover.kept_kv import open_kv_file, open_ledger
from penstock.engine.kv_reservation import described_cache, reserve_kv
from penstock.engine.kv_transfer.peers import transfer_options
from penstock.engine.lora.feature import open_adapters
from penstock.engine.model_loading import load_weights, open_configured, open_packer
from penstock.model.adapter_files import AdapterBase
from penstock.model.draft import open_draft
from penstock.model.load import Checkpoint
from penstock.model.mtp_head import beside
from penstock.model.registry import PackedModel
from penstock.planning.memory_plan import (
    footprint_of,
    plan_memory,
)

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

Tell = Callable[[str], None]
UntilNeeded = Callable[[], None]  # returns when the engine is to take over


class StartupTimer:
    """Adds up where the time of a start went, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent: list[str] = []

    def stop(self, what: str) -> None:
        now = time.perf_counter()
        self._spent.append(f"{what} {now - self._last:.2f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._spent)


def silent(_: str) -> None: ...


def at_once() -> None: ...


def open_engine(config: Config, tell: Tell = silent, until_needed: UntilNeeded = at_once) -> Engine:
    """Returns an engine for the model file or folder that the config names: see `build_engine`."""
    return build_engine(config, open_configured(config), tell, until_needed)


def build_engine(
    config: Config, checkpoint: Checkpoint, tell: Tell = silent, until_needed: UntilNeeded = at_once
) -> Engine:
    """Loads the checkpoint and reserves its KV cache. On a GPU, `tell` gets the plan of the memory before any is taken,
    and the times of the start. Until `until_needed` returns, another engine may be using KV cache, disk and GPU."""
    config, timer = resolve_defaults(config, checkpoint.fp8, checkpoint.whole), StartupTimer()
    draft = open_draft(config, checkpoint)
    checkpoint = beside(checkpoint, draft)
    kv_file = open_kv_file(config, checkpoint)
    if kv_file is not None:
        config = replace(config, kv_memory=config.kv_memory or kv_file.kv_memory)
    backend = open_backend(config, packed_caches_of(config, checkpoint, draft), kv_file)
    if not backend.own_memory:
        tell = silent
    checkpoint = quantized(checkpoint, config)
    timer.stop(config.device)
    if backend.own_memory:
        until_needed()  # there is memory for one engine
        _tell_memory(config, checkpoint, draft, backend, tell)
    keeper, models = backend.keeper, [each for each in (checkpoint, draft) if each]
    packer = open_packer(config, models, backend)
    weights = load_weights(checkpoint, backend, packer, yielding=config.yielding and not backend.own_memory)
    if draft is not None:
        draft = load_draft(draft, config, checkpoint, weights.model, backend, packer)
    timer.stop("weights")
    _check_kv(config, checkpoint, weights.model, backend, timer)
    limits, group_token, kv_memory = reserve_kv(config, checkpoint, backend, draft)
    blocks, ledger = kv_identity(config, [each for each in (checkpoint, draft) if each], backend), None
    timer.stop("cache")
    backend.warm_up()
    timer.stop("kernels")
    tell(f"engine ready: {timer}; {described_cache(limits, group_token)}")
    grammars = open_grammars(config, limits)
    until_needed()
    if kv_file is not None:
        ledger = open_ledger(kv_file, blocks, limits, kv_memory, keeper)
    if keeper is not None:
        keeper.keep()
    most, drafting = draft_limit(config.speculation), open_copying(config, backend, limits)
    return assemble(
        backend,
        limits,
        depth=backend.depth,
        grammars=grammars,
        costs=cost_model(backend, drafting),
        drafting=drafting,
        draft_model=open_drafting(draft, checkpoint, backend, limits),
        draft_tokens=MOST_DRAFTED if most is None else most,
        chain=chain_hash(),
        block_events=bool(config.listen),
        classifier=checkpoint.classifier,
        dense=checkpoint.dense,
        adapters=open_adapters(config, backend, AdapterBase.of(checkpoint, weights.placements)),
        weights=WeightReader(backend, checkpoint, weights.kept, partial(open_update, config, checkpoint, draft)),
        unknown_fields=checkpoint.unknown,
        sleeper=backend.sleeper,
        ledger=ledger,
        kv_store=open_store(config, blocks, backend, limits, log_to_stderr),
        transfer=transfer_options(config, blocks, backend.sharing),
    )


def _tell_memory(
    config: Config, checkpoint: Checkpoint, draft: Checkpoint | None, backend: Backend, tell: Tell
) -> None:
    has = footprint_of(backend, checkpoint, draft and quantized(draft, config, silent))
    for line in plan_memory(config, checkpoint.spec, has).lines():
        tell(line)


def _check_kv(
    config: Config, checkpoint: Checkpoint, model: PackedModel, backend: Backend, timer: StartupTimer
) -> None:
    if is_kv_quantized(config.kv):
        from penstock.planning.kv_guard import check_kv  # imports an evaluation, which most starts skip

        check_kv(config, checkpoint, model, backend, log_to_stderr)
        timer.stop("KV check")
