"""Compares what is ahead of a request with a plain definition of it."""

from __future__ import annotations

from math import inf
from random import Random

from penstock.server.access.waiting_lines import Place, WaitingLines, Work
from penstock.types import Claim, Request, SamplingParams

NOW = 5.0


def test_what_is_ahead_is_what_the_policy_begins_before() -> None:
    random, lines, waiting = Random(1), WaitingLines(), list[tuple[Request, object, Place, Work]]()
    senders = [object() for _ in range(8)]
    for id in range(200):
        claim = Claim(random.choice("ab"), random.choice((1.0, 3.0)))
        request = Request(id, (), SamplingParams(), 1, claim=claim, priority=random.choice((-1, 0, 1)))
        place = Place(random.choice((inf, random.uniform(0, 10))), random.uniform(0, 10), id)
        waiting.append((request, random.choice(senders), place, Work(random.randrange(100), random.randrange(100), 1)))
        lines.join(*waiting[-1])
        if random.random() < 0.3:
            request, sender, place, _ = waiting.pop(random.randrange(len(waiting)))
            lines.leave(request, sender, place)
    for request, sender, place, _ in waiting:
        first = mine = others = Work()
        for other, its_sender, its_place, work in waiting:
            late = its_place.due < NOW and place.due < inf
            if other.priority < request.priority:
                first = first.plus(work)
            elif other.priority > request.priority:
                continue
            elif other.claim.tenant != request.claim.tenant:
                others = others.plus(work)
            elif its_sender is not sender and its_place <= place and not late:
                mine = mine.plus(work)
        found = lines.ahead(request, sender, place, NOW)
        assert (found.mine, found.others, found.first) == (mine, others, first)
    for request, sender, place, _ in waiting:
        lines.leave(request, sender, place)
    assert not lines
