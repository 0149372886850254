"""The whole of it: the default model in an engine process behind the server, and the SDK in front."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import ollama
import pytest

from penstock import LLM, SamplingParams
from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text

MODEL = "smollm2"
QUESTIONS = [
    f"What is the capital of {country}?" for country in ("France", "Italy", "Japan", "Egypt", "Peru", "Norway")
]


@pytest.fixture(scope="module")
def server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=MODEL, max_len=1024, max_rows=16)
    with serve(ProcessClient(config), load_text(smollm2), MODEL, smollm2) as server:
        yield server


def ask(question: str, **fields: Any) -> dict[str, Any]:
    settings = {"model": MODEL, "temperature": 0, "max_tokens": 24} | fields
    return settings | {"messages": [{"role": "user", "content": question}]}


def test_it_answers(server: Any) -> None:
    whole = server.sdk().chat.completions.create(**ask("Why is the sky blue?", max_tokens=60))
    assert "scatter" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.prompt_tokens > 10


def test_the_best_of_several(server: Any) -> None:
    asked = {"model": MODEL, "prompt": "The best thing about", "seed": 3, "max_tokens": 6}
    all = server.sdk().completions.create(**asked, n=4, logprobs=0).choices
    means = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs) for choice in all]
    best = sorted(range(4), key=lambda each: means[each], reverse=True)
    told = server.sdk().completions.create(**asked, n=2, best_of=4, extra_body={"penstock": True})
    assert [choice.text for choice in told.choices] == [all[each].text for each in best[:2]]
    assert [choice.index for choice in told.choices] == [0, 1]
    assert told.choices[0].logprobs is None
    assert told.usage.completion_tokens == 24
    assert len(told.penstock["choices"]) == 2


def test_streamed_whole_and_scripted_answers_are_the_same(server: Any, smollm2: Path) -> None:
    question = "Write a line with an emoji, and one in French."
    sdk = server.sdk()
    asked = ask(question, max_tokens=40)
    whole = sdk.chat.completions.create(**asked).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(**asked, stream=True)
    )
    with LLM(smollm2, max_len=1024) as llm:
        scripted = llm.chat(asked["messages"], SamplingParams(temperature=0, max_tokens=40))[0].text
    assert whole == streamed == scripted


def test_every_way_to_an_embedding_gives_the_same_bits(server: Any, smollm2: Path) -> None:
    """Beside an answer, from a process, in both dialects, and in a script. Of three texts, two alike are nearest."""
    texts = ["The cat sat on the mat.", "A cat was sitting on the rug.", "Stock prices fell sharply on Monday."]
    sdk = server.sdk()
    with sdk.chat.completions.create(**ask("Tell a story.", stream=True)) as beside:
        next(beside)
        told = [entry.embedding for entry in sdk.embeddings.create(model=MODEL, input=texts).data]
    assert ollama.Client(server.url).embed(MODEL, texts).embeddings == told
    with LLM(smollm2, max_len=1024) as llm:
        embedded = llm.embed(texts)
    assert [output.outputs.embedding for output in embedded] == told
    vectors = np.stack([output.outputs.vector for output in embedded])
    near = vectors @ vectors.T
    assert near[0, 1] > max(near[0, 2], near[1, 2])


def test_three_dialects_give_one_answer(server: Any) -> None:
    asked = ask("What is the sea?")
    told = server.sdk().chat.completions.create(**asked).choices[0].message.content
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    fields = {"model": MODEL, "max_tokens": 24, "messages": asked["messages"], "extra_body": {"temperature": 0}}
    assert claude.create(**fields).content[0].text == told
    with claude.stream(**fields) as stream:
        assert stream.get_final_text() == told
    parts = ollama.Client(server.url).chat(
        MODEL, asked["messages"], options={"temperature": 0, "num_predict": 24}, stream=True
    )
    assert "".join(part.message.content or "" for part in parts) == told


SIZES = {"type": "object", "properties": {"sea": {"enum": ["large", "small"]}}, "required": ["sea"]}
SIZES["additionalProperties"] = False


def test_schemas_in_other_dialects(server: Any) -> None:
    asked = ask("Is the sea large or small? Answer in JSON.")
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages
    config: Any = {"format": {"type": "json_schema", "schema": SIZES}}
    told = claude.create(model=MODEL, max_tokens=40, messages=asked["messages"], output_config=config)
    client = ollama.Client(server.url)
    whole = client.chat(MODEL, asked["messages"], format=SIZES).message.content or ""
    parts = client.generate(MODEL, asked["messages"][0]["content"], format=SIZES, stream=True)
    for text in (told.content[0].text, whole, "".join(part.response or "" for part in parts)):
        assert json.loads(text)["sea"] in ("large", "small")
    unknown = server.post("/api/chat", model=MODEL, messages=asked["messages"], format="yaml", stream=False)
    assert unknown.json()["penstock"]["ignored_fields"] == ["format"]


def test_ollamas_client_reads_what_is_served(server: Any) -> None:
    client = ollama.Client(server.url)
    shown = client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 1024
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert "<|im_start|>" in (shown.template or "")
    details = client.ps().models[0].details
    assert details is not None
    assert (details.format, details.family, details.parameter_size) == ("gguf", "llama", "134.52M")
    assert details.quantization_level == "Q4_1"


def test_the_second_time_the_prompt_is_reused(server: Any) -> None:
    sdk = server.sdk()
    asked = ask("Count from one to five, please, and tell me what you think of each of the numbers.", max_tokens=4)
    first, second = (sdk.chat.completions.create(**asked) for _ in range(2))
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 17
    assert first.choices[0].message.content == second.choices[0].message.content


def test_scoring_prefers_the_right_continuation(server: Any, smollm2: Path) -> None:
    """As lm-eval's local-completions client does it."""
    encode = load_text(smollm2).encode_prompt
    context = encode("The capital of France is")
    continuations = [encode(" Paris"), encode(" banana"), encode(" Tuesday")]
    prompts = [context + continuation for continuation in continuations]
    asked = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    answer = server.post("/v1/completions", echo=True, **asked).json()
    scores = [sum(choice["logprobs"]["token_logprobs"][len(context) : -1]) for choice in answer["choices"]]
    assert max(scores) == scores[0]
    told = answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(prompts[0]) + 1
    assert told["token_logprobs"][len(context)] == max(told["top_logprobs"][len(context)].values())
    assert "".join(told["tokens"][:-1]) == "The capital of France is Paris"


def test_logprobs_of_a_greedy_answer_are_those_of_its_echo(server: Any) -> None:
    prompt = "The sea is"
    told = server.post("/v1/completions", model=MODEL, prompt=prompt, max_tokens=6, temperature=0, logprobs=0).json()
    generated = told["choices"][0]
    again = server.post(
        "/v1/completions", model=MODEL, prompt=prompt + generated["text"], max_tokens=0, logprobs=0, echo=True
    ).json()
    scored = again["choices"][0]["logprobs"]["token_logprobs"][-6:]
    assert scored == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)


def test_answers_in_a_crowd_equal_those_alone_and_leave_no_block(server: Any) -> None:
    async def read(sdk: Any, question: str, leave: bool) -> str:
        text = ""
        stream = await sdk.chat.completions.create(**ask(question), stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if leave and text:
                await stream.close()
                break
        return text

    async def crowd() -> list[str]:
        async with server.async_sdk() as sdk:
            return await asyncio.gather(*(read(sdk, question, at % 3 == 2) for at, question in enumerate(QUESTIONS)))

    together = asyncio.run(crowd())
    server.until_idle()
    assert server.client.stats.blocks_used == 0
    sdk = server.sdk()
    for at, question in enumerate(QUESTIONS):
        if at % 3 != 2:
            assert together[at] == sdk.chat.completions.create(**ask(question)).choices[0].message.content


def test_a_killed_engine_is_back_with_the_same_answer(server: Any) -> None:
    sdk = server.sdk()
    before = sdk.chat.completions.create(**ask(QUESTIONS[1])).choices[0].message.content
    pid = server.get("/health").json()["engine"]["pid"]
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.client.restarts == 1)
    assert server.get("/health").json()["engine"]["pid"] != pid
    assert sdk.chat.completions.create(**ask(QUESTIONS[1])).choices[0].message.content == before


def test_tokens_there_and_back(server: Any, smollm2: Path) -> None:
    text = "Rivers run <|im_end|> to the sea."
    told = server.post("/tokenize", model=MODEL, prompt=text, return_token_strs=True).json()
    assert told["tokens"] == load_text(smollm2).encode_prompt(text)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert "".join(told["token_strs"]) == text
    assert told["max_model_len"] == 1024
    assert server.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": text, "content": text}
    plain = server.post("/tokenize", content=text, parse_special=False, with_pieces=True).json()["tokens"]
    assert "".join(token["piece"] for token in plain) == text
    assert len(plain) > told["count"]


def test_a_rendered_chat_is_the_prompt_of_an_answer(server: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    prompt = server.post("/apply-template", messages=messages).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    counted = server.post("/tokenize", messages=messages).json()["count"]
    assert counted == server.post("/tokenize", prompt=prompt).json()["count"]
    asked = {"model": MODEL, "messages": messages, "max_tokens": 1}
    assert server.sdk().chat.completions.create(**asked).usage.prompt_tokens == counted


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/tokenize", {}, "send exactly one of prompt, content, messages; got none of them"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "got prompt and content"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "token ids are from 0 to"),
        ("/apply-template", {"messages": []}, "messages is empty"),
    ],
)
def test_what_cannot_be_tokenized_is_named(server: Any, path: str, fields: dict[str, Any], told: str) -> None:
    answer = server.post(path, **fields)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


def test_a_batch_says_what_requests_say(server: Any) -> None:
    sdk = server.sdk()
    lines = [
        {"custom_id": question, "method": "POST", "url": "/v1/chat/completions", "body": ask(question)}
        for question in QUESTIONS
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    file = sdk.files.create(file=("questions.jsonl", content), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    server.until(lambda: sdk.batches.retrieve(batch.id).status == "completed")
    output = sdk.files.content(sdk.batches.retrieve(batch.id).output_file_id).text
    told = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, output.splitlines())
    }
    direct = sdk.chat.completions.create(**ask(QUESTIONS[0])).choices[0].message.content
    assert list(told) == QUESTIONS
    assert told[QUESTIONS[0]] == direct


# -- speculation --------------------------------------------------------------------------------------------------

REPEATED = "Say after me: red, green, blue, red, green, blue, red, green, blue, red, green, blue."


def drafted(answer: Any, source: str) -> tuple[int, int]:
    found = [each for each in answer.penstock["choices"][0].get("drafts", ()) if each["source"] == source]
    return sum(each["drafted_tokens"] for each in found), sum(each["accepted_tokens"] for each in found)


def test_a_prediction_that_is_the_answer_is_drafted_and_accepted(server: Any) -> None:
    sdk, asked = server.sdk(), ask("Describe a storm at sea.", max_tokens=64)
    text = sdk.chat.completions.create(**asked, extra_body={"speculation": "off"}).choices[0].message.content
    fields = {"prediction": {"type": "content", "content": text}, "extra_body": {"cache_salt": "s", "penstock": True}}
    right = 0
    for _ in range(50):  # whether any draft pays, and is tried, depends on what steps cost on this machine just now
        told = sdk.chat.completions.create(**asked, **fields)
        assert told.choices[0].message.content == text
        details = told.usage.completion_tokens_details
        assert details.rejected_prediction_tokens == 0
        assert 60 <= details.accepted_prediction_tokens <= 64
        tried, right = drafted(told, "prediction")
        assert tried >= right
        if right:
            break
    assert right, told.penstock


def test_answers_are_the_same_with_and_without_drafts(server: Any) -> None:
    asked = {"prompt": REPEATED, "temperature": 0.2, "top_k": 5, "seed": 4242, "n_predict": 48, "return_tokens": True}
    accepted = 0
    for _ in range(10):  # how many drafts pay depends on what steps cost on this machine just now
        found = [server.post("/completion", **asked, speculation=each).json() for each in ("off", 1, 4, 12, "auto")]
        assert [each["tokens"] for each in found] == [found[0]["tokens"]] * len(found)
        assert "draft_n" not in found[0]["timings"]
        accepted = max(each["timings"].get("draft_n_accepted", 0) for each in found[1:])
        if accepted > 8:
            break
    assert accepted > 8


def test_drafts_do_not_leave_the_context(server: Any) -> None:
    told = server.post("/completion", prompt=[260] + [260, 1057] * 506, temperature=0, n_predict=256).json()
    assert told["tokens_evaluated"] + told["tokens_predicted"] == 1024
    assert (told["stop_type"], told["truncated"]) == ("limit", True)
