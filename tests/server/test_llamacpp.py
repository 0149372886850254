"""Routes of llama.cpp's server: every field it reads has an effect, has none there either, or is listed as ignored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from penstock.text import ChatTemplate
from penstock.types import BANNED, DryPenalty, SamplerChain
from tests.server import toys

USUAL = SamplerChain()
END_BIAS = {"token": toys.END, "bias": None}


def complete(server: Any, prompt: Any = "[hello]", **fields: Any) -> Any:
    answer = server.post("/completion", prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Any, path: str = "/completion", **fields: Any) -> list[dict[str, Any]]:
    answer = server.post(path, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


# -- /completion --------------------------------------------------------------------------------------------------


def test_a_whole_answer(parrot: Any) -> None:
    answer = complete(parrot, return_tokens=True)
    timings = answer.pop("timings")
    settings = answer.pop("generation_settings")
    assert answer == {
        "index": 0,
        "content": "hello",
        "tokens": [*b"hello"],
        "id_slot": -1,
        "stop": True,
        "model": "toy/parrot",
        "tokens_predicted": 6,
        "tokens_evaluated": 7,
        "prompt": "[hello]",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_cached": 12,
    }
    assert settings["n_predict"] == settings["max_tokens"] == -1
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (7, 0, 6)
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] == pytest.approx(1e3 / timings["predicted_ms"] * 5)


def test_a_streamed_answer_has_no_done_at_its_end(parrot: Any) -> None:
    raw = parrot.post("/completion", prompt="[hey]", stream=True).text
    assert "[DONE]" not in raw
    *parts, last = events(parrot, prompt="[hey]")
    assert [(part["content"], part["tokens"], part["stop"]) for part in parts] == [
        (character, [ord(character)], False) for character in "hey"
    ]
    assert [part["tokens_predicted"] for part in parts] == [1, 2, 3]
    assert all("timings" not in part for part in parts)
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["timings"]["predicted_n"] == 4


def test_completions_is_the_same_route(parrot: Any) -> None:
    assert parrot.post("/completions", prompt="[hi]").json()["content"] == "hi"


@pytest.mark.parametrize(
    ("prompt", "contents"),
    [
        ("[a]", ["a"]),
        ([*b"[b]"], ["b"]),
        ([*b"[", "c", ord("]")], ["c"]),
        ({"prompt_string": "[d]"}, ["d"]),
        (["[e]"], ["e"]),
        (["[f]", [*b"[g]"], {"prompt_string": "[h]"}, [ord("["), "i]"]], ["f", "g", "h", "i"]),
    ],
)
def test_forms_of_prompts(parrot: Any, prompt: Any, contents: list[str]) -> None:
    answer = complete(parrot, prompt)
    answers = answer if isinstance(answer, list) else [answer]
    assert [each["content"] for each in answers] == contents
    assert [each["index"] for each in answers] == [*range(len(contents))]
    assert isinstance(answer, list) == (len(contents) > 1)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "empty list"),
        ("", "empty"),
        ([1, ["a"]], "only ids and texts"),
        ([999], "token ids are from 0 to 256; got 999"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "multimodal_data is not supported"),
        ({}, "prompt_string"),
    ],
)
def test_prompts_that_are_refused(parrot: Any, prompt: Any, told: str) -> None:
    answer = parrot.post("/completion", prompt=prompt)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
def test_the_limit(parrot: Any, name: str) -> None:
    answer = complete(parrot, "[*ab]", **{name: 3})
    assert (answer["content"], answer["stop_type"], answer["truncated"]) == ("aba", "limit", False)
    assert answer["generation_settings"]["n_predict"] == 3


@pytest.mark.parametrize("limit", [-1, 10**6])
def test_an_answer_ends_where_the_context_does(parrot: Any, limit: int) -> None:
    answer = complete(parrot, "[*ab]", n_predict=limit)
    assert (answer["tokens_predicted"], answer["stop_type"], answer["truncated"]) == (507, "limit", True)


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(parrot: Any) -> None:
    for path, fields in (
        ("/completion", {"prompt": "x" * 600}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 600}]}),
    ):
        error = parrot.post(path, **fields).json()["error"]
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] >= 600
        assert error["n_ctx"] == 512
        assert "exceeds the available context size" in error["message"]


def test_stop_strings(parrot: Any) -> None:
    answer = complete(parrot, stop=["", "ll"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("he", "word", "ll")
    assert complete(parrot, stop="l")["content"] == "he"


def test_several_choices(parrot: Any) -> None:
    for name in ("n", "n_cmpl"):
        assert [each["content"] for each in complete(parrot, **{name: 2})] == ["hello", "hello"]


def test_probabilities_of_the_model(parrot: Any) -> None:
    first = complete(parrot, n_probs=2)["completion_probabilities"][0]
    assert first == {
        "id": 104,
        "token": "h",
        "bytes": [104],
        "logprob": -104 / 64,
        "top_logprobs": [
            {"id": 104, "token": "h", "bytes": [104], "logprob": -104 / 64},
            {"id": 65, "token": "A", "bytes": [65], "logprob": -8.0},
        ],
    }
    *parts, last = events(parrot, prompt="[hey]", n_probs=1)
    assert [len(part["completion_probabilities"]) for part in parts] == [1, 1, 1]
    assert "completion_probabilities" not in last


def test_probabilities_after_sampling(parrot: Any) -> None:
    fields: dict[str, Any] = {"n_probs": 5, "post_sampling_probs": True, "temperature": 1.0}
    first = complete(parrot, **fields)["completion_probabilities"][0]
    assert [each["token"] for each in first["top_probs"]] == ["h", "A", "B"]
    assert sum(each["prob"] for each in first["top_probs"]) == pytest.approx(1)
    (alone,) = complete(parrot, min_p=0.5, **fields)["completion_probabilities"][0]["top_probs"]
    assert alone["prob"] == 1.0
    two = complete(parrot, top_k=2, **fields)["completion_probabilities"][0]["top_probs"]
    assert [each["token"] for each in two] == ["h", "A"]
    assert len(complete(parrot, top_p=0.5, **fields)["completion_probabilities"][0]["top_probs"]) == 1


def test_more_probabilities_than_there_are_is_listed(parrot: Any) -> None:
    assert complete(parrot, n_probs=50)["penstock"]["ignored_fields"] == ["n_probs"]


def test_chosen_fields_of_the_answer(parrot: Any) -> None:
    chosen = complete(parrot, n_predict=2, response_fields=["content", "generation_settings/n_predict", "no/such"])
    assert chosen == {"content": "he", "generation_settings/n_predict": 2}
    assert "timings" in complete(parrot, response_fields=[])


def test_timings_of_every_part(parrot: Any) -> None:
    parts = events(parrot, prompt="[hey]", timings_per_token=True)
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3, 4]


def test_an_answer_that_takes_too_long_ends_after_a_line(slow_parrot: Any) -> None:
    began = time.monotonic()
    answer = complete(slow_parrot, "[*a\n]", t_max_predict_ms=50)
    assert answer["stop_type"] == "limit"
    assert answer["has_new_line"]
    assert time.monotonic() - began < 30
    without = complete(slow_parrot, "[*ab]", t_max_predict_ms=1, n_predict=50)
    assert without["tokens_predicted"] == 50


def test_a_prompt_that_is_not_to_be_cached(parrot: Any) -> None:
    long = "x" * 100 + "[hi]"
    assert complete(parrot, long)["timings"]["cache_n"] == 0
    assert complete(parrot, long)["timings"]["cache_n"] > 0
    assert complete(parrot, long, cache_prompt=True)["timings"]["cache_n"] > 0
    for _ in range(2):
        assert complete(parrot, long, cache_prompt=False)["timings"]["cache_n"] == 0
        said = parrot.post("/v1/completions", prompt=long, cache_prompt=False).json()
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_ignoring_the_end_is_shown_as_biases(parrot: Any) -> None:
    assert complete(parrot, ignore_eos=True, n_predict=7)["generation_settings"]["logit_bias"] == [END_BIAS]
    assert complete(parrot)["generation_settings"]["logit_bias"] == []


@pytest.mark.parametrize(
    ("given", "biases"),
    [
        ([[65, -1.5], [66, False]], {65: -1.5, 66: BANNED}),
        ({"65": 2, "BC": -3}, {65: 2.0, 66: -3.0, 67: -3.0}),
        ([["AB", 1]], {65: 1.0, 66: 1.0}),
    ],
)
def test_logit_biases(watched_parrot: Any, given: Any, biases: dict[int, float]) -> None:
    complete(watched_parrot, logit_bias=given)
    assert watched_parrot.requests[-1].sampling.logit_bias == biases


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"top_k": 3, "temperature": 0.5, "chain": None}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 8}, {"repetition_penalty": 1.5, "penalty_window": 8}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 9}, {"dry": DryPenalty(0.8, window=9)}),
        ({"mirostat": 2, "mirostat_tau": 3}, {"chain": USUAL._replace(mirostat=2, mirostat_tau=3.0)}),
        ({"samplers": ["top_k", "infill"]}, {"chain": USUAL._replace(order=("top_k",))}),
        ({"seed": 7}, {"seed": 7, "chain": USUAL._replace(mersenne=True)}),
        ({"seed": 7, "typical_p": 0.5}, {"chain": USUAL._replace(typical_p=0.5, mersenne=True)}),
        ({"seed": -1}, {"chain": None}),
        ({"json_schema": {"const": 1}}, {}),
    ],
)
def test_sampling(watched_parrot: Any, fields: dict[str, Any], settings: dict[str, Any]) -> None:
    watched_parrot.post("/completion", prompt="[hi]", **fields)
    sampling = watched_parrot.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in settings} == settings
    assert (sampling.grammar is not None) == ("json_schema" in fields)


def test_grammars(watched_parrot: Any) -> None:
    """The toy has no vocabulary for grammars, so that these requests are refused, but only after they were read."""
    watched_parrot.post("/completion", prompt="[a]", grammar='root ::= "a"')
    assert watched_parrot.requests[-1].sampling.grammar[:2] == ("gbnf", 'root ::= "a"')
    triggers = [{"type": 1, "value": "<x>"}]
    lazy: dict[str, Any] = {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": triggers}
    watched_parrot.post("/completion", prompt="[a]", **lazy)
    assert watched_parrot.requests[-1].sampling.grammar.triggers == ("<x>",)


def test_settings_are_those_that_apply(parrot: Any) -> None:
    settings = complete(parrot, temperature=0.3, top_k=7, typical_p=0.5, dry_multiplier=0.5, seed=11, stop=["x"])[
        "generation_settings"
    ]
    expected = {"temperature": 0.3, "top_k": 7, "typical_p": 0.5, "dry_multiplier": 0.5, "seed": 11, "stop": ["x"]}
    assert {name: settings[name] for name in expected} == expected
    assert settings["samplers"] == [
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
    ]
    assert settings["speculative.types"] == "ngram-simple"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "whatever"),
        ("id_slot", 1),
        ("n_keep", 5),
        ("n_discard", 5),
        ("n_cache_reuse", 256),
        ("backend_sampling", True),
        ("sse_ping_interval", 5),
        ("preserved_tokens", ["<x>"]),
        ("adaptive_decay", 0.5),
        ("t_max_prompt_ms", 500),
        ("lora", []),
        ("n_indent", 0),
        ("return_progress", False),
    ],
)
def test_fields_that_change_nothing(strict_parrot: Any, field: str, value: Any) -> None:
    assert complete(strict_parrot, **{field: value})["content"] == "hello"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_indent", 4),
        ("return_progress", True),
        ("adaptive_target", 0.5),
        ("samplers", ["top_k", "infill"]),
        ("no_such_field", 1),
    ],
)
def test_fields_that_are_listed_as_ignored(parrot: Any, field: str, value: Any) -> None:
    answer = complete(parrot, **{field: value})
    assert answer["content"] == "hello"
    assert answer["penstock"]["ignored_fields"] == [field]


# -- other routes -------------------------------------------------------------------------------------------------


def test_infill_needs_the_model_to_know_it(parrot: Any) -> None:
    answer = parrot.post("/infill", input_prefix="a", input_suffix="b")
    assert answer.status_code == 400
    assert "no tokens for infill" in answer.json()["error"]["message"]
    for extra in ({}, {"filename": "a"}, {"filename": 1, "text": "a"}):
        answer = parrot.post("/infill", input_prefix="a", input_suffix="b", input_extra=[extra])
        assert answer.status_code == 400
        assert "input_extra[0]" in answer.json()["error"]["message"]


class InfillTokenizer(toys.ToyTokenizer):
    """Knows three infill tokens beyond the toy's: 253 to 255, which are no text."""

    special_ids = frozenset({toys.END, 253, 254, 255})
    _markers = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")

    def token_text(self, id: int) -> str:
        return self._markers[id - 253] if 253 <= id < 256 else super().token_text(id)


class InfillText(toys.ToyText):
    tokenizer = InfillTokenizer()


def test_infill(serve: Any) -> None:
    client = InProcessClient(toys.open_parrot, "parrot")
    run, seen = client.run, []
    client.run = lambda request, read: seen.append(request) or run(request, read)  # type: ignore[method-assign]
    with serve(client, InfillText(), "toy") as server:
        extra = [{"filename": "a.h", "text": "int a;"}]
        answer = server.post("/infill", input_prefix="[vwx", prompt="yz]", input_suffix="a", input_extra=extra)
        assert answer.json()["content"] == "yz"  # the toy counts what follows its bracket
        prompt = (*b"\n\n--- a.h ---\n\nint a;", 253, *b"[vwxyz]", 254, *b"a", 255)
        assert seen[-1].prompt == prompt
        assert {253, 254, 255} <= seen[-1].stop_ids


def test_embeddings(parrot: Any) -> None:
    (only,) = parrot.post("/embedding", content="abc").json()
    assert only["index"] == 0
    (vector,) = only["embedding"]
    assert sum(value**2 for value in vector) == pytest.approx(1)
    both = parrot.post("/embeddings", input=["a", [98, "c"]]).json()
    assert [each["index"] for each in both] == [0, 1]
    unscaled, largest, taxicab = (
        parrot.post("/embedding", content="abc", embd_normalize=order).json()[0]["embedding"][0] for order in (-1, 0, 1)
    )
    assert sum(unscaled) == pytest.approx(1)  # the mean of three unit vectors
    assert max(largest) == 32760
    assert sum(map(abs, taxicab)) == pytest.approx(1)
    error = parrot.post("/embedding").json()["error"]
    assert "exactly one of content, input" in error["message"]


def test_props(parrot: Any) -> None:
    props = parrot.get("/props").json()
    assert props["total_slots"] == 16
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 0.7
    assert props["chat_template"] == "a toy needs none"
    assert (props["bos_token"], props["eos_token"]) == ("", "<end>")
    assert props["build_info"].startswith("b")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert parrot.post("/props").json() == {"success": True}


def test_slots(slow_parrot: Any) -> None:
    assert [slot["is_processing"] for slot in slow_parrot.get("/slots").json()] == [False] * 16
    with slow_parrot.http.stream("POST", "/completion", json={"prompt": "[*a]", "stream": True}) as answer:
        lines = answer.iter_lines()  # the connection is closed as soon as nobody refers to it
        next(lines)
        slow_parrot.until(lambda: slow_parrot.get("/slots").json()[0]["is_processing"])
        assert not slow_parrot.get("/slots").json()[1]["is_processing"]
        assert slow_parrot.get("/slots?fail_on_no_slot=1").status_code == 200
    slow_parrot.until_idle()


def test_slots_have_nothing_to_save(parrot: Any) -> None:
    assert parrot.post("/slots/3?action=erase").json() == {"id_slot": 3, "n_erased": 0}
    for action in ("save", "restore"):
        answer = parrot.post(f"/slots/3?action={action}", filename="x")
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 501
        assert error["type"] == "not_supported_error"
    assert parrot.post("/slots/16?action=erase").status_code == 404
    assert parrot.post("/slots/3?action=paint").status_code == 400


def test_unversioned_names(parrot: Any) -> None:
    said = {"messages": [{"role": "user", "content": "[hi]"}], "model": "any"}
    chat = parrot.post("/chat/completions", **said).json()
    assert chat["choices"][0]["message"]["content"] == "hi"
    assert chat["timings"]["predicted_n"] == 3
    assert chat["system_fingerprint"].startswith("b")
    assert "timings" not in parrot.post("/v1/chat/completions", **said | {"model": "toy/parrot"}).json()
    assert parrot.get("/models").json()["data"][0]["id"] == "toy/parrot"
    assert parrot.get("/v1/health").json()["status"] == "ok"
    assert parrot.get("/lora-adapters").json() == []
    assert parrot.post("/responses", input="[hi]").json()["object"] == "response"
    assert parrot.post("/chat/completions/input_tokens", **said).json()["input_tokens"] == len("user:[hi]\nassistant:")


@pytest.mark.parametrize(
    ("path", "limit", "answered"),
    [
        ("/chat/completions", {"max_tokens": 10**6}, 491),
        ("/chat/completions", {"max_tokens": -1}, 491),
        ("/v1/chat/completions", {"max_tokens": -1}, 491),
        ("/v1/chat/completions", {"n_predict": 3}, 3),
        ("/v1/chat/completions", {"n_predict": 10**6}, 491),
        ("/v1/completions", {"n_predict": 20}, 20),
        ("/v1/completions", {"n_predict": 10**6}, 507),
        ("/v1/completions", {"n_predict": -1}, 507),
        ("/v1/completions", {"max_tokens": -1}, 507),
        ("/v1/completions", {}, 16),
    ],
)
def test_limits_as_llamacpps_clients_write_them(parrot: Any, path: str, limit: dict[str, int], answered: int) -> None:
    said = {"messages": [{"role": "user", "content": "[*ab]"}]} if "chat" in path else {"prompt": "[*ab]"}
    answer = parrot.post(path, **said, **limit).json()
    assert answer["usage"]["completion_tokens"] == answered
    assert answer["choices"][0]["finish_reason"] == "length"


def test_chat_streams_as_llamacpp_does(parrot: Any) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "[hi]"}],
        "stream_options": {"include_usage": True},
    }
    first, *parts, last = events(parrot, "/chat/completions", timings_per_token=True, **fields)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in first
    assert [part["timings"]["predicted_n"] for part in parts if part["choices"][0]["delta"]] == [1, 2]
    assert last["choices"] == []
    assert last["timings"]["predicted_n"] == 3
    *_, ending = events(parrot, "/chat/completions", messages=fields["messages"])
    assert ending["timings"]["prompt_n"] > 0


def test_chat_shows_its_prompt_on_request(parrot: Any) -> None:
    said = {"messages": [{"role": "user", "content": "[hi]"}]}
    assert parrot.post("/chat/completions", verbose=True, **said).json()["__verbose"] == {
        "prompt": "user:[hi]\nassistant:"
    }
    assert "__verbose" not in parrot.post("/chat/completions", **said).json()


def test_tokens_of_both_dialects(parrot: Any) -> None:
    assert parrot.post("/tokenize", content="hi").json()["tokens"] == [104, 105]
    assert parrot.post("/tokenize", content="hi", with_pieces=True).json()["tokens"] == [
        {"id": 104, "piece": "h"},
        {"id": 105, "piece": "i"},
    ]
    assert parrot.post("/tokenize", prompt="hi").json()["count"] == 2
    assert parrot.post("/detokenize", tokens=[104, 105]).json()["content"] == "hi"


class RenderingText(toys.ToyText):
    chat_template = ChatTemplate({"default": "{{ tools | length if tools else 0 }}{{ add_generation_prompt }}"}, {})

    def render_chat(self, messages: Any, **kwargs: Any) -> str:
        return self.chat_template.render(messages, **kwargs)


@pytest.fixture
def rendering(serve: Any) -> Iterator[Any]:
    with serve(
        InProcessClient(toys.open_parrot, "parrot"), RenderingText(), "toy", rules=Rules(lenient=True)
    ) as server:
        yield server


def test_applying_the_template(rendering: Any) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}]}
    tool = {"type": "function", "function": {"name": "f"}}
    for tools, count in ((None, 0), ([], 0), ([tool], 1)):
        assert rendering.post("/apply-template", tools=tools, **said).json() == {"prompt": f"{count}True"}
    assert rendering.post("/apply-template", add_generation_prompt=False, **said).json() == {"prompt": "0False"}


def test_a_server_with_a_seed_draws_as_llamacpp_does(serve: Any) -> None:
    class Seeded(toys.ToyText):
        sampling_defaults = {"seed": 42, "temperature": 0.8, "max_tokens": 2}  # noqa: RUF012

    client = InProcessClient(toys.open_parrot, "parrot")
    run, seen = client.run, []
    client.run = lambda request, read: seen.append(request) or run(request, read)  # type: ignore[method-assign]
    with serve(client, Seeded(), "toy") as server:
        answer = complete(server, "[hello]")
        assert answer["content"] == "he"
        assert answer["generation_settings"]["seed"] == 42
        server.post("/v1/completions", prompt="[hi]", seed=7)
    assert [request.sampling.seed for request in seen] == [42, 7]
    assert all(request.sampling.chain.mersenne for request in seen)
