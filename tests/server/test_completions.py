"""/v1/completions beyond plain text: echo and logprobs, as lm-eval's local-completions client needs them."""

from __future__ import annotations

from typing import Any

import pytest

MODEL = "toy/parrot"


def completion(server: Any, **fields: Any) -> Any:
    answer = server.post("/v1/completions", model=MODEL, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows(told: Any) -> list[Any]:
    return list(zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True))


def logprob(token: int) -> float:
    return -token / 64


def test_lm_eval_scores_a_continuation(parrot: Any) -> None:
    """It sends context and continuation as token ids, and reads the entries after the context but the last."""
    context, continuation = list(b"[x] the sky is"), list(" blüe".encode())
    prompts = [context + continuation, list(b"[y]ab")]
    answer = completion(parrot, prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    told = answer["choices"][0]["logprobs"]
    scored = slice(len(context), -1)
    assert told["token_logprobs"][scored] == [logprob(token) for token in continuation]
    assert [max(top.values()) for top in told["top_logprobs"][scored]] == [logprob(token) for token in continuation]
    assert len(told["tokens"]) == len(prompts[0]) + 1
    assert len(answer["choices"][1]["logprobs"]["tokens"]) == len(prompts[1]) + 1


def test_the_stop_token_has_an_entry_so_that_every_generated_token_has_one(parrot: Any) -> None:
    choice = completion(parrot, prompt="[]abc"[:2], max_tokens=1, logprobs=1, echo=True)["choices"][0]
    assert choice["text"] == "[]"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == ["[", "]", "<end>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_echo_with_logprobs_has_an_entry_for_every_token(parrot: Any) -> None:
    choice = completion(parrot, prompt="é[hé]", max_tokens=5, logprobs=2, echo=True)["choices"][0]
    assert choice["text"] == "é[hé]hé"
    told = choice["logprobs"]
    spelled = ["\ufffd", "\ufffd", "[", "h", "\ufffd", "\ufffd", "]", "h", "\ufffd", "\ufffd", "<end>"]
    assert told["tokens"] == spelled
    assert told["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert told["token_logprobs"][2] == logprob(ord("["))
    assert told["top_logprobs"][2] == {"[": logprob(ord("[")), "A": -8.0}


def test_max_tokens_zero_with_echo_scores_and_generates_nothing(parrot: Any) -> None:
    answer = completion(parrot, prompt="[hey]", max_tokens=0, logprobs=0, echo=True)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("[hey]", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *map(logprob, b"hey]")]
    assert choice["logprobs"]["top_logprobs"][1:] == [{chr(token): logprob(token)} for token in b"hey]"]
    assert answer["usage"]["completion_tokens"] == 0
    assert completion(parrot, prompt="[hey]", max_tokens=0, echo=True)["choices"][0]["text"] == "[hey]"


def test_a_prompt_that_fills_the_context_can_still_be_scored(parrot: Any) -> None:
    choice = completion(parrot, prompt="x" * 512, max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 512


def test_logprobs_without_echo_are_of_the_answer(parrot: Any) -> None:
    told = completion(parrot, prompt="[hey]", max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert told["tokens"] == ["h", "e"]
    assert told["text_offset"] == [0, 1]
    assert told["top_logprobs"] == [{"h": logprob(ord("h"))}, {"e": logprob(ord("e"))}]


@pytest.mark.parametrize("prompt", ["[héy]", list("[héy]".encode())], ids=["text", "ids"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("n", [1, 2])
def test_streamed_echo_equals_the_whole(parrot: Any, prompt: Any, logprobs: int | None, n: int) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "logprobs": logprobs, "echo": True, "n": n}
    sdk = parrot.sdk()
    whole = sdk.completions.create(**asked).choices
    texts = [""] * n
    entries: list[list[Any]] = [[] for _ in range(n)]
    for chunk in sdk.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            entries[choice.index] += rows(choice.logprobs)
    assert texts == [choice.text for choice in whole] == ["[héy]héy"] * n
    for choice, streamed in zip(whole, entries, strict=True):
        assert streamed == (rows(choice.logprobs) if choice.logprobs else [])


def test_stop_strings_are_looked_for_in_the_answer_alone(parrot: Any) -> None:
    choice = completion(parrot, prompt="b[abc]", stop="b", echo=True, max_tokens=10)["choices"][0]
    assert choice["text"] == "b[abc]a"
