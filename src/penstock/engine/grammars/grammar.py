"""Compiles grammars in threads, and follows them token by token.

A compiled grammar is shared by all requests with the same text. Each request walks through its own copy, which knows
the allowed tokens and, where only one text is possible, the forced ones.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.backend.base import Ints
from penstock.engine.grammars.lazy_triggers import PatternTrigger, TriggerWatch, compile_patterns
from penstock.engine.grammars.thinking_budget import ThinkingBudget
from penstock.errors import InvalidGrammar, InvalidRequest, Overloaded, PenstockError, UnsupportedModel
from penstock.system.runtime import large_stacks
from penstock.text.grammar import gbnf, structural_tag
from penstock.text.grammar.json_schema import guaranteed
from penstock.types import Grammar, Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKERS = 2
MOST_GRAMMARS = 256  # compiled ones that are kept
COMPILE_SECONDS = 10.0  # after which a grammar is given up
SLOWEST_MASK = 0.25  # seconds for one bitmask: a thousand times the usual
MARK = "\x02"  # a character that is a token of its own in vocabularies that put a space before texts
STACK_BYTES = 2**30  # bytes of addresses: the library recurses for every rule in a chain
LONGEST_REASON = 400  # characters of the library's words that are passed on
DEAD_END = "NoExtensionBias"  # the library's word for a grammar that no token can follow
WHITESPACE = {"whitespace_pattern": r" |\n[ \t]{0,20}"}  # small models never stop where any run of spaces may follow


class GrammarVocabulary(Protocol):
    """Describes a model's tokens for grammars."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]

    def token_bytes(self, id: int) -> bytes: ...
    def encode(self, text: str) -> list[int]: ...


@dataclass
class Costs:
    """Counts what grammars cost: see Stats, which has the same fields."""

    grammars: int = 0
    grammar_seconds: float = 0.0
    masks: int = 0
    mask_seconds: float = 0.0
    forced_tokens: int = 0


class Grammars:
    """Compiles and keeps grammars. Nothing is loaded before the first one. Threads live while there is one to compile,
    so that an engine which is given up leaves none behind."""

    def __init__(self, vocabulary: Callable[[], GrammarVocabulary], width: int) -> None:
        self.costs = Costs()
        self._vocabulary = vocabulary
        self._width = width  # number of logits
        self._compiled: OrderedDict[tuple[object, ...], Compiling] = OrderedDict()
        self._queue: deque[Compiling] = deque()
        self._workers = 0
        self._queue_lock, self._load_lock = threading.Lock(), threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> Compiling:
        key = grammar.kind, grammar.text, grammar.trigger_patterns
        if key not in self._compiled:
            compiling = Compiling(grammar)
            self._enqueue(compiling)
            self._compiled[key] = compiling
        self._compiled.move_to_end(key)
        if len(self._compiled) > MOST_GRAMMARS:
            self._compiled.popitem(last=False)
        return self._compiled[key]

    def follow(self, compiling: Compiling, grammar: Grammar) -> Constraint:
        """Returns the constraint of one request, once its grammar is ready; raises InvalidGrammar if it was refused."""
        compiled = compiling.result()
        matcher = compiled.matcher.deep_copy()
        constraint = Constraint(matcher, self._ends, self._width, grammar.thinking, self.costs)
        if grammar.lazy:
            constraint.await_trigger(self._watch(grammar, compiled.patterns))
        return constraint

    def _watch(self, grammar: Grammar, patterns: tuple[PatternTrigger, ...]) -> TriggerWatch:
        assert self._tokenizer is not None
        return TriggerWatch(grammar, patterns, self._spell, self._tokenizer.tokenize_bytes)

    def _enqueue(self, compiling: Compiling) -> None:
        """Hands a grammar to a worker; raises Overloaded if there is none and no thread can be had."""
        with self._queue_lock:
            if self._workers < WORKERS:
                self._start_worker()
            self._queue.append(compiling)

    def _start_worker(self) -> None:
        try:
            with large_stacks(STACK_BYTES):
                threading.Thread(target=self._work, daemon=True).start()
            self._workers += 1
        except RuntimeError as error:
            if not self._workers:
                raise Overloaded(
                    f"the grammar cannot be compiled, for want of a thread with {STACK_BYTES >> 20} MB of addresses "
                    f"({error}): try again, or raise the limits of the engine's process"
                ) from error

    # -- in a worker ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while compiling := self._next():
            began = time.perf_counter()
            try:
                compiling.finish(self._compile(compiling))
            except PenstockError as error:
                compiling.fail(error)
            except BaseException as error:  # the library's panics are no Exceptions
                compiling.fail(InvalidGrammar(f"the grammar cannot be compiled: {error}"))
            self.costs.grammars += 1
            self.costs.grammar_seconds += time.perf_counter() - began

    def _next(self) -> Compiling | None:
        """Returns the grammar to compile next; without one, the worker that asks ends."""
        with self._queue_lock:
            if self._queue:
                return self._queue.popleft()
            self._workers -= 1
            return None

    def warm_up(self) -> None:
        """Reads the vocabulary in a thread, so that the first grammar does not wait for it. If it cannot be read, the
        first grammar fails with the reason."""

        def load() -> None:
            with suppress(PenstockError):
                self._load()

        threading.Thread(target=load, name="penstock-grammars", daemon=True).start()

    def _compile(self, compiling: Compiling) -> Compiled:
        tokenizer = self._load()
        compiling.begun = True
        grammar = compiling.grammar
        return Compiled(_matcher(tokenizer, grammar, self._special), compile_patterns(grammar.trigger_patterns))

    def _load(self) -> LLTokenizer:
        with self._load_lock:
            if self._tokenizer is None:
                vocabulary = self._vocabulary()
                self._ends = vocabulary.eos_ids
                self._spell = vocabulary.token_bytes
                self._special = _special_tokens(vocabulary)
                self._tokenizer = _tokenizer(vocabulary, self._width)
            return self._tokenizer


class Compiled(NamedTuple):
    """Holds a compiled grammar, which stands at its beginning, and the patterns that trigger it."""

    matcher: LLMatcher
    patterns: tuple[PatternTrigger, ...] = ()


class Compiling:
    """Waits for one grammar, which is or soon will be compiled or refused."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.begun = False
        self._deadline = time.monotonic() + COMPILE_SECONDS
        self._done = threading.Event()
        self._compiled: Compiled | None = None
        self._error: PenstockError | None = None

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    @property
    def ready(self) -> bool:
        return self._done.is_set() or time.monotonic() > self._deadline

    def result(self) -> Compiled:
        if self._error is not None:
            raise self._error
        if self._compiled is None:
            raise InvalidGrammar(f"the grammar took more than {COMPILE_SECONDS:.0f} s to compile: simplify it")
        return self._compiled

    def finish(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._done.set()

    def fail(self, error: PenstockError) -> None:
        self._error = error
        self._done.set()


class Constraint:
    """Follows one answer through its thinking, the free text before a trigger and its grammar, and knows which tokens
    may come next."""

    __slots__ = ("_costs", "_matcher", "_thinking", "_trigger", "_width", "ends", "forced")

    def __init__(
        self, matcher: LLMatcher | None, ends: frozenset[int], width: int, thinking: Thinking | None, costs: Costs
    ) -> None:
        self.ends = ends  # the tokens that may come when the grammar is satisfied
        self.forced = 0  # tokens
        self._matcher = matcher
        self._width = width
        self._costs = costs
        self._thinking = ThinkingBudget(thinking)
        self._trigger: TriggerWatch | None = None

    @classmethod
    def free(cls, thinking: Thinking | None) -> Constraint:
        return cls(None, frozenset(), 0, thinking, Costs())

    def await_trigger(self, trigger: TriggerWatch) -> None:
        self._trigger = trigger

    @property
    def problem(self) -> str:
        """Returns why the library cannot follow the grammar further; empty if it can."""
        return _reason(self._matcher.get_error()) if self._matcher is not None and self._matcher.is_error() else ""

    @property
    def active(self) -> bool:
        """Returns False while everything is allowed, without a bitmask."""
        return self._matcher is not None and self._trigger is None and not self._thinking.active

    @property
    def complete(self) -> bool:
        return self._matcher is not None and self.active and self._matcher.is_stopped()

    def draftable(self, tokens: Sequence[int], force: bool) -> int:
        """Returns how many drafted tokens can be verified in one step: the allowed ones, up to the end of thinking or
        free text or, with `force`, up to a forced token."""
        if self._thinking.active:
            return self._thinking.free_run(tokens)
        if self._thinking.opens >= 0 and self._thinking.opens in tokens[:1]:
            return 0
        if self._trigger is not None:
            return self._trigger.free_run(tokens)
        if self._matcher is None:
            return len(tokens)
        return _draftable(self._matcher, tokens, force)

    def bitmasks(self, draft: Sequence[int]) -> list[Ints]:
        """Returns the tokens that may come next and those that may follow each token of a draft, which is one that
        `draftable` allows, a bit for each: [ceil(vocab / 32)]. An error of the matcher allows nothing here and is
        raised by the next `take`, so that it fails this request and nobody else's step."""
        assert self._matcher is not None
        masks = [self._bitmask(self._matcher, self._thinking.opens)]
        for token in draft:
            self._matcher.consume_token(token)
            masks.append(self._bitmask(self._matcher, -1))
        if draft:
            self._matcher.rollback(len(draft))
        return masks

    def _bitmask(self, matcher: LLMatcher, opens: int) -> Ints:
        began = time.perf_counter()
        words = np.zeros(-(-self._width // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            words[:] = 0  # the library would let the answer end here
        if opens >= 0:
            words[opens // 32] |= np.uint32(1 << opens % 32).view(np.int32)
        self._costs.masks += 1
        self._costs.mask_seconds += time.perf_counter() - began
        return words

    def take(self, *tokens: int, force: bool) -> tuple[int, ...]:
        """Goes on by the sampled tokens and, with `force`, by what must follow them, which is returned: an end token
        where nothing else can follow. Raises InvalidGrammar where the grammar turns out to be too much to follow."""
        for token in tokens[:-1]:
            self._take_one(token, force=False, last=False)
        return self._take_one(tokens[-1], force=force, last=True)

    def resume(self, tokens: Sequence[int], *, force: bool) -> tuple[int, ...]:
        """Goes on by all tokens of an answer that another engine has generated, as `take` does step by step. Returns
        what must follow the last of them: it is not empty where that engine ended within a step's tokens."""
        owed: tuple[int, ...] = ()
        for token in tokens:
            if owed and token != owed[0]:
                raise InvalidGrammar(f"the answer cannot be resumed: token {token} stands where {owed[0]} must")
            owed = owed[1:] if owed else self._take_one(token, force=force, last=True)
        return owed

    def _take_one(self, token: int, *, force: bool, last: bool) -> tuple[int, ...]:
        if (ending := self._thinking.take(token, last=last)) is not None:
            self.forced += len(ending)
            return ending
        if self._matcher is None:
            return ()
        begun = self._begun(token)
        if self._matcher.is_error() or not all(self._matcher.consume_token(each) for each in begun):
            raise InvalidGrammar(f"the grammar could not be followed further: {_reason(self._matcher.get_error())}")
        return self._forced(self._matcher) if force and begun else ()

    def _begun(self, token: int) -> list[int]:
        """Returns the tokens that the grammar is to follow: none while it waits for its trigger."""
        if self._trigger is None:
            return [token]
        begun = None if token in self.ends else self._trigger.take(token)
        if begun is not None:
            self._trigger = None
        return begun or []

    def _forced(self, matcher: LLMatcher) -> tuple[int, ...]:
        forced = matcher.compute_ff_tokens()
        if matcher.is_error() or (forced and not matcher.consume_tokens(forced)):
            raise InvalidGrammar(f"the grammar could not be followed further: {_reason(matcher.get_error())}")
        if matcher.is_stopped():
            forced.append(min(self.ends))
        self.forced += len(forced)
        self._costs.forced_tokens += len(forced)
        return tuple(forced)


def _draftable(matcher: LLMatcher, tokens: Sequence[int], force: bool) -> int:
    """Returns how many of the tokens a matcher allows. Where something must follow a token, that is not sampled without
    a draft, so the token is sampled as the step's last."""
    if matcher.is_error():
        return 0
    taken = count = 0
    for token in tokens:
        if not matcher.try_consume_tokens([token]):
            break
        taken += 1
        if force and (matcher.is_stopped() or matcher.compute_ff_tokens()):
            break
        count += 1
    if taken:
        matcher.rollback(taken)
    return count


# -- the library --------------------------------------------------------------------------------------------------


def _matcher(tokenizer: LLTokenizer, grammar: Grammar, special: Mapping[str, int]) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _in_library_form(grammar, special), log_level=0)
    if matcher.is_error():
        raise InvalidGrammar(f"the {_NAMES[grammar.kind]} cannot be used: {_reason(matcher.get_error())}")
    _check_beginning(matcher.deep_copy(), grammar)
    return matcher


def _in_library_form(grammar: Grammar, special: Mapping[str, int]) -> str:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            return _of_schema(guaranteed(grammar.text))
        case "rewritten_json":
            return _of_schema(json.loads(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "gbnf" | "ebnf":
            return LLMatcher.grammar_from_lark(gbnf.to_lark(grammar.text, special))
        case "structural_tag":
            tag = json.loads(grammar.text)
            return LLMatcher.grammar_from_lark(
                structural_tag.to_lark(tag, special, lambda schema: guaranteed(json.dumps(schema)))
            )
        case kind:
            raise InvalidRequest(f"a grammar is one of {', '.join(_NAMES)}; got {kind!r}")


def _of_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    flexible = schema.get("x-guidance", {}).get("whitespace_flexible", True)  # if not, a default pattern counts as well
    defaults: Any = WHITESPACE if flexible else None
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)


def _check_beginning(matcher: LLMatcher, grammar: Grammar) -> None:
    """Refuses a grammar whose first bitmask allows no token, or takes so long that it would delay everybody's steps."""
    began = time.perf_counter()
    matcher.compute_bitmask()
    forced = matcher.compute_ff_tokens()
    if (seconds := time.perf_counter() - began) > SLOWEST_MASK:
        raise InvalidGrammar(
            f"the grammar is too complex: its first token took {seconds:.1f} s to work out; simplify it"
        )
    if forced and matcher.consume_tokens(forced):
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidGrammar(f"the {_NAMES[grammar.kind]} cannot be used: {_reason(matcher.get_error())}")


_NAMES = {
    "json": "JSON schema",
    "rewritten_json": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "ebnf": "EBNF grammar",
    "structural_tag": "structural tag",
}


def _reason(error: str) -> str:
    """Returns the library's error in one line, without its dump of the state, and cut where it is long."""
    words = " ".join(error.partition("\n<state>")[0].split())
    if words == DEAD_END:
        return "no text matches it"
    if len(words) > LONGEST_REASON:
        words = f"{words[: LONGEST_REASON // 2]} ... {words[-LONGEST_REASON // 2 :]}"
    return words or "nothing may follow what was sampled"


def _tokenizer(vocabulary: GrammarVocabulary, width: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not vocabulary.eos_ids:
        raise UnsupportedModel("grammars need an end-of-text token, and this model's vocabulary has none")
    tokenizer = TokenizerWrapper(_LibraryTokenizer(vocabulary, width))
    return LLTokenizer(tokenizer, n_vocab=width, eos_token=sorted(vocabulary.eos_ids))


def _special_tokens(vocabulary: GrammarVocabulary) -> dict[str, int]:
    ids = vocabulary.special_ids - vocabulary.eos_ids
    return {text: id for id in ids if (text := vocabulary.token_bytes(id).decode("utf-8", "ignore"))}


class _LibraryTokenizer:
    """Presents a vocabulary as the library reads it; logits past the vocabulary belong to no token."""

    def __init__(self, vocabulary: GrammarVocabulary, width: int) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = vocabulary.bos_id
        self.tokens = [vocabulary.token_bytes(id) for id in range(width)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        marked = vocabulary.encode(MARK)
        self._marked = len(marked) if marked and self.tokens[marked[0]].startswith(b" ") else 0

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of a text within an answer. A vocabulary that puts a space before every text gets a mark
        before it, whose tokens are left out."""
        if self._marked:
            return self._encode(MARK + text.decode())[self._marked :]
        return self._encode(text.decode())
