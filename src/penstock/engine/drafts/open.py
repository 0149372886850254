"""Opens the features that draft: copying, a draft model or a head."""

from __future__ import annotations

from penstock.backend.base import Backend
from penstock.backend.quantize_at_load import quantized
from penstock.config import Config, draft_limit
from penstock.core.drafting.depths import DraftDepths
from penstock.core.drafting.lengths import StepCost
from penstock.core.step_cost import CostModel
from penstock.engine.drafts.draft_model import EAGLE3_HEAD, MTP_HEAD, SMALL_MODEL, DraftModel
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.kv_reservation import weight_bytes
from penstock.model.draft import group_of
from penstock.model.eagle import EagleHead
from penstock.model.load import Checkpoint, load_model
from penstock.model.mtp_head import is_head, load_head
from penstock.model.packer import Packs
from penstock.model.registry import PackedModel
from penstock.planning.memory_plan import gigabytes
from penstock.types import Limits


def open_copying(config: Config, backend: Backend, limits: Limits) -> Drafting | None:
    """Returns the drafting that copies tokens; None if the config or the model does not draft."""
    if draft_limit(config.speculation) == 0 or not limits.generates:
        return None
    return Drafting(backend.padded_sizes)


def cost_model(backend: Backend, drafting: Drafting | None) -> CostModel:
    if drafting is None:
        return CostModel(StepCost(shapes=backend.padded_sizes))
    return CostModel(drafting.cost, learns_answers=False)


def open_drafting(draft: Checkpoint | None, target: Checkpoint, backend: Backend, limits: Limits) -> DraftModel | None:
    """Returns the drafting with a loaded draft model or head; None without one."""
    if draft is None:
        return None
    kind = MTP_HEAD if is_head(draft) else SMALL_MODEL
    if isinstance(draft, EagleHead):
        kind = EAGLE3_HEAD._replace(token_ids=draft.token_ids)
    group, depth = group_of(target), backend.depth
    depths = DraftDepths(backend.padded_sizes)
    return DraftModel(backend, limits, draft.spec.max_len, depths=depths, kind=kind, group=group, depth=depth)


def load_draft(
    draft: Checkpoint, config: Config, target: Checkpoint, model: PackedModel, backend: Backend, packer: Packs
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
