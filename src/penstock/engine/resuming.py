"""Resumes answers that another engine has begun: finds what of them is decided before anything is computed."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core import Sequence
from penstock.engine.record import RequestRecord
from penstock.types import Event, Finished, Report, Tokens


class Decided(NamedTuple):
    """Holds what follows a resumed answer without a step: tokens, and whether and at which token it ends."""

    tokens: tuple[int, ...] = ()
    ended: bool = False
    stop: int | None = None
    loop: int = 0  # tokens of the phrase that it repeated, if the loop guard ends it

    def events(self, record: RequestRecord) -> list[Event]:
        """Returns the events that tell it of an answer that has ended."""
        id, reason = record.request.id, "length" if self.stop is None else "stop"
        told: list[Event] = [Tokens(id, self.tokens)] if self.tokens else []
        return [*told, record.complete(Finished(id, reason, self.stop, report=Report(loop=self.loop)))]


def append_decided(sequence: Sequence, owed: tuple[int, ...]) -> Decided:
    """Appends to a resumed sequence the tokens that must follow, and returns what is decided of it. Its last token may
    be the one that ends it, if the engine that generated it did not get to say so."""
    if len(sequence.tokens) == sequence.prompt_len:
        return Decided()
    last = sequence.tokens[-1]
    if last in sequence.params.stop_ids:
        return Decided((), True, last)
    if sequence.looped:
        return Decided((), True, loop=sequence.times.loop)
    tokens, stop = sequence.append(owed)
    ended = stop is not None or len(sequence.tokens) >= sequence.max_len
    return Decided(tokens, ended, stop, sequence.times.loop)
