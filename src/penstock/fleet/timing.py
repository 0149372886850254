"""Predicts how long a replica's steps take, from polynomials that were fitted to measurements."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from penstock.core.step_cost import CostModel
from penstock.types import prefill_budget

MARGIN = 1.2  # engines plan steps shorter than a target by this factor


class EngineTiming(NamedTuple):
    """Describes the speed and the limits of one replica. Coefficients give milliseconds, the highest power first.

    The defaults are those that Dynamo publishes for its mock engine, so that results compare with its simulator's.
    """

    prefill: tuple[float, float, float] = (
        4.209989e-07,
        1.518344e-02,
        16.50142,
    )  # polynomial in the new tokens
    decode: tuple[float, float, float] = (-25.74, 54.01, 5.74)  # polynomial in the used share of the KV cache
    kv_tokens: int = 262_144
    step_tokens: int = 8_192  # prompt tokens that one step computes at most
    max_rows: int = 256
    prefill_budget: int = 0  # prompt tokens of a step while up to 64 rows answer; 0: step_tokens
    pull_ms_per_token: float = 0.0052  # blocks from another replica: 128 KiB a token at 25 GB/s
    host_ms_per_token: float = 0.0026  # blocks from host memory: at 50 GB/s
    context_ms: float = 0.0  # per pair of a new token and a token from an earlier step

    def prefill_ms(self, tokens: float) -> float:
        """Returns the milliseconds that a step needs for its prompt tokens."""
        square, linear, fixed = self.prefill
        return (square * tokens + linear) * tokens + fixed if tokens > 0 else 0.0

    def decode_ms(self, share: float) -> float:
        """Returns the milliseconds that a step needs for the rows that answer."""
        square, linear, fixed = self.decode
        return (square * share + linear) * share + fixed

    def usual_itl_ms(self, share: float = 0.0) -> float:
        """Returns the milliseconds from one token to the next that answers have as a target if they state none."""
        return max(1000 * CostModel.USUAL_ITL, CostModel.USUAL_STEPS * self.decode_ms(share))

    def prompt_tokens(self, answering: int, share: float = 0.0) -> int:
        if not answering or not 0 < self.prefill_budget < self.step_tokens:
            return self.step_tokens
        most = min(prefill_budget(self.prefill_budget, answering), self.step_tokens)
        left = self.usual_itl_ms(share) / MARGIN - self.decode_ms(share)
        return most if self.prefill_ms(most) <= left else max(self._tokens_within(left), 1)

    def _tokens_within(self, ms: float) -> int:
        """Returns how many prompt tokens a step computes in `ms` milliseconds."""
        square, linear, fixed = self.prefill
        left = max(ms - fixed, 0.0)
        slope = linear + sqrt(max(linear * linear + 4 * square * left, 0.0))
        return int(2 * left / slope) if slope > 0 else 0

    def prompt_ms(self, tokens: float, cached: float = 0.0) -> float:
        """Returns the milliseconds of all the steps that compute `tokens` prompt tokens, after the cached ones."""
        full, rest = divmod(tokens, self.step_tokens)
        within = full * self.step_tokens**2 + rest**2  # twice the pairs of two tokens of one step
        earlier = self.context_ms * (tokens * cached + (tokens**2 - within) / 2)
        return full * self.prefill_ms(self.step_tokens) + self.prefill_ms(rest) + earlier
