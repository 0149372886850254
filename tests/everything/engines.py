"""Makes the engines of a world: those that have its features, and plain ones that answer a request alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from penstock.core import check
from penstock.core.memory_forecast import MemoryForecast
from penstock.core.step_cost import CostModel
from penstock.engine.assemble import assemble
from penstock.engine.drafts.draft_model import MTP_HEAD, SMALL_MODEL, DraftModel
from penstock.engine.drafts.drafting import Drafting
from penstock.engine.grammars.grammar import Grammars
from penstock.engine.kv_disk.segment import BlockLayout
from penstock.engine.kv_disk.store import SegmentStore
from penstock.engine.kv_handover.ledger import KvLedger, ledger_bytes
from penstock.engine.kv_transfer.peers import NO_TRANSFER, PeerBlocks, TransferOptions
from penstock.engine.lora.adapters import Adapters
from penstock.errors import StepFailed
from penstock.planning.memory_plan import all_states
from penstock.types import BlockCopy, Limits, Request, blocks_for
from tests.core.test_properties import Shuffles, Unmeasured
from tests.engine.guesses import RandomDrafting
from tests.engine.test_draft_model import RandomDepths
from tests.everything.backend import OFTEN, VOCAB, WorldBackend, WorldWeights
from tests.everything.client import VOCABULARY, Answer
from tests.everything.recipe import MAX_LEN, Recipe
from tests.everything.virtual import VirtualTime

ADAPTERS = {"eleven": 11, "seven": 7}
OWN_ADAPTER = 13  # the value of each adapter that is registered while engines run
FREE = 1 << 40  # bytes of the disk


class Remains(NamedTuple):
    """Is what outlives an engine process."""

    ledger: bytes
    memory: list[NDArray[Any]]


class SomeDrafting(Drafting):
    """Copies drafts as usual, has steps verify as much of them as the world says, and learns nothing of costs."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def lengths(self, proposals: Sequence[Any], rows: int, tokens: int, budget: int) -> list[int]:
        lengths = []
        for proposal in proposals:
            most = min(len(proposal.tokens), budget)
            lengths.append(most if self._random.random() < OFTEN else self._random.randint(0, most))
            budget -= lengths[-1]
        return lengths

    def observe(self, rows: int, tokens: int, seconds: float) -> None: ...


class SomeDepths(RandomDepths):
    """Drafts to random depths."""


class Process:
    """Is an engine process of a world, and what it has of its own. `exchanged` is called before its weights change,
    `future` says how a request's answer goes on."""

    def __init__(
        self,
        recipe: Recipe,
        clock: VirtualTime,
        folder: Path,
        exchanged: Callable[[Process, int, bool], None],
        future: Callable[[Request], Sequence[int]],
        adapters: Mapping[str, int],
        remains: Remains | None = None,
    ) -> None:
        has, limits, random = {*recipe.engine}, recipe.limits(), Random(recipe.seed)
        self.limits, self.folder = limits, folder
        drafts = next((each for each in ("draft model", "head") if each in has), "")
        loops = [ask.looping for ask in recipe.asks if ask.period]
        self.backend = WorldBackend(limits.max_rows, limits.windows, loops, recipe.seed, drafts)
        self.backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
        self.backend.spend = lambda tokens: clock.advance(0.002 + 0.0005 * tokens)
        self._memory = bytearray(ledger_bytes(limits)) if "ledger" in has else None
        if remains is not None and self._memory is not None:
            self._memory[:] = remains.ledger
            self.backend.restore(remains.memory)
        depth = 1 if "steps in flight" in has else 0
        costs = Unmeasured() if random.random() < 0.7 else CostModel()
        self.store = self._open_store(has)
        self.engine = assemble(
            self.backend,
            limits,
            depth=depth,
            grammars=Grammars(lambda: VOCABULARY, VOCAB),
            policy=Shuffles(limits, random) if "random order" in has else None,
            costs=costs,
            drafting=self._drafting(has, random, future),
            draft_model=self._draft_model(drafts, depth, random),
            block_events="block events" in has,
            adapters=adapters_of(self.backend, adapters),
            weights=WorldWeights(self.backend, lambda *about: exchanged(self, *about)),  # type: ignore[arg-type]
            sleeper=self.backend.sleeper,
            ledger=None if self._memory is None else KvLedger(self._memory, limits),
            kv_store=self.store,
            transfer=TransferOptions(b"world", ("shm",)) if recipe.peers else NO_TRANSFER,
        )
        self.asked: dict[int, str] = {}  # control messages without an answer yet, and what they ask
        self.failures: dict[str, int] = {}  # requests that failed, by code
        self.weights = 0
        self.salts: dict[bytes, int] = {}  # what KV under a salt is moved by, as first seen

    def _open_store(self, has: set[str]) -> SegmentStore | None:
        if (
            "disk tier" not in has
            or not self.limits.host_places
            or (self.limits.states and not self.limits.host_states)
        ):
            return None
        state_bytes = len(self.backend.states.export_blocks([0])) if self.limits.states else 0
        sizes = len(self.limits.windows), len(self.backend.kv.export_blocks([0])), state_bytes
        layout = BlockLayout(b"f" * 16, self.limits.block_size, *sizes)
        store = SegmentStore(self.folder, layout, 1 << 20, free=lambda _: FREE)
        store.open()
        return store

    def _drafting(self, has: set[str], random: Random, future: Callable[[Request], Sequence[int]]) -> Any:
        if "guesses" in has:
            return RandomDrafting(future, VOCAB, random)
        wanted = has & {"copied drafts", "draft model", "head"}
        return SomeDrafting(random) if wanted else None

    def _draft_model(self, drafts: str, depth: int, random: Random) -> DraftModel | None:
        if not drafts:
            return None
        kind = MTP_HEAD if drafts == "head" else SMALL_MODEL
        options: dict[str, Any] = {"kind": kind, "group": self.limits.windows.index(0), "depth": depth}
        return DraftModel(self.backend, self.limits, MAX_LEN, depths=SomeDepths(random), **options)

    def remains(self) -> Remains | None:
        """Returns what is left of it if it ends now."""
        return None if self._memory is None else Remains(bytes(self._memory), self.backend.remains())

    def fail_a_copy(self) -> None:
        """Lets the next copy of blocks to or from host memory fail, if there is any."""
        blocks: Any = self.engine.host.blocks
        if blocks is None or "carry_out" in vars(blocks):
            return

        def fail(copies: Sequence[BlockCopy]) -> None:
            del blocks.carry_out
            self.backend.fail("failed copy", self.limits.max_rows)
            raise StepFailed("the copy failed")

        blocks.carry_out = fail

    def end(self) -> None:
        """Lets go of what the machine would take back from a process that has ended."""
        if self.store is not None:
            self.store.close()
        self.engine.find(PeerBlocks).close()

    def check(self) -> None:
        """Raises AssertionError if an invariant does not hold, or if a block of the prefix cache does not have what it
        is found by."""
        check(self.engine.scheduler)
        limits, trie = self.limits, self.engine.scheduler.cache.trie
        if 0 not in limits.windows or self.engine.asleep:
            return
        group, kv = limits.windows.index(0), self.backend.target.kv
        stack = [(node, node.salt_hash) for node in trie._root.children.values()]
        while stack:
            node, salt = stack.pop()
            if node.blocks[group] >= 0:
                assert len(node.tokens) == limits.block_size, f"block {node.blocks} is published and not full"
                moved = {int(value) - token for value, token in zip(kv[node.blocks[group]], node.tokens, strict=True)}
                expected = {self.salts.setdefault(salt, next(iter(moved)))}
                assert moved == expected, f"block {node.blocks} of {node.tokens} does not hold them, but {moved}"
            stack += [(child, salt) for child in node.children.values()]


def adapters_of(backend: WorldBackend, values: Mapping[str, int]) -> Adapters:
    base: Any = SimpleNamespace(placements=())
    adapters = Adapters(backend.adapters, base, 2, 1 << 20, available=lambda: FREE)
    for name, value in values.items():
        adapters.registered(name, Path(str(value)), 1.0, 1)
    return adapters


def overcommitted(recipe: Recipe) -> dict[str, Any]:
    """Returns what makes sequences start as if no answer would get longer, so that they are preempted."""
    return {"peak": lambda *_: 0.0} if "small cache" in recipe.engine else {"peak": MemoryForecast.peak}


class Alone:
    """Answers requests alone, each in a fresh engine without any feature."""

    def __init__(self, recipe: Recipe, clock: VirtualTime) -> None:
        limits = recipe.limits()
        whole = blocks_for(MAX_LEN + 32, limits.windows, limits.block_size, MAX_LEN)
        self._limits: Limits = limits._replace(
            max_len=MAX_LEN + 32,
            max_rows=1,
            step_tokens=MAX_LEN + 32,
            num_blocks=2 * whole,
            host_places=0,
            host_states=0,
            prefill_budget=0,
        )
        self._loops = [ask.looping for ask in recipe.asks if ask.period]
        self._clock = clock
        self._grammars = Grammars(lambda: VOCABULARY, VOCAB)
        self._known: dict[tuple[Any, ...], Answer] = {}

    def answer(self, request: Request, weights: int = 0) -> Answer:
        """Returns what a request is answered with by such weights, as far as it is not answered yet."""
        asked = Request(
            request.id,
            request.prompt,
            request.sampling,
            request.max_tokens,
            stop_ids=request.stop_ids,
            pooling=request.pooling,
            bad_words=request.bad_words,
            adapters=request.adapters,
            generated=request.generated,
            scored=request.scored,
            mirostat_mu=request.mirostat_mu,
            speculation=0,
        )
        key = (repr(asked._replace(id=0)), weights)
        if key not in self._known:
            self._known[key] = self._answer(asked, weights)
        return self._known[key]

    def _answer(self, request: Request, weights: int) -> Answer:
        limits = self._limits
        backend = WorldBackend(1, limits.windows, self._loops, 0)
        backend.reserve_kv(limits.num_blocks, limits.block_size, all_states(limits))
        backend.target.weights = weights
        values = {use.name: ADAPTERS.get(use.name, OWN_ADAPTER) for use in request.adapters}
        adapters = adapters_of(backend, values) if values else None
        engine = assemble(backend, limits, grammars=self._grammars, adapters=adapters)
        engine.add(request)
        answer = Answer()
        while not engine.idle:
            for event in engine.step():
                answer.note(event)
            self._clock.work_once()
        return answer
