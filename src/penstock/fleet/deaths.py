"""Waits for word of how a gateway's engines died, and has their requests doubted or trusted by it.

For the thread of one event loop only.
"""

from __future__ import annotations

import asyncio

from penstock.fleet.directory import Death
from penstock.ipc.crashes import LostRequests
from penstock.ipc.streams import RequestStreams

WORD_SECONDS = 0.5  # longest wait for the cause of an engine's death
DOUBTED_WORD_SECONDS = 5.0  # the same if a request was doubted before: it would end another engine
TURN_SECONDS = 1.0  # between the gateways that a death makes doubt their requests: two are not to try some at once

EngineLife = tuple[str, int]  # a replica's name, and the epoch of its engine


class DeathNotices:
    """Holds the requests of lost engines until a keeper reports the cause, or is too late. `client` is the gateway's
    name at engines."""

    def __init__(self, client: str, streams: RequestStreams) -> None:
        self._client = client
        self._streams = streams
        self._known: dict[EngineLife, Death] = {}
        self._awaited: dict[EngineLife, LostRequests] = {}
        self._overdue: dict[EngineLife, LostRequests] = {}  # the cause did not come in time

    def lose(self, life: EngineLife, lost: LostRequests) -> None:
        if (death := self._known.get(life)) is not None:
            self._judge(lost, death)
        elif lost.unanswered or lost.answered:
            if (before := self._awaited.get(life)) is not None:  # it was joined again, and lost again
                unanswered, answered = [*before.unanswered, *lost.unanswered], before.answered or lost.answered
                lost = lost._replace(unanswered=unanswered, answered=answered)
            self._awaited[life] = lost
            seconds = DOUBTED_WORD_SECONDS if lost.suspected else WORD_SECONDS
            asyncio.get_running_loop().call_later(seconds, self._stop_waiting, life, lost)

    def explain(self, death: Death) -> None:
        life = death.replica, death.epoch
        self._known[life] = death
        if (lost := self._awaited.pop(life, None)) is not None:
            self._judge(lost, death)
            self._streams.dispatcher.dispatch()
        elif (lost := self._overdue.pop(life, None)) is not None:
            own = self._own_suspects(death)
            if len(own) == len(death.suspects):
                self._streams.judge.blame_late(lost, own, crashed=death.crashed)

    def forget(self, replica: str) -> None:
        """Forgets the deaths of a replica that has ended for good: no word of one will come any more."""
        for life, lost in [each for each in self._awaited.items() if each[0][0] == replica]:
            self._stop_waiting(life, lost)
        for lives in (self._known, self._overdue):
            for life in [each for each in lives if each[0] == replica]:
                del lives[life]

    def _own_suspects(self, death: Death) -> set[int]:
        return {id for client, id in death.suspects if client == self._client}

    def _judge(self, lost: LostRequests, death: Death) -> None:
        own = self._own_suspects(death)
        clients = sorted({client for client, _ in death.suspects} | {self._client})
        doubts = any(stream.id in own for stream in lost.unanswered)
        if death.suspects and not own:
            self._streams.judge.clear(lost)  # it worked on another gateway's requests
        elif doubts and (turn := clients.index(self._client)):
            asyncio.get_running_loop().call_later(turn * TURN_SECONDS, self._blame, lost, death)
        else:
            self._blame(lost, death)

    def _blame(self, lost: LostRequests, death: Death) -> None:
        suspects = self._own_suspects(death)
        self._streams.judge.blame(lost, suspects, crashed=death.crashed, shared=len(death.suspects) > len(suspects))
        self._streams.dispatcher.dispatch()

    def _stop_waiting(self, life: EngineLife, lost: LostRequests) -> None:
        """Frees the requests of an engine whose cause of death did not come in time: one after the other."""
        if self._awaited.get(life) is not lost:
            return
        del self._awaited[life]
        if lost.unanswered:
            self._overdue[life] = lost
            self._streams.judge.blame(lost, None, crashed=False)
            self._streams.dispatcher.dispatch()
