"""An answer at temperature 0 that repeats itself without end is ended, always at the same token; nothing else is."""

from __future__ import annotations

import json
from collections.abc import Sequence as Tokens
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Scheduler, Sequence, SequenceParams
from penstock.core.loop_guard import EVERY, LONGEST, REPEATS, SPAN, loop_phrase
from penstock.model.gguf.reader import read_gguf
from penstock.text import Tokenizer
from penstock.types import Finished
from tests.core import world

SOURCES = Path(__file__).parents[2]


def guarded(max_tokens: int = 10_000, least: int = 0, stop: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(1, (7, 7, 7), max_tokens, SequenceParams(stop_ids=stop, guarded_from=least))


def appended(seq: Sequence, tokens: Tokens[int], piece: int) -> int:
    """Returns how many tokens the answer has when it ends, or has all."""
    for at in range(0, len(tokens), piece):
        seq.append(tuple(tokens[at : at + piece]))
        if len(seq.tokens) == seq.max_len:
            break
    return len(seq.tokens) - seq.prompt_len


@given(st.integers(1, LONGEST), st.integers(0, 700), st.integers(1, 200))
def test_a_loop_ends_at_the_same_token_however_many_come_at_once(phrase: int, before: int, piece: int) -> None:
    answer = [*range(1000, 1000 + before), *list(range(phrase)) * 4500][:4500]
    one, other = guarded(), guarded()
    length = appended(one, answer, 1)
    assert length == appended(other, answer, piece)
    assert one.times.loop == other.times.loop == phrase
    repeated = length - before
    assert max(SPAN, REPEATS * phrase) <= repeated < max(SPAN, REPEATS * phrase) + EVERY
    assert one.tokens == other.tokens


@given(st.integers(1, LONGEST), st.integers(0, 100))
def test_a_resumed_answer_ends_at_the_same_token(phrase: int, before: int) -> None:
    answer = [*range(1000, 1000 + before), *list(range(phrase)) * 4500][:4500]
    length = appended(guarded(), answer, 1)
    ended = Sequence(1, (7, 7, 7), 10_000, SequenceParams(guarded_from=0), generated=tuple(answer[:length]))
    assert ended.looped
    assert (ended.times.loop, ended.max_len) == (phrase, length + 3)
    for cut in (length - 1, length - EVERY, length // 2):
        resumed = Sequence(1, (7, 7, 7), 10_000, SequenceParams(guarded_from=0), generated=tuple(answer[:cut]))
        assert not resumed.looped
        assert appended(resumed, answer[cut:], 5) == length
    assert not Sequence(1, (7,), 10_000, generated=tuple(answer[:length])).looped


def test_what_was_asked_for_goes_first() -> None:
    zeros = [0] * 3000
    assert appended(Sequence(1, (7,), 2000), zeros, 1) == 2000
    assert appended(guarded(SPAN - 1), zeros, 1) == SPAN - 1
    assert appended(guarded(least=2500), zeros, 1) == 2560
    stopped = guarded(stop=frozenset({9}))
    stopped.append(tuple(zeros[: SPAN - 1]))
    assert stopped.append((9, 0, 0)) == ((9,), 9)
    assert stopped.times.loop == 0
    late = guarded(stop=frozenset({9}))
    late.append(tuple(zeros[: SPAN - 1]))
    assert late.append((0, 0, 9)) == ((0,), None)
    assert late.times.loop == 1


def test_a_prompt_is_no_part_of_a_loop() -> None:
    seq = Sequence(1, (0,) * 4000, 3000, SequenceParams(guarded_from=0))
    assert appended(seq, [0] * 2000, 1) == SPAN


def test_the_scheduler_ends_a_loop_as_it_ends_what_is_too_long() -> None:
    scheduler = Scheduler(world.limits(max_len=4096, num_blocks=1024))
    events = world.run(scheduler, guarded(4000))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.report is not None
    assert (last.reason, last.report.loop, len(events) - 1) == ("length", 1, SPAN)
    assert scheduler.stats().blocks_used == 0


# -- what is no loop ----------------------------------------------------------------------------------------------


def zeros(rows: int, columns: int) -> str:
    return "\n".join("| " + " | ".join(["0"] * columns) + " |" for _ in range(rows))


HARMLESS = {
    "a table of zeros": zeros(24, 10),
    "a matrix in JSON": json.dumps([[0] * 20] * 20),
    "a list of numbers": "\n".join(f"{number}. item" for number in range(3000)),
    "a list of squares": ", ".join(str(number * number) for number in range(3000)),
    "rows that differ in their number": "\n".join(f"{number},0,0,0,ok" for number in range(2000)),
    "records": "\n".join(json.dumps({"id": number, "name": "", "tags": []}) for number in range(1000)),
    "three hundred zeros": "0, " * 300,
    "a rule": "-" * 4000,
    "a verse with its chorus": ("We will, we will rock you. " * 20 + "Buddy you're a boy. ") * 12,
    "a multiplication table": "\n".join(f"{a} x {b} = {a * b}" for a in range(1, 40) for b in range(1, 40)),
    "assertions": "\n".join(f"    assert value[{number}] == 0" for number in range(1500)),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(smollm2).metadata)


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_lists_and_tables_are_no_loops(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert appended(guarded(1_000_000), tokens, 1) == len(tokens)


@pytest.mark.parametrize("pattern", ["*.md", "docs/*.md", "src/penstock/**/*.py", "src/**/*.h", "src/**/*.html"])
def test_prose_and_code_are_no_loops(tokenizer: Tokenizer, pattern: str) -> None:
    for path in SOURCES.glob(pattern):
        tokens = tokenizer.encode(path.read_text(encoding="utf-8"))
        assert appended(guarded(10_000_000), tokens, 64) == len(tokens), path


def test_a_loop_with_a_change_is_none() -> None:
    assert loop_phrase([1, 2, 3] * 400) == 3
    assert loop_phrase([1, 2, 3] * 200 + [4] + [1, 2, 3] * 200) == 0
    assert loop_phrase([1] * (SPAN - 1)) == 0
    assert loop_phrase(list(range(LONGEST + 1)) * 40) == 0
