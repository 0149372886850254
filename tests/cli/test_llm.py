from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock
from penstock import (
    LLM,
    BeamSearchParams,
    Grammar,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    Targets,
)
from penstock.errors import (
    AdapterError,
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    PenstockError,
    StepFailed,
)
from penstock.llm.engine_options import read_options
from penstock.store import DerivedModel, save_derived
from penstock.types import AdapterUse, Claim, DryPenalty, Event, Failed, SamplerChain, Thinking, sampling_fields

MODELS = Path(__file__).parents[1] / "models"
RECITED = "abcdefghijklménopqrstuvwxyz"
CHAT = [{"role": "user", "content": "go"}]
STRANGE = StructuredOutputsParams(regex=re.compile("a"))  # type: ignore[arg-type]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def vector(llm: LLM, prompt: Any, **options: Any) -> np.ndarray:
    (output,) = llm.embed(prompt, **options)
    return output.outputs.vector


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, device="ref", max_rows=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    llm._engine.inner.step()
    assert llm._engine.inner.engine.idle
    assert not llm._engine.pending
    assert llm._engine.inner.engine.stats().blocks_used == 0


def test_a_derived_model_is_computed_with_its_adapters(
    reciter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are registered before anything is asked, so that one of another base is an error at once."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    derived = DerivedModel(name="mate", base="reciter", path=str(reciter))
    save_derived(derived)
    with LLM("mate", device="ref") as mate:
        assert mate._uses(None, 1) == [()]
    save_derived(replace(derived, adapters=[str(MODELS / "adapters" / "gpt2")]))
    with pytest.raises(AdapterError, match="which this model does not have"):
        LLM("mate", device="ref")
    monkeypatch.setattr("penstock.engine.build.open_adapters", lambda *_: None)
    with LLM("mate", device="ref") as mate:
        assert mate._uses("other", 1) == [(AdapterUse("Modelfile's adapter 1"), AdapterUse("other"))]
        assert mate.adapter_names == ()


def test_chats_of_a_derived_model_begin_as_its_modelfile_says(reciter: Path) -> None:
    greeting = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made = DerivedModel(name="mate", base="reciter", path=str(reciter), system="Be brief.", messages=greeting)
    save_derived(made)
    with LLM("mate", device="ref") as mate:
        (answer,) = mate.chat(CHAT, SamplingParams(max_tokens=1))
        turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", "go")]
        begun = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        assert answer.prompt == f"{begun}<|im_start|>assistant\n"
    save_derived(replace(made, template="{{ .System }}|{{ .Prompt }};{{ .Response }}"))
    with LLM("mate", device="ref") as mate:
        (answer,) = mate.chat(CHAT, SamplingParams(max_tokens=1))
        assert str(answer.prompt) == "Be brief.|hi;ho|go;"


def test_a_text_is_continued(llm: LLM) -> None:
    (done,) = llm.generate("uvw")
    (answer,) = done.outputs
    assert (answer.index, answer.text, answer.finish_reason, answer.stop_reason) == (0, "xyz", "stop", None)
    assert (answer.logprobs, answer.cumulative_logprob, answer.finished()) == (None, None, True)
    assert (done.prompt, done.prompt_token_ids) == ("uvw", llm._maker.text.encode_prompt("uvw"))
    assert len(answer.token_ids) == 4  # the end's own token is one of them
    assert (done.text, done.tokens, done.finish_reason) == (answer.text, answer.token_ids, answer.finish_reason)
    assert (done.finished, done.prompt_logprobs) == (True, None)


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm._maker.text.encode_prompt("uvw")
    assert texts(llm.generate(ids)) == texts(llm.generate(np.array(ids))) == ["xyz"]
    assert texts(llm.generate([ids, ids[:2]])) == ["xyz", "wxyz"]
    mixed = ["uvw", {"prompt": "uv"}, {"prompt_token_ids": ids}, ids[:2]]
    assert texts(llm.generate(mixed)) == ["xyz", "wxyz", "xyz", "wxyz"]
    assert texts(llm.generate(mixed[1])) == ["wxyz"]
    assert [done.prompt for done in llm.generate(mixed)] == ["uvw", "uv", None, None]


def test_embeddings_have_a_length_of_one(llm: LLM) -> None:
    one = vector(llm, "uvw")
    dim = llm._maker.limits.dim
    assert (one.shape, one.dtype) == ((dim,), np.float32)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert np.array_equal(vector(llm, llm._maker.text.encode_prompt("uvw")), one)
    many = llm.embed(["abc", "uvw"])
    assert many[1].outputs.embedding == pytest.approx(one.tolist(), abs=1e-6)
    assert (many[1].outputs.hidden_size, many[1].prompt_token_ids) == (dim, llm._maker.text.encode_prompt("uvw"))
    assert not np.allclose(vector(llm, "uvw", pooling="last"), one)
    assert np.array_equal(vector(llm, "uvwabc", truncate_prompt_tokens=3), one)
    most = one[: dim - 9]
    assert vector(llm, "uvw", dimensions=dim - 9) == pytest.approx(most / np.linalg.norm(most), abs=1e-6)
    assert llm.embed([]) == []
    (raw,) = llm.encode("uvw")
    assert raw.outputs.data / np.linalg.norm(raw.outputs.data) == pytest.approx(one, abs=1e-6)


def test_scores_of_an_embedding_model_are_cosines() -> None:
    with LLM(MODELS / "encoders" / "bert", device="ref") as bert:
        one, other = vector(bert, "the river"), vector(bert, "a stone")
        found = [output.outputs.score for output in bert.score("the river", ["the river", "a stone"])]
        assert found == pytest.approx([1, one @ other], abs=1e-5)
        pairs = bert.score(["the river", "a stone"], ["a stone", "a stone"])
        assert [output.outputs.score for output in pairs] == pytest.approx([one @ other, 1], abs=1e-5)
        with pytest.raises(InvalidRequest, match="data_1 has 2 texts and data_2 3"):
            bert.score(["a", "b"], ["a", "b", "c"])
        with pytest.raises(InvalidRequest, match="it has no classification head"):
            bert.classify("a")


def test_a_model_without_a_head_neither_scores_nor_classifies(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="this model cannot score"):
        llm.score("a", "b")
    with pytest.raises(InvalidRequest, match="this model cannot classify"):
        llm.classify("a")


def test_what_cannot_be_embedded_is_refused(llm: LLM) -> None:
    for call, told in (
        (lambda: llm.embed([[]]), "prompt is empty"),
        (lambda: llm.embed("a", pooling="max"), "pooling must be mean, last or cls; got 'max'"),
        (lambda: llm.embed("a", dimensions=0), "dimensions must be from 1 to"),
        (lambda: llm.embed([1.5]), "a prompt is a text, a list of token ids"),
        (lambda: llm.embed([0] * 5000), "5000 tokens and the context holds"),
        (lambda: llm.embed([10**6]), "prompt token ids must be"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            call()


def test_many_prompts_answer_in_their_order(llm: LLM) -> None:
    prompts = [RECITED[: 1 + i % 12] for i in range(16)]
    before = llm._engine.inner.engine.stats().steps
    done = llm.generate(prompts)
    assert [prompt + text for prompt, text in zip(prompts, texts(done), strict=True)] == [RECITED] * 16
    assert llm._engine.inner.engine.stats().steps - before < sum(len(one.tokens) for one in done) / 4
    assert llm.generate([]) == []


def test_chat_and_its_stream_say_the_same(llm: LLM) -> None:
    (whole,) = llm.chat(CHAT)
    assert whole.text == RECITED
    assert whole.prompt == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    stream = llm.stream(CHAT)
    pieces = list(stream)
    assert "".join(pieces) == RECITED
    assert len(pieces) > 1
    assert any("é" in piece for piece in pieces)
    assert stream.completion.outputs == whole.outputs
    assert texts(llm.chat([CHAT, CHAT])) == [RECITED, RECITED]


def test_a_second_turn_reuses_the_first(llm: LLM) -> None:
    (first,) = llm.chat(CHAT)
    turns = [*CHAT, {"role": "assistant", "content": first.text}, {"role": "user", "content": "again"}]
    assert llm.chat(turns)[0].num_cached_tokens >= 32


@pytest.mark.parametrize(("stop", "kept"), [(("def",), "abc"), (("é",), "abcdefghijklm"), (("zz", "bcd"), "a")])
def test_a_stop_string_ends_an_answer(llm: LLM, stop: tuple[str, ...], kept: str) -> None:
    params = SamplingParams(stop=stop, logprobs=0, max_tokens=30)
    (done,) = llm.chat(CHAT, params)[0].outputs
    assert (done.text, done.finish_reason, done.stop_reason) == (kept, "stop", stop[-1])
    assert len(done.token_ids) == len(done.logprobs or ()) == len(kept.encode()) + len(stop[-1].encode())
    assert "".join(llm.stream(CHAT, params)) == kept


def test_a_stop_token_is_no_text(llm: LLM) -> None:
    (d,) = llm._maker.text.tokenizer.encode("d")
    (done,) = llm.chat(CHAT, SamplingParams(stop_token_ids=[d]))[0].outputs
    assert (done.text, done.token_ids[-1], done.finish_reason, done.stop_reason) == ("abc", d, "stop", d)


def test_length_and_what_half_a_character_becomes(llm: LLM) -> None:
    (done,) = llm.chat(CHAT, SamplingParams(max_tokens=14))
    assert (done.text, done.finish_reason) == ("abcdefghijklm\ufffd", "length")


def test_an_answer_ends_where_the_context_does(reciter: Path) -> None:
    with LLM(reciter, device="ref", max_len=8) as llm:
        for most in (6, 4096, None):
            (done,) = llm.generate("abc", SamplingParams(max_tokens=most))
            assert (done.text, done.finish_reason) == ("defgh", "length")
        assert llm.generate("abc")[0].text == "defgh"
        assert len(llm.generate("a" * 7, SamplingParams(max_tokens=3))[0].tokens) == 1
        with pytest.raises(ContextTooLong, match="the context holds 8"):
            llm.generate("a" * 8, SamplingParams(max_tokens=3))


def test_an_emptied_cache_is_empty(llm: LLM) -> None:
    llm.generate(RECITED)
    assert llm.generate(RECITED)[0].num_cached_tokens == 16
    assert llm.reset_prefix_cache()
    assert llm.generate(RECITED)[0].num_cached_tokens == 0


def test_prompts_can_be_scored(llm: LLM) -> None:
    (done,) = llm.generate("abc", SamplingParams(prompt_logprobs=1, max_tokens=1))
    first, *rest = done.prompt_logprobs or ()
    assert first is None
    for token, scores in zip(llm._maker.text.encode_prompt("bc"), rest, strict=True):
        assert scores is not None
        assert scores[token].logprob > -0.1
        assert (scores[token].rank, scores[token].decoded_token) == (1, llm._maker.text.tokenizer.token_text(token))


def test_logprobs_have_the_chosen_token_and_the_alternatives(llm: LLM) -> None:
    (answer,) = llm.generate("uvw", SamplingParams(temperature=0, logprobs=2, max_tokens=1))[0].outputs
    (position,) = answer.logprobs or ()
    (chosen,) = answer.token_ids
    assert (position[chosen].decoded_token, position[chosen].rank) == ("x", 1)
    assert sorted(entry.rank or 0 for entry in position.values()) == [1, 2]
    assert answer.cumulative_logprob == pytest.approx(position[chosen].logprob)


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
    with pytest.raises(InvalidRequest, match="token ids"):
        llm.generate([[1, "x"]])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest):
        llm.generate("")
    with pytest.raises(InvalidRequest, match="from 0 to 257"):
        llm.generate([[1], [2], [999]])


@pytest.mark.parametrize("kv", ["f16", "f32", "int8"])
def test_the_kv_cache_can_be_kept_in_several_types(reciter: Path, kv: str) -> None:
    with LLM(reciter, device="cpu", kv=kv, max_rows=1) as llm:
        assert texts(llm.generate("uvw")) == ["xyz"]


def test_answers_can_be_deterministic(reciter: Path, penstock: Callable[..., Any]) -> None:
    with LLM(reciter, device="cpu", max_rows=2, deterministic=True) as llm:
        assert texts(llm.generate(["uvw", RECITED[:20]])) == ["xyz", RECITED[20:]]
    with pytest.raises(ConfigError, match="not deterministic"):
        LLM(reciter, device="ref", deterministic=True)
    done = penstock("run", reciter, "uvw", "--device", "cpu", "--deterministic")
    assert (done.code, done.out) == (0, f"{RECITED}\n")
    for command in ("serve", "bench"):
        assert "--deterministic" in penstock(command, "--help").out


def test_blocks_and_steps_can_have_other_sizes(reciter: Path) -> None:
    with LLM(reciter, device="cpu", max_rows=2, block_size=5, step_tokens=7, prefill_budget=3) as llm:
        assert texts(llm.generate(["uvw", RECITED[:20], RECITED])) == ["xyz", RECITED[20:], ""]
        assert llm._maker.limits[1:4] == (2, 7, 5)


def test_an_older_name_of_an_option_works_and_is_told(reciter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(reciter, device="ref", max_tokens=99) as llm:
        assert llm._maker.limits.step_tokens == 99
    assert capsys.readouterr().err == "option max_tokens is now called step_tokens; the older name still works\n"


def test_unknown_settings_and_models_are_named(reciter: Path) -> None:
    with pytest.raises(ConfigError, match="unknown options: max_length, speed; there are adapter, "):
        LLM(reciter, max_length=5, speed="high")
    with pytest.raises(ModelNotFound):
        LLM("no-such-model")


def on_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch, act: Callable[[list[Event]], list[Event]]) -> None:
    engine = llm._engine.inner.engine
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
        assert texts(llm.chat(CHAT)) == [RECITED]


def test_threads_share_an_llm_and_its_steps(llm: LLM) -> None:
    prompts = [RECITED[: 1 + i % 20] for i in range(24)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        if number % 3:
            answers[number] = texts(llm.generate(prompts[number], use_tqdm=False))[0]
        else:
            answers[number] = "".join(llm.stream(prompts[number]))

    before = llm._engine.inner.engine.stats().steps
    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {number: prompts[number] + answer for number, answer in answers.items()} == dict.fromkeys(range(24), RECITED)
    alone = sum(len(answer.encode()) + 1 for answer in answers.values())
    assert llm._engine.inner.engine.stats().steps - before < alone * 0.8


def test_one_threads_failure_is_its_own(llm: LLM) -> None:
    failures: list[Exception] = []

    def fail() -> None:
        try:
            llm.generate([[1], [999]])
        except InvalidRequest as error:
            failures.append(error)

    thread = threading.Thread(target=fail)
    thread.start()
    assert texts(llm.chat(CHAT)) == [RECITED]
    thread.join()
    assert len(failures) == 1


def test_an_error_in_reading_one_answer_is_no_other_answers(llm: LLM) -> None:
    class Broken:
        def __getattr__(self, _: str) -> Any:
            raise ZeroDivisionError

    failing, other = llm.stream("abc"), llm.stream("uv")
    failing._pending.choices[0]._text = Broken()  # type: ignore[assignment]
    assert "".join(other) == "wxyz"
    with pytest.raises(ZeroDivisionError):
        next(failing)


def test_a_closed_llm_says_so(reciter: Path) -> None:
    llm = LLM(reciter, device="ref", max_rows=1)
    stream = llm.stream(CHAT)
    next(stream)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("a"), lambda: llm.embed("a"), lambda: llm.stream("a"), lambda: next(stream)):
        with pytest.raises(PenstockError, match="this LLM is closed"):
            use()


def test_choices(llm: LLM) -> None:
    last = SamplingParams(n=2, temperature=100.0, max_tokens=4, seed=2**64 - 1)
    first = replace(last, n=1, seed=0)
    assert llm.generate("abc", last)[0].outputs[1].text == llm.generate("abc", first)[0].outputs[0].text
    params = SamplingParams(n=3, temperature=100.0, max_tokens=4, seed=5)
    (done,) = llm.generate("abc", params)
    assert [answer.index for answer in done.outputs] == [0, 1, 2]
    assert len({answer.text for answer in done.outputs}) == 3
    alone = [llm.generate("abc", replace(params, n=1, seed=5 + choice))[0].outputs[0] for choice in range(3)]
    assert [answer.token_ids for answer in done.outputs] == [answer.token_ids for answer in alone]
    scored = llm.generate("abc", replace(params, logprobs=0))[0].outputs
    (best,) = llm.generate("abc", replace(params, n=1, best_of=3))[0].outputs
    likeliest = max(scored, key=lambda answer: answer.cumulative_logprob or 0)
    assert (best.text, best.index, best.logprobs) == (likeliest.text, 0, None)
    with pytest.raises(InvalidRequest, match="a stream has one answer"):
        llm.stream("abc", params)


def test_each_prompt_may_have_its_own_sampling(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    assert texts(llm.generate(["a", "a"], each)) == ["b", "bc"]
    assert texts(llm.chat([CHAT, CHAT], each)) == ["a", "ab"]
    with pytest.raises(InvalidRequest, match="there are 3 prompts and 2 sampling parameters"):
        llm.generate(["a", "b", "c"], each)


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("max_tokens", 2.5, "a whole number or None"),
        ("n", "2", "a whole number"),
        ("temperature", "hot", "a number"),
        ("top_p", None, "a number"),
        ("ignore_eos", "yes", "True or False"),
        ("stop", ["a", 5], "a text or a list of texts"),
        ("bad_words", "\ud800", "a text or a list of texts"),
        ("stop_token_ids", ["a"], "a list of token ids"),
        ("stop_token_ids", [2**70], "a list of token ids"),
        ("allowed_token_ids", 7, "a list of token ids or None"),
        ("logit_bias", {"a": 1}, "a dictionary of token ids and numbers"),
        ("logit_bias", {2**70: 1}, "a dictionary of token ids and numbers"),
        ("logit_bias", {1: 10**310}, "a dictionary of token ids and numbers"),
        ("grammar", "root ::= x", "a Grammar or None"),
        ("structured_outputs", {"json": {}}, "a StructuredOutputsParams or None"),
        ("output_kind", "delta", "a whole number"),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: Any, takes: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"{field} takes {takes}; got {value!r:.100}")):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("given", "name", "takes"),
    [
        ({"grammar": Grammar("regex", 5)}, "grammar.text", "a text; got 5"),  # type: ignore[arg-type]
        ({"grammar": Grammar("regex", "\ud800")}, "grammar.text", "a text; got '\\ud800'"),
        ({"grammar": Grammar("free", "", Thinking((1,), 2**70))}, "grammar.thinking.opens", "a token id; got 11805"),
        ({"structured_outputs": STRANGE}, "structured_outputs.regex", "a text or None; got re.compile('a')"),
        ({"guided_decoding": StructuredOutputsParams(json=dict)}, "guided_decoding.json", "JSON as a text or a dic"),  # type: ignore[arg-type]
        ({"dry": DryPenalty("x")}, "dry.multiplier", "a number; got 'x'"),  # type: ignore[arg-type]
        ({"dry": DryPenalty(1.0, breakers=(1,))}, "dry.breakers", "a text or a list of texts; got (1,)"),  # type: ignore[arg-type]
        ({"chain": SamplerChain(mersenne="x")}, "chain.mersenne", "True or False; got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_a_part_of_a_field_of_another_type_is_refused(given: dict[str, Any], name: str, takes: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(f"{name} takes {takes}")) as refused:
        SamplingParams(**given)
    assert refused.value.param == name


def test_every_field_has_the_type_that_an_engine_process_reads() -> None:
    given: dict[str, Any] = {"n": np.int64(2), "temperature": np.float32(0.5), "ignore_eos": np.True_}
    given |= {
        "logit_bias": {np.int64(1): np.float32(2)},
        "stop_token_ids": np.arange(2),
        "stop": np.array(["a", "b"])[0],
    }
    given |= {"dry": DryPenalty(np.float32(1), breakers=["a"]), "chain": SamplerChain(["top_k"], np.float64(1))}
    given |= {"grammar": Grammar(np.str_("regex"), "a", triggers=["b"], trigger_tokens=np.arange(2))}
    params = SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert {field.name for field in fields(SamplingParams)} == set(sampling_fields._FIELDS)
    grammar, outputs, dry, chain = map(
        sampling_fields._FIELDS.__getitem__, ("grammar", "structured_outputs", "dry", "chain")
    )
    assert [set(each.fields) for each in (grammar, grammar.fields["thinking"], outputs, dry, chain)] == [
        set(kind._fields) for kind in (Grammar, Thinking, StructuredOutputsParams, DryPenalty, SamplerChain)
    ]
    with pytest.raises(InvalidRequest, match="seed must be between"):
        SamplingParams(seed=2**64)


@pytest.mark.parametrize("wrong", [None, 5, [["a", "b"]], [5.5], object()])
def test_what_is_no_prompt_is_told(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is a text, a list of token ids, or a dictionary"):
        llm.generate(wrong)


@pytest.mark.parametrize("wrong", [None, "Hello", ["Hello"], [["Hello"]], {"role": "user", "content": "Hello"}])
def test_what_is_no_conversation_is_told(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a conversation is a list of messages such as"):
        llm.chat(wrong)


@pytest.mark.parametrize("wrong", [{"max_tokens": 3}, [{"max_tokens": 3}], 7])
def test_what_is_no_sampling_is_told(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params takes penstock\.SamplingParams\(\.\.\.\)"):
        llm.generate("abc", wrong)


@pytest.mark.parametrize("wrong", [LoRARequest("a", scale="much"), AdapterUse(5), AdapterUse("a", None)])  # type: ignore[arg-type]
def test_what_is_no_adapter_is_told(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="lora_request takes the name of an adapter and a number as its scale"):
        llm.generate("abc", lora_request=wrong)


def test_what_sampling_takes(llm: LLM) -> None:
    assert SamplingParams(stop="is a").stop == ("is a",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1], bad_words=["c"], top_k=-1, logit_bias=None) == (
        SamplingParams(stop=("a", "b"), stop_token_ids=(1,), bad_words=("c",))
    )
    with pytest.raises(TypeError, match="'speed'"):
        SamplingParams(speed=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="best_of must be between 2 and"):
        SamplingParams(n=2, best_of=1)
    (answer,) = llm.chat(CHAT, SamplingParams(stop="def", include_stop_str_in_output=True))
    assert answer.text == "abcdef"
    (answer,) = llm.chat(CHAT, SamplingParams(max_tokens=3, detokenize=False))
    assert (answer.text, len(answer.tokens)) == ("", 3)
    end = "<|im_end|>"
    assert texts(llm.generate("xy", SamplingParams(skip_special_tokens=False, ignore_eos=True, max_tokens=2))) == [
        f"z{end}"
    ]
    (cut,) = llm.generate("abcxy", SamplingParams(truncate_prompt_tokens=2))
    assert (cut.prompt_token_ids, cut.text) == (llm._maker.text.encode_prompt("xy"), "z")


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": {"type": "null"}}, Grammar("json", '{"type": "null"}')),
        ({"json": "{}"}, Grammar("json", "{}")),
        ({"json_object": True}, Grammar("json", '{"type": "object"}')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["a", 'b"']}, Grammar("lark", 'start: CHOICE\nCHOICE: "a" | "b\\""')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"grammar": 'root ::= "a"'}, Grammar("gbnf", 'root ::= "a"')),
        ({"structural_tag": {"a": 1}}, Grammar("structural_tag", '{"a": 1}')),
    ],
)
def test_structured_outputs_become_grammars(given: dict[str, Any], grammar: Grammar) -> None:
    outputs = StructuredOutputsParams(**given)
    assert SamplingParams(structured_outputs=outputs) == SamplingParams(grammar=grammar)
    assert SamplingParams(guided_decoding=outputs).grammar == grammar
    with pytest.raises(InvalidRequest, match="takes exactly one of"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"]))


def test_chat_options(llm: LLM) -> None:
    (done,) = llm.chat(CHAT, SamplingParams(max_tokens=1), chat_template="{{ messages[0].content }} {{ tone }}:")
    assert done.prompt == "go :"
    (done,) = llm.chat(
        CHAT, SamplingParams(max_tokens=1), chat_template="{{ tone }}:", chat_template_kwargs={"tone": "low"}
    )
    assert done.prompt == "low:"
    begun = [*CHAT, {"role": "assistant", "content": "abc"}]
    (done,) = llm.chat(begun, add_generation_prompt=False, continue_final_message=True)
    assert done.text == RECITED[3:]
    with pytest.raises(InvalidRequest, match="needs add_generation_prompt=False"):
        llm.chat(begun, continue_final_message=True)
    parts = [{"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]}]
    assert llm.chat(parts)[0].prompt == llm.chat(CHAT)[0].prompt
    with pytest.raises(InvalidRequest, match="content can be text only"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}])


def test_beams_find_what_is_likeliest(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    found = llm.beam_search(["abc", {"prompt": "wx"}], params)
    assert [output.sequences[0].text for output in found] == ["abcdef", "wxyz"]
    assert [(output.sequences[0].finish_reason) for output in found] == ["length", "stop"]
    first, second = found[0].sequences
    assert 0 > first.cum_logprob > second.cum_logprob
    assert first.tokens == llm._maker.text.encode_prompt("abcdef")
    assert found[1].sequences[0].stop_reason in llm._maker.text.tokenizer.eos_ids
    assert "yz" in llm.beam_search("wx", replace(params, ignore_eos=True))[0].sequences[0].text
    with pytest.raises(InvalidRequest, match="beam width must be between 1 and 10"):
        llm.beam_search("abc", BeamSearchParams(beam_width=11, max_tokens=3))


def test_a_bar_counts_the_prompts(llm: LLM) -> None:
    counts: list[int] = []

    class Bar:
        def __init__(self, **given: Any) -> None:
            counts.append(given["total"])

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int) -> None:
            counts.append(count)

    llm.generate(["uvw", "a"], use_tqdm=Bar)
    assert (counts[0], sum(counts[1:])) == (2, 2)


def test_the_tokenizer_has_the_methods_that_scripts_use(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("abc")
    assert (tokenizer.decode(ids), tokenizer.decode(ids[0]), tokenizer("abc")) == ("abc", "a", {"input_ids": ids})
    assert tokenizer.encode("abc", add_special_tokens=False) == ids
    assert len(tokenizer) == tokenizer.vocab_size == 258
    assert tokenizer.decode([tokenizer.eos_token_id or 0]) == "<|im_end|>"
    assert tokenizer.decode([tokenizer.eos_token_id or 0], skip_special_tokens=True) == ""
    assert tokenizer.bos_token_id is None
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompt == llm.chat(CHAT)[0].prompt
    assert tokenizer.apply_chat_template(CHAT) == llm.chat(CHAT)[0].prompt_token_ids


def test_options_of_vllm(reciter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"tensor_parallel_size": 1, "trust_remote_code": True, "enforce_eager": True, "quantization": None}
    sizes = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    with LLM(model=str(reciter), device="ref", **options, **sizes) as llm:
        assert llm._maker.limits[:3] == (64, 3, 32)
    assert capsys.readouterr().err == ""
    own = {"temperature": 0.125, "top_k": 3}
    with LLM(reciter, device="ref", dtype="half", gpu_memory_utilization=0.9, override_generation_config=own) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(**own, max_tokens=None)
    assert capsys.readouterr().err == ("warning: options of vLLM without effect here: dtype, gpu_memory_utilization\n")
    read = read_options({"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "max_length": 3})
    assert read.engine == {"quantize": "fp8", "kv": "fp8", "max_length": 3}
    read = read_options({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}})
    assert read.engine == {"speculation": "4"}
    with pytest.raises(ConfigError, match="'medusa', which is not supported"):
        read_options({"speculative_config": {"method": "medusa"}})


def test_calls_have_targets_of_their_own_or_those_of_the_engine(reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(reciter, device="ref", targets=Targets(ttft=2.0, itl=0.05)) as llm:
        claims, submit = list[Claim](), llm._engine.submit

        def watch(choices: list[Any]) -> None:
            claims.extend(choice.request.claim for choice in choices)
            submit(choices)

        monkeypatch.setattr(llm._engine, "submit", watch)
        few = SamplingParams(max_tokens=2)
        llm.generate("ab", few, use_tqdm=False)
        llm.generate("ab", few, use_tqdm=False, targets=Targets(itl=0.2))
        llm.chat(CHAT, few, use_tqdm=False, targets=Targets(ttft=9.0))
        llm.stream("ab", few, targets=Targets(1.0, 0.1)).rest()
        assert claims == [Claim(ttft=ttft, itl=itl) for ttft, itl in ((2.0, 0.05), (2.0, 0.2), (9.0, 0.05), (1.0, 0.1))]
        for wrong in (0.05, (0.05, None), Targets(itl=0.0), Targets(ttft=-1), Targets(itl="50")):  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest, match="each in seconds, above 0, or None; got"):
                llm.generate("ab", few, use_tqdm=False, targets=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="targets are"):
        LLM(reciter, device="ref", targets=0.05)


def test_a_seed_repeats_calls_in_their_order(reciter: Path) -> None:
    hot = SamplingParams(temperature=100.0, max_tokens=5)
    runs = []
    for seed in (1, 1, 2):
        with LLM(reciter, device="ref", seed=seed) as llm:
            runs.append([llm.generate("a", hot)[0].tokens for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


def test_a_folders_own_sampling_is_the_default(reciter: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reciter, tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 9}')
    with LLM(folder, device="ref") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=9, max_tokens=None)
        assert llm._maker.generation(llm._maker.prompt("a"), None).params.top_k == 9
        assert llm._maker.generation(llm._maker.prompt("a"), SamplingParams()).params.temperature == 1.0


def test_the_public_names_are_listed() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "Grammar", "RequestOutput"} <= set(dir(penstock))
