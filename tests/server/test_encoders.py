"""An encoder behind the server: embeddings in both dialects, and no text in any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from penstock.config import Config
from penstock.engine.build import open_engine
from penstock.ipc.inprocess import InProcessClient
from penstock.model.load import load_text

MODEL = "tiny"
BERT = Path(__file__).parents[1] / "models" / "encoders" / "bert"
MESSAGES = [{"role": "user", "content": "the river"}]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(BERT), device="cpu", threads=1)
    with serve(InProcessClient(lambda: open_engine(config), MODEL), load_text(BERT), MODEL, BERT) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(BERT / "expected.npz") as file:
        return dict(file)


def close(got: Any, wanted: np.ndarray) -> bool:
    return bool(np.abs(np.array(got) - wanted).max() < 1e-5)


def test_both_dialects_embed_what_sentence_transformers_does(server: Any, expected: dict[str, np.ndarray]) -> None:
    texts, vectors = [text for text in expected["texts"].tolist() if text], expected["vectors"]
    vectors = vectors[[bool(text) for text in expected["texts"].tolist()]]
    told = server.sdk().embeddings.create(model=MODEL, input=texts)
    assert close([entry.embedding for entry in told.data], vectors)
    told = ollama.Client(server.url).embed(MODEL, texts)
    assert close(told.embeddings, vectors)
    old = np.array(ollama.Client(server.url).embeddings(MODEL, texts[0]).embedding)
    assert close(old / np.linalg.norm(old), vectors[0])


def test_pooling_can_be_chosen(server: Any, expected: dict[str, np.ndarray]) -> None:
    states, tokens = expected["states"], expected["tokens"].tolist()
    for kind, wanted in (("cls", states[0]), ("last", states[-1]), ("mean", states.mean(0))):
        body = {"pooling": kind}
        [entry] = server.sdk().embeddings.create(model=MODEL, input=tokens, extra_body=body).data
        assert close(entry.embedding, wanted / np.linalg.norm(wanted))


def test_too_long_a_text_is_refused_or_cut_before_what_closes_it(server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="input has 62 tokens and the context holds 50"):
        server.sdk().embeddings.create(model=MODEL, input="a " * 60)
    client = ollama.Client(server.url)
    cut, whole = (client.embed(MODEL, "a " * count, truncate=True).embeddings for count in (60, 48))
    assert cut == whole


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/responses", {"input": "the"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "the"}),
        ("/api/generate", {"prompt": "the", "raw": True}),
    ],
)
def test_no_api_makes_it_speak(server: Any, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, model=MODEL, **body)
    assert answer.status_code == 400
    assert "this model is an encoder, which returns embeddings and no text" in answer.text


def test_it_says_what_it_can(server: Any) -> None:
    assert server.post("/api/show", model=MODEL).json()["capabilities"] == ["embedding"]
    assert server.post("/tokenize", prompt="the rivers", return_token_strs=True).json()["token_strs"] == [
        *("[CLS]", " the", " river", "s", "[SEP]")
    ]
    assert server.post("/tokenize", prompt="the", add_special_tokens=False).json()["count"] == 1
    assert server.post("/tokenize", content="the").json()["count"] == 1
    assert server.post("/tokenize", content="the", add_special=True).json()["count"] == 3
    assert server.get("/health").json()["status"] == "ok"
