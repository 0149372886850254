"""The delta rule in chunks of tokens, as GPUs compute prompts, is what it is token by token: in NumPy, where one can
follow it. With gates g_t, shares beta_t and S_t = g_t S_(t-1) + k_t u_t, where u_t = beta_t (v_t - k_t g_t S_(t-1)),
the u of a chunk solve a triangular system (the WY form), and the state moves on once per chunk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from penstock.backend.base import Floats
from penstock.backend.ref.delta import delta_rule, each_value_head, unit
from penstock.backend.ref.ops import sigmoid
from penstock.model.ops import DeltaWeights
from penstock.model.recurrence import DeltaSpec

CHUNK = 64
FLOAT = 1e-5  # the same sums in another order, relative to the largest value
# The keys of a text repeat themselves, gates let go of all or of nothing, and shares are 0 or 1: what divides would
# overflow, and what cancels would lose its digits.
GATES = {"ordinary": -3.0, "near one": -12.0, "near zero": 4.0}


class Prompt(NamedTuple):
    """Holds what delta nets make of the tokens of a prompt: [tokens, *]."""

    mixed: Floats
    learned: Floats
    alpha: Floats
    weights: DeltaWeights


def make_prompt(spec: DeltaSpec, tokens: int, rate: float, alike: float, seed: int = 3) -> Prompt:
    """Returns a prompt whose states decay by about e^-(e^rate) per token, and whose keys are `alike` at 1."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, spec.width)).astype(np.float32)
    keys = mixed[:, spec.k_width : 2 * spec.k_width]
    keys[:] = alike * keys[0] + (1 - alike) * keys
    decay = -np.exp(rng.normal(rate, 1, spec.v_heads)).astype(np.float32)
    dt_bias = rng.standard_normal(spec.decay_width).astype(np.float32)
    alpha = rng.standard_normal((tokens, spec.decay_width)).astype(np.float32)
    learned = sigmoid(rng.normal(0, 3, (tokens, spec.v_heads)).astype(np.float32))
    nothing = np.zeros(0, np.float32)
    return Prompt(mixed, learned, alpha, DeltaWeights(nothing, decay, dt_bias, nothing))


def token_by_token(state: Floats, prompt: Prompt, spec: DeltaSpec) -> tuple[Floats, Floats]:
    read = []
    for mixed, learned, alpha in zip(prompt.mixed, prompt.learned, prompt.alpha, strict=True):
        state, out = delta_rule(state, mixed, learned, alpha, prompt.weights, spec)
        read.append(out)
    return state, np.stack(read)


def in_chunks(state: Floats, prompt: Prompt, spec: DeltaSpec, size: int) -> tuple[Floats, Floats]:
    read = []
    for first in range(0, len(prompt.mixed), size):
        some = slice(first, first + size)
        part = Prompt(prompt.mixed[some], prompt.learned[some], prompt.alpha[some], prompt.weights)
        state, out = chunk(state, part, spec)
        read.append(out)
    return state, np.concatenate(read)


def chunk(state: Floats, prompt: Prompt, spec: DeltaSpec) -> tuple[Floats, Floats]:
    """Returns the heads' states after a chunk, and what its tokens read: [v_heads, k_dim, v_dim], [tokens, v_heads,
    v_dim]. Exponents of decays are sums over tokens, and those of what came later are never above 0."""
    count, weights = len(prompt.mixed), prompt.weights
    q, k, v = (x.reshape(count, -1) for x in np.split(prompt.mixed, [spec.k_width, 2 * spec.k_width], axis=1))
    q, k = (np.stack([each_value_head(unit(t.reshape(-1, spec.k_dim)), spec) for t in x], 1) for x in (q, k))
    q, v = q * np.float32(spec.k_dim**-0.5), v.reshape(count, spec.v_heads, spec.v_dim).swapaxes(0, 1)
    gates = np.logaddexp(np.float32(0), prompt.alpha + weights.dt_bias).reshape(count, spec.v_heads, -1)
    at = np.cumsum(weights.decay[:, None] * gates, axis=0).swapaxes(0, 1)  # [heads, tokens, 1 or k_dim]
    beta = prompt.learned.T[:, :, None]
    since = np.exp(np.minimum(at[:, :, None] - at[:, None], 0))  # from one token to a later one
    weighted = since * k[:, None]  # [heads, tokens, earlier tokens, k_dim]
    among = np.tril(np.einsum("hid,hijd->hij", k, weighted), -1) * beta
    scores = np.tril(np.einsum("hid,hijd->hij", q, weighted))
    update = solve(among, beta * (v - (k * np.exp(at)) @ state))
    read = (q * np.exp(at)) @ state + scores @ update
    kept = k * np.exp(at[:, -1:] - at)
    state = state * np.exp(at[:, -1])[:, :, None] + kept.swapaxes(1, 2) @ update
    return state, read.swapaxes(0, 1)


def solve(below: Floats, values: Floats) -> Floats:
    """Returns (1 + below)^-1 values by forward substitution: powers of `below` would grow where keys are alike."""
    inverse = np.broadcast_to(np.eye(below.shape[1], dtype=np.float32), below.shape).copy()
    for column in range(below.shape[1]):
        inverse -= below[:, :, column, None] * inverse[:, column, None, :]
    solved: Floats = inverse @ values
    return solved


SPECS = {
    "heads of one size": DeltaSpec(2, 4, 16, 16, 4),
    "tiled": DeltaSpec(2, 6, 16, 24, 4, tiled=True),
    "by channel": DeltaSpec(2, 2, 16, 16, 4, channel_decay=True),
    "large": DeltaSpec(1, 1, 128, 32, 4),
}


@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("rate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_chunks_give_what_tokens_give(spec: DeltaSpec, rate: float, alike: float) -> None:
    prompt = make_prompt(spec, 150, rate, alike)
    state = np.random.default_rng(1).standard_normal((spec.v_heads, spec.k_dim, spec.v_dim)).astype(np.float32)
    wanted = token_by_token(state, prompt, spec)
    for size in (1, 7, CHUNK):
        for got, right in zip(in_chunks(state, prompt, spec, size), wanted, strict=True):
            assert np.abs(got - right).max() <= FLOAT * np.abs(right).max()
