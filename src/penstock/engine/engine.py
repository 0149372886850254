"""Runs requests: they come in, steps are computed, events go out. It has no threads, no text and no network."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

from penstock.backend.base import Backend, Sleeper, Ticket
from penstock.backend.synchronous import SynchronousBackend
from penstock.core import Policy, Scheduler, StandardPolicy, hashing
from penstock.core.block_events import BlockEvents
from penstock.core.deadlines import expire, refuse_hopeless
from penstock.core.refusal import refuse_impossible
from penstock.core.requeue import requeue
from penstock.core.step_cost import CostModel
from penstock.core.tiers import CopyCosts
from penstock.engine.adapter_control import AdapterControl
from penstock.engine.adapter_messages import AdapterMessage
from penstock.engine.adapters import Adapters
from penstock.engine.batch import Batcher, bitmasks
from penstock.engine.carry.peers import NOT_CARRIED, CarryOptions, PeerBlocks
from penstock.engine.draft_model import DraftModel
from penstock.engine.failures import lost_device, not_finite, step_failure
from penstock.engine.flight_recorder import FlightRecorder, Memory
from penstock.engine.grammar import Constraint, Grammars
from penstock.engine.host_blocks import HostMemory
from penstock.engine.kv_disk.prefixes import open_prefixes
from penstock.engine.kv_disk.store import SegmentStore
from penstock.engine.kv_ledger import KvLedger
from penstock.engine.needs import RequestNeeds
from penstock.engine.record import RequestRecord, observe_surprises
from penstock.engine.refusals import check_ids, refuse_logprobs, refuse_wrong_kind
from penstock.engine.resuming import Decided, append_decided
from penstock.engine.router_stats import RouterStats
from penstock.engine.sleep_state import SleepState
from penstock.engine.speculation import Drafters, Speculation
from penstock.engine.waiting import Need, WaitingRoom
from penstock.engine.weight_control import PATIENCE, WeightControl
from penstock.engine.weights import WeightReader
from penstock.errors import InvalidGrammar, InvalidRequest, OutOfMemory, PenstockError
from penstock.model.classifier import ClassifierHead, DenseHead
from penstock.types import (
    STEP_SIZES,
    Aborted,
    AdapterInfo,
    BlockEvent,
    BlockSnapshot,
    Event,
    Failed,
    Finished,
    Limits,
    MemoryUse,
    Request,
    Row,
    RowResult,
    Stats,
    StepPlan,
    StepResult,
    Tokens,
)

MOST_DRAFTED = 64  # tokens of one row in one step
NOTHING = StepPlan(0, ())  # is what a paused engine does


class Engine(WeightControl):
    """Answers requests: every one that was added ends in exactly one Finished, Aborted or Failed. `depth` steps are in
    flight while the next one is planned, `policy` decides where there is a choice, `costs` learns how long steps take,
    `drafting` proposes how answers may go on, as does a `draft_model` (a step drafts at most `draft_tokens` tokens of a
    request), `chain` computes chain hashes, `classifier` is the model's classification head, `dense` turns its pooled
    states into embeddings, `adapters` are those that requests may name, `weights` reads others for the model,
    `unknown_fields` are those of its config that nothing is known of, `sleeper` gives the backend's memory back,
    `ledger` has what of the KV cache an engine before has computed, `kv_store` keeps prompts on disk, `carry` says how
    blocks are exchanged with other engines, and with `block_events` it is recorded what enters and leaves the prefix
    cache."""

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        depth: int = 0,
        grammars: Grammars | None = None,
        policy: Policy | None = None,
        costs: CostModel | None = None,
        drafting: Drafters[Any] | None = None,
        draft_model: DraftModel | None = None,
        draft_tokens: int = MOST_DRAFTED,
        chain: hashing.Chain = hashing.chain,
        block_events: bool = False,
        classifier: ClassifierHead | None = None,
        dense: DenseHead | None = None,
        adapters: Adapters | None = None,
        weights: WeightReader | None = None,
        unknown_fields: tuple[str, ...] = (),
        sleeper: Sleeper | None = None,
        ledger: KvLedger | None = None,
        kv_store: SegmentStore | None = None,
        carry: CarryOptions = NOT_CARRIED,
    ) -> None:
        super().__init__(weights, ledger)
        self.limits, self.unknown_fields = limits, unknown_fields
        self.draft_tokens = 0 if drafting is None else min(draft_tokens, MOST_DRAFTED)
        self._grammars, self._adapters = grammars, adapters
        self._backend, self._depth, self._classifier, self._dense = backend, depth, classifier, dense
        self._adapter_control = AdapterControl(adapters)
        self._sleep = SleepState(sleeper)
        self.epoch = time.time_ns() if block_events else 0  # of its block events; 0: none are recorded
        self._block_events = BlockEvents(self.epoch) if block_events else None
        self._router_stats = RouterStats()
        watchers = [watcher for watcher in (self._block_events, ledger) if watcher is not None]
        self._records: dict[int, RequestRecord] = {}
        self._speculation = (
            Speculation(drafting, self._records, self.draft_tokens, draft_model) if drafting is not None else None
        )
        self._costs = costs or CostModel()
        copying = CopyCosts(self._costs.prompts)
        policy = policy or StandardPolicy(limits, self._costs, copying)
        self._scheduler = Scheduler(
            limits, policy=policy, drafts=self._speculation, chain=chain, watchers=watchers, copy_costs=copying
        )
        cache = self._scheduler.cache
        self._adopted = 0 if ledger is None else ledger.adopt_into(cache)
        self._batcher, self._waiting_room = Batcher(limits), WaitingRoom()
        self._host = HostMemory.open(limits, backend, copying)
        self._disk = open_prefixes(kv_store, cache, self._host, backend, limits, self._costs, chain)
        self.peers = PeerBlocks(carry, cache, self._host, backend, limits, self._costs.prompts, chain)
        self._needs = RequestNeeds(grammars, self._adapter_control, self.peers, self._disk)
        self._constrained, self._mirostats = set[int](), set[int]()  # have started with a constraint, with mirostat
        self._in_flight: deque[tuple[StepPlan, Ticket, float]] = deque()  # with when they were launched
        self._answered = self._busy_seconds = 0.0  # when the last step's answer came; spent in steps
        self._goes_on = self._out_of_memory = False  # after that step there was more to compute; it found no memory
        self._events: list[Event] = []
        self._computed = 0
        self._step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.recorder = FlightRecorder()

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to compute and no event to return."""
        asked = self._sleep.asked and not self._pause.paused
        return not (self._waiting_room or self._computing or self._adapter_control or self._update or asked)

    @property
    def _computing(self) -> bool:
        may_run = self._scheduler.sequences and not self._pause.paused
        return bool(may_run or self._in_flight or self._events)

    @property
    def slow(self) -> bool:
        """Returns whether what is done next may take long and be no step: weights are exchanged, or memory is given
        back or taken again."""
        return bool(self._update or self._sleep.asked or self._sleep.asleep)

    @property
    def can_sleep(self) -> bool:
        """Returns whether the device's memory can be given back while the engine stays."""
        return self._sleep.possible

    @property
    def shared_device(self) -> str:
        """Returns the device whose memory it can share with other engines; empty: none."""
        return "" if self._backend.sharing is None else self._backend.sharing.name

    def add(self, request: Request) -> None:
        """Takes a request in, and wakes up for it; raises InvalidRequest for one that could never be answered. Ids are
        the caller's and are never used twice. A request with a grammar or adapters starts when those are ready; if they
        cannot be, a step returns the failure."""
        refuse_wrong_kind(request, self.limits, self._classifier is not None)
        if request.id in self._records:
            raise InvalidRequest(f"request id {request.id} is already in use")
        check_ids(request, self.limits.vocab)
        self._sleep.wake()
        record = RequestRecord(request, self.limits.vocab, self._classifier, self._dense)
        grammar = request.sampling.grammar
        if grammar is not None and grammar.thinking and grammar.thinking.budget is not None:
            refuse_logprobs(request)
        if grammar is not None and grammar.kind == "free":
            record.constrain(Constraint.free(grammar.thinking))
        try:
            self._begin(record, self._needs.of(record))
        except PenstockError:
            self._release(record)
            raise

    def record_flight(self, memory: Memory) -> None:
        """Records what it does in memory that outlives it. Devices may compile kernels for a step of a new size."""
        self.recorder = FlightRecorder(memory, slow_first=not isinstance(self._backend, SynchronousBackend))

    def abort(self, id: int) -> None:
        """Ends a request at once; the next step returns the event. Unknown ids have ended already."""
        self._scheduler.now = time.perf_counter()
        if id in self._waiting_room or id in self._pause:
            (self._waiting_room if id in self._waiting_room else self._pause).leave(id)
            self._emit([Aborted(id)])
        else:
            self._emit(self._scheduler.abort(id))

    def flush_cache(self) -> None:
        """Empties the prefix cache, on disk too. Blocks that a running request holds stay until it ends."""
        self._scheduler.cache.flush()
        self.peers.clear()
        self._disk.clear()

    def step(self) -> list[Event]:
        """Plans and launches a step, commits the oldest one in flight; returns all that happened since last time."""
        if self._adapter_control:
            self._emit(self._adapter_control.register_ready(0 if self._computing else PATIENCE))
        if self._update:
            self._exchange_ready(*self._update)
        if self._waiting_room:
            self._start_ready()
        began = self._scheduler.now = time.perf_counter()
        self._emit([*expire(self._scheduler), *refuse_hopeless(self._scheduler, self._costs)])
        plan = NOTHING if self._pause.paused else self._scheduler.plan()
        self._batcher.apply(plan)
        if self._carry_out(plan) and plan.rows:
            self._launch(plan)
            if self._speculation is not None:
                self._speculation.prepare()
        if len(self._in_flight) > self._depth or (self._in_flight and not plan.rows):
            self._commit(*self._in_flight.popleft())
        if self._ledger is not None:
            self._ledger.settle(self._scheduler.running)
        if not self._in_flight:
            self._disk.write_behind()
        if self._sleep.asked and not (self._scheduler.sequences or self._in_flight or self._waiting_room):
            self._fall_asleep()
        self._busy_seconds += time.perf_counter() - began
        self._answer_pauses()
        events, self._events = self._events, []
        return events

    def block_events(self) -> list[BlockEvent]:
        """Returns what entered and left the prefix cache since the last call, if that is recorded."""
        return [] if self._block_events is None else self._block_events.take()

    def block_snapshot(self) -> BlockSnapshot:
        """Returns what the prefix cache holds; nothing, if block events are not recorded."""
        return (self._block_events or BlockEvents(0)).snapshot(self._scheduler.cache.trie.nodes())

    def prepare_in_idle(self) -> bool:
        """Uses a moment without requests to make later steps faster; returns False when nothing is left to do."""
        return not self._sleep.asleep and (self._disk.write_in_idle() or self._backend.prepare_in_idle())

    def stats(self) -> Stats:
        """Returns the engine's state and counters."""
        stats = self._scheduler.stats()
        costs = vars(self._grammars.costs) if self._grammars is not None else {}
        if self._adapters is not None:
            slots, used = self._adapters.most, self._adapters.used
            stats = stats._replace(adapter_slots=slots, adapter_bytes=used, adapters=self._adapters.requests())
        return stats._replace(
            busy_seconds=self._busy_seconds,
            waiting=stats.waiting + len(self._waiting_room) + len(self._pause),
            computed_tokens=self._computed,
            adopted_blocks=self._adopted,
            step_sizes=tuple(self._step_sizes),
            drafts=self._speculation.counts if self._speculation else (),
            disk=self._disk.counts(),
            peers=self.peers.counts(),
            **costs,
            **(self._router_stats.fields(self._scheduler, self._costs) if self.epoch else {}),
        )

    def close(self) -> None:
        """Gives the backend's memory back."""
        self.peers.close()
        self._disk.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._weights is not None:
            self._weights.close()
        self._backend.close()

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self, record: RequestRecord) -> None:
        """Queues a request, or lets it wait for the end of a pause."""
        request = record.request
        self._scheduler.now = time.perf_counter()
        sequence = record.sequence(record.pooling != "mean" and not self.limits.encoder, self._weight_state)
        if self._pause.stops(request.id):
            refuse_impossible(sequence, self.limits)
            self._records[request.id] = record
            self._pause.hold(record, self._scheduler.now)
            return
        decided = append_decided(sequence, record.owed)
        if decided.ended:
            return self._end_resumed(record, decided)
        self._scheduler.add(sequence)
        self._records[request.id] = record
        if record.constraint is not None:
            self._constrained.add(request.id)
        if record.mirostat:
            self._mirostats.add(request.id)
        if self._speculation is not None:
            self._speculation.open(record)
            self._speculation.append(request.id, request.generated + decided.tokens)
        record.owed = decided.tokens

    def _end_resumed(self, record: RequestRecord, decided: Decided) -> None:
        """Ends a resumed request that has nothing left to compute."""
        self._records.pop(record.request.id, None)
        self._release(record)
        self._emit(decided.events(record))

    def _begin(self, record: RequestRecord, needs: Sequence[Need]) -> None:
        """Starts a request, or lets it wait for what it needs."""
        needs = needs or self._needs.blocks_of(record, self._weight_state)
        if not needs:
            self._start(record)
            return
        self._records[record.request.id] = record
        self._waiting_room.enter(record, needs, time.perf_counter())
        self.recorder.hold(self._waiting_room.worked_on)

    def _start_ready(self) -> None:
        """Starts the requests that have what they waited for. If there is nothing to compute, it waits a little."""
        if not self._computing:
            self._waiting_room.wait(PATIENCE)
        if self._adapters is not None:
            self._adapters.advance()
        now = time.perf_counter()
        for record, (need, *others) in self._waiting_room.take_ready(now):
            try:
                need.deliver()
                self._begin(record, others)
            except PenstockError as error:
                self._emit([Failed(record.request.id, error.code, error.message)])
        self.recorder.hold(self._waiting_room.worked_on)

    def _release(self, record: RequestRecord) -> None:
        """Gives back what a request that has ended has held."""
        if record.lease is not None and self._adapters is not None:
            self._adapters.release(record.lease)
        if self._speculation is not None:
            self._speculation.close(record)

    # -- sleeping ------------------------------------------------------------------------------------------------

    def sleep(self, id: int) -> None:
        """Gives the device's memory back once all requests have ended; a step then returns the answer. What was cached
        of prompts is forgotten."""
        self._sleep.ask(id)

    def wake(self, id: int) -> None:
        """Takes the memory again; raises OutOfMemory if that is not possible now. A step returns the answer. Whoever
        still waits for it to sleep is told the same."""
        self._sleep.wake()
        asked, self._sleep.asked = self._sleep.asked, []
        self._emit([MemoryUse(each, self.limits.memory, self._sleep.host_bytes) for each in (*asked, id)])

    def _fall_asleep(self) -> None:
        self._scheduler.cache.flush()
        self.peers.release_device()
        self._host.release()
        if self._adapters is not None:
            self._adapters.evict_unheld()
        try:
            self._sleep.sleep()
            self._emit([MemoryUse(id, 0, self._sleep.host_bytes) for id in self._sleep.asked])
        except PenstockError as error:
            self._emit([Failed(id, error.code, error.message) for id in self._sleep.asked])
        self._sleep.asked.clear()

    # -- adapters ------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Returns the adapters that requests may name."""
        return self._adapter_control.listed()

    def control_adapters(self, message: AdapterMessage) -> None:
        """Registers, unregisters or lists adapters; a step returns the answer. Raises what cannot be done at once."""
        self._emit(self._adapter_control.answer(message))

    # -- one step ------------------------------------------------------------------------------------------------

    def _carry_out(self, plan: StepPlan) -> bool:
        """Carries out a plan's copies. If one fails, nobody can tell what blocks hold that are not in use: the step's
        requests fail and the prefix cache is emptied; returns False."""
        try:
            self._host.carry_out(plan)
        except Exception as error:
            self._fail(plan, error)
            self._scheduler.cache.flush()
            return False
        return True

    def _launch(self, plan: StepPlan) -> None:
        speculation = self._speculation if any(row.draft for row in plan.rows) and self._goes_on else None
        follows = speculation is not None and speculation.copies  # drafting costs what the device waits for it
        began = self._answered if follows else time.perf_counter()
        self.recorder.launch(plan)
        try:
            self._in_flight.append((plan, self._launch_batch(plan), began))
            if speculation is not None and follows and len(self._in_flight) == 1:
                speculation.observe_gap(len(plan.rows), time.perf_counter() - began)
            self._out_of_memory = False
        except OutOfMemory as error:
            self._find_memory(plan, error)
        except Exception as error:
            self._fail(plan, error)

    def _launch_batch(self, plan: StepPlan) -> Ticket:
        """Launches a plan's rows. Bitmasks follow the launch: the host works them out while a device computes."""
        batch = self._batcher.build(plan, self._scheduler.sequences, self._records)
        ticket = self._backend.launch(batch)
        if len(batch.constrained):
            self._backend.constrain(ticket, bitmasks(plan, batch, self._records))
        self._computed += (size := len(batch.tokens))
        self._step_sizes[bisect_left(STEP_SIZES, size)] += 1
        return ticket

    def _find_memory(self, plan: StepPlan, error: OutOfMemory) -> None:
        """Has the backend free memory and queues the step's sequences again; if that was not enough, they fail and no
        others do."""
        self._backend.free_memory()
        if self._out_of_memory:
            self._fail(plan, error)
        else:
            requeue(self._scheduler, plan)
        self._out_of_memory = not self._out_of_memory

    def _commit(self, plan: StepPlan, ticket: Ticket, began: float) -> None:
        try:
            result = self._backend.wait(ticket)
        except Exception as error:
            self._fail(plan, error)
        else:
            began, self._answered = max(began, self._answered), time.perf_counter()
            if not plan.loads:
                self._costs.observe(plan.rows, self._answered - began, answers=self._speculation is None)
            if result.not_finite:
                self._fail_rows(plan, result.not_finite)
            self.recorder.commit(plan, self._answered - began)
            if self._speculation is not None:
                result = self._speculation.verify(plan, result, self._answered - began)
            if self._mirostats:
                observe_surprises(plan, result, self._records)
            if self._constrained:
                rows = zip(plan.rows, result.rows, strict=True)
                result = StepResult(result.step, tuple(self._follow_constraint(row, answer) for row, answer in rows))
            self._scheduler.now = time.perf_counter()
            self._emit(self._scheduler.commit(plan, result))
            self._goes_on = bool(self._scheduler.sequences)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Fails a step's requests. If no other step can succeed they are left as they are: the engine ends, and whoever
        has started it may have another one resume them."""
        if self._backend.is_lost():
            raise lost_device(error) from error
        self._emit(self._scheduler.fail(plan, *step_failure(error)))

    def _fail_rows(self, plan: StepPlan, indices: Sequence[int]) -> None:
        """Fails the requests of rows that have no answer, and forgets cached prefixes: they may have theirs."""
        for id in {plan.rows[index].seq for index in indices} & self._records.keys():
            self._scheduler.abort(id)
            self._emit([not_finite(id)])
        self._scheduler.cache.flush()
        self.peers.clear()

    def _emit(self, events: Sequence[Event]) -> None:
        """Keeps events for the step's caller. A request that ends is forgotten."""
        for event in events:
            if isinstance(event, Tokens):
                if self._speculation is not None:
                    sequence = self._scheduler.sequences.get(event.seq) if self._depth else None
                    self._speculation.follow(event, sequence, len(self._scheduler.running))
                if (record := self._records.get(event.seq)) is not None:
                    event = record.complete_tokens(event)
            elif isinstance(event, Finished | Aborted | Failed) and (record := self._records.pop(event.seq, None)):
                self._constrained.discard(event.seq)
                self._mirostats.discard(event.seq)
                self._disk.end(record, event)
                self.peers.end(record)
                self._release(record)
                event = record.complete(event)
            self._events.append(event)

    # -- constraints ---------------------------------------------------------------------------------------------

    def _follow_constraint(self, row: Row, answer: RowResult) -> RowResult:
        """Returns a row's answer with the tokens that its constraint forces after those that were sampled."""
        record = self._records.get(row.seq)
        if record is None or record.constraint is None or not answer.tokens:
            return answer
        try:
            forced = record.constraint.take(*answer.tokens, force=not answer.logprobs)
        except InvalidGrammar as error:
            self._scheduler.abort(row.seq)
            self._emit([Failed(row.seq, error.code, error.message)])
            return answer
        return answer._replace(tokens=answer.tokens + forced)
