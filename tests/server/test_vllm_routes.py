"""vLLM's routes beyond OpenAI's."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from penstock import __version__
from tests.server import toys

MODEL = "toy/parrot"


def test_version_ping_and_load(parrot: Any) -> None:
    assert parrot.get("/version").json() == {"version": __version__}
    assert parrot.get("/ping").status_code == parrot.post("/ping").status_code == 200
    assert parrot.get("/load").json() == {"server_load": 0}


def test_load_counts_requests(slow_parrot: Any) -> None:
    asked = {"model": MODEL, "prompt": "[*ab]", "stream": True, "max_tokens": 4000}
    with slow_parrot.http.stream("POST", "/v1/completions", json=asked):
        slow_parrot.until(lambda: slow_parrot.get("/load").json() == {"server_load": 1})
    slow_parrot.until_idle()


def test_models_say_how_long_a_context_is(parrot: Any) -> None:
    (model,) = parrot.get("/v1/models").json()["data"]
    assert (model["max_model_len"], model["root"], model["parent"]) == (toys.LIMITS.max_len, MODEL, None)
    assert model["permission"][0]["allow_logprobs"] is True
    assert parrot.get(f"/v1/models/{MODEL}").json()["max_model_len"] == toys.LIMITS.max_len


def test_tokenizer_info_is_what_lm_eval_reads(parrot: Any) -> None:
    """Its remote tokenizer needs eos_token to be there, encodes it with /tokenize, and renders chat_template."""
    told = parrot.get("/tokenizer_info").json()
    assert (told["eos_token"], told["bos_token"], told["pad_token"]) == ("<end>", None, None)
    assert told["chat_template"] == toys.ToyText.template.source
    assert told["tokenizer_class"]
    assert told["model_max_length"] == toys.LIMITS.max_len
    ids = parrot.post("/tokenize", prompt="ab", add_special_tokens=False).json()["tokens"]
    assert ids == [97, 98]
    assert parrot.post("/detokenize", tokens=ids).json()["prompt"] == "ab"


def test_pooling(parrot: Any) -> None:
    def pooled(**fields: Any) -> Any:
        answer = parrot.post("/pooling", model=MODEL, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    told = pooled(input=["ab", "c"])
    same = parrot.post("/v1/embeddings", model=MODEL, input=["ab", "c"]).json()
    assert [each["data"] for each in told["data"]] == [each["embedding"] for each in same["data"]]
    assert [(each["object"], each["index"]) for each in told["data"]] == [("pooling", 0), ("pooling", 1)]
    assert told["usage"]["prompt_tokens"] == 3
    (packed,) = pooled(input="ab", encoding_format="base64")["data"]
    assert np.frombuffer(b64decode(packed["data"]), "<f4").tolist() == told["data"][0]["data"]
    state = pooled(input="ab", normalize=False)["data"][0]["data"]
    assert state == pytest.approx([0, 0.5, 0.5, 0, 0, 0, 0, 0])
    assert len(pooled(input="ab", dimensions=4, normalize=False)["data"][0]["data"]) == 4
    ignored = parrot.post("/pooling", model=MODEL, input="ab", softmax=True, task="classify")
    assert ignored.headers["x-penstock-ignored"] == "softmax, task"
