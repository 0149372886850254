"""Runs one recipe: engines with all their features at once, clients, and what happens to both. After every step the
invariants must hold, and every answer must be that of the same request alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

from penstock.core.memory_forecast import MemoryForecast
from penstock.engine.block_feed import NoBlockFeed
from penstock.engine.kv_transfer.peers import PeerBlocks
from penstock.engine.loop import advance
from penstock.errors import (
    AdapterNotFound,
    EngineUnavailable,
    InvalidRequest,
    NotFinite,
    OutOfMemory,
    StepFailed,
    WaitTooLong,
)
from penstock.server.access.expected_wait import WaitForecast
from penstock.types import (
    Aborted,
    BlockOffer,
    Event,
    Failed,
    Finished,
    MemoryUse,
    Offered,
    Request,
    SamplingParams,
    Tokens,
)
from penstock.types.messages import (
    Abort,
    AbortAll,
    Add,
    FlushCache,
    Message,
    Offer,
    Pause,
    Prefill,
    RegisterAdapter,
    Resume,
    Sleep,
    UnregisterAdapter,
    UpdateWeights,
    Wake,
)
from tests.everything.backend import Death
from tests.everything.client import Client, Era
from tests.everything.engines import ADAPTERS, OWN_ADAPTER, Alone, Process, Remains, overcommitted
from tests.everything.features import BY_NAME, own_adapter
from tests.everything.recipe import Ask, Moment, Recipe
from tests.everything.virtual import VirtualTime, virtual

CONTROL = 10**6  # ids of control messages begin here
MOST_STEPS = 6000
PATIENCE = 60.0  # seconds that a request without a target may wait: longer than any world
FAULTS = ("no memory", "failed step", "not finite")


class World:
    """Is one recipe under way."""

    def __init__(self, recipe: Recipe, clock: VirtualTime, folder: Path) -> None:
        self.recipe, self.clock, self._folder = recipe, clock, folder
        self._random = Random(recipe.seed)
        self.alone = Alone(recipe, clock)
        self.clients: dict[int, Client] = {}
        self.homes: dict[int, int] = {}  # of live clients: the process that has the request
        self.processes: list[Process] = []
        self._waiting: dict[int, tuple[int, Client]] = {}  # for an Offered with this id, of a process
        self._later: list[tuple[int, int, Message]] = []  # step, process, message
        self._next, self._step, self._weights = CONTROL, 0, 0
        self.notes: set[str] = set()
        self._adapters = dict(ADAPTERS)  # that engines have or will have
        self._forecast = WaitForecast() if "admission" in recipe.engine else None
        self._failures, self._failed = Counter[str](), Counter[str]()  # of processes that have died
        for ask in recipe.asks:
            for copy in range(2 if "n" in ask.features else 1):
                client = self._client(ask, 10 * ask.id + copy, copy)
                self.clients[client.request.id] = client
        for place in range(2 if recipe.peers else 1):
            self.processes.append(self._process(place))

    def _process(self, place: int, remains: Remains | None = None) -> Process:
        folder = self._folder / str(place)
        process = Process(self.recipe, self.clock, folder, self._exchanged, self._future, self._adapters, remains)
        process.backend.struck = lambda fault: self._live(place, fault)
        return process

    def _client(self, ask: Ask, id: int, copy: int) -> Client:
        random = Random(f"{self.recipe.seed} {ask.id}")
        sampling = SamplingParams(temperature=0.0, seed=copy, loop_guard="loop guard" in ask.features)
        request = Request(id, ask.prompt, sampling, ask.max_tokens)
        for name in ask.features:
            change = BY_NAME[name].change
            request = request if change is None else change(request, ask, random)
        if copy:
            request = request._replace(sampling=replace(request.sampling, seed=100 + copy))
        stop: tuple[str, ...] = ()
        if {"resumed", "stop strings", "prediction"} & {*ask.features}:
            answer = self.alone.answer(request)
            if "resumed" in ask.features and answer.tokens:
                cut = ask.when % len(answer.tokens) + 1
                mu = answer.mus[cut - 1]
                request = request._replace(generated=tuple(answer.tokens[:cut]), mirostat_mu=mu)
            if "stop strings" in ask.features:
                shown = bytes(token for token in answer.tokens[len(request.generated) :] if token < 256)
                text = shown.decode("utf-8", "ignore")
                stop = (text[len(text) // 2 :][:2] or "zz", "never said")
            if "prediction" in ask.features:
                told = tuple(self._future(request))
                wrong = random.randrange(len(told) + 1)
                request = request._replace(prediction=(*told[:wrong], 9, *told[wrong + 1 :]))
        return Client(ask, request, self.recipe.engine, stop)

    def _future(self, request: Request) -> list[int]:
        """Returns how a request is answered, and how a loop would go on."""
        client = self.clients.get(request.id)
        ask = client.ask if client is not None else None
        tokens = self.alone.answer(client.request if client is not None else request).tokens
        whole = [*(client.request if client is not None else request).generated, *tokens]
        if ask is not None and ask.period:
            text = [*ask.prompt, *whole]
            while len(text) < len(ask.prompt) + ask.max_tokens:
                text.append(text[-ask.period])
            whole = text[len(ask.prompt) :]
        return whole

    # -- steps -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all steps until every answer has ended."""
        last = max([ask.at for ask in self.recipe.asks] + [each.at + 9 * each.lasts for each in self.recipe.moments])
        while self._step <= last or self._later or self._waiting or not self._all_idle:
            self._begin_moments()
            self._act()
            for place in range(len(self.processes)):
                self._step_process(place)
            self._step += 1
            assert self._step < MOST_STEPS, "no end in sight"
        self.check_ends()

    @property
    def _all_idle(self) -> bool:
        ended = all(client.end is not None for client in self.clients.values())
        return ended and all(process.engine.idle for process in self.processes)

    def _step_process(self, place: int) -> None:
        process = self.processes[place]
        due = [message for step, at, message in self._later if at == place and step <= self._step]
        self._later = [entry for entry in self._later if not (entry[1] == place and entry[0] <= self._step)]
        self.clock.owner, rested = place, process.engine.idle
        try:
            events = advance(process.engine, due)
        except Death:
            self._die(place)
            return
        process.engine.find(NoBlockFeed).take()
        if due or events or not rested:
            process.check()
        shares: dict[int, list[Event]] = {}
        for event in events:
            shares.setdefault(event.seq, []).append(event)
        for id, share in shares.items():
            self._deliver(place, id, share)
        self.clock.work()
        self.clock.advance(self._random.choice((0.0001, 0.001, 0.01)))
        if process.engine.idle:
            process.engine.use_idle_moment()

    def _send(self, place: int, message: Message, what: str = "", after: int = 0) -> None:
        """Has a process get a message before its next step, or some steps later."""
        if what:
            self.processes[place].asked[message.id] = what  # type: ignore[union-attr]
        self._later.append((self._step + after, place, message))

    def _id(self) -> int:
        self._next += 1
        return self._next

    # -- clients ---------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Lets clients come, change their mind and move on to another engine."""
        for client in self.clients.values():
            if client.arrived < 0 and client.ask.at <= self._step:
                self._arrive(client)
            self._unregister_late(client)
            if not client.live or client.request.id not in self.homes:
                continue
            here = self.homes[client.request.id]
            if client.leaving:
                continue
            features = client.ask.features
            if client.left or ("abort" in features and self._step >= client.arrived + client.ask.when):
                client.leaving = client.aborted = True
                self._send(here, Abort(client.request.id))
            elif "hand-over" in features and not client.handed_over and client.journal.delivered > client.ask.when % 5:
                client.leaving = client.handed_over = True
                self._send(here, Abort(client.request.id))

    def _arrive(self, client: Client) -> None:
        client.arrived = self._step
        if self._forecast is not None and not self._admits(self._forecast, client):
            return
        if "own adapter" in client.ask.features:
            self._register(client)
        else:
            self._begin_client(client)

    def _admits(self, forecast: WaitForecast, client: Client) -> bool:
        """Returns whether the server lets a request in that has come."""
        process = self.processes[0]
        forecast.measure(process.engine.stats())
        try:
            client.expected = forecast.admit(client.request, PATIENCE, self.clock.now, process.limits)
        except WaitTooLong as error:
            client.take([Failed(client.request.id, error.code, error.message)])
        return client.end is None

    def _register(self, client: Client) -> None:
        """Has all engines register the client's own adapter, before its request is sent."""
        name = own_adapter(client.request.id)
        self._adapters[name] = OWN_ADAPTER
        for place in range(len(self.processes)):
            client.registering.add(id := self._id())
            self._send(place, RegisterAdapter(name, str(OWN_ADAPTER), id=id), "register")

    def _registered(self, id: int) -> None:
        for client in self.clients.values():
            if id in client.registering:
                client.registering.remove(id)
                if not client.registering:
                    self._begin_client(client)

    def _unregister_late(self, client: Client) -> None:
        """Has all engines forget the client's own adapter some steps after its request was sent."""
        id, name = client.request.id, own_adapter(client.request.id)
        sent = client.end is not None or (id in self.homes and self._step >= client.arrived + client.ask.when)
        if name in self._adapters and sent:
            client.outlived_adapter = client.live
            del self._adapters[name]
            for place in range(len(self.processes)):
                self._send(place, UnregisterAdapter(name, id=self._id()), "unregister")

    def _begin_client(self, client: Client) -> None:
        if "pull" in client.ask.features:
            id = self._id()
            self._waiting[id] = 1, client
            self._send(1, Prefill(client.request, seconds=100.0, id=id))
        else:
            self._add(0, client)

    def _add(self, place: int, client: Client, pull: BlockOffer | None = None) -> None:
        """Sends a client's request to a process, for what is left of its answer."""
        request = client.journal.so_far()
        self.homes[request.id] = place
        self._begin_era(self.processes[place], client)
        self._send(place, Add(request._replace(pull=pull)))

    def _begin_era(self, process: Process, client: Client) -> None:
        request = client.journal.so_far()
        client.begin_era(process.weights, len(request.generated), request.scored, request.mirostat_mu, False)

    def _deliver(self, place: int, id: int, share: list[Event]) -> None:
        process = self.processes[place]
        if id in self._waiting and isinstance(offered := share[-1], Offered):
            _, client = self._waiting.pop(id)
            self._add(0, client, offered.offer)
            return
        if id >= CONTROL:
            what = process.asked.pop(id)
            assert not isinstance(share[-1], Failed), (what, share)
            if isinstance(share[-1], MemoryUse) and not share[-1].device:
                self.notes.add("sleep")
            self._registered(id)
            return
        client = self.clients[id]
        assert self.homes[id] == place, f"request {id} is answered by an engine that has it no more"
        if isinstance(share[-1], Aborted) and client.handed_over and not client.aborted:
            self._hand_over(place, client, share)
            return
        client.adopted = client.adopted or (process.engine.stats().adopted_blocks > 0 and "death" in client.lived)
        self._tell_forecast(client, share)
        client.take(share)
        if client.end is not None:
            del self.homes[id]
            if isinstance(client.end, Failed):
                process.failures[client.end.code] = process.failures.get(client.end.code, 0) + 1

    def _tell_forecast(self, client: Client, share: list[Event]) -> None:
        if self._forecast is None or client.expected is None:
            return
        for event in share:
            if isinstance(event, Tokens) and event.tokens and client.expected.waits:
                self._forecast.answer(client.expected, self.clock.now, event.cached)
        if not isinstance(share[-1], Tokens):
            self._forecast.end(client.expected, client.tokens, self.processes[0].limits)

    def _hand_over(self, place: int, client: Client, share: list[Event]) -> None:
        """Has another engine go on with an answer, which reads what this one has computed of it."""
        *tokens, aborted = share
        assert not tokens, f"{tokens} came after the request was aborted"
        if isinstance(aborted, Aborted) and aborted.report is not None:
            client.reports.append(aborted.report)
        request = client.journal.so_far()
        offer = Offer(request.prompt + request.generated, request.salt, seconds=100.0, id=self._id())
        [offered] = self.processes[place].engine.find(PeerBlocks).answer(offer)
        assert isinstance(offered, Offered)
        client.leaving = False
        self._add(1 - place, client, offered.offer)

    # -- moments ---------------------------------------------------------------------------------------------------

    def _begin_moments(self) -> None:
        for moment in self.recipe.moments:
            if moment.at == self._step:
                for place in range(len(self.processes)):
                    self._begin(moment, place)
                if moment.what in ("new weights", "mixed weights"):
                    self._weights += 1

    def _begin(self, moment: Moment, place: int) -> None:
        what, lasts = moment.what, moment.lasts
        if what.startswith("pause") or what in ("flush", "abort all"):  # what others strike is noted when they do
            self._live(place, what)
        if what.startswith("pause"):
            self._send(place, Pause(what.removeprefix("pause "), id=self._id()), what)
            self._send(place, Resume(id=self._id()), "resume", lasts)
        elif what == "abort all":
            self._send(place, AbortAll(id=self._id()), what)
        elif what == "failed copy":
            self.processes[place].fail_a_copy()
        elif what in ("new weights", "mixed weights"):
            if "weights" not in self.processes[place].asked.values():
                self._update(place, self._weights + 1, what == "new weights")
        elif what == "flush":
            self._send(place, FlushCache())
        elif what == "sleep":
            self._send(place, Sleep(id=self._id()), what)
            self._send(place, Wake(id=self._id()), "wake", 9 * lasts)
        elif what == "death" and lasts % 2 and place == 0:
            self._die(place)
        elif place == 0 or what in FAULTS:
            self.processes[place].backend.faults += [what] * (lasts % 2 + 1 if what == "no memory" else 1)

    def _update(self, place: int, number: int, recompute: bool) -> None:
        path = f"{number} {'recompute' if recompute else 'keep'}"
        self._send(place, UpdateWeights(path, "", recompute, number, id=self._id()), "weights")

    def _die(self, place: int) -> None:
        """Ends a process as it is. Another one takes what it left, and goes on with what it had to answer."""
        self._live(place, "death")
        old = self.processes[place]
        self._failures += Counter(old.failures)
        self._failed += Counter(old.backend.failed)
        remains = old.remains()
        old.end()
        self.clock.drop(place)
        self.processes[place] = process = self._process(place, remains)
        again = Add | Prefill | UpdateWeights  # is sent again below
        self._later = [entry for entry in self._later if entry[1] != place or not isinstance(entry[2], again)]
        ids = {getattr(message, "id", -1) for _, at, message in self._later if at == place}
        process.asked = {id: what for id, what in old.asked.items() if id in ids}
        if self._weights:
            self._update(place, self._weights, True)
        for id, home in sorted(self.homes.items()):
            if home == place:
                self.clients[id].leaving = False
                self._add(place, self.clients[id])
        for id, (asked, client) in list(self._waiting.items()):
            if asked == place:
                del self._waiting[id]
                self._add(0, client)
        for id in old.asked.keys() - ids:
            self._registered(id)  # the new process has had the adapter from its start

    def _live(self, place: int, what: str) -> None:
        for id, home in self.homes.items():
            if home == place and self.clients[id].live:
                self.clients[id].lived.add(what)

    def _exchanged(self, process: Process, number: int, recompute: bool) -> None:
        """Notes where the answers are that other weights go on with."""
        place = self.processes.index(process)
        process.weights = number
        scheduler = process.engine.scheduler
        for id, home in self.homes.items():
            client, record = self.clients[id], process.engine.records.get(id)
            if home != place or record is None:
                continue
            seq = scheduler.sequences.get(id)
            if seq is None:
                self._begin_era(process, client)
                continue
            mixed = seq.computed > 0 and not recompute
            client.lived.add("mixed weights" if mixed else "new weights")
            scored = max(seq.scored - 1, 0) if seq.score else 0
            mu = record.sampler.mu if record.mirostat else None
            client.begin_era(number, len(seq.tokens) - seq.prompt_len, scored, mu, mixed)

    # -- ends ------------------------------------------------------------------------------------------------------

    def check_ends(self) -> None:
        """Raises AssertionError if anything is left over, or if an answer is not what it would be alone."""
        for process in self.processes:
            stats = process.engine.stats()
            assert not process.asked, f"messages were not answered: {process.asked}"
            assert stats.blocks_used == stats.running == stats.waiting == 0, stats
            assert stats.blocks_free + stats.blocks_cached == process.limits.num_blocks
            self._failures += Counter(process.failures)
            self._failed += Counter(process.backend.failed)
        for client in self.clients.values():
            self._check_client(client)
        assert self._forecast is None or not self._forecast._lines, "somebody is still expected to wait"
        steps = self._failed["no memory"] + self._failed["failed step"] + self._failed["failed copy"]
        assert self._failures[StepFailed.code] + self._failures[OutOfMemory.code] <= steps, "others failed with a step"
        assert self._failures[NotFinite.code] <= self._failed["not finite"], "others failed with a row"

    def _check_client(self, client: Client) -> None:
        assert client.end is not None, f"request {client.request.id} was not answered to its end"
        if isinstance(client.end, Aborted):
            assert client.aborted or client.left or client.handed_over, f"request {client.request.id} was aborted"
        if isinstance(client.end, Failed):
            self._check_failure(client, client.end)
        whole = isinstance(client.end, Finished) and client.end.reason != "abort"
        for era, following in zip(client.eras, [*client.eras[1:], None], strict=True):
            if not era.mixed:
                self._check_era(client, era, following, whole and following is None)
        client.check_text()

    def _check_era(self, client: Client, era: Era, following: Era | None, whole: bool) -> None:
        """Checks what was answered from the beginning of an era up to the following one."""
        request = client.request._replace(
            generated=tuple(client.tokens[: era.tokens]), scored=era.scored, mirostat_mu=era.mu
        )
        right, given = self.alone.answer(request, era.weights), len(client.request.generated)
        until = following or Era(len(client.tokens), len(client.scores), 0)
        parts = (
            ("tokens", client.tokens[era.tokens : until.tokens], right.tokens),
            ("logprobs", client.logprobs[era.tokens - given : until.tokens - given], right.logprobs),
            ("scores", client.scores[era.scored : until.scored], right.scores),
        )
        if isinstance(right.end, Failed):  # it may bring scores of several steps before it fails, or those of none
            parts = parts[:1]
        for name, mine, expected in parts:
            expected = expected if whole else expected[: len(mine)]
            assert mine == expected, f"request {request.id}, {name} from {era}: {mine} and alone {expected}"
        if isinstance(client.end, Failed) and client.end.code == InvalidRequest.code:
            assert isinstance(right.end, Failed), f"{client.end}, and alone {right.end}"
        if whole:
            assert client.ending == right.ending, f"request {request.id} ends {client.ending}, alone {right.ending}"

    def _check_failure(self, client: Client, failed: Failed) -> None:
        causes = {
            WaitTooLong.code: client.request.claim.deadline is not None,
            OutOfMemory.code: "no memory" in client.lived,
            StepFailed.code: client.lived & {"no memory", "failed step", "failed copy"},
            NotFinite.code: "not finite" in client.lived,
            InvalidRequest.code: True,  # it must fail alone, too
            AdapterNotFound.code: client.outlived_adapter and "death" in client.lived,
            EngineUnavailable.code: client.request.pooling and client.lived & {"pause abort", "abort all"},
        }
        assert causes.get(failed.code), f"request {client.request.id} failed: {failed}"


def run(recipe: Recipe) -> World:
    """Runs a world to its end; raises AssertionError, or what an engine raises, if anything in it is wrong."""
    with (
        virtual(recipe.seed, recipe.every) as clock,
        patch.multiple(MemoryForecast, **overcommitted(recipe)),
        TemporaryDirectory() as folder,
    ):
        world = World(recipe, clock, Path(folder))
        try:
            world.run()
        finally:
            for process in world.processes:
                process.end()
        return world
