"""Chooses the engine for a request among those that have its model: by priority, then by what each would cost.

Engines that publish KV events are routed by what they hold. For others it is guessed (guess.py).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from penstock.core.hashing import Chain
from penstock.engine.chain_hash import chain_hash
from penstock.fleet.foreign.engine import MOST_REFUSED_SECONDS, ForeignEngine
from penstock.fleet.foreign.guess import CHUNK_TOKENS, GuessedCache, chunk_hashes, prompt_text
from penstock.fleet.foreign.http import RECEIVED, EngineLost, GiveUp
from penstock.fleet.foreign.kv_events import KvSubscriber
from penstock.fleet.foreign.mute import mute_requests
from penstock.fleet.foreign.sse_stream import Said
from penstock.fleet.holders import BlockChange, chain_hash_table
from penstock.fleet.index import BlockIndex
from penstock.fleet.ledger import Ledger, Load
from penstock.fleet.route import Route, RoutedPrompt, Router
from penstock.fleet.timing import EngineTiming

CHARACTERS_PER_TOKEN = 4  # about
TOKENIZE_SECONDS = 1.0
MOST_AHEAD = 2.0  # requests that an engine may have more than the least busy one
MOST_SHARE = 1.25  # or its requests as a share of the least busy one's


class Job(NamedTuple):
    """Is a request as the placement sees it."""

    model: str
    path: str
    body: Mapping[str, Any]
    said: Said | None = None  # the beginning of its answer, which is to be continued
    translated: bool = False  # its body was written here, from another dialect


@dataclass(slots=True, eq=False)
class Placed:
    """Is a request on the engine that was chosen for it. `release` takes it off."""

    engine: ForeignEngine
    why: str
    tokens: int  # prompt tokens, perhaps estimated
    hashes: Sequence[Hashable]
    uncached: int
    answering: bool = False
    sent: float = 0.0  # in the placement's seconds
    whole: float = 0.0  # tokens of an answer that comes whole, infinite if it has no limit; 0: it is streamed
    overtaken: int = 0  # later requests with longer prompts whose answers have begun
    give_up: GiveUp | None = None
    model: str = ""


class _Holdings:
    """Numbers the changes of one engine's cache, as the index wants them."""

    def __init__(self, index: BlockIndex, number: int) -> None:
        self._index, self._number = index, number
        self._epoch = self._next = 0

    def apply(self, changes: Sequence[BlockChange]) -> None:
        self._index.apply(self._number, self._epoch, self._next, changes)
        self._next += len(changes)

    def forget(self) -> None:
        self._epoch += 1
        self._next = 0
        self._index.restore(self._number, self._epoch, 0, ())


class _Group:
    """Routes the requests for one model."""

    def __init__(self, seed: int) -> None:
        self.guess_index = BlockIndex()
        self.caches: dict[int, tuple[GuessedCache, _Holdings]] = {}
        self.turns: dict[int, float] = {}  # credit of each engine, in proportion to its weight
        self._seed = seed
        self._routers: dict[bool, tuple[Router, Ledger]] = {}
        self._received: dict[tuple[bool, int], int] = {}

    def guessed(self, number: int) -> tuple[GuessedCache, _Holdings]:
        if number not in self.caches:
            self.caches[number] = GuessedCache(), _Holdings(self.guess_index, number)
        return self.caches[number]

    def route(self, exact: BlockIndex | None, prompt: RoutedPrompt, loads: Mapping[int, Load], now: float) -> Route:
        """Returns which engine is chosen, by its number, and why."""
        index = self.guess_index if exact is None else exact
        key = exact is not None
        if key not in self._routers:
            ledger = Ledger()
            self._routers[key] = Router(EngineTiming(), index, ledger, seed=self._seed), ledger
        router, ledger = self._routers[key]
        for number in ledger.replicas():
            if number not in loads:
                ledger.leave(number)
        for number, load in loads.items():
            if not ledger.knows(number):
                ledger.join(number)
                self._received[key, number] = 0
            ledger.report(number, load, self._received[key, number])
        route = router.route(prompt, now)
        self._received[key, route.replica] += 1
        return route

    def take_turn(self, weights: Mapping[int, float]) -> int:
        """Returns the engine whose turn it is: turns are spread evenly, in proportion to the weights."""
        total = sum(weights.values())
        for number, weight in weights.items():
            self.turns[number] = self.turns.get(number, 0.0) + weight
        chosen = max(weights, key=lambda number: self.turns[number])
        self.turns[chosen] -= total
        return chosen


@dataclass
class EnginePlacement:
    """Knows all engines, what they hold and what they owe."""

    engines: Sequence[ForeignEngine]
    index: BlockIndex = field(default_factory=lambda: BlockIndex(chain_hash_table()))  # from KV events
    subscribers: dict[int, KvSubscriber] = field(default_factory=dict)
    _groups: dict[str, _Group] = field(default_factory=dict)
    _placed: dict[int, set[Placed]] = field(default_factory=dict)
    _lives: dict[int, int] = field(default_factory=dict)
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict)  # bytes of each engine, and since when
    awake: float = 0.0  # seconds that this process was awake
    _chain: Chain = field(default_factory=chain_hash)

    def __post_init__(self) -> None:
        for engine in self.engines:
            if engine.spec.events:
                holdings = _Holdings(self.index, engine.number)
                holdings.forget()
                self.subscribers[engine.number] = KvSubscriber(
                    engine.spec.events, engine.spec.replay, holdings.apply, holdings.forget
                )

    def candidates(self, model: str, without: Collection[ForeignEngine] = ()) -> list[ForeignEngine]:
        having = [each for each in self.engines if model in each.models and each.available and each not in without]
        first = min((each.models[model].priority for each in having), default=0)
        return [each for each in having if each.models[model].priority == first]

    async def place(self, job: Job, candidates: Sequence[ForeignEngine]) -> Placed:
        if len(candidates) == 1:
            prompt, exact = _by_text(job), False
            placed = Placed(candidates[0], f"{candidates[0].name}: no other engine", prompt.tokens, prompt.hashes, 0)
        else:
            prompt, exact = await self._prompt(job, candidates)
            placed = self._choose(job.model, prompt, exact, candidates)
        if not job.body.get("stream"):
            limit = job.body.get("max_tokens") or job.body.get("max_completion_tokens")
            placed.whole = limit if isinstance(limit, int) else inf
        placed.sent, placed.model = self.awake, job.model
        placed.engine.in_flight += 1
        self._placed.setdefault(placed.engine.number, set()).add(placed)
        return placed

    def _choose(self, model: str, prompt: RoutedPrompt, exact: bool, candidates: Sequence[ForeignEngine]) -> Placed:
        group = self._group(model)
        self._forget_restarted(group, candidates)
        index = self.index if exact else group.guess_index
        by_number = {each.number: each for each in candidates}
        idle = not any(each.in_flight for each in candidates)
        if idle and not _held(index, prompt.hashes, by_number):
            engine = by_number[group.take_turn({each.number: each.models[model].weight for each in candidates})]
            told = f"{engine.name}: its turn; no engine holds any of the prompt"
            return Placed(engine, told, prompt.tokens, prompt.hashes, prompt.tokens)
        loads = {each.number: self._load(each, each.models[model].weight) for each in _least_busy(candidates, model)}
        route = group.route(self.index if exact else None, prompt, loads, monotonic() * 1000)
        why = route.why(lambda number: by_number[number].name)
        return Placed(by_number[route.replica], why, prompt.tokens, prompt.hashes, route.uncached)

    def begun(self, placed: Placed) -> None:
        """Notes that an engine has begun to answer: the prompt is computed."""
        placed.answering = True
        for other in self._placed.get(placed.engine.number, ()):
            other.overtaken += other.sent < placed.sent and other.tokens <= placed.tokens

    def tick(self, seconds: float) -> None:
        """Gives up requests that engines do not answer though they answer probes, where another engine can take them.
        It is called again and again, with the seconds that this process was awake since."""
        self.awake += seconds
        for engine in self.engines:
            received = engine.http.traffic[RECEIVED]
            if received != self._heard.get(engine.number, (-1, 0.0))[0]:
                self._heard[engine.number] = received, self.awake
            waiting = [each for each in self._placed.get(engine.number, ()) if not each.answering]
            for placed in mute_requests(waiting, self._heard[engine.number][1], self.awake):
                if placed.give_up is not None and self.candidates(placed.model, [engine]):
                    placed.give_up(
                        f"it has not answered for {self.awake - placed.sent:.0f} s, though it answers probes"
                    )
                    engine.spare(MOST_REFUSED_SECONDS)

    def release(self, job: Job, placed: Placed, cached: float | None = None, computed: bool = True) -> None:
        """Takes a request off its engine. `cached` is the reused share of its prompt, if known; `computed`: the engine
        has computed the prompt."""
        if placed not in self._placed.get(placed.engine.number, ()):
            return
        self._placed[placed.engine.number].discard(placed)
        placed.engine.in_flight -= 1
        if computed and placed.hashes and isinstance(placed.hashes, _TextHashes):
            cache, holdings = self._group(job.model).guessed(placed.engine.number)
            holdings.apply(cache.served(placed.hashes, cached))

    def _group(self, model: str) -> _Group:
        return self._groups.setdefault(model, _Group(len(self._groups)))

    def _forget_restarted(self, group: _Group, candidates: Sequence[ForeignEngine]) -> None:
        for engine in candidates:
            if self._lives.setdefault(engine.number, engine.lives) != engine.lives:
                self._lives[engine.number] = engine.lives
                for each in self._groups.values():
                    cache, holdings = each.guessed(engine.number)
                    holdings.apply(cache.clear())

    def _load(self, engine: ForeignEngine, weight: float) -> Load:
        """Returns an engine's load divided by its weight."""
        placed = self._placed.get(engine.number, ())
        waiting = sum(each.uncached for each in placed if not each.answering)
        rows = sum(each.answering for each in placed)
        tokens = sum(each.tokens for each in placed)
        return Load(int(waiting / weight), int(waiting / weight), round(rows / weight), int(tokens / weight))

    async def _prompt(self, job: Job, candidates: Sequence[ForeignEngine]) -> tuple[RoutedPrompt, bool]:
        """Returns the prompt to route, and whether it is given in tokens: all candidates publish KV events, and one of
        them tokenizes."""
        sizes = {self._block_size(each) for each in candidates}
        speaker = next((each for each in candidates if each.traits.tokenizes), None)
        if speaker is None or len(sizes) != 1 or 0 in sizes:
            return _by_text(job), False
        try:
            tokens = await _tokenized(speaker, job)
        except EngineLost:
            return _by_text(job), False
        size, model = sizes.pop(), speaker.models[job.model]
        return RoutedPrompt(self._chain(model.id if model.parent else "", tokens, size), len(tokens), size), True

    def _block_size(self, engine: ForeignEngine) -> int:
        subscriber = self.subscribers.get(engine.number)
        return 0 if subscriber is None else subscriber.translator.block_size


def _least_busy(candidates: Sequence[ForeignEngine], model: str) -> list[ForeignEngine]:
    """Returns the engines that do not have many more requests than the least busy one, by weight. Their concurrency is
    unknown, so a cached prompt must not outweigh idle engines."""
    requests = [each.in_flight / each.models[model].weight for each in candidates]
    most = max(min(requests) + MOST_AHEAD, min(requests) * MOST_SHARE)
    return [each for each, count in zip(candidates, requests, strict=True) if count < most]


class _TextHashes(list[bytes]):
    """Are hashes of text, not of tokens."""


def _held(index: BlockIndex, hashes: Sequence[Hashable], numbers: Collection[int]) -> bool:
    holders = index.lookup(hashes)
    return any(holders.of(number) is not None for number in numbers)


def _by_text(job: Job) -> RoutedPrompt:
    text = prompt_text(job.body)
    return RoutedPrompt(_TextHashes(chunk_hashes(text)), max(len(text) // CHARACTERS_PER_TOKEN, 1), CHUNK_TOKENS)


async def _tokenized(engine: ForeignEngine, job: Job) -> list[int]:
    """Returns the tokens of a prompt, from an engine."""
    fields: tuple[str, ...] = (
        "messages",
        "tools",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    )
    if "messages" not in job.body:
        fields = ("prompt",)
        if isinstance(given := job.body.get("prompt"), list) and all(isinstance(each, int) for each in given):
            return given
    body = {name: job.body[name] for name in fields if job.body.get(name) is not None}
    answer = await engine.call("/tokenize", {"model": engine.models[job.model].id} | body, TOKENIZE_SECONDS)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(each, int) for each in tokens):
        raise EngineLost("/tokenize returned no tokens")
    return tokens
