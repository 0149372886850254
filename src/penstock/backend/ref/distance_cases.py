"""Makes inputs of attention that knows positions by a bias for each distance, or not at all (see cases.py)."""

from __future__ import annotations

from functools import partial

from penstock.backend.ref.cases import HALF, Case, attend_whole, attention
from penstock.backend.ref.mla_cases import attend_mla
from penstock.model.spec import AttentionSpec, RopeSpec

NOWHERE = RopeSpec((), interleaved=False)
LATENT = AttentionSpec(4, 1, 48, NOWHERE, multiplier=0.7, v_dim=32)
BIASED = partial(attention, interleaved=False, rotated=0, causal=False)

DISTANCE_CASES = (
    *(
        Case(
            *("attend", f"bias within {reach}", "F32", HALF),
            partial(attend_whole, spec=BIASED(4, kv_heads, 16, distance_bias=reach), lengths=lengths),
        )
        for reach, kv_heads, lengths in ((3, 4, (1, 40, 7)), (20, 2, (33, 150)), (200, 1, (330,)))
    ),
    Case("attend_mla", "nothing rotated", "F32", HALF, partial(attend_mla, spec=LATENT, lengths=(1, 40))),
)
