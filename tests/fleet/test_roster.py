"""What a steward decides, without processes: who is started, drained and ended, and in which order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.fleet.directory import Death, ReplicaInfo, ReplicaState
from penstock.fleet.roster import FIRST_WORD, HOPELESS, IDLE, SHOWN, SILENT, Roster
from penstock.fleet.steward_wire import KeeperReport, StartFailure

DRAIN = 30.0
ALL = 2**62  # gateways have seen every version
READY, STARTING, DRAINING, ENDED = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.ENDED,
)
BROKEN = StartFailure("bad_model", "the file is damaged")


class Played:
    """A roster, and keepers that do as they are told."""

    def __init__(self, wanted: int) -> None:
        self.roster = Roster("m", wanted)
        self.now = 0.0
        self.running: dict[str, KeeperReport] = {}
        self.seen = ALL

    def step(self, seconds: float = 0.1, *, starts: bool = True) -> list[str]:
        """Lets time pass; returns what happened."""
        self.now += seconds
        for report in self.running.values():
            self.roster.take(report, self.now)
        plan = self.roster.plan(self.now, DRAIN, self.seen)
        for name in plan.start:
            self.report(name, READY if starts else STARTING)
        for name in plan.end:
            if name in self.running:
                self.report(name, ENDED)
                self.roster.take(self.running.pop(name), self.now)
        return [f"start {name}" for name in plan.start] + [f"end {name}" for name in plan.end]

    def report(self, name: str, state: ReplicaState, **fields: object) -> None:
        address = "ipc://there" if state is READY else ""
        info = ReplicaInfo(name, address, 100, 7, state)
        revision = self.roster.replicas[name].revision
        self.running[name] = KeeperReport("", info, 1, revision, **fields)  # type: ignore[arg-type]

    def states(self) -> dict[str, str]:
        return {info.name: str(info.state) for info in self.roster.directory().replicas}


def test_as_many_start_as_are_wanted() -> None:
    fleet = Played(3)
    assert fleet.step() == ["start m-0", "start m-1", "start m-2"]
    assert fleet.step() == []
    assert fleet.states() == {"m-0": READY, "m-1": READY, "m-2": READY}


def test_who_is_too_many_is_drained_and_then_ends() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.report("m-1", READY, in_flight=1)
    fleet.roster.wanted = 1
    assert fleet.step() == []
    assert fleet.states() == {"m-0": READY, "m-1": DRAINING}
    for _ in range(20):
        assert fleet.step() == []  # its answer goes on
    fleet.report("m-1", READY, in_flight=0)
    assert fleet.step() == []
    assert fleet.step(IDLE) == ["end m-1"]
    assert fleet.states() == {"m-0": READY, "m-1": ENDED}
    fleet.step(SHOWN + 1)
    assert fleet.states() == {"m-0": READY}


def test_an_answer_that_takes_too_long_does_not_hold_up_a_drain() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.report("m-0", READY, in_flight=1)
    fleet.roster.drain("m-0", fleet.now)
    assert fleet.roster.wanted == 1
    assert fleet.step(DRAIN - 1) == []
    assert fleet.step(2) == ["end m-0"]


def test_a_replica_does_not_end_before_every_gateway_knows_that_it_is_drained() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.seen = fleet.roster.directory().version
    fleet.roster.drain("m-0", fleet.now)
    for _ in range(20):
        assert fleet.step() == []
    fleet.seen = fleet.roster.directory().version
    assert fleet.step() == ["end m-0"]


def test_an_upgrade_replaces_one_after_the_other() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.roster.revision = 1
    happened = [event for _ in range(40) for event in fleet.step()]
    assert happened == ["start m-2", "end m-0", "start m-3", "end m-1"]
    assert all(each.revision == 1 for each in fleet.roster.replicas.values() if each.ended is None)


def test_an_upgrade_whose_engines_cannot_start_ends_no_old_one() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.roster.revision = 1
    assert fleet.step(starts=False) == ["start m-2"]
    assert fleet.roster.hopeless_upgrade is None
    fleet.report("m-2", STARTING, failure=BROKEN, attempts=HOPELESS)
    assert fleet.step() == []
    assert fleet.roster.hopeless_upgrade == BROKEN
    fleet.roster.revision = 0
    assert fleet.step() == ["end m-2"]
    assert fleet.step() == []
    assert fleet.states() == {"m-0": READY, "m-1": READY, "m-2": ENDED}


def test_the_engine_of_a_lost_keeper_is_drained_and_another_takes_its_place() -> None:
    fleet = Played(2)
    fleet.step()
    fleet.step()
    del fleet.running["m-0"]
    assert fleet.step(SILENT + 1) == ["start m-2"]
    assert fleet.states() == {"m-0": DRAINING, "m-1": READY, "m-2": STARTING}
    assert fleet.step(DRAIN + 1) == ["end m-0"]
    assert fleet.states()["m-0"] == ENDED


def test_a_keeper_that_was_taken_for_lost_may_come_back() -> None:
    fleet = Played(1)
    fleet.step()
    fleet.step()
    kept = fleet.running.pop("m-0")
    assert fleet.step(SILENT + 1) == ["start m-1"]
    fleet.running["m-0"] = kept
    events = [event for _ in range(20) for event in fleet.step()]
    assert len(events) == 1  # there is one too many now
    assert sorted(fleet.states().values()) == [ENDED, READY]


def test_a_keeper_that_never_says_a_word_is_replaced() -> None:
    fleet = Played(1)
    fleet.step()
    fleet.running.clear()
    assert fleet.step(FIRST_WORD + 1) == []
    assert fleet.step(1) == ["start m-1"]


def test_keepers_that_end_before_their_engine_was_ready_are_replaced_after_pauses_that_grow() -> None:
    fleet = Played(1)
    started = []
    for _ in range(200):
        events = fleet.step(starts=False)
        started += [fleet.now for event in events if event.startswith("start")]
        for name in list(fleet.running):
            del fleet.running[name]
            fleet.roster.lose_keeper(name, fleet.now, "it ended with code 1")
    waits = [later - earlier for earlier, later in pairwise(started)]
    assert waits == pytest.approx([0.6, 1.1, 2.1, 4.1, 8.1], abs=0.2)
    assert fleet.roster.failure == StartFailure("engine_unavailable", "m-5: it ended with code 1")


def test_a_new_steward_takes_over_those_who_say_who_they_are() -> None:
    old = Played(2)
    old.step()
    new = Played(2)
    new.running = old.running
    assert new.step() == []
    assert new.states() == {"m-0": READY, "m-1": READY}
    assert new.roster.add(new.now) == "m-2"  # no name is used twice


def test_what_keeps_all_from_starting_is_told() -> None:
    fleet = Played(2)
    fleet.step(starts=False)
    fleet.report("m-0", STARTING, failure=BROKEN)
    fleet.step()
    assert fleet.roster.failure is None  # the other may start
    fleet.report("m-1", STARTING, failure=BROKEN)
    fleet.step()
    assert fleet.roster.failure == BROKEN


def test_the_directory_has_a_new_version_only_if_it_has_changed() -> None:
    fleet = Played(1)
    fleet.step()
    fleet.step()
    before = fleet.roster.directory()
    assert fleet.roster.directory().version == before.version
    death = Death("m-0", 7, True, (("gateway", 4),))
    fleet.report("m-0", READY, deaths=(death,))
    fleet.step()
    fleet.step()
    after = fleet.roster.directory()
    assert after.version == before.version + 1
    assert after.deaths == (death,)
