"""What users see of speculation: the prediction that a client sends, the limits of a server and of a request, and where
it is told what was drafted. That answers stay the same is tested in tests/engine, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest

from penstock.engine.assemble import assemble
from penstock.engine.engine import Engine
from penstock.ipc.inprocess import InProcessClient
from penstock.server.generation.prediction import PredictionTally
from penstock.types import Request
from tests.engine.guesses import RandomDrafting
from tests.server import toys
from tests.server.conftest import serving

MODEL = "toy/parrot"
ANSWER = "the same file with one word changed"
CHANGED = "the same file with two words changed"


def content(text: str) -> dict[str, Any]:
    return {"type": "content", "content": text}


def ask(server: Any, answer: str = ANSWER, **fields: Any) -> Any:
    messages = [{"role": "user", "content": f"[{answer}]"}]
    return server.sdk().chat.completions.create(model=MODEL, messages=messages, **fields)


def counted(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


# -- OpenAI's prediction ------------------------------------------------------------------------------------------


def test_a_prediction_that_is_the_answer_is_accepted_whole(parrot: Any) -> None:
    plain, steps = ask(parrot), parrot.client.stats.steps
    told = ask(parrot, prediction=content(ANSWER), extra_body={"penstock": True})
    assert told.choices == plain.choices
    assert plain.usage.completion_tokens_details is None
    assert counted(told.usage) == (len(ANSWER), 0)
    assert told.usage.completion_tokens == plain.usage.completion_tokens
    (drafts,) = told.penstock["choices"][0]["drafts"]
    assert drafts["source"] == "prediction"
    assert drafts["accepted_tokens"] == drafts["drafted_tokens"]
    taken = parrot.client.stats.steps - steps
    assert taken < 6
    assert drafts["drafted_tokens"] >= len(ANSWER) - taken, "each step adds one token of its own"


def test_what_is_not_in_the_answer_is_rejected(parrot: Any) -> None:
    told = ask(parrot, prediction=content(CHANGED))
    assert told.choices[0].message.content == ANSWER
    assert counted(told.usage) == (len(ANSWER) - len("one"), len("two") + len("s"))
    assert counted(ask(parrot, prediction=content("z" * 20)).usage) == (0, 20)


def test_a_streamed_answer_tells_the_same(parrot: Any) -> None:
    parts = [{"type": "text", "text": ANSWER[:9]}, {"type": "text", "text": ANSWER[9:]}]
    prediction = {"type": "content", "content": parts}
    chunks = list(ask(parrot, prediction=prediction, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert counted(chunks[-1].usage) == (len(ANSWER), 0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 5}, ANSWER[:5]),  # the prediction is longer than the answer may be
        ({"stop": ["one"]}, ANSWER[: ANSWER.index("one")]),
        ({"n": 2}, ANSWER),
        ({"logprobs": True}, ANSWER),
        ({"extra_body": {"speculation": 4}}, ANSWER),
    ],
)
def test_with_other_fields(parrot: Any, fields: dict[str, Any], text: str) -> None:
    told = ask(parrot, prediction=content(ANSWER), **fields)
    choices = len(told.choices)
    assert [choice.message.content for choice in told.choices] == [text] * choices
    accepted, rejected = counted(told.usage)
    assert choices * len(text) <= accepted <= choices * (len(text) + len("one"))
    assert accepted + rejected == choices * len(ANSWER)


@pytest.mark.parametrize(
    ("prediction", "answer", "accepted"),
    [
        ("abcdef", "abcdef", 6),
        ("abcdef", "abcdefghi", 6),
        ("abcdef", "abc", 3),
        ("abcdef", "abcXYdef", 6),  # inserted
        ("abcdefgh", "abcfgh", 6),  # left out
        ("abcdefgh", "abXYfgh", 5),  # changed
        ("abcdefgh", "defghabc", 5),  # in another order
        ("abcabcabc", "abcabcabcabc", 9),
        ("ab", "XXab", 2),
        ("abcd", "XXcd", 0),  # too short a run to be known again
        ("", "abc", 0),
    ],
)
def test_which_tokens_of_a_prediction_appear(prediction: str, answer: str, accepted: int) -> None:
    whole, pieces = PredictionTally(prediction.encode()), PredictionTally(prediction.encode())
    whole.add(answer.encode())
    for at in range(0, len(answer), 2):
        pieces.add(answer[at : at + 2].encode())
    assert (whole.accepted, whole.rejected) == (accepted, len(prediction) - accepted)
    assert pieces.accepted == accepted


def test_an_empty_prediction_is_none(parrot: Any) -> None:
    assert ask(parrot, prediction=content("")).usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "guess", "content": "x"}, "prediction.type"),
        ("x", "prediction"),
    ],
)
def test_a_prediction_that_is_none_is_refused_by_name(parrot: Any, prediction: Any, param: str) -> None:
    messages = [{"role": "user", "content": "[x]"}]
    refused = parrot.post("/v1/chat/completions", model=MODEL, messages=messages, prediction=prediction)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


# -- limits -------------------------------------------------------------------------------------------------------

SAID = {"model": MODEL, "messages": [{"role": "user", "content": "[hi]"}], "max_tokens": 5}
OLLAMA = {"model": MODEL, "prompt": "[hi]", "stream": False}
LIMITED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", SAID | {"speculation": 3}),
    ("/v1/chat/completions", SAID | {"speculative.n_max": 3}),
    ("/v1/chat/completions", SAID | {"speculation": 3, "speculative.n_max": 8}),
    ("/v1/completions", {"model": MODEL, "prompt": "[hi]", "speculation": 3}),
    ("/v1/responses", {"model": MODEL, "input": "[hi]", "speculation": 3}),
    ("/v1/messages", SAID | {"speculation": 3}),
    ("/api/generate", OLLAMA | {"speculation": 3}),
    ("/api/generate", OLLAMA | {"options": {"draft_num_predict": 3}}),
    ("/api/chat", SAID | {"stream": False, "max_tokens": None, "options": {"draft_num_predict": 3}}),
    ("/completion", {"prompt": "[hi]", "speculation": 3}),
    ("/completion", {"prompt": "[hi]", "speculative.n_max": 3}),
    ("/generate", {"text": "[hi]", "speculation": 3}),
    ("/generate", {"inputs": "[hi]", "speculation": 3}),
]
NAMES = [f"{path} {'+'.join(sorted(body))}" for path, body in LIMITED]


@pytest.mark.parametrize(("path", "body"), LIMITED, ids=NAMES)
def test_every_dialect_limits_drafts(watched_parrot: Any, path: str, body: dict[str, Any]) -> None:
    answer = watched_parrot.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert "specul" not in answer.headers.get("x-penstock-ignored", "")
    assert watched_parrot.requests[-1].speculation == 3


@pytest.mark.parametrize(("wish", "limit"), [("auto", None), ("off", 0), (0, 0), (None, None)])
def test_what_may_be_wished(watched_parrot: Any, wish: Any, limit: int | None) -> None:
    assert watched_parrot.post("/v1/chat/completions", **SAID, speculation=wish).status_code == 200
    assert watched_parrot.requests[-1].speculation == limit


def test_a_request_without_drafts_leaves_its_prediction_out(parrot: Any) -> None:
    told = ask(parrot, prediction=content(ANSWER), extra_body={"speculation": "off"})
    assert told.choices[0].message.content == ANSWER
    assert told.usage.completion_tokens_details is None
    assert told.penstock["ignored_fields"] == ["prediction"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    """A server with --speculation off."""
    with serving(InProcessClient(toys.open_plain_parrot, "parrot"), toys.ToyText(), MODEL) as server:
        yield server


def test_a_server_that_drafts_nothing_says_so(plain: Any) -> None:
    told = ask(plain, prediction=content(ANSWER), extra_body={"speculation": 4})
    assert told.choices[0].message.content == ANSWER
    assert told.penstock["ignored_fields"] == ["prediction", "speculation"]
    listed = plain.post("/api/generate", **OLLAMA, options={"draft_num_predict": 3})
    assert listed.headers["x-penstock-ignored"] == "options.draft_num_predict"
    assert "x-penstock-ignored" not in plain.post("/v1/chat/completions", **SAID, speculation="off").headers
    assert not any(slot["speculative"] for slot in plain.get("/slots").json())
    assert plain.get("/props").json()["default_generation_settings"]["params"]["speculative.types"] == "none"
    assert "drafted_tokens_total{" not in plain.get("/metrics").text


# -- telling ------------------------------------------------------------------------------------------------------


def samples(server: Any) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_metrics_count_drafts_by_source_and_by_vllms_names(parrot: Any) -> None:
    before = samples(parrot)
    told = ask(parrot, prediction=content(CHANGED), extra_body={"penstock": True})
    (counts,) = told.penstock["choices"][0]["drafts"]
    drafted, accepted = counts["drafted_tokens"], counts["accepted_tokens"]
    assert drafted > accepted > 0
    parrot.until_idle()
    now = samples(parrot)

    def added(name: str) -> float:
        return now[name] - before.get(name, 0)

    labels = '{engine="0",model_name="toy/parrot"}'
    assert added('penstock_drafts_total{source="prediction"}') == 1
    assert added(f"vllm:spec_decode_num_drafts_total{labels}") == 1
    assert added('penstock_drafted_tokens_total{source="prediction"}') == drafted
    assert added('penstock_accepted_tokens_total{source="prediction"}') == accepted
    assert added(f"vllm:spec_decode_num_draft_tokens_total{labels}") == drafted
    assert added(f"vllm:spec_decode_num_accepted_tokens_total{labels}") == accepted


def test_llamacpps_clients_are_told(parrot: Any) -> None:
    assert all(slot["speculative"] for slot in parrot.get("/slots").json())
    assert parrot.get("/props").json()["default_generation_settings"]["params"]["speculative.types"] == "ngram-simple"
    told = parrot.post("/chat/completions", **SAID, prediction=content("hi")).json()
    assert (told["timings"]["draft_n"], told["timings"]["draft_n_accepted"]) == (1, 1)
    assert "draft_n" not in parrot.post("/chat/completions", **SAID).json()["timings"]
    off = parrot.post("/completion", prompt="[hi]", speculation="off").json()
    assert off["generation_settings"]["speculative.types"] == "none"


# -- llama.cpp's cases --------------------------------------------------------------------------------------------


def right(request: Request) -> Sequence[int]:
    """How the parrot goes on, and further than its answers go."""
    spoken: list[int] = []
    for _ in range(64):
        spoken.append(toys.spoken(bytes((*request.prompt, *spoken))) % 256)
    return spoken


def open_guessing() -> Engine:
    drafting = RandomDrafting(right, toys.LIMITS.vocab, Random(1))
    return assemble(toys.Parrot(toys.LIMITS), toys.LIMITS, drafting=drafting)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def guessing() -> Iterator[Any]:
    """A server whose drafts are mostly right, sometimes wrong, and longer than the answers."""
    with serving(InProcessClient(open_guessing, "parrot"), toys.ToyText(), MODEL) as server:
        yield server


def complete(server: Any, prompt: str, **fields: Any) -> Any:
    answer = server.post("/completion", prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_with_and_without_drafts(plain: Any, guessing: Any) -> None:
    asked = {"n_predict": 24, "return_tokens": True, "n_probs": 2}
    without = complete(plain, f"[{ANSWER}]", **asked)
    told = complete(guessing, f"[{ANSWER}]", **asked)
    assert told["timings"]["draft_n"] >= told["timings"]["draft_n_accepted"] > 0
    assert "draft_n" not in without["timings"]
    for field in ("tokens", "content", "completion_probabilities", "stop_type", "tokens_predicted"):
        assert told[field] == without[field]


@pytest.mark.parametrize("most", [1, 2, 4, 8, 16])
def test_drafts_of_different_lengths(guessing: Any, most: int) -> None:
    limits = {"speculative.n_max": most, "speculative.n_min": 1}
    assert complete(guessing, f"[*{ANSWER}]", n_predict=len(ANSWER), **limits)["content"] == ANSWER


def test_the_context_is_not_exceeded(guessing: Any) -> None:
    prompt = "[*hello ]" + "x" * (toys.LIMITS.max_len - 17)
    told = complete(guessing, prompt, n_predict=256)
    assert (told["tokens_predicted"], told["stop_type"], told["truncated"]) == (8, "limit", True)


@pytest.mark.parametrize("count", [2, 40])
def test_many_at_once(guessing: Any, count: int) -> None:
    answers = [f"{number} is the answer to one of them" for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        told: list[Any] = list(pool.map(lambda text: complete(guessing, f"[{text}]"), answers))
    assert [each["content"] for each in told] == answers
    guessing.until_idle()
    stats = guessing.client.stats
    assert stats.blocks_used == 0


# -- what an answer contains does not depend on how many tokens come in a step --------------------------------------


class Foretold(toys.Reciting):
    """Drafts what a prompt has in brackets."""

    def open(self, request: Request) -> toys.Reciter:
        told = bytes(token for token in request.prompt if token != toys.END).partition(b"[")[2].partition(b"]")[0]
        told = bytes.fromhex(told[1:].decode()) if told.startswith(b"=") else told
        return toys.Reciter(request._replace(prediction=tuple(told)))


LIMITS = toys.LIMITS._replace(max_len=1024)
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = {"type": "function", "function": {"name": "now"}}


def answers_of(path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the answers to the same request with drafts and without."""
    engines: list[dict[str, Any]] = [{"drafting": Foretold()}, {}]
    answers = []
    for fields in engines:
        engine = partial(assemble, toys.Parrot(LIMITS), LIMITS, **fields)  # type: ignore[arg-type]
        with serving(InProcessClient(engine, "parrot"), toys.Hermes(), MODEL) as server:
            answers.append(server.post(path, **body).json())
            answers.append(server.client.stats.steps)
    assert answers[1] < answers[3], "nothing was drafted"
    return [answers[0], answers[2]]


def test_a_repeated_call_counts_the_same_tokens_with_drafts_and_without() -> None:
    said = f"{CALLED}\n{CALLED}\nand so on, for many a token that nobody reads"
    messages = [{"role": "user", "content": f"[={said.encode().hex()}]"}]
    drafted, plain = answers_of("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [NOW]})
    assert len(plain["choices"][0]["message"]["tool_calls"]) == 1
    assert plain["usage"]["completion_tokens"] == len(f"{CALLED}\n{CALLED}") - len("\n</tool_call>")
    assert drafted["usage"] == plain["usage"]


def test_every_token_of_tgi_has_its_own_text() -> None:
    parameters = {"details": True, "max_new_tokens": 30}
    drafted, plain = answers_of("/generate", {"inputs": "[as it is told]", "parameters": parameters})
    assert drafted == plain
    assert [token["text"] for token in plain["details"]["tokens"]] == [*"as it is told", "<end>"]
