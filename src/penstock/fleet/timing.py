"""Predicts how long a replica's steps take, from polynomials that were fitted to measurements."""

from __future__ import annotations

from typing import NamedTuple


class EngineTiming(NamedTuple):
    """Describes the speed and the limits of one replica. Coefficients give milliseconds, the highest power first.

    The defaults are those that Dynamo publishes for its mock engine, so that results compare with its simulator's.
    """

    prefill: tuple[float, float, float] = (4.209989e-07, 1.518344e-02, 16.50142)  # of the new tokens of a step
    decode: tuple[float, float, float] = (-25.74, 54.01, 5.74)  # of the share of the KV cache that is in use
    kv_tokens: int = 262_144
    step_tokens: int = 8_192  # prompt tokens that one step computes at most
    max_rows: int = 256
    pull_ms_per_token: float = 0.0052  # blocks from another replica: 128 KiB a token at 25 GB/s
    host_ms_per_token: float = 0.0026  # blocks from host memory: at 50 GB/s

    def prefill_ms(self, tokens: float) -> float:
        """Returns the milliseconds that a step needs for its prompt tokens."""
        square, linear, fixed = self.prefill
        return (square * tokens + linear) * tokens + fixed if tokens > 0 else 0.0

    def decode_ms(self, share: float) -> float:
        """Returns the milliseconds that a step needs for the rows that answer."""
        square, linear, fixed = self.decode
        return (square * share + linear) * share + fixed

    def prompt_ms(self, tokens: float) -> float:
        """Returns the milliseconds of all the steps that compute so many prompt tokens."""
        if tokens <= self.step_tokens:
            return self.prefill_ms(tokens)
        full, rest = divmod(tokens, self.step_tokens)
        return full * self.prefill_ms(self.step_tokens) + self.prefill_ms(rest)
