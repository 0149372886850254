"""Answers follow their grammars whatever the model would say, and nobody waits for anybody else's grammar."""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.backend.base import Batch, Bitmasks
from penstock.backend.fake import FakeBackend
from penstock.backend.sample import sample
from penstock.core import check
from penstock.engine.assemble import assemble
from penstock.engine.control.pausing import Pausing
from penstock.engine.engine import Engine
from penstock.engine.grammars import grammar as grammar_module
from penstock.engine.grammars.grammar import Constraint, Costs, Grammars
from penstock.engine.grammars.thinking_budget import ThinkingBudget
from penstock.errors import InvalidGrammar, InvalidRequest
from penstock.types import (
    PAUSE_KEEP,
    Aborted,
    Event,
    Failed,
    Finished,
    Grammar,
    Limits,
    Request,
    SamplingParams,
    StepResult,
    Thinking,
    Tokens,
)
from penstock.types.messages import Pause, Resume

END, OPEN, CLOSE = 256, 257, 258
LIMITS = Limits(max_len=512, max_rows=8, step_tokens=64, block_size=4, num_blocks=1024, vocab=260)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json", json.dumps(PERSON))
DATE = Grammar("regex", r"\d{4}-\d{2}")
EITHER = Grammar("lark", 'start: "yes" | "no"')


class Bytes:
    """A token for each byte, and three that carry structure."""

    vocab_size = 259
    bos_id = None
    eos_ids = frozenset({END})
    special_ids = frozenset({END, OPEN, CLOSE})

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < END else {END: b"<end>", OPEN: b"<think>", CLOSE: b"</think>"}.get(id, b"")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Babble(FakeBackend):
    """Says anything at all: its logits are noise that depends on the place alone, with a fondness for `favourite`."""

    def __init__(self, favourite: int = END, fondness: float = 0.0) -> None:
        super().__init__(LIMITS.vocab)
        self.fond = favourite, fondness

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        places = batch.positions[batch.sampled].tolist()
        logits = np.zeros((len(places), LIMITS.vocab))
        for row, place in zip(logits, places, strict=True):
            row += np.random.default_rng(place).normal(0, 3, LIMITS.vocab)
        logits[:, self.fond[0]] += self.fond[1]
        return sample(logits.astype(np.float32), batch, masks)


def engine(
    backend: Babble | None = None, vocabulary: Callable[[], Any] = Bytes, depth: int = 0, **limits: int
) -> Engine:
    settled = LIMITS._replace(**limits)
    backend = backend or Babble()
    backend.reserve_kv(settled.num_blocks, settled.block_size)
    return assemble(backend, settled, depth=depth, grammars=Grammars(vocabulary, settled.vocab))


def request(id: int, grammar: Grammar | None, max_tokens: int = 300, **settings: Any) -> Request:
    params = SamplingParams(seed=id, grammar=grammar, **settings)
    return Request(id, tuple(range(id % 7 + 1)), params, max_tokens, stop_ids=frozenset({END}))


def drain(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
        check(engine.scheduler)
    return events


def answer(events: list[Event], id: int) -> tuple[str, str]:
    """The text and how it ended."""
    tokens = [token for event in events if isinstance(event, Tokens) and event.seq == id for token in event.tokens]
    (last,) = (event for event in events if event.seq == id and not isinstance(event, Tokens))
    assert isinstance(last, Finished), last
    return bytes(token for token in tokens if token < END).decode("utf-8", "replace"), last.reason


def ask(engine: Engine, *requests: Request) -> list[tuple[str, str]]:
    for each in requests:
        engine.add(each)
    events = drain(engine)
    return [answer(events, each.id) for each in requests]


def check_person(text: str) -> None:
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {}, {"top_k": 3, "min_p": 0.1}, {"frequency_penalty": 1.0}])
def test_noise_becomes_what_was_asked_for(settings: dict[str, Any], depth: int) -> None:
    asked = engine(depth=depth)
    kinds = [JSON, DATE, EITHER, None] * 3
    answers = ask(asked, *(request(id, kind, max_tokens=200, **settings) for id, kind in enumerate(kinds, 1)))
    for kind, (text, reason) in zip(kinds, answers, strict=True):
        assert kind is None or reason == "stop"
        if kind is JSON:
            check_person(text)
        if kind is DATE:
            assert re.fullmatch(DATE.text, text)
        if kind is EITHER:
            assert text in ("yes", "no")
    stats = asked.stats()
    assert stats.grammars == 3
    assert stats.masks > 0
    assert stats.forced_tokens > 0


def test_white_space_that_was_ruled_out_is_not_generated() -> None:
    pair = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    compact, flexible = ({**pair, "x-guidance": spacing}, pair)
    fond = engine(Babble(ord(" "), 50.0))
    (got, _), (spaced, _) = ask(
        fond, request(1, Grammar("json", json.dumps(compact))), request(2, Grammar("json", json.dumps(flexible)))
    )
    assert re.fullmatch(r"\[[12], [12]\]", got)
    assert re.fullmatch(r"\[ [12] , [12] \]", spaced)


def test_forced_tokens_change_nothing_but_the_steps() -> None:
    forced, sampled = engine(), engine()
    text = ask(forced, request(1, JSON))[0]
    assert text == ask(sampled, request(1, JSON, logprobs=0))[0]
    assert forced.stats().generated_tokens == sampled.stats().generated_tokens
    assert forced.stats().steps < sampled.stats().steps
    assert sampled.stats().forced_tokens == 0


@pytest.mark.usefixtures("overcommitted")
@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_keeps_the_place_in_the_grammar(depth: int) -> None:
    squeezed = engine(num_blocks=24, max_len=96, depth=depth)
    kinds = [JSON, None, JSON, None, JSON]
    answers = ask(squeezed, *(request(id, kind, max_tokens=80) for id, kind in enumerate(kinds, 1)))
    assert squeezed.stats().preemptions > 0
    roomy = ask(engine(), *(request(id, kind, max_tokens=80) for id, kind in enumerate(kinds, 1)))
    assert answers == roomy


def test_the_end_comes_when_the_grammar_allows_it_and_not_before() -> None:
    text, reason = ask(engine(Babble(END, fondness=50)), request(1, JSON))[0]
    check_person(text)
    assert reason == "stop"


@pytest.mark.parametrize("settings", [{"min_tokens": 50}, {"ignore_eos": True}, {"logit_bias": {END: -100.0}}])
def test_an_answer_ends_where_nothing_can_follow(settings: dict[str, Any]) -> None:
    asked = request(1, DATE, **settings)._replace(stop_ids=frozenset())
    text, reason = ask(engine(), asked)[0]
    assert re.fullmatch(DATE.text, text)
    assert reason == "stop"


def test_an_answer_that_is_too_long_is_cut_even_within_forced_tokens() -> None:
    text, reason = ask(engine(), request(1, Grammar("lark", 'start: "a long text that is forced"'), max_tokens=9))[0]
    assert (text, reason) == ("a long te", "length")


@pytest.mark.parametrize("opens", [-1, OPEN])
def test_thinking_comes_first_and_is_free(opens: int) -> None:
    thinking = DATE._replace(thinking=Thinking((CLOSE,), opens))
    thinker = engine(Babble(OPEN if opens == OPEN else CLOSE, fondness=3))
    events: list[Event] = []
    for id in range(1, 9):
        thinker.add(request(id, thinking, min_tokens=300))
    events = drain(thinker)
    thought = 0
    for id in range(1, 9):
        tokens = [token for e in events if isinstance(e, Tokens) and e.seq == id for token in e.tokens]
        if opens < 0 or tokens[0] == OPEN:
            thought += 1
            tokens = tokens[tokens.index(CLOSE) + 1 :]
        assert tokens[-1] == END
        assert re.fullmatch(DATE.text, bytes(tokens[:-1]).decode())
    assert thought


@pytest.mark.parametrize("opens", [-1, OPEN])
@pytest.mark.parametrize("kind", ["free", "regex"])
def test_a_budget_ends_the_thinking(opens: int, kind: str) -> None:
    """The model, left alone, would think on; one that ends by itself is not cut."""
    thinking = Grammar(kind, DATE.text if kind == "regex" else "", Thinking((65, CLOSE), opens, budget=5))
    thinker = engine(Babble(OPEN, fondness=5))
    for id in range(1, 5):
        thinker.add(request(id, thinking, max_tokens=30))
    events = drain(thinker)
    for id in range(1, 5):
        tokens = [token for e in events if isinstance(e, Tokens) and e.seq == id for token in e.tokens]
        if opens < 0 or tokens[0] == OPEN:
            thought = tokens[opens >= 0 :]
            assert [65, CLOSE] in (thought[5:7], thought[4:6])
            (end,) = [event for event in events if isinstance(event, Finished) and event.seq == id]
            assert end.report is not None
            assert end.report.forced > 0
    assert thinker.idle


@pytest.mark.parametrize(
    ("said", "must"),
    [
        ([1, 2, 3], [(), (), (7, 8)]),
        ([1, 2, 7], [(), (), (8,)]),  # its end has begun by itself
        ([1, 7, 8], [(), (), ()]),
        ([7, 8, 1], [(), (), None]),
    ],
)
def test_what_must_follow_the_thoughts(said: list[int], must: list[Any]) -> None:
    thoughts = ThinkingBudget(Thinking((7, 8), budget=3))
    assert [thoughts.take(token) for token in said] == must
    assert not thoughts.active


def test_what_is_not_sampled_has_no_logprobs() -> None:
    asked = request(1, Grammar("free", "", Thinking((CLOSE,), budget=3)), logprobs=2)
    with pytest.raises(InvalidRequest, match="logprobs cannot be given with a thinking budget"):
        engine().add(asked)


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar("json", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("json", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("json", '{"$ref": "#/definitions/missing"}'), "missing"),
        (Grammar("regex", "(?=a)b"), "look-ahead"),
        (Grammar("regex", "(a"), "unclosed"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("poem", "roses"), "poem"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(grammar: Grammar, named: str) -> None:
    asked = engine()
    asked.add(request(1, grammar))
    asked.add(request(2, DATE))
    events = drain(asked)
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert failed.seq == 1
    assert failed.code.startswith("invalid_")
    assert named in failed.message
    assert answer(events, 2)[1] == "stop"


def test_nobody_waits_for_a_grammar_of_another() -> None:
    gate = threading.Event()

    def slow() -> Bytes:
        gate.wait(30)
        return Bytes()

    asked = engine(vocabulary=slow)
    asked.add(request(1, DATE))
    asked.add(request(2, EITHER))
    asked.add(request(3, None, max_tokens=5))
    events: list[Event] = []
    while not any(isinstance(event, Finished) for event in events):
        events += asked.step()
    assert {event.seq for event in events} == {3}
    assert asked.stats().waiting == 2
    asked.abort(2)
    assert asked.step() == [Aborted(2)]
    gate.set()
    assert re.fullmatch(DATE.text, answer(drain(asked), 1)[0])
    assert asked.idle


@pytest.mark.parametrize("paused", [False, True])
def test_a_request_that_ends_before_it_starts_leaves_others_their_grammars(paused: bool) -> None:
    """It counted as one that follows a grammar no more, and so the next one's was not followed."""
    asked = engine(max_len=64)
    if paused:
        asked.handle(Pause(PAUSE_KEEP, id=100))
        asked.add(request(1, DATE, max_tokens=8))
        while not asked.find(Pausing).waiting:
            asked.step()
        asked.abort(1)
        asked.handle(Resume(id=101))
    else:
        asked.add(request(1, DATE)._replace(prompt=(1,) * 65))
    ended = [event for event in drain(asked) if isinstance(event, Aborted | Failed)]
    assert [type(event) for event in ended] == [Aborted if paused else Failed]
    for id in (2, 3):
        ((text, reason),) = ask(asked, request(id, DATE, max_tokens=20))
        assert re.fullmatch(DATE.text, text)
        assert reason == "stop"


def test_a_grammar_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0.01)
    gate = threading.Event()
    asked = engine(vocabulary=lambda: (gate.wait(30), Bytes())[1])
    asked.add(request(1, DATE))
    (failed,) = drain(asked)
    assert isinstance(failed, Failed)
    assert failed.code == "invalid_grammar"
    assert "simplify" in failed.message
    gate.set()


def test_a_grammar_that_is_slow_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "SLOWEST_MASK", 0.0)
    asked = engine()
    asked.add(request(1, DATE))
    (failed,) = drain(asked)
    assert isinstance(failed, Failed)
    assert "too complex" in failed.message


def test_the_same_grammar_is_compiled_once() -> None:
    asked = engine()
    ask(asked, *(request(id, DATE) for id in range(1, 6)))
    ask(asked, request(9, DATE))
    assert asked.stats().grammars == 1


def test_several_tokens_of_one_step_follow_the_grammar_together() -> None:
    class Pairs(Babble):
        """Answers two tokens a step, as verified drafts would: a digit, and a seven after it."""

        def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
            result = super()._compute(batch, masks)
            rows = [row._replace(tokens=(*row.tokens, ord("7"))) for row in result.rows]
            return result._replace(rows=tuple(rows))

    stepping = engine(Pairs())
    stepping.add(request(1, Grammar("regex", "[0-9]{4}-[0-9]{2}")))
    events = drain(stepping)
    text = bytes(t for event in events if isinstance(event, Tokens) for t in event.tokens if t != END).decode()
    assert re.fullmatch(r"\d7\d7-\d7", text)
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.report is not None
    assert end.report.forced == 2  # the dash, and the end


def test_an_engine_without_a_tokenizer_says_so() -> None:
    backend = Babble()
    backend.reserve_kv(LIMITS.num_blocks, LIMITS.block_size)
    with pytest.raises(Exception, match="started without a tokenizer"):
        assemble(backend, LIMITS).add(request(1, DATE))


def test_a_grammar_that_becomes_too_complex_fails_instead_of_ending_the_answer() -> None:
    class Broken:
        """Allows the end, as the library does after an error."""

        def is_error(self) -> bool:
            return bool(self.failed)

        def get_error(self) -> str:
            return "lexer error: too many expressions"

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            self.failed = True
            ctypes.memset(pointer, 255, size)

        def consume_token(self, token: int) -> bool:
            return True

        failed = False

    broken: Any = Broken()
    constraint = Constraint(broken, frozenset({END}), LIMITS.vocab, None, Costs())
    assert not constraint.bitmasks(())[0].any()
    with pytest.raises(InvalidGrammar, match="too many expressions"):
        constraint.take(END, force=True)


# -- other notations, and grammars that wait for a trigger --------------------------------------------------------

GBNF = Grammar("gbnf", 'root ::= "<call>" [0-9]{2} "</call>"')
TAG = {"type": "structural_tag", "structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}]}
LAZY = GBNF._replace(triggers=("<call>", "<other>"))


@pytest.mark.parametrize("kind", ["gbnf", "ebnf"])
def test_rules_in_other_notations(kind: str) -> None:
    text, reason = ask(engine(), request(1, GBNF._replace(kind=kind)))[0]
    assert re.fullmatch(r"<call>\d\d</call>", text)
    assert reason == "stop"


class Speaker(Babble):
    """Says a text by heart, as far as its grammar lets it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._said = text.encode()

    def _compute(self, batch: Batch, masks: Bitmasks | None) -> StepResult:
        places = batch.positions[batch.sampled].tolist()
        logits = np.random.default_rng(0).normal(0, 1, (len(places), LIMITS.vocab))
        for row, place in zip(logits, places, strict=True):
            row[self._said[place - 1] if place - 1 < len(self._said) else END] += 50
        return sample(logits.astype(np.float32), batch, masks)


def said(text: str, grammar: Grammar, **settings: Any) -> tuple[str, str]:
    """What becomes of a text that a model would say. The prompt has two tokens, so the text begins at place one."""
    return ask(engine(Speaker(text)), request(1, grammar, temperature=0, **settings))[0]


def test_text_is_free_until_a_trigger_was_generated() -> None:
    assert said("free text", LAZY) == ("free text", "stop")
    text, reason = said("free <call>not a number", LAZY)
    assert re.fullmatch(r"free <call>\d\d</call>", text)
    assert reason == "stop"
    assert re.fullmatch(r"<call>\d\d</call>", said("<call>x", LAZY)[0])
    assert re.fullmatch(r"a <call>1\d</call>", said("a <call>1", LAZY, logprobs=1)[0])


def test_what_triggers_a_grammar_must_match_it() -> None:
    asked = engine(Speaker("a <other>"))
    asked.add(request(1, LAZY, temperature=0))
    (failed,) = [event for event in drain(asked) if isinstance(event, Failed)]
    assert failed.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("<c[a-z]+>", "a <call>no", r"a <call>\d\d</call>"),
        ("(?:now|then): (<call>)", "then: <call>no", r"then: <call>\d\d</call>"),
        (r"^[\s\S]*?(<call>)[\s\S]*$", "a\n<call>no", r"a\n<call>\d\d</call>"),
        ("^(<call>)$", "<call>no", r"<call>\d\d</call>"),
        ("^(<call>)$", "a <call>no", "a <call>no"),
        ("(<call>|<other>)x", "a <call>no", "a <call>no"),
    ],
)
def test_patterns_trigger_a_grammar_from_their_first_group_on(pattern: str, text: str, expected: str) -> None:
    assert re.fullmatch(expected, said(text, GBNF._replace(trigger_patterns=(pattern,)))[0])


def test_tokens_trigger_a_grammar() -> None:
    """The letter x begins what must match."""
    lazy = Grammar("gbnf", 'root ::= "x" [0-9]', trigger_tokens=(ord("x"),))
    assert re.fullmatch(r"mix\d", said("mix it", lazy)[0])


def test_a_trigger_within_a_token() -> None:
    class Syllables(Bytes):
        """One token spells the end of a word and the beginning of a call."""

        def token_bytes(self, id: int) -> bytes:
            return b"k <ca" if id == 1 else super().token_bytes(id)

    for first in ([1, *b"ll>"], [*b"ok <call>"]):
        speaker = Speaker("")
        speaker._said = bytes(first)
        asked = engine(speaker, vocabulary=Syllables)
        asked.add(request(1, LAZY, temperature=0))
        tokens = [token for event in drain(asked) if isinstance(event, Tokens) for token in event.tokens]
        assert re.fullmatch(rb"o?k <call>\d\d</call><end>", b"".join(map(Syllables().token_bytes, tokens)))


@pytest.mark.parametrize("pattern", ["(?=a)b", "(", "["])
def test_a_pattern_that_cannot_be_watched_for_is_refused(pattern: str) -> None:
    asked = engine()
    asked.add(request(1, GBNF._replace(trigger_patterns=(pattern,))))
    (failed,) = drain(asked)
    assert isinstance(failed, Failed)
    assert "trigger" in failed.message


def test_structural_tags_hold_what_a_trigger_begins() -> None:
    grammar = Grammar("structural_tag", json.dumps(TAG | {"triggers": ["<n>"]}))
    assert said("seven", grammar)[0] == "seven"
    assert said("it is <n>8</n>!", grammar)[0].startswith("it is <n>7</n>")


class Spaced(Bytes):
    """Puts a space before every text, as SentencePiece does."""

    def encode(self, text: str) -> list[int]:
        return super().encode(f" {text}")


def test_forced_tokens_have_no_space_that_a_vocabulary_puts_before_texts() -> None:
    tokenizer = grammar_module._LibraryTokenizer(Spaced(), 300)
    assert tokenizer(b"abc") == Bytes().encode("abc")
    assert grammar_module._LibraryTokenizer(Bytes(), 300)(b"abc") == Bytes().encode("abc")
