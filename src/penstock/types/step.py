"""Defines a step: the plan that the scheduler makes, and the result that the backend returns."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Describes a sequence's share of a step: compute `count` positions from `start`, answer the last `sample` of them.
    The last positions hold the `draft`: tokens that are right if they equal the tokens sampled one position before
    them."""

    seq: int
    start: int
    count: int  # type: ignore[assignment]  # a row is no one's list: tuple.count is not missed
    sample: int
    begin: int = -1  # the saved state that it begins with; -1: its own, or none at position 0
    save: int = -1  # the place where its state is saved; -1: nowhere
    at: int = 0  # how many positions the saved state covers
    draft: tuple[int, ...] = ()


class TableUpdate(NamedTuple):
    """Tells which blocks a sequence took in one layer group: they are written to its block table from entry `at`."""

    seq: int
    at: int
    blocks: tuple[int, ...]
    group: int = 0


class BlockCopy(NamedTuple):
    """Asks for a copy of one block, or of one saved state, between the device and a place in host memory."""

    block: int
    place: int
    direction: str  # "in": from the place to the block; "out": from the block to the place


class StepPlan(NamedTuple):
    """States what the scheduler has decided for one step."""

    step: int
    rows: tuple[Row, ...]
    grown: tuple[TableUpdate, ...] = ()
    dropped: tuple[int, ...] = ()  # sequences that lost their block tables since the last plan
    copies: tuple[BlockCopy, ...] = ()  # in this order, before the step
    state_copies: tuple[BlockCopy, ...] = ()  # of saved recurrent states, likewise

    @property
    def loads(self) -> bool:
        """Returns whether blocks or states are copied in before the step, which may wait for them."""
        return any(copy.direction == "in" for copy in (*self.copies, *self.state_copies))


class TokenLogprob(NamedTuple):
    """Holds the log probabilities of a token and of the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


class RowResult(NamedTuple):
    """Holds the backend's answer for one row, and the number of right draft tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, when asked for
    scores: tuple[TokenLogprob, ...] = ()  # known prompt tokens that were scored, in order
    pooled: bytes = b""  # the hidden state or the logits that were asked for, in float32, little-endian
    surprise: float | None = None  # bits, of the sampled token among mirostat's candidates
    accepted: int = 0  # drafted tokens that were sampled too: `tokens` begins with them


class StepResult(NamedTuple):
    """Holds the backend's answer for one step."""

    step: int
    rows: tuple[RowResult, ...]  # parallel to the plan's rows
    not_finite: tuple[int, ...] = ()  # indices of rows that have no answer, because it would not be made of numbers
