"""The official SDK is the judge: what it reads from our answers, streamed and whole, and what it raises."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server import toys

MODEL = "toy/parrot"


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": f"[{text}]"}], **fields}


def streamed(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


TEXTS = [
    "hello",
    "naïve café",
    "漢字かな交じり文",
    "👩‍👩‍👧 family",
    "line\nline\r\n\ttab",
    'quotes " and \\ slashes',
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_chat_whole_and_streamed_read_the_same(parrot: Any, text: str) -> None:
    sdk = parrot.sdk()
    whole = sdk.chat.completions.create(**say(text))
    assert whole.object == "chat.completion"
    assert whole.model == MODEL
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(sdk.chat.completions.create(**say(text, stream=True)))
    assert streamed(chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("text", TEXTS)
def test_completions_whole_and_streamed_read_the_same(parrot: Any, text: str) -> None:
    sdk = parrot.sdk()
    whole = sdk.completions.create(model=MODEL, prompt=f"[{text}]", max_tokens=100)
    assert whole.object == "text_completion"
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(sdk.completions.create(model=MODEL, prompt=f"[{text}]", max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_async_chat_whole_and_streamed(parrot: Any) -> None:
    async def scenario() -> None:
        async with parrot.async_sdk() as sdk:
            whole, stream = await asyncio.gather(
                sdk.chat.completions.create(**say("one")), sdk.chat.completions.create(**say("two", stream=True))
            )
            assert whole.choices[0].message.content == "one"
            assert streamed([chunk async for chunk in stream]) == "two"

    asyncio.run(scenario())


def test_async_completions_whole_and_streamed(parrot: Any) -> None:
    async def scenario() -> None:
        async with parrot.async_sdk() as sdk:
            whole = await sdk.completions.create(model=MODEL, prompt="[one]")
            assert whole.choices[0].text == "one"
            stream = await sdk.completions.create(model=MODEL, prompt="[two]", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "two"

    asyncio.run(scenario())


def test_the_sdks_own_accumulation_of_a_stream(parrot: Any) -> None:
    with parrot.sdk().chat.completions.stream(**say("héllo", stream_options={"include_usage": True})) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "héllo"
    assert final.usage.completion_tokens == len("héllo".encode()) + 1


def test_usage_counts_prompt_answer_and_cached(parrot: Any) -> None:
    sdk = parrot.sdk()
    asked = say("a prompt that fills several blocks of sixteen tokens")
    first, again = sdk.chat.completions.create(**asked).usage, sdk.chat.completions.create(**asked).usage
    prompt = len(f"user:{asked['messages'][0]['content']}\nassistant:")
    assert first.prompt_tokens == prompt
    assert first.completion_tokens == prompt - len("user:[]\nassistant:") + 1
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert again.prompt_tokens_details.cached_tokens == (prompt - 1) // 16 * 16
    assert first.prompt_tokens_details.cached_tokens < again.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_include_usage_adds_a_last_chunk_without_choices(parrot: Any, path: str) -> None:
    sdk = parrot.sdk()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    if path == "chat":
        chunks = list(sdk.chat.completions.create(**say("hello", **options)))
    else:
        chunks = list(sdk.completions.create(model=MODEL, prompt="[hello]", **options))
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 6
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])


def test_max_tokens_ends_with_length(parrot: Any) -> None:
    sdk = parrot.sdk()
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        choice = sdk.chat.completions.create(**say("hello", **limit)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hel", "length")


def test_half_a_character_at_the_end_becomes_a_replacement(parrot: Any) -> None:
    sdk = parrot.sdk()
    whole = sdk.chat.completions.create(**say("aé", max_tokens=2)).choices[0].message.content
    chunks = list(sdk.chat.completions.create(**say("aé", max_tokens=2, stream=True)))
    assert whole == streamed(chunks) == "a\ufffd"


def test_defaults_for_max_tokens(parrot: Any) -> None:
    sdk = parrot.sdk()
    whole = sdk.chat.completions.create(**say("*abc"))
    assert whole.usage.total_tokens == 512
    assert whole.choices[0].finish_reason == "length"
    assert sdk.completions.create(model=MODEL, prompt="[*abc]").usage.completion_tokens == 16


@pytest.mark.parametrize("stop", [" and", [" and", "zzz"], ["never", " and"]])
def test_stop_strings_end_the_text_before_them(parrot: Any, stop: Any) -> None:
    sdk = parrot.sdk()
    asked = say("you an I and they and *", stop=stop)
    choice = sdk.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("you an I", "stop")
    chunks = list(sdk.chat.completions.create(**asked, stream=True))
    assert streamed(chunks) == "you an I"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stop_string_aborts_the_engines_request(slow_parrot: Any) -> None:
    done = slow_parrot.client.stats.generated_tokens
    usage = slow_parrot.sdk().chat.completions.create(**say("*abcdef", stop="cd")).usage
    assert usage.completion_tokens == 4
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.generated_tokens - done < toys.ENDLESS // 2
    assert slow_parrot.client.stats.blocks_used == 0


def test_stop_token_ids_and_ignore_eos(parrot: Any) -> None:
    sdk = parrot.sdk()
    choice = sdk.chat.completions.create(**say("hello", extra_body={"stop_token_ids": [ord("l")]})).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("he", "stop")
    whole = sdk.chat.completions.create(**say("hi", max_tokens=6, extra_body={"ignore_eos": True}))
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hi", "length")
    assert whole.usage.completion_tokens == 6


def test_n_gives_as_many_choices(parrot: Any) -> None:
    sdk = parrot.sdk()
    whole = sdk.chat.completions.create(**say("hello", n=3, seed=7))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {"hello"}
    assert whole.usage.prompt_tokens == len("user:[hello]\nassistant:")
    assert whole.usage.completion_tokens == 18
    texts = ["", "", ""]
    roles = [0, 0, 0]
    for chunk in sdk.chat.completions.create(**say("hello", n=3, stream=True)):
        delta = chunk.choices[0].delta
        roles[chunk.choices[0].index] += delta.role == "assistant"
        texts[chunk.choices[0].index] += delta.content or ""
    assert texts == ["hello"] * 3
    assert roles == [1, 1, 1]


def test_several_prompts_and_several_choices(parrot: Any) -> None:
    sdk = parrot.sdk()
    whole = sdk.completions.create(model=MODEL, prompt=["[one]", "[two]"], n=2, extra_body={"best_of": 2})
    assert [choice.text for choice in whole.choices] == ["one", "one", "two", "two"]
    ids = [list(b"[one]"), list(b"[two]")]
    assert [choice.text for choice in sdk.completions.create(model=MODEL, prompt=ids).choices] == ["one", "two"]
    assert sdk.completions.create(model=MODEL, prompt=list(b"[one]")).choices[0].text == "one"


def test_every_sampling_field_is_taken(parrot: Any) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": False,
        "stop_token_ids": [250],
        "skip_special_tokens": True,
    }
    settings = {
        "temperature": 0.3,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.1,
        "logit_bias": {"65": -100},
        "seed": 2**63 - 1,
        "stop": None,
        "n": 1,
        "user": "me",
    }
    choice = parrot.sdk().chat.completions.create(**say("hello", **settings, extra_body=extra)).choices[0]
    assert choice.message.content == "hello"


def test_neutral_values_are_accepted(parrot: Any) -> None:
    no_effect = {
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "prompt_cache_key": "k",
    }
    choice = parrot.sdk().chat.completions.create(**say("hello", **no_effect)).choices[0]
    assert choice.message.content == "hello"


def test_messages_of_every_role_and_parts_of_text(parrot: Any) -> None:
    sdk = parrot.sdk()
    said = sdk.chat.completions.create(**say("hi")).choices[0].message
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "[part"}],
            "name": "x",
        },
        said,
        {"role": "tool", "content": "1]", "tool_call_id": "call"},
    ]
    whole = sdk.chat.completions.create(model=MODEL, messages=messages)
    assert whole.choices[0].message.content == "part\nassistant:hi\ntool:1"
    assert whole.usage.prompt_tokens == len("system:be brief\nuser:first\n[part\nassistant:hi\ntool:1]\nassistant:")


def test_chat_logprobs_are_of_the_tokens_of_the_text(parrot: Any) -> None:
    sdk = parrot.sdk()
    asked = say("aé", logprobs=True, top_logprobs=2)
    entries = sdk.chat.completions.create(**asked).choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "aé"
    assert [entry.token for entry in entries] == ["a", "\ufffd", "\ufffd"]
    assert entries[0].logprob == -ord("a") / 64
    assert [(top.token, top.logprob) for top in entries[0].top_logprobs] == [("a", -ord("a") / 64), ("A", -8.0)]
    chunks = list(sdk.chat.completions.create(**asked, stream=True))
    parts = [chunk.choices[0] for chunk in chunks]
    assert [entry for part in parts if part.logprobs for entry in part.logprobs.content] == entries
    plain = sdk.chat.completions.create(**say("aé", logprobs=True)).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in plain] == [[], [], []]
    assert sdk.chat.completions.create(**say("aé")).choices[0].logprobs is None


def test_models(parrot: Any) -> None:
    sdk = parrot.sdk()
    (model,) = sdk.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "penstock")
    assert sdk.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="toy/parrot"):
        sdk.models.retrieve("toy/other")


def test_request_ids_differ_and_reach_the_sdk(parrot: Any) -> None:
    sdk = parrot.sdk()
    first, second = (sdk.chat.completions.create(**say("a"))._request_id for _ in range(2))
    assert first.startswith("req-")
    assert first != second
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**say("a", top_p=7))
    assert caught.value.request_id.startswith("req-")


def test_errors_become_the_sdks_exceptions(strict_parrot: Any) -> None:
    sdk = strict_parrot.sdk()
    with pytest.raises(openai.NotFoundError, match="serves 'toy/parrot'") as missing:
        sdk.chat.completions.create(**say("a") | {"model": "gpt"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="unknown field 'foo'") as unknown:
        sdk.chat.completions.create(**say("a"), extra_body={"foo": 1})
    assert (unknown.value.param, unknown.value.type) == ("foo", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="512") as too_long:
        sdk.completions.create(model=MODEL, prompt="x" * 600)
    assert too_long.value.code == "context_length_exceeded"
    assert "600" in str(too_long.value)
