"""Puts an engine together: a new feature is a file and a line in the list below."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.core import Policy, Scheduler, StandardPolicy, hashing
from penstock.core.block_events import BlockEvents, BlockWatcher
from penstock.core.step_cost import CostModel
from penstock.core.tiers import CopyCosts
from penstock.engine.control.pausing import Pausing
from penstock.engine.control.sleeping import Sleeping
from penstock.engine.control.weight_updates import WeightUpdates
from penstock.engine.drafts.speculation import Drafters, Speculation
from penstock.engine.engine import Engine
from penstock.engine.feature import Feature
from penstock.engine.grammars.constraints import Constraints
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_disk.prefixes import open_prefixes
from penstock.engine.kv_handover.kept_kv import KeptKv
from penstock.engine.kv_transfer.peers import NO_TRANSFER, PeerBlocks, TransferOptions
from penstock.engine.loaded_model import LoadedModel
from penstock.engine.lora.feature import AdapterControl, NoAdapters
from penstock.engine.router_feed import BlockFeed, NoBlockFeed
from penstock.engine.samplers.mirostat import Mirostat
from penstock.types import Limits

if TYPE_CHECKING:
    from penstock.backend.base import Backend, Sleeper
    from penstock.engine.control.weight_reader import WeightReader
    from penstock.engine.drafts.draft_model import DraftModel
    from penstock.engine.grammars.grammar import Grammars
    from penstock.engine.kv_disk.store import SegmentStore
    from penstock.engine.kv_handover.ledger import KvLedger
    from penstock.engine.lora.adapters import Adapters
    from penstock.model.classifier import ClassifierHead, DenseHead

MOST_DRAFTED = 64  # tokens of one row in one step


def assemble(
    backend: Backend,
    limits: Limits,
    *,
    depth: int = 0,
    grammars: Grammars | None = None,
    policy: Policy | None = None,
    costs: CostModel | None = None,
    drafting: Drafters[Any] | None = None,
    draft_model: DraftModel | None = None,
    draft_tokens: int = MOST_DRAFTED,
    chain: hashing.Chain = hashing.chain,
    block_events: bool = False,
    classifier: ClassifierHead | None = None,
    dense: DenseHead | None = None,
    unknown_fields: tuple[str, ...] = (),
    adapters: Adapters | None = None,
    weights: WeightReader | None = None,
    sleeper: Sleeper | None = None,
    ledger: KvLedger | None = None,
    kv_store: SegmentStore | None = None,
    transfer: TransferOptions = NO_TRANSFER,
    more: tuple[Feature, ...] = (),
) -> Engine:
    """Returns an engine that answers requests with a backend. Each argument that is given adds a feature."""
    costs = costs or CostModel(learns_answers=drafting is None)
    copying = CopyCosts(costs.prompts)
    speculation = None if drafting is None else Speculation(drafting, min(draft_tokens, MOST_DRAFTED), draft_model)
    feed = BlockEvents(time.time_ns()) if block_events else None
    watchers: list[BlockWatcher] = [watcher for watcher in (feed, ledger) if watcher is not None]
    scheduler = Scheduler(
        limits,
        policy=policy or StandardPolicy(limits, costs, copying),
        drafts=speculation,
        chain=chain,
        watchers=watchers,
        copy_costs=copying,
    )
    cache = scheduler.cache
    # adopts blocks before others use free ones
    kept = Feature() if ledger is None else KeptKv(ledger, cache, backend.keeper)
    host = HostMemory.open(limits, backend, copying)
    features = [
        LoadedModel(classifier, dense, unknown_fields),
        Sleeping(sleeper),
        NoAdapters() if adapters is None else AdapterControl(adapters),
        speculation or Feature(),  # removes wrong drafts before samplers and constraints see them
        Mirostat(),
        Constraints(grammars),
        PeerBlocks(transfer, cache, host, backend, limits, costs.prompts, chain),
        open_prefixes(kv_store, cache, host, backend, limits, costs, chain),
        kept,
        WeightUpdates(weights),
        Pausing(),
        NoBlockFeed() if feed is None else BlockFeed(feed),
        *more,
    ]
    return Engine(backend, scheduler, features, costs=costs, host=host, depth=depth)
