"""Makes inputs for what Llama 4 needs of attention and of experts, and for layer norms of queries and keys (see
cases.py).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.backend.ref.cases import BYTE, FLOAT, HALF, Case, attend, attention, moe, norm_qk
from penstock.model.spec import ExpertSpec

HALVES, PAIRS = (partial(attention, interleaved=interleaved) for interleaved in (False, True))
ONE = ExpertSpec(6, 1, 32, scoring="sigmoid", weigh_inputs=True)
CHUNKED = PAIRS(4, 2, 16, chunk=7)
TEMPERED = HALVES(4, 2, 16, rotated=0, temperature=0.8, temperature_span=5)
BOTH = HALVES(3, 1, 10, chunk=37, window=20, temperature=0.4, temperature_span=9)

LLAMA4_CASES = (
    Case("attend", "chunks", "F32", HALF, partial(attend, spec=CHUNKED, lengths=(5, 64))),
    Case("attend", "chunks, one by one", "F32", HALF, partial(attend, spec=CHUNKED, lengths=(20,), longest=1)),
    Case("attend", "a prompt of chunks", "F32", HALF, partial(attend, spec=CHUNKED, lengths=(90, 7), longest=1000)),
    Case(
        "attend",
        "long chunks",
        "F32",
        HALF,
        partial(attend, spec=replace(CHUNKED, chunk=530), lengths=(1100, 600), longest=90),
    ),
    Case("attend", "temperature", "F32", HALF, partial(attend, spec=TEMPERED, lengths=(5, 64))),
    Case("attend", "temperature, one by one", "F32", HALF, partial(attend, spec=TEMPERED, lengths=(20,), longest=1)),
    Case("attend", "chunks and window", "F32", HALF, partial(attend, spec=BOTH, lengths=(80, 33))),
    Case("norm_qk", "layer", "F32", FLOAT, partial(norm_qk, spec=HALVES(4, 2, 10, qk_norm="layer"), tokens=5)),
    Case(
        "norm_qk",
        "layer, one KV head",
        "F32",
        FLOAT,
        partial(norm_qk, spec=HALVES(3, 1, 36, qk_norm="layer"), tokens=1),
    ),
    Case("moe", "weighted inputs", "F32", FLOAT, partial(moe, spec=ONE, tokens=9)),
    Case("moe", "weighted inputs, one token", "F32", FLOAT, partial(moe, spec=ONE, tokens=1)),
    Case(
        "moe",
        "weighted inputs of three",
        "F32",
        FLOAT,
        partial(moe, spec=replace(ONE, top_k=3, act="gelu_tanh"), tokens=5),
    ),
    Case("moe", "weighted inputs, Q8_0", "Q8_0", 3 * BYTE, partial(moe, spec=ONE, format="Q8_0", tokens=9)),
    Case("moe", "weighted inputs, BF16", "BF16", 3 * HALF, partial(moe, spec=ONE, format="BF16", tokens=9)),
)
