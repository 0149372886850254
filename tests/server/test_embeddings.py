"""Embeddings in both dialects that have them, with the official SDKs as judges. The toy's hidden state at a byte is a 1
among eight numbers (toys.py), so the mean of a text tells how often each of its bytes' last three bits came."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import ollama
import openai
import pytest

from penstock.ipc.request_stream import EventReader
from penstock.types import Request
from tests.server.conftest import WAIT

MODEL = "toy/parrot"
TEXTS = ["hello", "a longer text, which takes the toy more than one step: " + "x" * 100, "漢字"]


def state(given: str | list[int]) -> np.ndarray:
    ids = list(given.encode()) if isinstance(given, str) else given
    return np.bincount(np.array(ids) % 8, minlength=8) / len(ids)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def client(server: Any) -> ollama.Client:
    return ollama.Client(server.url, timeout=120.0)


# -- OpenAI -------------------------------------------------------------------------------------------------------


def test_one_text_and_several(parrot: Any) -> None:
    sdk = parrot.sdk()
    one = sdk.embeddings.create(model=MODEL, input=TEXTS[0])
    assert (one.object, one.model, one.data[0].object) == ("list", MODEL, "embedding")
    assert (one.usage.prompt_tokens, one.usage.total_tokens) == (5, 5)
    many = sdk.embeddings.create(model=MODEL, input=TEXTS * 30)  # more than are in the engine at once
    assert [entry.index for entry in many.data] == list(range(90))
    for entry, text in zip(many.data, TEXTS * 30, strict=True):
        assert entry.embedding == pytest.approx(unit(state(text)), abs=1e-6)
    assert many.data[0].embedding == one.data[0].embedding
    assert many.usage.prompt_tokens == 30 * sum(len(text.encode()) for text in TEXTS)


def test_token_ids_are_embedded_as_they_are(parrot: Any) -> None:
    sdk = parrot.sdk()
    [one] = sdk.embeddings.create(model=MODEL, input=[1, 2, 10]).data
    assert one.embedding == pytest.approx(unit(state([1, 2, 10])), abs=1e-6)
    two = sdk.embeddings.create(model=MODEL, input=[[1, 2, 10], [3]]).data
    assert two[0].embedding == one.embedding
    assert two[1].embedding == pytest.approx(state([3]))


def test_both_encodings_hold_the_same_numbers(parrot: Any) -> None:
    """The SDK asks for base64 by itself and decodes it; told a format, it leaves the answer as it came."""
    sdk = parrot.sdk()
    by_default, floats, encoded = (
        sdk.embeddings.create(model=MODEL, input="hello", **({"encoding_format": format} if format else {})).data[0]
        for format in (None, "float", "base64")
    )
    assert by_default.embedding == floats.embedding
    assert np.frombuffer(base64.b64decode(encoded.embedding), "<f4").tolist() == floats.embedding
    plain = parrot.post("/v1/embeddings", model=MODEL, input="hello").json()
    assert plain["data"][0]["embedding"] == floats.embedding


def test_fewer_dimensions_are_the_first_ones_scaled_again(parrot: Any) -> None:
    sdk = parrot.sdk()
    for count in (1, 3, 8):
        [entry] = sdk.embeddings.create(model=MODEL, input="hello", dimensions=count).data
        assert entry.embedding == pytest.approx(unit(state("hello")[:count]), abs=1e-6)
        assert len(entry.embedding) == count


def test_the_last_state_can_be_asked_for(parrot: Any) -> None:
    [entry] = parrot.sdk().embeddings.create(model=MODEL, input="hello", extra_body={"pooling": "last"}).data
    assert entry.embedding == state("o").tolist()


def test_async(parrot: Any) -> None:
    async def ask() -> list[Any]:
        async with parrot.async_sdk() as sdk:
            calls = [sdk.embeddings.create(model=MODEL, input=[text], user="somebody") for text in TEXTS]
            return await asyncio.gather(*calls)

    for answer, text in zip(asyncio.run(ask()), TEXTS, strict=True):
        assert answer.data[0].embedding == pytest.approx(unit(state(text)), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": ["x", ""]}, "input[1]", "empty"),
        ({"input": [[1], []]}, "input[1]", "empty"),
        ({"input": ["x", [1]]}, "input", "a list of strings"),
        ({"input": {"a": 1}}, "input", "Expected"),
        ({"input": [1, 257]}, "input", "0 to 256; got 257"),
        ({"input": [[1], [-1]]}, "input[1]", "got -1"),
        ({"input": ["x"] * 2049}, "input", "2049 texts; at most 2048"),
        ({"input": "x" * 513}, "input", "513 tokens and the context holds 512"),
        ({"input": ["x", "x" * 600]}, "input[1]", "600 tokens"),
        ({"input": "x", "dimensions": 0}, "dimensions", "from 1 to 8"),
        ({"input": "x", "dimensions": 9}, "dimensions", "from 1 to 8"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "Invalid enum"),
        ({"input": "x", "extra_body": {"pooling": "max"}}, "pooling", "Invalid enum"),
        ({"input": "x", "extra_body": {"truncate": True}}, "truncate", "unknown field 'truncate'"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    strict_parrot: Any, fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        strict_parrot.sdk().embeddings.create(model=MODEL, **fields)
    assert caught.value.param == param
    assert told in caught.value.message
    strict_parrot.until_idle()


def test_too_long_has_its_own_code_and_a_foreign_model_is_404(parrot: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        parrot.sdk().embeddings.create(model=MODEL, input="x" * 513)
    assert caught.value.code == "context_length_exceeded"
    assert len(parrot.sdk().embeddings.create(model=MODEL, input="x" * 512).data) == 1
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        parrot.sdk().embeddings.create(model="text-embedding-3-small", input="x")


def test_a_client_that_leaves_takes_its_embeddings_along(slow_parrot: Any) -> None:
    asked = {"model": MODEL, "input": ["x" * 4000] * 200}  # a minute's work
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow_parrot.url}/v1/embeddings", json=asked, timeout=httpx.Timeout(WAIT, read=0.3))
    slow_parrot.until_idle()
    steps = slow_parrot.client.stats.steps
    slow_parrot.post("/v1/embeddings", model=MODEL, input="x")
    assert slow_parrot.client.stats.steps - steps < 10


def test_many_embeddings_leave_room_for_an_answer(slow_parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes after hundreds of texts does not wait for all of them."""
    order: list[str] = []
    run = slow_parrot.client.run

    async def recorded(request: Request, read: EventReader) -> None:
        """Most texts wait until the answer is asked for, however slow its client is."""
        kind = "text" if request.pooling else "answer"
        while request.pooling and len(order) >= 64 and "answer" not in order:
            await asyncio.sleep(0.001)
        order.append(kind)
        try:
            await run(request, read)
        finally:
            order.append(f"{kind} ended")

    async def ask() -> None:
        async with slow_parrot.async_sdk() as sdk:
            before = slow_parrot.client.stats.prompt_tokens
            many = asyncio.create_task(sdk.embeddings.create(model=MODEL, input=["x" * 64] * 400))
            while slow_parrot.client.stats.prompt_tokens == before:
                await asyncio.sleep(0.001)
            said = await sdk.completions.create(model=MODEL, prompt="[hello]", max_tokens=10)
            assert said.choices[0].text == "hello"
            assert len((await many).data) == 400

    monkeypatch.setattr(slow_parrot.client, "run", recorded)
    asyncio.run(ask())
    assert order.count("text ended") == 400
    assert "text" in order[order.index("answer ended") :]


def test_metrics_count_embeddings_by_a_name_of_their_own(parrot: Any) -> None:
    parrot.sdk().embeddings.create(model=MODEL, input=["a", "b"])
    [line] = [line for line in parrot.get("/metrics").text.splitlines() if 'finished_total{reason="pooled"}' in line]
    assert float(line.split()[-1]) >= 2


def test_an_engine_process_answers_the_same(parrot_process: Any, parrot: Any) -> None:
    fields = {"model": MODEL, "input": TEXTS}
    near = parrot_process.sdk().embeddings.create(**fields)
    assert near.data == parrot.sdk().embeddings.create(**fields).data


# -- Ollama -------------------------------------------------------------------------------------------------------


def test_ollama_embeds_one_and_several(parrot: Any) -> None:
    one = client(parrot).embed(MODEL, "hello")
    assert one.model == MODEL
    assert one.embeddings[0] == pytest.approx(unit(state("hello")), abs=1e-6)
    assert (one.prompt_eval_count, one.load_duration) == (5, 0)
    assert one.total_duration > 0
    many = client(parrot).embed(f"{MODEL}:latest", TEXTS, keep_alive="5m", options={"temperature": 0, "num_thread": 2})
    assert many.embeddings[0] == one.embeddings[0]
    assert len(many.embeddings) == 3
    for nothing in ("", []):
        assert client(parrot).embed(MODEL, nothing).embeddings == []
    assert parrot.post("/api/embed", model=MODEL).json()["embeddings"] == []
    fewer = client(parrot).embed(MODEL, "hello", dimensions=6)
    assert fewer.embeddings[0] == pytest.approx(unit(state("hello")[:6]), abs=1e-6)


def test_ollama_async(parrot: Any) -> None:
    async def ask() -> list[Any]:
        sdk = ollama.AsyncClient(parrot.url, timeout=120.0)
        return await asyncio.gather(sdk.embed(MODEL, TEXTS), sdk.embeddings(MODEL, TEXTS[0]))

    new, old = asyncio.run(ask())
    assert new.embeddings[0] == pytest.approx(unit(np.array(old.embedding)), abs=1e-6)


def test_ollamas_older_endpoint_gives_a_state_as_long_as_it_is(parrot: Any) -> None:
    assert client(parrot).embeddings(MODEL, "hello").embedding == pytest.approx(state("hello"))
    assert client(parrot).embeddings(MODEL).embedding == []


def test_ollama_cuts_only_what_it_is_told_to_cut(parrot: Any) -> None:
    text = "a" * 512 + "b" * 100
    whole = client(parrot).embed(MODEL, "a" * 512)
    cut = client(parrot).embed(MODEL, [text, "b"], truncate=True)
    assert cut.embeddings[0] == whole.embeddings[0]
    assert cut.prompt_eval_count == 513
    short = client(parrot).embed(MODEL, "aab", truncate=True, options={"num_ctx": 2})
    assert (short.prompt_eval_count, short.embeddings[0]) == (2, whole.embeddings[0])


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("embed", {"input": "x" * 600}, "input has 600 tokens and the context holds 512: shorten it, or send truncate"),
        ("embed", {"input": "x" * 600, "truncate": False}, "600 tokens"),
        ("embed", {"input": "xxx", "options": {"num_ctx": 2}}, "3 tokens and the context holds 2"),
        (
            "embed",
            {"input": "x", "options": {"num_ctx": 9999}},
            "options.num_ctx is not supported with this value: 9999",
        ),
        ("embed", {"input": "x", "options": {"warp": 1}}, "unknown field 'options.warp'"),
        ("embed", {"input": ["x", ""]}, "input[1] is empty"),
        ("embed", {"input": [1]}, "Expected str"),
        ("embed", {"input": ["x"] * 2049}, "at most 2048"),
        ("embed", {"input": "x", "dimensions": 9}, "dimensions must be from 1 to 8"),
        ("embed", {"input": "x", "keep_alive": "soon"}, "keep_alive"),
        ("embed", {"input": "x", "prompt": "x"}, "unknown field 'prompt'"),
        ("embeddings", {"prompt": "x" * 600}, "prompt has 600 tokens and the context holds 512: shorten it"),
        ("embeddings", {"input": "x"}, "unknown field 'input'"),
    ],
)
def test_what_ollama_cannot_embed_is_said(strict_parrot: Any, path: str, fields: dict[str, Any], told: str) -> None:
    answer = strict_parrot.post(f"/api/{path}", model=MODEL, **fields)
    assert answer.status_code == 400
    assert told in answer.json()["error"]


def test_ollamas_client_reads_the_refusals(parrot: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="600 tokens") as caught:
        client(parrot).embed(MODEL, "x" * 600)
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client(parrot).embed("nomic-embed-text", "x")
    assert caught.value.status_code == 404
