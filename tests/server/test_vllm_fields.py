"""vLLM's fields beyond OpenAI's: each has an effect, or is listed as ignored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.text import ChatTemplate, Text
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
BOS = 1
SOURCE = """{% for message in messages %}{{ message.role }}:{{ message.content }}
{% endfor %}{% if documents %}({{ documents[0].text }}){% endif %}{% if add_generation_prompt %}assistant:{% endif %}"""
USER = {"role": "user", "content": "[hello]"}
BEGUN = [USER, {"role": "assistant", "content": "he"}]


class BosTokenizer(toys.ToyTokenizer):
    """Puts a BOS before a text, as many models want."""

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        return [BOS] * bos + super().encode(text)


def open_text() -> Any:
    tokenizer: Any = BosTokenizer()
    return Text(tokenizer, ChatTemplate({"default": SOURCE}, tokenizer.names))


@pytest.fixture(scope="module")
def templated() -> Iterator[Server]:
    """Renders chats with a template of its own, and with those that requests bring."""
    pool = {"trust_templates": True}
    with serving(InProcessClient(toys.open_parrot, "parrot"), open_text(), MODEL, pool=pool) as server:
        yield server


def chat(server: Any, *messages: Any, **fields: Any) -> Any:
    answer = server.post("/v1/chat/completions", model=MODEL, messages=list(messages) or [USER], **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: Any, prompt: Any = "[hello]", **fields: Any) -> Any:
    answer = server.post("/v1/completions", model=MODEL, prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def prompt_of(server: Any, *messages: Any, **fields: Any) -> str:
    """What the messages became, without the BOS."""
    ids = chat(server, *messages, return_token_ids=True, **fields)["prompt_token_ids"]
    return bytes(id for id in ids if id != BOS).decode()


def refused(server: Any, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    given = {"messages": [USER]} if "chat" in path else {"prompt": "[hello]"}
    answer = server.post(path, model=MODEL, **(given | fields))
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


# -- the prompt ---------------------------------------------------------------------------------------------------


def test_the_last_message_is_continued(templated: Any) -> None:
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert content(chat(templated, *BEGUN, **continued)) == "llo"
    assert content(chat(templated, *BEGUN, continue_final_message=True)) == "llo"
    assert prompt_of(templated, *BEGUN, **continued) == "user:[hello]\nassistant:he"
    padded = [USER, {"role": "assistant", "content": " he "}]
    assert prompt_of(templated, *padded, **continued) == "user:[hello]\nassistant: he "
    both = refused(templated, messages=BEGUN, continue_final_message=True, add_generation_prompt=True)
    assert both["param"] == "continue_final_message"
    empty = refused(templated, messages=[{"role": "user", "content": " "}], continue_final_message=True)
    assert empty["param"] == "continue_final_message"


def test_an_echo_begins_with_the_last_message(templated: Any) -> None:
    fields = {"continue_final_message": True, "echo": True}
    assert content(chat(templated, *BEGUN, **fields)) == "hello"
    assert content(chat(templated, USER, echo=True)) == "hello"  # a user's message is not echoed
    streamed = templated.post("/v1/chat/completions", model=MODEL, messages=BEGUN, stream=True, **fields).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks) == "hello"


def test_an_answer_need_not_be_begun(templated: Any) -> None:
    assert prompt_of(templated).endswith("assistant:")
    assert prompt_of(templated, add_generation_prompt=False) == "user:[hello]\n"


def test_documents_go_to_the_template_or_are_listed(templated: Any, watched_parrot: Any) -> None:
    documents = [{"title": "t", "text": "fact"}]
    assert prompt_of(templated, documents=documents) == "user:[hello]\n(fact)assistant:"
    assert chat(watched_parrot, documents=documents)["penstock"]["ignored_fields"] == ["documents"]


def test_a_template_in_a_request_is_rendered_where_the_server_trusts_it(templated: Any, watched_parrot: Any) -> None:
    source = "{{ messages[0].content }}{{ eos_token }}{{ extra }}"
    assert prompt_of(templated, chat_template=source) == "[hello]<end>"
    error = refused(watched_parrot, chat_template=source)
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ raise_exception('no') }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ '%09999999d' | format(1) }}",
        "{{ [1] | tojson(indent=9999999) }}",
        "{{ ''.__class__.__mro__ }}",
        "x" * (2**16 + 1),
    ],
)
def test_a_template_in_a_request_that_fails_is_refused(templated: Any, source: str) -> None:
    error = refused(templated, chat_template=source)
    assert error["param"] == "chat_template"
    assert "the model's" not in error["message"]


def test_special_tokens_before_a_prompt(templated: Any) -> None:
    for fields, expected in (({}, BOS), ({"add_special_tokens": True}, BOS), ({"add_special_tokens": False}, None)):
        chatted = chat(templated, return_token_ids=True, **fields)["prompt_token_ids"]
        completed = complete(templated, return_token_ids=True, **fields)["choices"][0]["prompt_token_ids"]
        assert (chatted[0] == BOS, completed[0] == BOS) == (expected == BOS,) * 2
        assert bytes(completed).endswith(b"[hello]")


def test_a_prompt_is_cut_to_its_end(parrot: Any) -> None:
    cut = complete(parrot, "abc[hello]", truncate_prompt_tokens=7, return_token_ids=True)["choices"][0]
    assert bytes(cut["prompt_token_ids"]) == b"[hello]"


def test_tokenize_has_the_chats_fields(templated: Any) -> None:
    """The tokens of a chat are those that the chat's own route has as its prompt."""

    def tokens(*messages: Any, **fields: Any) -> list[int]:
        answer = templated.post("/tokenize", messages=list(messages), **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["count"] == len(answer.json()["tokens"])
        assert answer.json()["max_model_len"] == toys.LIMITS.max_len
        return list(answer.json()["tokens"])

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for fields in (
        {},
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template": "{{ messages[0].content }}"},
        {"chat_template_kwargs": {"documents": [{"text": "fact"}]}},
        {"add_special_tokens": False},
        {"tools": tools},
    ):
        chatted = chat(templated, *BEGUN, return_token_ids=True, **fields)["prompt_token_ids"]
        assert tokens(*BEGUN, **fields) == chatted, fields
    ignored = templated.post(
        "/tokenize", messages=[USER], chat_template_kwargs={"odd": 1}, mm_processor_kwargs={"a": 1}
    )
    assert ignored.headers["x-penstock-ignored"] == "chat_template_kwargs.odd, mm_processor_kwargs"


# -- logprobs -----------------------------------------------------------------------------------------------------


def test_prompt_logprobs(parrot: Any) -> None:
    first, *rest = complete(parrot, "[é", prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert first is None
    assert rest[0] == {"195": {"logprob": -195 / 64, "rank": 1, "decoded_token": "\ufffd"}}
    told = chat(parrot, prompt_logprobs=0, max_tokens=1, return_token_ids=True)
    first, *rest = told["prompt_logprobs"]
    assert first is None
    assert [next(iter(each)) for each in rest] == [str(id) for id in told["prompt_token_ids"][1:]]
    assert rest[0]["115"] == {"logprob": -115 / 64, "rank": None, "decoded_token": "s"}  # it may be any
    assert "prompt_logprobs" not in chat(parrot)
    alone = complete(parrot, "[a", prompt_logprobs=0, echo=True, logprobs=2, max_tokens=1)["choices"][0]
    assert [len(each or ()) for each in alone["prompt_logprobs"]] == [0, 1]
    assert len(alone["logprobs"]["top_logprobs"][1]) == 2
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert refused(parrot, path, prompt_logprobs=1, stream=True)["param"] == "prompt_logprobs"


def test_tokens_spelled_by_their_ids(parrot: Any) -> None:
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    entry = chat(parrot, logprobs=True, top_logprobs=2, **fields)["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "token_id:104"
    assert [each["token"] for each in entry["top_logprobs"]] == ["token_id:104", "token_id:65"]
    told = complete(parrot, logprobs=2, **fields)["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:104"]
    assert list(told["top_logprobs"][0]) == ["token_id:104", "token_id:65"]


# -- the answer ---------------------------------------------------------------------------------------------------


def test_the_answers_id_has_the_requests(parrot: Any) -> None:
    assert chat(parrot, request_id="mine")["id"] == "chatcmpl-mine"
    assert complete(parrot, request_id="mine")["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"stop": "l"}, "l"),
        ({"stop_token_ids": [ord("o")]}, ord("o")),
        ({"max_tokens": 1}, None),
    ],
)
def test_a_choice_says_which_stop_ended_it(parrot: Any, fields: dict[str, Any], reason: int | str | None) -> None:
    assert chat(parrot, **fields)["choices"][0]["stop_reason"] == reason
    assert complete(parrot, **fields)["choices"][0]["stop_reason"] == reason
    for path, given in (("/v1/chat/completions", {"messages": [USER]}), ("/v1/completions", {"prompt": "[hello]"})):
        lines = parrot.post(path, model=MODEL, stream=True, **given, **fields).text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: "))["choices"][0]
        assert last["stop_reason"] == reason


def test_reasoning_may_be_left_out() -> None:
    told = {"role": "user", "content": "[<think>so</think>yes]"}
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.Hermes(), MODEL) as server:
        assert chat(server, told)["choices"][0]["message"]["reasoning"] == "so"
        message = chat(server, told, include_reasoning=False)["choices"][0]["message"]
        assert ("reasoning" in message, message["content"]) == (False, "yes")


def test_special_tokens_may_be_shown(parrot: Any) -> None:
    fields = {"ignore_eos": True, "max_tokens": 6}
    assert complete(parrot, **fields)["choices"][0]["text"] == "hello"
    assert complete(parrot, skip_special_tokens=False, **fields)["choices"][0]["text"] == "hello<end>"


# -- beam search --------------------------------------------------------------------------------------------------


def test_beams_are_searched(watched_parrot: Any) -> None:
    """The toy says what it is told with much the highest probability, so that is the best beam."""
    del watched_parrot.requests[:]
    told = complete(watched_parrot, use_beam_search=True, n=2, max_tokens=8, temperature=0)
    texts = [choice["text"] for choice in told["choices"]]
    assert texts[0] == "hello"
    assert texts[1] != "hello"
    assert {request.sampling.logprobs for request in watched_parrot.requests} == {4}
    assert max(len(request.prompt) for request in watched_parrot.requests) > len("[hello]") + 4
    assert told["choices"][0]["finish_reason"] == "stop"
    assert told["usage"]["prompt_tokens"] == 7
    assert content(chat(watched_parrot, use_beam_search=True, max_tokens=8)) == "hello"


def test_beams_of_several_prompts_with_logprobs_and_stops(parrot: Any) -> None:
    fields = {"use_beam_search": True, "max_tokens": 8, "logprobs": 1}
    told = complete(parrot, ["[ab]", "[cd]"], n=2, best_of=3, **fields)
    assert [choice["text"] for choice in told["choices"]][::2] == ["ab", "cd"]
    assert len(told["choices"]) == 4
    scored = told["choices"][0]["logprobs"]
    assert scored["tokens"] == ["a", "b", "<end>"]
    assert scored["token_logprobs"] == pytest.approx([-97 / 64, -98 / 64, -256 / 64])
    stopped = complete(parrot, stop="l", **fields)["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("he", "l")
    lines = parrot.post("/v1/completions", model=MODEL, prompt="[ab]", stream=True, **fields).text.split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == "ab"


def test_a_length_penalty_decides_between_beams(parrot: Any) -> None:
    """What is told ends after one token: an end there is likelier than going on, but longer beams divide by more."""
    fields = {"use_beam_search": True, "n": 1, "max_tokens": 9}
    short = complete(parrot, "[a]", length_penalty=0, **fields)["choices"][0]["text"]
    long = complete(parrot, "[a]", length_penalty=16, **fields)["choices"][0]["text"]
    assert len(short) < len(long)


def test_what_beam_search_cannot_do(watched_parrot: Any) -> None:
    assert refused(watched_parrot, use_beam_search=True, n=11)["param"] == "n"
    assert refused(watched_parrot, use_beam_search=True, length_penalty=99)["param"] == "length_penalty"
    assert refused(watched_parrot, use_beam_search=True, guided_regex="a")["param"] == "use_beam_search"
    told = complete(watched_parrot, use_beam_search=True, temperature=0.5, top_k=3, seed=1, max_tokens=2)
    assert told["penstock"]["ignored_fields"] == ["seed", "temperature", "top_k"]


def test_a_client_that_leaves_ends_its_beams(slow_parrot: Any) -> None:
    asked = {"prompt": "[*ab]", "use_beam_search": True, "n": 4, "max_tokens": 9999}
    before = slow_parrot.client.stats.steps
    with closing(HTTPConnection(slow_parrot.url.removeprefix("http://"))) as connection:
        connection.request("POST", "/v1/completions", json.dumps(asked))
        slow_parrot.until(lambda: slow_parrot.client.stats.steps > before + 2)
    steps = 0
    for _ in range(20):  # between two steps of a search the engine is idle, too
        if steps == (steps := slow_parrot.client.stats.steps):
            break
        time.sleep(0.5)
    else:
        pytest.fail("the search goes on")
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.blocks_used == 0
    assert complete(slow_parrot, max_tokens=1)["choices"][0]["text"] == "h"


# -- what is ignored ----------------------------------------------------------------------------------------------


def test_what_is_not_done_is_listed(watched_parrot: Any) -> None:
    asked = {
        "mm_processor_kwargs": {"num_crops": 4},
        "kv_transfer_params": {"do_remote_decode": True},
        "vllm_xargs": {"a": 1},
        "logits_processors": ["x"],
    }
    assert complete(watched_parrot, **asked)["penstock"]["ignored_fields"] == sorted(asked)
    told = chat(watched_parrot, best_of=2, chat_template_kwargs={"odd": 1}, **asked)["penstock"]["ignored_fields"]
    assert told == sorted([*asked, "best_of", "chat_template_kwargs.odd"])
    without = {"spaces_between_special_tokens": False, "mm_processor_kwargs": {}, "logits_processors": []}
    assert "penstock" not in chat(watched_parrot, best_of=1, **without)
    assert "penstock" not in complete(watched_parrot, **without)
