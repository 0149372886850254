"""Grammars: compiled beside the steps, and followed token by token.

A compiled grammar is shared by all requests with the same text. Each of them walks through its own copy, which knows
what may come next and, where only one text can, what must.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.backend.base import Ints
from penstock.engine.thinking_budget import Thoughts
from penstock.errors import InvalidGrammar, InvalidRequest, PenstockError, UnsupportedModel
from penstock.types import Grammar, Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKERS = 2
KEPT = 256  # compiled grammars
LIMIT = 10.0  # seconds a grammar may take to compile
SLOWEST = 0.25  # seconds for what may come next: a thousand times what is usual
STACK = 2**30  # bytes of addresses: the library calls itself for every rule in a chain of them
LONGEST = 400  # characters of its words that are passed on
SPACES = {"whitespace_pattern": r" |\n[ \t]{0,20}"}  # small models never stop where any run of spaces may follow


class Vocabulary(Protocol):
    """What a grammar must know of a model's tokens."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]

    def token_bytes(self, id: int) -> bytes: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass
class Costs:
    grammars: int = 0
    grammar_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    forced_tokens: int = 0


class Grammars:
    """Nothing is loaded and no thread started before the first grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], width: int) -> None:
        self.costs = Costs()
        self._vocabulary = vocabulary
        self._width = width  # of the logits
        self._kept: OrderedDict[tuple[str, str], Compiling] = OrderedDict()
        self._queue: SimpleQueue[Compiling] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Compiling:
        """Begins, unless the same text was seen before."""
        if not self._workers:
            self._hire()
        key = grammar.kind, grammar.text
        if key not in self._kept:
            self._kept[key] = Compiling(grammar)
            self._queue.put(self._kept[key])
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def follow(self, compiling: Compiling, grammar: Grammar) -> Constraint:
        """For one request, once the grammar is ready; raises InvalidGrammar for one that cannot be followed."""
        matcher = compiling.matcher()
        return Constraint(matcher, self._ends, self._width, grammar.thinking, self.costs)

    def _hire(self) -> None:
        usual = threading.stack_size(STACK)
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(WORKERS)]
        for worker in self._workers:
            worker.start()
        threading.stack_size(usual)

    # -- in a worker ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            compiling = self._queue.get()
            began = time.perf_counter()
            try:
                compiling.finish(_matcher(self._load(), compiling.grammar))
            except PenstockError as error:
                compiling.fail(error)
            except BaseException as error:  # the library's panics are no Exceptions
                compiling.fail(InvalidGrammar(f"the grammar cannot be compiled: {error}"))
            self.costs.grammars += 1
            self.costs.grammar_seconds += time.perf_counter() - began

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                self._ends = vocabulary.eos_ids
                self._tokenizer = _tokenizer(vocabulary, self._width)
            return self._tokenizer


class Compiling:
    """A grammar that is, or soon will be, compiled or refused."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._deadline = time.monotonic() + LIMIT
        self._done = threading.Event()
        self._matcher: LLMatcher | None = None
        self._error: PenstockError | None = None

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    @property
    def ready(self) -> bool:
        """There is an answer, be it a refusal."""
        return self._done.is_set() or time.monotonic() > self._deadline

    def matcher(self) -> LLMatcher:
        """At its beginning."""
        if self._error is not None:
            raise self._error
        if self._matcher is None:
            raise InvalidGrammar(f"the grammar took more than {LIMIT:.0f} s to compile and is given up: simplify it")
        return self._matcher.deep_copy()

    def finish(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._done.set()

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self._done.set()


class Constraint:
    """One answer on its way through its grammar. It is the mask of the next token too."""

    __slots__ = ("_costs", "_matcher", "_thoughts", "_width", "ends", "forced", "waited")

    def __init__(
        self, matcher: LLMatcher | None, ends: frozenset[int], width: int, thinking: Thinking | None, costs: Costs
    ) -> None:
        self.ends = ends  # the tokens that may come when the grammar is satisfied
        self.forced = 0  # tokens
        self.waited = 0.0  # seconds, for the grammar to be compiled
        self._matcher = matcher
        self._width = width
        self._costs = costs
        self._thoughts = Thoughts(thinking)

    @classmethod
    def free(cls, thinking: Thinking | None) -> Constraint:
        """Of an answer that may be any text, after thinking that may be limited."""
        return cls(None, frozenset(), 0, thinking, Costs())

    @property
    def mask(self) -> Constraint | None:
        """None while everything is allowed."""
        return None if self._thoughts.going or self._matcher is None else self

    def words(self) -> Ints:
        """Whatever happens here is told by the next `take`, to whom it concerns, and fails no one's step."""
        began = time.perf_counter()
        words = np.zeros(-(-self._width // 32), np.int32)
        opens = self._thoughts.opens
        assert self._matcher is not None
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if opens >= 0:
            words[opens // 32] |= np.uint32(1 << opens % 32).view(np.int32)
        self._costs.masks += 1
        self._costs.mask_seconds += time.perf_counter() - began
        return words

    def take(self, token: int, *, force: bool) -> tuple[int, ...]:
        """Goes on by a sampled token and, with `force`, by what must follow it, which is returned: an end where nothing
        else can. Raises InvalidGrammar where the grammar turns out to be too much to follow."""
        if (ending := self._thoughts.take(token)) is not None:
            self.forced += len(ending)
            return ending
        if self._matcher is None:
            return ()
        if not self._matcher.consume_token(token):
            raise InvalidGrammar(f"the grammar could not be followed further: {_reason(self._matcher.get_error())}")
        return self._forced(self._matcher) if force else ()

    def _forced(self, matcher: LLMatcher) -> tuple[int, ...]:
        forced = matcher.compute_ff_tokens()
        if forced and not matcher.consume_tokens(forced):
            raise InvalidGrammar(f"the grammar could not be followed further: {_reason(matcher.get_error())}")
        if matcher.is_stopped():
            forced.append(min(self.ends))
        self.forced += len(forced)
        self._costs.forced_tokens += len(forced)
        return tuple(forced)


# -- the library --------------------------------------------------------------------------------------------------


def _matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=SPACES)  # type: ignore[arg-type]
        case "regex":
            text = LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            text = LLMatcher.grammar_from_lark(grammar.text)
        case kind:
            raise InvalidRequest(f"a grammar is json, regex or lark; got {kind!r}")
    matcher = LLMatcher(tokenizer, text, log_level=0)
    if matcher.is_error():
        raise InvalidGrammar(f"the {_NAMES[grammar.kind]} cannot be used: {_reason(matcher.get_error())}")
    _rehearse(matcher.deep_copy())
    return matcher


def _rehearse(matcher: LLMatcher) -> None:
    """What takes long for one token would hold up everybody's steps."""
    began = time.perf_counter()
    matcher.compute_bitmask()
    matcher.compute_ff_tokens()
    if (seconds := time.perf_counter() - began) > SLOWEST:
        raise InvalidGrammar(
            f"the grammar is too complex: its first token took {seconds:.1f} s to work out; simplify it"
        )


_NAMES = {"json": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


def _reason(error: str) -> str:
    """The library's words, in one line, without its dump of the state and what they repeat of the grammar."""
    words = " ".join(error.partition("\n<state>")[0].split())
    if len(words) > LONGEST:
        words = f"{words[: LONGEST // 2]} ... {words[-LONGEST // 2 :]}"
    return words or "nothing may follow what was sampled"


def _tokenizer(vocabulary: Vocabulary, width: int) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        told = "structured output needs llguidance, which is not installed here: pip install 'penstock[server]'"
        raise InvalidRequest(told, code="unsupported_parameter") from error
    if not vocabulary.eos_ids:
        raise UnsupportedModel("grammars need a token that ends an answer, and this model's vocabulary has none")
    spelled = TokenizerWrapper(_Spelled(vocabulary, width))
    return LLTokenizer(spelled, n_vocab=width, eos_token=sorted(vocabulary.eos_ids))


class _Spelled:
    """A vocabulary as the library reads it; logits past it are of no token."""

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = vocabulary.bos_id
        self.tokens = [vocabulary.token_bytes(id) for id in range(width)]
        self.special_token_ids = sorted(vocabulary.special_ids)

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode())
