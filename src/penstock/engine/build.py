"""Builds an engine that is ready to step from a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.backend import open_backend, resolve_defaults
from penstock.backend.base import Backend
from penstock.backend.blocks.sharing import DeviceSharing
from penstock.backend.packed_cache import packed_caches_of
from penstock.backend.quantize_at_load import quantized
from penstock.backend.weight_exchange import KeepingPacker
from penstock.config import (
    Config,
    Device,
    available_memory,
    draft_limit,
    log_to_stderr,
    parse_adapter,
)
from penstock.config.kv_formats import is_kv_quantized
from penstock.core.drafting.depths import DraftDepths
from penstock.core.drafting.lengths import StepCost
from penstock.core.step_cost import CostModel
from penstock.engine.assemble import MOST_DRAFTED, assemble
from penstock.engine.chain_hash import chain_hash
from penstock.engine.control.weight_reader import WeightReader
from penstock.engine.drafts.draft_model import EAGLE3_HEAD, MTP_HEAD, SMALL_MODEL, DraftModel
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.engine import Engine
from penstock.engine.grammars.grammar import Grammars
from penstock.engine.kv_disk.open import open_store
from penstock.engine.kv_handover.identity import kv_identity, weights_identity
from penstock.engine.kv_handover.kept_kv import open_kv_file, open_ledger
from penstock.engine.kv_transfer.peers import TransferOptions
from penstock.engine.lora.adapters import Adapters
from penstock.engine.low_priority import run_yielding
from penstock.errors import OutOfMemory, WeightsError
from penstock.model.adapters import AdapterBase
from penstock.model.classifier import limits_of_labels
from penstock.model.draft import group_of, open_draft
from penstock.model.eagle import EagleHead
from penstock.model.heads import beside, is_head, load_head
from penstock.model.load import CONFIG, Checkpoint, load_model, load_placed, load_text, open_checkpoint, unknown_line
from penstock.model.low_rank import Placement
from penstock.model.registry import PackedModel
from penstock.model.spec import ModelSpec
from penstock.planning.limits import resolve
from penstock.planning.memory_plan import (
    adapter_memory,
    all_states,
    block_token,
    check_machine,
    footprint_of,
    gigabytes,
    host_tier,
    missing_tiers,
    plan_memory,
)
from penstock.types import Limits, blocks_for

Tell = Callable[[str], None]
UntilNeeded = Callable[[], None]  # returns when the engine is to take over
ADAPTER_SHARE = 8  # adapters may take one part in so many of the free memory
SPARE_FOR_ADAPTERS = 1 << 29  # bytes of a GPU that are free in any case
TRIES = 4  # to reserve a cache: others may take memory meanwhile


class StartupTimer:
    """Adds up where the time of a start went, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._spent: list[str] = []

    def stop(self, what: str) -> None:
        """Counts the time since the last stop as spent on `what`."""
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


def open_configured(config: Config) -> Checkpoint:
    """Opens the model of a config. Fields of its config.json that nothing is known of are logged, and which of its two
    RoPEs a model with LongRoPE gets."""
    checkpoint = open_checkpoint(Path(config.model), config.config, config.strict_config, config.max_len)
    lines = [unknown_line(checkpoint.unknown)] if checkpoint.unknown else []
    if checkpoint.spec.long:
        lines.append(long_context_line(checkpoint.spec))
    if lines:
        import logging  # takes longer than reading the rest

        for line in lines:
            logging.getLogger(__name__).warning(line)
    return checkpoint


def long_context_line(spec: ModelSpec) -> str:
    """Returns a line that says which factors a model with LongRoPE is computed with, and what would change that."""
    if spec.max_len == spec.longest:
        return "longrope: all positions have the long factors, because max_len is beyond the model's original context"
    return (
        f"longrope: the context is the original one, {spec.max_len} tokens, with the short factors; "
        f"a larger --max-len, up to {spec.longest}, gives all positions the long ones"
    )


def build_engine(
    config: Config, checkpoint: Checkpoint, tell: Tell = silent, until_needed: UntilNeeded = at_once
) -> Engine:
    """Loads the checkpoint and reserves its KV cache. On a GPU, `tell` is told what memory is for before any is taken,
    and where the time went. Until `until_needed` returns, another engine may be using KV cache, disk and GPU."""
    config, timer = resolve_defaults(config, checkpoint.fp8, checkpoint.whole), StartupTimer()
    on_gpu = Device.parse(config.device).kind == "cuda"
    if not on_gpu:
        tell = silent
    draft = open_draft(config, checkpoint)
    checkpoint = beside(checkpoint, draft)
    kv_file = open_kv_file(config, checkpoint)
    if kv_file is not None:
        config = replace(config, kv_memory=config.kv_memory or kv_file.kv_memory)
    backend = open_backend(config, packed_caches_of(config, checkpoint, draft), kv_file)
    checkpoint = quantized(checkpoint, config)
    timer.stop(config.device)
    if on_gpu:
        until_needed()  # there is memory for one engine
        _tell_memory(config, checkpoint, draft, backend, tell)
    keeper, models = backend.keeper, [each for each in (checkpoint, draft) if each]
    packs = backend if keeper is None else keeper.packer(weights_identity(config, models, backend), backend)
    packer = KeepingPacker(packs)
    loading = partial(_load_weights, checkpoint, backend, packer)
    model, placements = run_yielding(loading) if config.yielding and not on_gpu else loading()
    if draft is not None:
        draft = load_draft(draft, config, checkpoint, model, backend, KeepingPacker(packs))
    timer.stop("weights")
    _check_kv(config, checkpoint, model, backend, timer)
    limits, group_token, kv_memory = _reserve(config, checkpoint, backend, draft)
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
    most = draft_limit(config.speculation)
    drafting = None if most == 0 or not limits.generates else Drafting(backend.padded_sizes)
    return assemble(
        backend,
        limits,
        depth=backend.depth,
        grammars=grammars,
        costs=_cost_model(backend, drafting),
        drafting=drafting,
        draft_model=open_drafting(draft, checkpoint, backend, limits),
        draft_tokens=MOST_DRAFTED if most is None else most,
        chain=chain_hash(),
        block_events=bool(config.listen),
        classifier=checkpoint.classifier,
        dense=checkpoint.dense,
        adapters=open_adapters(config, backend, AdapterBase.of(checkpoint, placements)),
        weights=WeightReader(backend, checkpoint, packer.kept, partial(open_update, config, checkpoint, draft)),
        unknown_fields=checkpoint.unknown,
        sleeper=backend.sleeper,
        ledger=ledger,
        kv_store=open_store(config, blocks, backend, limits, log_to_stderr),
        transfer=TransferOptions(blocks, offer_addresses(config, backend.sharing)),
    )


def _cost_model(backend: Backend, drafting: Drafting | None) -> CostModel:
    """Returns the forecast of steps, which drafting shares."""
    if drafting is None:
        return CostModel(StepCost(shapes=backend.padded_sizes))
    return CostModel(drafting.cost, learns_answers=False)


def _tell_memory(
    config: Config, checkpoint: Checkpoint, draft: Checkpoint | None, backend: Backend, tell: Tell
) -> None:
    """Tells what the memory of a GPU will be for."""
    has = footprint_of(backend, checkpoint, draft and quantized(draft, config, silent))
    for line in plan_memory(config, checkpoint.spec, has).lines():
        tell(line)


def _check_kv(
    config: Config, checkpoint: Checkpoint, model: PackedModel, backend: Backend, timer: StartupTimer
) -> None:
    """Refuses a quantized KV cache that changes the model's predictions too much."""
    if is_kv_quantized(config.kv):
        from penstock.planning.kv_guard import check_kv  # with an evaluation, which most starts do without

        check_kv(config, checkpoint, model, backend, log_to_stderr)
        timer.stop("KV check")


def open_grammars(config: Config, limits: Limits) -> Grammars:
    """Returns what compiles grammars; its vocabulary is loaded at once if requests wait for that."""
    grammars = Grammars(lambda: load_text(Path(config.model), config.config).tokenizer, limits.vocab)
    if config.grammars_wait:
        grammars.warm_up()
    return grammars


def offer_addresses(config: Config, sharing: DeviceSharing | None = None) -> tuple[str, ...]:
    """Returns where an engine offers KV blocks: one that several clients may join does so on its device, on its machine
    and, if they may be on others, on the network."""
    if config.offers or not config.listen:
        return config.offers
    scheme, _, rest = config.listen.partition("://")
    here = ("shm",) if sharing is None else ("cuda_ipc", "shm")
    if scheme == "ipc":
        return here
    from penstock.engine.kv_transfer import nixl  # with sockets, which take long

    host = rest.rpartition(":")[0]
    return (*here, *([f"nixl:{host}:0"] if nixl.preferable() else []), f"tcp:{host}:0")


def open_drafting(draft: Checkpoint | None, target: Checkpoint, backend: Backend, limits: Limits) -> DraftModel | None:
    """Returns what drafts with a model or a head that is loaded; None if there is none."""
    if draft is None:
        return None
    kind = MTP_HEAD if is_head(draft) else SMALL_MODEL
    if isinstance(draft, EagleHead):
        kind = EAGLE3_HEAD._replace(token_ids=draft.token_ids)
    group, depth = group_of(target), backend.depth
    depths = DraftDepths(backend.padded_sizes)
    return DraftModel(backend, limits, draft.spec.max_len, depths=depths, kind=kind, group=group, depth=depth)


def load_draft(
    draft: Checkpoint, config: Config, target: Checkpoint, model: PackedModel, backend: Backend, packer: KeepingPacker
) -> Checkpoint:
    """Loads a draft model or a head of the target's `model` as the backend's program 1, packed by `packer`; returns its
    checkpoint as it is stored. A draft model that is larger than its target is logged."""
    draft = quantized(draft, config)
    token_ids = draft.token_ids if isinstance(draft, EagleHead) else ()
    made = load_head(draft, model, packer) if is_head(draft) else load_model(draft, packer)
    backend.load(made, 1, token_ids)
    sizes = weight_bytes(draft, backend), weight_bytes(target, backend)
    if sizes[0] > sizes[1]:
        import logging  # takes longer than reading the rest

        logging.getLogger(__name__).warning(
            "the draft model %s has %s of weights and its target %s: a smaller one drafts faster",
            draft.name,
            *map(gigabytes, sizes),
        )
    return draft


def _load_weights(
    checkpoint: Checkpoint, backend: Backend, packer: KeepingPacker
) -> tuple[PackedModel, Sequence[Placement]]:
    """Loads a model's weights; returns the model, and where each of its tensors is."""
    model, placements = load_placed(checkpoint, packer)
    backend.load(model)
    return model, placements


def open_update(config: Config, loaded: Checkpoint, draft: Checkpoint | None, path: Path) -> Checkpoint:
    """Opens weights that are to take the place of a loaded model's, a folder or a GGUF file, as that was opened. A head
    keeps its own."""
    folder = loaded.path.is_dir()
    if path.is_dir() and not (path / CONFIG).exists() and len(files := list(path.glob("*.gguf"))) == 1:
        path = files[0]
    if path.is_dir() != folder:
        raise WeightsError(f"the loaded model is a {'folder' if folder else 'GGUF file'}, and this is not")
    found = open_checkpoint(path, config.config, config.strict_config, config.max_len)
    return quantized(beside(found, draft), config)


def open_adapters(config: Config, backend: Backend, base: AdapterBase) -> Adapters:
    """Returns the adapters that requests may name at first: those of the config."""
    memory = config.adapter_memory or available_memory() // ADAPTER_SHARE
    if Device.parse(config.device).kind == "cuda":
        memory = config.adapter_memory or max(adapter_memory(config), SPARE_FOR_ADAPTERS)
    adapters = Adapters(backend.adapters, base, config.max_adapters, memory)
    for text in config.adapter:
        name, path, scale = parse_adapter(text)
        adapters.register(name, Path(path).expanduser(), scale)
    return adapters


def described_cache(limits: Limits, group_token: int) -> str:
    """Returns a few words about the KV cache, where a token costs `group_token` bytes in one layer group."""
    tokens = limits.num_blocks * limits.block_size
    size = gigabytes(tokens * group_token)
    if not any(limits.windows):
        return f"{tokens:,} tokens in {size} of KV cache"
    sequences = limits.num_blocks // blocks_for(limits.max_len, limits.windows, limits.block_size)
    return f"{sequences:,} x {limits.max_len:,} tokens, with windows, in {size} of KV cache"


def _reserve(
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
        if Device.parse(config.device).kind == "cuda":
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
    if Device.parse(config.device).kind != "cuda":
        kept += tier.blocks * block_bytes + tier.states * needs.state_bytes
        for line in missing_tiers(config, limits):  # on a GPU the plan has said so
            log_to_stderr(line)
    limits = limits._replace(memory=weights + kept, host_places=tier.blocks, host_states=tier.states)
    return limits, group_token, config.kv_memory or room


def weight_bytes(checkpoint: Checkpoint, backend: Backend) -> int:
    """Returns the bytes that the weights take as the backend stores them."""
    tensors = checkpoint.tensors.values()
    return int(sum(backend.stored_as(tensor).bytes(tensor) for tensor in tensors))
