"""The parts of the gateway alone: who an engine is, what it is guessed to hold, and how streams are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.fleet.foreign.engine import as_set, parse_engine
from penstock.fleet.foreign.guess import CHUNK, GuessedCache, chunk_hashes, prompt_text
from penstock.fleet.foreign.http import EngineLost, parse_url
from penstock.fleet.foreign.kinds import EngineKind, kind_of, models_of
from penstock.fleet.foreign.sse_stream import Continuation, EventStream, TokenUse, usage_in
from penstock.fleet.holders import REMOVED

# -- who it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ({"/api/version": {"version": "0.12", "penstock": "0.1"}, "/props": {}, "/version": {}}, EngineKind.PENSTOCK),
        ({"/api/version": {"version": "0.12"}}, EngineKind.OLLAMA),
        ({"/props": {"default_generation_settings": {}}}, EngineKind.LLAMACPP),
        ({"/get_server_info": {"model_path": "x"}, "/version": "x"}, EngineKind.SGLANG),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "sglang"}]}}, EngineKind.SGLANG),
        ({"/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}, EngineKind.VLLM),
        ({"/metrics": "# TYPE vllm:num_requests_running gauge"}, EngineKind.VLLM),
        ({"/v1/models": {"data": [{"id": "gpt", "owned_by": "openai"}]}}, EngineKind.OPENAI),
        ({}, EngineKind.OPENAI),
        ({"/v1/models": ["nonsense"], "/props": "text", "/api/version": "text"}, EngineKind.OPENAI),
    ],
)
def test_the_kind_is_known_by_what_it_answers(found: dict[str, Any], kind: EngineKind) -> None:
    assert kind_of(found) is kind


def test_models_are_called_by_short_names() -> None:
    found = {
        "/v1/models": {
            "data": [{"id": "/a/b/Model.Q4.gguf"}, {"id": "llama3:latest"}, {"id": "lora", "parent": "b"}, 3]
        }
    }
    assert [each[:3] for each in models_of(found)] == [
        ("Model.Q4", "/a/b/Model.Q4.gguf", ""),
        ("llama3", "llama3:latest", ""),
        ("lora", "lora", "b"),
    ]
    named = as_set(parse_engine("http://h,model=mine,alias=x,model@llama3=other,weight@lora=2"), models_of(found))
    assert [(name, each.id, each.aliases, each.weight) for name, each in named.items()] == [
        ("mine", "/a/b/Model.Q4.gguf", ("x",), 1.0),
        ("other", "llama3:latest", (), 1.0),
        ("lora", "lora", (), 2.0),
    ]


def test_an_option_says_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-1")
    spec = parse_engine(
        "https://host:1/base/v1,name=n,model=m,alias=gpt-*,alias=x,weight=2.5,priority=-1,key-env=KEY,"
        "events=tcp://h:5557,replay=tcp://h:5558,kind=vllm"
    )
    assert str(spec.url) == "https://host:1/base"
    events = "tcp://h:5557", "tcp://h:5558"
    assert spec[1:] == ("n", "m", ("gpt-*", "x"), 2.5, -1, "sk-1", *events, EngineKind.VLLM, {})
    assert parse_engine("host:8000").name == "host:8000"
    assert str(parse_url("http://[::1]:8/")) == "http://[::1]:8"


@pytest.mark.parametrize(
    "option",
    ["", "ftp://x", "http://", "http://h:99999", "http://h,weight=0", "http://h,weight=x", "http://h,colour=red",
     "http://h,priority=high", "http://h,key-env=NO_SUCH_VARIABLE", "http://h,kind=gpt", "http://h,weight"],
)  # fmt: skip
def test_a_wrong_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError):
        parse_engine(option)


# -- what it holds --------------------------------------------------------------------------------------------------


def test_a_prompt_is_chunked_from_its_beginning() -> None:
    messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "one"}]
    longer = [*messages, {"role": "assistant", "content": "x" * 300}]
    short, long = (chunk_hashes(prompt_text({"messages": each})) for each in (messages, longer))
    assert len(short) == 1
    assert len(long) == 2
    assert long[0] == short[0]
    assert chunk_hashes(prompt_text({"messages": messages, "tools": [{}]}))[0] != short[0]
    assert prompt_text({"prompt": [1, 2]}) == "[1,2]"


def test_an_answer_without_cached_tokens_takes_the_belief_away() -> None:
    cache, old, new = GuessedCache(), chunk_hashes("a" * CHUNK * 8), chunk_hashes("b" * CHUNK * 8)
    cache.served(old)
    cache.served(new)
    assert cache.depth(old) == 8
    changes = cache.served(old, 0.0)  # it was not there: so whatever was used before it is gone, and it is there now
    assert {block for tier, block in changes if tier == REMOVED} >= set(old)
    assert cache.capacity == 8  # what was used since filled it
    assert (cache.depth(old), cache.depth(new)) == (8, 0)
    cache.served(new, 0.0)
    assert (cache.depth(old), cache.depth(new)) == (0, 8)


def test_an_answer_with_more_cached_tokens_than_believed_gives_it_back() -> None:
    cache, prompt = GuessedCache(), chunk_hashes("a" * CHUNK * 8)
    cache.capacity = 0.0
    cache.served(prompt)
    assert cache.depth(prompt) == 0
    cache.served(prompt, 1.0)
    assert cache.depth(prompt) == 8


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.none() | st.floats(0, 1)), max_size=40))
def test_changes_always_lead_to_what_is_believed(requests: list[tuple[int, int, float | None]]) -> None:
    cache, told = GuessedCache(), set[Any]()
    cache.capacity = 12.0
    for prompt, length, cached in requests:
        for tier, block in cache.served(chunk_hashes(chr(97 + prompt) * CHUNK * length), cached):
            (told.discard if tier == REMOVED else told.add)(block)
        assert told == set(cache._blocks)
        assert len(cache) <= max(cache.capacity, 0)


# -- streams --------------------------------------------------------------------------------------------------------


def event(choices: list[Any], **more: Any) -> bytes:
    return b"data: " + json.dumps({"id": "x", "choices": choices, **more}).encode() + b"\n\n"


def word(text: str, finish: str | None = None) -> bytes:
    return event([{"index": 0, "delta": {"content": text}, "finish_reason": finish}])


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = word("one ") + word('"usage": {') + word("", "length") + event([], usage=USAGE) + b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans(), st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], wanted: bool, returns: bool) -> None:
    stream = EventStream(wanted, keep=True)
    ends = sorted({0, *cuts, len(STREAM)})
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(ends)]
    if returns:
        pieces = [STREAM.replace(b"\n", b"\r\n")]
    passed = b"".join(stream.push(piece) for piece in pieces)
    stream.end()
    kept = word("one ") + word('"usage": {') + word("", "length")
    assert passed == (kept + event([], usage=USAGE) if wanted else kept)
    assert (stream.use, stream.finish) == (TokenUse(9, 2, 4), "length")
    assert stream.so_far().text == 'one "usage": {'


def test_an_error_event_and_a_sudden_end_are_noticed() -> None:
    with pytest.raises(EngineLost, match="boom"):
        EventStream(False, keep=True).push(b'data: {"error": {"message": "boom"}}\n\n')
    stream = EventStream(False, keep=False)
    stream.push(word("one"))
    with pytest.raises(EngineLost, match="finish reason"):
        stream.end()


def test_llamacpps_older_versions_tell_cached_tokens_in_their_timings() -> None:
    body = {"usage": {"prompt_tokens": 5, "completion_tokens": 1}, "timings": {"cache_n": 3}}
    assert usage_in(json.dumps(body).encode()) == TokenUse(5, 1, 3)
    assert usage_in(b"nonsense") is None


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=6), st.data())
def test_what_is_repeated_is_left_out(said: str, rest: str, data: st.DataObject) -> None:
    whole = said + rest
    cuts = sorted({0, *data.draw(st.lists(st.integers(0, len(whole)), max_size=4)), len(whole)})
    fit = Continuation({"id": "old"}, said, ["b"])
    role = event([{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}])
    sent = role + b"".join(word(whole[a:b]) for a, b in itertools.pairwise(cuts))
    out = [json.loads(each[6:]) for each in fit.fit(sent).split(b"\n\n") if each]
    assert "".join(each["choices"][0]["delta"]["content"] for each in out) == rest
    assert {each["id"] for each in out} == {"old"}
    assert [each.get("penstock") for each in out] == [{"resumed_on": ["b"]}] + [None] * (len(out) - 1)
