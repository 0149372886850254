from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock import LLM, Completion, SamplingParams
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest, ModelNotFound, StepFailed
from penstock.types import Event, Failed

RECITED = "abcdefghijklménopqrstuvwxyz"
CHAT = [{"role": "user", "content": "go"}]


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, device="ref", max_rows=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    llm._engine.step()
    assert llm._engine.engine.idle
    assert not llm._pending
    assert llm._engine.engine.stats().blocks_used == 0


def test_a_text_is_continued(llm: LLM) -> None:
    done = llm.generate("uvw")
    assert done.text == "xyz"
    assert done.finish_reason == "stop"
    assert (done.prompt_tokens, len(done.tokens)) == (3, 4)  # the end's own token is one of them


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm._text.encode_prompt("uvw")
    assert llm.generate(ids).text == llm.generate(np.array(ids)).text == "xyz"
    assert [done.text for done in llm.generate([ids, ids[:2]])] == ["xyz", "wxyz"]


def test_embeddings_have_a_length_of_one(llm: LLM) -> None:
    one = llm.embed("uvw")
    dim = llm._limits.dim
    assert (one.shape, one.dtype) == ((dim,), np.float32)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert np.array_equal(llm.embed(llm._text.encode_prompt("uvw")), one)
    many = llm.embed(["abc", "uvw"])
    assert many.shape == (2, dim)
    assert np.allclose(many[1], one, atol=1e-6)
    assert not np.allclose(llm.embed("uvw", pooling="last"), one)
    most = one[: dim - 9]
    assert llm.embed("uvw", dimensions=dim - 9) == pytest.approx(most / np.linalg.norm(most), abs=1e-6)
    assert llm.embed([]).shape == (0, dim)


def test_what_cannot_be_embedded_is_refused(llm: LLM) -> None:
    for call, told in (
        (lambda: llm.embed([[]]), "prompt is empty"),
        (lambda: llm.embed("a", pooling="max"), "pooling must be mean, last or cls; got 'max'"),
        (lambda: llm.embed("a", dimensions=0), "dimensions must be from 1 to"),
        (lambda: llm.embed([1.5]), "a prompt is a text or a list of token ids"),
        (lambda: llm.embed([0] * 5000), "5000 tokens and the context holds"),
        (lambda: llm.embed([10**6]), "prompt token ids must be"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            call()


def test_many_prompts_answer_in_their_order(llm: LLM) -> None:
    prompts = [RECITED[: 1 + i % 12] for i in range(16)]
    before = llm._engine.engine.stats().steps
    done = llm.generate(prompts)
    assert [prompt + one.text for prompt, one in zip(prompts, done, strict=True)] == [RECITED] * 16
    assert llm._engine.engine.stats().steps - before < sum(len(one.tokens) for one in done) / 4
    assert llm.generate([]) == []


def test_chat_and_its_stream_say_the_same(llm: LLM) -> None:
    whole = llm.chat(CHAT)
    assert whole.text == RECITED
    stream = llm.stream(CHAT)
    pieces = list(stream)
    assert "".join(pieces) == RECITED
    assert len(pieces) > 20
    assert "é" in pieces
    assert stream.completion == Completion(**{**_fields(whole), "cached_tokens": stream.completion.cached_tokens})


def test_a_second_turn_reuses_the_first(llm: LLM) -> None:
    first = llm.chat(CHAT)
    turns = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "again"}]
    assert llm.chat(turns).cached_tokens >= 32


@pytest.mark.parametrize(("stop", "kept"), [(("def",), "abc"), (("é",), "abcdefghijklm"), (("zz", "bcd"), "a")])
def test_a_stop_string_ends_an_answer(llm: LLM, stop: tuple[str, ...], kept: str) -> None:
    params = SamplingParams(stop=stop, logprobs=0)
    done = llm.chat(CHAT, params)
    assert (done.text, done.finish_reason) == (kept, "stop")
    assert len(done.tokens) == len(done.logprobs) == len(kept.encode()) + len(stop[-1].encode())
    assert "".join(llm.stream(CHAT, params)) == kept


def test_a_stop_token_is_no_text(llm: LLM) -> None:
    (d,) = llm._text.tokenizer.encode("d")
    done = llm.chat(CHAT, SamplingParams(stop_token_ids=(d,)))
    assert (done.text, done.tokens[-1], done.finish_reason) == ("abc", d, "stop")


def test_length_and_what_half_a_character_becomes(llm: LLM) -> None:
    done = llm.chat(CHAT, SamplingParams(max_tokens=14))
    assert (done.text, done.finish_reason) == ("abcdefghijklm\ufffd", "length")


def test_prompts_can_be_scored(llm: LLM) -> None:
    done = llm.generate("abc", SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert [score.token for score in done.prompt_logprobs] == llm._text.encode_prompt("bc")
    assert all(score.logprob > -0.1 for score in done.prompt_logprobs)


def test_streams_take_turns(llm: LLM) -> None:
    one, other = llm.stream("abc"), llm.stream("xy")
    assert next(one) == "d"
    assert "".join(other) == "z"
    assert "".join(one) == RECITED[4:]
    one, other = llm.stream("abc"), llm.stream("xy")
    assert "".join(one) == RECITED[3:]
    assert "".join(other) == "z"  # it came while the other was read


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    for piece in llm.stream(CHAT):
        assert piece == "a"
        break
    llm.stream(CHAT)
    stream = llm.stream(CHAT)
    next(stream)
    stream.close()
    assert (stream.completion.text, stream.completion.finish_reason) == ("a", "abort")
    assert list(stream) == []


def test_what_cannot_be_answered_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match="4096"):
        llm.generate([1] * 5000)
    with pytest.raises(ContextTooLong):
        llm.stream("a", SamplingParams(max_tokens=4096))
    with pytest.raises(InvalidRequest, match="token ids"):
        llm.generate([[1, "x"]])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest):
        llm.generate("")
    with pytest.raises(InvalidRequest, match="from 0 to 257"):
        llm.generate([[1], [2], [999]])


@pytest.mark.parametrize("kv", ["f16", "f32", "int8"])
def test_the_kv_cache_can_be_kept_in_several_types(reciter: Path, kv: str) -> None:
    with LLM(reciter, device="cpu", kv=kv, max_rows=1) as llm:
        assert llm.generate("uvw").text == "xyz"


def test_blocks_and_steps_can_have_other_sizes(reciter: Path) -> None:
    with LLM(reciter, device="cpu", max_rows=2, block_size=5, step_tokens=7, prefill_budget=3) as llm:
        assert [done.text for done in llm.generate(["uvw", RECITED[:20], RECITED])] == ["xyz", RECITED[20:], ""]
        assert llm._limits[1:4] == (2, 7, 5)


def test_an_older_name_of_an_option_works_and_is_told(reciter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(reciter, device="ref", max_tokens=99) as llm:
        assert llm._limits.step_tokens == 99
    assert capsys.readouterr().err == "option max_tokens is now called step_tokens; the older name still works\n"


def test_unknown_settings_and_models_are_named(reciter: Path) -> None:
    with pytest.raises(ConfigError, match="unknown options: max_length, speed; there are block_size, config, device"):
        LLM(reciter, max_length=5, speed="high")
    with pytest.raises(ModelNotFound):
        LLM("no-such-model")


def on_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[list[Event]], list[Event]]) -> None:
    engine = llm._engine.engine
    step = engine.step

    def once() -> list[Event]:
        monkeypatch.undo()
        return act(step())

    monkeypatch.setattr(engine, "step", once)


def test_a_failed_step_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(events: list[Event]) -> list[Event]:
        return [Failed(event.seq, "step_failed", "the step failed") for event in events]

    for ask in (llm.chat, lambda chat: list(llm.stream(chat))):
        on_next_step(llm, monkeypatch, fail)
        with pytest.raises(StepFailed, match="the step failed"):
            ask(CHAT)


def test_an_interrupt_waits_for_the_step_and_leaves_the_engine_sound(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def interrupt(events: list[Event]) -> list[Event]:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            reached.append(True)
        return events

    for ask in (llm.chat, lambda chat: list(llm.stream(chat))):
        reached.clear()
        on_next_step(llm, monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(CHAT)
        assert len(reached) == 1000
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.chat(CHAT).text == RECITED


def _fields(done: Completion) -> dict[str, object]:
    return {name: getattr(done, name) for name in Completion.__dataclass_fields__}
