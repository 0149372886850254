"""Proposes the tokens that may come next, copied from what the client predicts, from the request's own text or from
recent answers of the same owner.

A draft is never trusted: the model verifies it, and the answer is the one that would have come without. So guessing
and learning cannot change an answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.core import suffixes
from penstock.core.speculation import (
    MOST,
    NOTHING,
    Acceptance,
    DraftPlanner,
    Proposal,
    StepCost,
    StreamAcceptance,
)
from penstock.core.suffixes import SEPARATOR, StreamCursor, StreamIndex
from penstock.types import Request

Scope = tuple[str, str]  # salt and owner: drafts are taken from answers that agree in both

TEXT_TOKENS = 2**17  # of one request's own text; a longer one starts anew
SCOPE_TOKENS = 2**16  # of the recent answers of one scope
RECENT_TOKENS = 2**19  # of the recent answers of all scopes
CONTEXT = 16  # tokens before an answer that it is recognized by
INDEXED = 2048  # tokens that are indexed in a step: two tenths of a millisecond

PREDICTION, TEXT, RECENT = "prediction", "text", "recent"
SOURCES = (PREDICTION, TEXT, RECENT)


class RequestDrafter:
    """Proposes drafts for one request and learns from the tokens that it commits.

    Every proposal is compared with what is committed after it, whether it was drafted or not. So acceptance is learned
    without drafting anything."""

    def __init__(self, drafting: Drafting, prompt: Sequence[int], prediction: Sequence[int], scope: Scope) -> None:
        self.scope = scope
        self.context = tuple(prompt[-CONTEXT:])
        self.answer: list[int] = []
        self._drafting = drafting
        self._acceptance = StreamAcceptance(drafting.acceptance)
        self._prediction = tuple(prediction)
        self._text = drafting.new_index(TEXT_TOKENS)
        self._unindexed: deque[Sequence[int]] = deque([prompt[-TEXT_TOKENS // 2 :]])
        self._cursors: dict[str, StreamCursor] = {}
        self._recent: StreamIndex | None = None
        self._followed, self._depth = NOTHING, 0
        if prediction:
            index = drafting.new_index(len(prediction))
            index.extend(prediction)
            self._cursors[PREDICTION] = drafting.new_cursor(index)

    def propose(self, most: int) -> Proposal:
        """Returns at most `most` tokens that may come next, from the source that promises the most accepted ones. It
        is empty if none has any."""
        self._look_up_recent()
        best, promised = NOTHING, 0.0
        for source, tokens, match in self._found(min(most, MOST)):
            survival = self._acceptance.survival(source, match)[: len(tokens)]
            if sum(survival) > promised:
                promised = sum(survival)
                best = Proposal(tuple(tokens[: len(survival)]), survival, source, match)
        if not self._followed.tokens:
            self._followed, self._depth = best, 0
        return best

    def append(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that were committed."""
        self._follow(tokens)
        self.answer += tokens
        for cursor in self._cursors.values():
            cursor.advance(tokens)
        if self._unindexed:
            self._unindexed.append(tokens)
        else:
            self._text.extend(tokens)

    def index(self, most: int) -> int:
        """Indexes the next tokens of the text that wait for it, at most `most`. Returns how many it did."""
        left = most
        while self._unindexed and left:
            tokens = self._unindexed.popleft()
            self._text.extend(tokens[:left])
            if len(tokens) > left:
                self._unindexed.appendleft(tokens[left:])
            left -= min(len(tokens), left)
        return most - left

    @property
    def indexed(self) -> bool:
        """Returns whether all of its text is indexed."""
        return not self._unindexed

    def _found(self, most: int) -> list[tuple[str, Sequence[int], int]]:
        """Returns what each source has: its name, tokens that may come next, and the length of its match."""
        found: list[tuple[str, Sequence[int], int]] = []
        if self._prediction and not self.answer:
            return [(PREDICTION, self._prediction[:most], 0)]
        if not self._unindexed:
            found.append((TEXT, *self._text.continuation(most)))
        found += [(source, *cursor.continuation(most)) for source, cursor in self._cursors.items()]
        return [entry for entry in found if entry[1]]

    def _look_up_recent(self) -> None:
        """Begins to follow the recent answers of its scope once there are any."""
        recent = self._drafting.recent(self.scope)
        if recent is not None and recent is not self._recent:
            self._recent = recent
            cursor = self._cursors[RECENT] = self._drafting.new_cursor(recent)
            cursor.advance([*self.context, *self.answer[-CONTEXT:]])

    def _follow(self, tokens: Sequence[int]) -> None:
        """Learns how far the proposal that is followed was right."""
        proposal, depth = self._followed, self._depth
        left = proposal.tokens[depth : depth + len(tokens)]
        if not left:
            return
        accepted = common_prefix(left, tokens)
        self._acceptance.observe(proposal.source, proposal.match, depth, accepted, accepted < len(left))
        self._depth += accepted
        if accepted < len(left) or self._depth == len(proposal.tokens):
            self._followed, self._depth = NOTHING, 0


class Drafting:
    """Makes drafters, and holds what they share: acceptance, the cost of steps, and an index of recent answers for each
    scope. `shapes` are the numbers of tokens that a device pads a step to."""

    def __init__(self, shapes: Sequence[int] = ()) -> None:
        self.acceptance = Acceptance()
        self._cost = StepCost(shapes=shapes)
        self._planner = DraftPlanner(self._cost)
        self.new_index, self.new_cursor = suffix_classes()
        self._recent: OrderedDict[Scope, StreamIndex] = OrderedDict()
        self._waiting: deque[RequestDrafter] = deque()
        self._ended: deque[tuple[Scope, list[int]]] = deque()

    def open(self, request: Request) -> RequestDrafter:
        """Returns a drafter for a request. Its prompt is indexed step by step."""
        drafter = RequestDrafter(self, request.prompt, request.prediction, (request.salt, request.owner))
        self._waiting.append(drafter)
        return drafter

    def close(self, drafter: RequestDrafter) -> None:
        """Lets the answer of a request that has ended be drafted from by later ones of its scope."""
        if drafter in self._waiting:
            self._waiting.remove(drafter)
        if drafter.answer:
            self._ended.append((drafter.scope, [SEPARATOR, *drafter.context, *drafter.answer]))

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        """Returns how many tokens of each proposal a step verifies that has so many rows and tokens without them: at
        most `budget` together."""
        return self._planner.lengths(proposals, rows, tokens, budget)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Takes note of how long a step took that had nothing but answering rows."""
        self._cost.observe(rows, tokens, seconds)

    def index(self, most: int = INDEXED) -> None:
        """Indexes at most `most` of the tokens that wait for it. Call it once a step: no step is held up by a long
        prompt."""
        while most and self._waiting:
            most -= self._waiting[0].index(most)
            if self._waiting[0].indexed:
                self._waiting.popleft()
        while most and self._ended:
            scope, tokens = self._ended.popleft()
            self._add_recent(scope, tokens[:most])
            if len(tokens) > most:
                self._ended.appendleft((scope, tokens[most:]))
            most -= min(len(tokens), most)

    def _add_recent(self, scope: Scope, tokens: Sequence[int]) -> None:
        """Extends the index of a scope. While all indexes together are too large, those not extended for the longest
        time go."""
        if scope not in self._recent:
            self._recent[scope] = self.new_index(SCOPE_TOKENS)
        self._recent.move_to_end(scope)
        self._recent[scope].extend(tokens)
        while sum(map(len, self._recent.values())) > RECENT_TOKENS:
            self._recent.popitem(last=False)

    def recent(self, scope: Scope) -> StreamIndex | None:
        """Returns the index of the recent answers of a scope, if there are any."""
        return self._recent.get(scope)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that recent answers take."""
        return sum(index.nbytes for index in self._recent.values())


def suffix_classes() -> tuple[Callable[[int], StreamIndex], Callable[[Any], StreamCursor]]:
    """Returns the classes of an automaton and of its cursor: native ones, or Python's if the extension is not built."""
    try:
        from penstock.backend.cpu._native import SuffixAutomaton, SuffixCursor
    except ImportError:
        return suffixes.SuffixAutomaton, suffixes.SuffixCursor
    return SuffixAutomaton, SuffixCursor


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many of their first tokens are the same."""
    at, end = 0, min(len(one), len(other))
    while at < end and one[at] == other[at]:
        at += 1
    return at
