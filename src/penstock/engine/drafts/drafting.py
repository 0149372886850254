"""Proposes the tokens that may come next, copied from what the client predicts, from the request's own text or from
recent answers of the same owner.

A draft is never trusted: the model verifies it, and the answer is the one that would have come without. So guessing
and learning cannot change an answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.core.drafting import suffixes
from penstock.core.drafting.lengths import (
    MOST,
    NOTHING,
    Acceptance,
    Exploration,
    Proposal,
    StepCost,
    StreamAcceptance,
    cells_of,
    draft_lengths,
)
from penstock.core.drafting.suffixes import SEPARATOR, SINGLE, Continuation, StreamCursor, StreamIndex
from penstock.types import Request

Scope = tuple[str, str]  # salt and owner: drafts are taken from answers that agree in both

TEXT_TOKENS = 2**17  # limit of one request's own text; a longer one starts anew
SCOPE_TOKENS = 2**16  # limit of the recent answers of one scope
RECENT_TOKENS = 2**19  # limit of the recent answers of all scopes
CONTEXT = 16  # tokens before an answer that it is recognized by
INDEXED, PADDED_INDEXED = 2048, 16384  # tokens that are indexed in a step: 0.2 ms, or 1.6 while a device computes
POOR = 0.25  # right tokens of a proposal, on average, below which a stream makes fewer
SEARCHING = 4  # poor streams that propose in a step

SLOPE, PADDED_SLOPE = 0.15, 0.005  # assumed share of a one-row step that one more token costs

GAP_ROWS = 8  # fixed host time of drafting, in rows

PREDICTION, TEXT, RECENT = "prediction", "text", "recent"

MOST_TOKENS = 1 << 20  # tokens of a step with drafts on devices that pad nothing


class DraftTexts:
    """Finds tokens to copy: in the prediction, in the request's own text and in recent answers of its scope."""

    def __init__(self, drafting: Drafting, prompt: Sequence[int], prediction: Sequence[int], scope: Scope) -> None:
        self.scope = scope
        self.context = tuple(prompt[-CONTEXT:])
        self.answer: list[int] = []
        self._drafting = drafting
        self._prediction = prediction
        self._text = drafting.new_index(TEXT_TOKENS)
        self._unindexed: deque[tuple[StreamIndex, Sequence[int]]] = deque([(self._text, prompt[-TEXT_TOKENS // 2 :])])
        self._cursors: dict[str, StreamCursor] = {}
        self._recent: StreamIndex | None = None
        self._read = 0  # tokens of the answer that all sources know
        if prediction:
            index = drafting.new_index(len(prediction))
            self._unindexed.appendleft((index, prediction))
            self._cursors[PREDICTION] = drafting.new_cursor(index)

    def find(self, most: int) -> Iterator[tuple[str, Continuation]]:
        if self._prediction and not self.answer:
            yield PREDICTION, (list(self._prediction[:most]), 0, [SINGLE] * most)
        elif not self._unindexed:
            self._catch_up()
            yield TEXT, self._text.continuation(most)
            for source, cursor in self._cursors.items():
                yield source, cursor.continuation(most)

    def index(self, most: int) -> int:
        """Indexes at most `most` tokens of the prediction and the prompt. Returns how many it did."""
        left = most
        while self._unindexed and left:
            index, tokens = self._unindexed.popleft()
            index.extend(tokens[:left])
            if len(tokens) > left:
                self._unindexed.appendleft((index, tokens[left:]))
            left -= min(len(tokens), left)
        return most - left

    @property
    def indexed(self) -> bool:
        """Returns whether the prediction and the prompt are indexed. Until then nothing but the beginning of the
        prediction is proposed."""
        return not self._unindexed

    def _catch_up(self) -> None:
        unread = self.answer[self._read :]
        self._read = len(self.answer)
        self._text.extend(unread)
        for cursor in self._cursors.values():
            cursor.advance(unread)
        recent = self._drafting.recent(self.scope)
        if recent is not None and recent is not self._recent:
            self._recent = recent
            cursor = self._cursors[RECENT] = self._drafting.new_cursor(recent)
            cursor.advance([*self.context, *self.answer[-CONTEXT:]])


class RequestDrafter:
    """Proposes drafts for one request and learns from the tokens that it commits.

    Every proposal is compared with the tokens committed after it, whether it was drafted or not, so acceptance is
    learned without drafting. A stream whose proposals are hardly ever right makes fewer if there are many streams."""

    def __init__(self, drafting: Drafting, texts: DraftTexts) -> None:
        self.texts = texts
        self._drafting = drafting
        self._acceptance = StreamAcceptance(drafting.acceptance)
        self._followed, self._depth = NOTHING, 0
        self._proposed, self._asked = NOTHING, 0  # last, and how many tokens it was asked for
        self._yield = 1.0  # running mean of the tokens of a proposal that were right
        self._rest = 0  # steps in which it proposes nothing

    def propose(self, most: int) -> Proposal:
        """Returns at most `most` tokens that may come next, from the source that promises the most accepted ones. It
        is empty if none has any."""
        if self._proposed.tokens and most <= self._asked:  # nothing was committed since
            return self._proposed.first(most)
        if self._rest:
            self._rest -= 1
            return NOTHING
        best, promised = NOTHING, 0.0
        for source, (tokens, match, agreements) in self.texts.find(min(most, MOST)):
            cells = cells_of(match, agreements)
            survival = self._acceptance.survival(source, cells)
            if sum(survival) > promised:
                promised, end = sum(survival), len(survival)
                best = Proposal(tuple(tokens[:end]), survival, source, match, cells[:end])
        if not self._followed.tokens:
            self._followed, self._depth = best, 0
        if self._yield < POOR:
            self._rest = self._drafting.running // SEARCHING
        self._proposed, self._asked = best, most
        return best

    def append(self, tokens: Sequence[int]) -> None:
        self.texts.answer += tokens
        self._proposed = NOTHING
        proposal, depth = self._followed, self._depth
        if not proposal.tokens:
            return
        left = proposal.tokens[depth : depth + len(tokens)]
        accepted = common_prefix(left, tokens)
        self._acceptance.observe(proposal, depth, accepted, accepted < len(left))
        self._depth += accepted
        if accepted < len(left) or self._depth == len(proposal.tokens):
            self._yield += (self._depth - self._yield) / 8
            self._followed, self._depth = NOTHING, 0


class Drafting:
    """Makes drafters, and holds what they share: acceptance, the cost of steps, and an index of recent answers for each
    scope. `shapes` are the numbers of tokens that a device pads a step with drafts to: no such step is larger."""

    def __init__(self, shapes: Sequence[int] = ()) -> None:
        self.acceptance = Acceptance()
        self.running = 0  # drafters that are open
        self.cost = StepCost(slope=PADDED_SLOPE if shapes else SLOPE, shapes=shapes)
        self._most = max(shapes, default=MOST_TOKENS)  # tokens of a step with drafts
        self._gap = 0.0  # seconds that a device waits for the drafts of one row
        self._indexed = PADDED_INDEXED if shapes else INDEXED
        self._exploration = Exploration()
        self.new_index, self.new_cursor = suffix_classes()
        self._recent: OrderedDict[Scope, StreamIndex] = OrderedDict()
        self._waiting: deque[DraftTexts] = deque()
        self._ended: deque[tuple[Scope, list[int]]] = deque()

    def open(self, request: Request) -> RequestDrafter:
        texts = DraftTexts(self, request.prompt, request.prediction, (request.salt, request.owner))
        self._waiting.append(texts)
        self.running += 1
        return RequestDrafter(self, texts)

    def close(self, drafter: RequestDrafter) -> None:
        self.running -= 1
        texts = drafter.texts
        if texts in self._waiting:
            self._waiting.remove(texts)
        if texts.answer:
            self._ended.append((texts.scope, [SEPARATOR, *texts.context, *texts.answer]))

    def lengths(self, proposals: Sequence[Proposal], rows: int, tokens: int, budget: int) -> list[int]:
        """Returns how many tokens of each proposal a step verifies, at most `budget` in total. `rows` and `tokens`
        count the step without drafts."""
        return draft_lengths(proposals, self.cost, rows, tokens, min(budget, self._most - tokens), self._exploration)

    def room(self, rows: int) -> int:
        return (self._most - rows) // rows

    def seconds(self, rows: int, tokens: int, most: int) -> list[float]:
        """Returns the expected seconds of a step with these rows and tokens and 0, 1, ... drafted tokens, at least up
        to `most`."""
        return self.cost.curve(rows, tokens, most)

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        self.cost.observe(rows, tokens, seconds)

    def observe_gap(self, rows: int, seconds: float) -> None:
        each = seconds / (GAP_ROWS + rows)
        self._gap += (min(each, 2 * self._gap) - self._gap) / 8 if self._gap else each

    def halves(self, rows: int) -> bool:
        """Returns whether a device waits longer for the drafts of `rows` rows than for one more step, which reads all
        weights again."""
        return rows > 1 and (GAP_ROWS + rows) * self._gap > self.cost.least

    def index(self, most: int | None = None) -> None:
        """Indexes at most `most` waiting tokens, by default a number that is cheap for a step. Call it once a step, so
        that a long prompt delays none."""
        most = self._indexed if most is None else most
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
        return self._recent.get(scope)

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self._recent.values())


def suffix_classes() -> tuple[Callable[[int], StreamIndex], Callable[[Any], StreamCursor]]:
    """Returns the classes of an automaton and of its cursor: native ones, or Python's if the extension is not built."""
    try:
        from penstock.backend.cpu._native import SuffixAutomaton, SuffixCursor
    except ImportError:
        return suffixes.SuffixAutomaton, suffixes.SuffixCursor
    return SuffixAutomaton, SuffixCursor


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    at, end = 0, min(len(one), len(other))
    while at < end and one[at] == other[at]:
        at += 1
    return at
