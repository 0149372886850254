"""Models that do harm: whose logits are no numbers, whose tokenizer fails, or whose vocabulary has no end."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.errors import MalformedFile
from penstock.model import check_text
from tests.attacks.conftest import Attacked, serving
from tests.cli.conftest import RECITED, write_reciter

POISON = "Z"  # a letter after which every logit is infinite


@pytest.fixture(scope="module", params=["cpu", "ref"])
def poisoned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Attacked]:
    folder = write_reciter(tmp_path_factory.mktemp("poisoned") / "poisoned", endless=False)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][:, vocabulary[POISON]] = 3e38
    save_file(tensors, folder / "model.safetensors")
    with serving(folder, tmp_path_factory.mktemp("home"), "--device", request.param) as server:
        yield server


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1.0}, {"logprobs": 2}, {"stream": True}, {"typical_p": 0.5}]
)
def test_logits_that_are_no_numbers_fail_their_request_alone(poisoned: Attacked, fields: dict[str, object]) -> None:
    def answer(prompt: str, **fields: object) -> httpx.Response:
        return poisoned.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 64, **fields})

    refused = answer(f"Hello!{POISON}", **fields)
    assert refused.status_code == 500, refused.text
    error = refused.json()["error"]
    assert error["code"] == "non_finite_logits"
    assert re.match(r"request \d+: ", error["message"])
    assert refused.headers["x-request-id"] in error["message"]
    assert answer("Hello!", temperature=0).json()["choices"][0]["text"] == RECITED


# -- tokenizers -------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, tokens: int) -> Path:
    """A file whose vocabulary has so many words of 8 digits. It has embeddings and a norm, and no other weights."""
    words = np.zeros(tokens, np.dtype([("size", "<u8"), ("text", "S8")]))
    words["size"], words["text"] = 8, np.char.zfill(np.arange(tokens).astype("S8"), 8)
    kinds = {str: 8, int: 4, float: 6}
    keys: dict[str, str | int | float] = {"general.architecture": "llama"}
    keys |= {"llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 64}
    keys |= {"llama.feed_forward_length": 64, "llama.attention.head_count": 1}
    keys |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2"}
    keys |= {"tokenizer.ggml.pre": "default", "tokenizer.ggml.eos_token_id": 0}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def pair(name: str, value: str | int | float) -> bytes:
        data = text(value) if isinstance(value, str) else struct.pack("<I" if isinstance(value, int) else "<f", value)
        return text(name) + struct.pack("<I", kinds[type(value)]) + data

    head = b"GGUF" + struct.pack("<IQQ", 3, 2, len(keys) + 3) + b"".join(pair(*each) for each in keys.items())
    merges = text("tokenizer.ggml.merges") + struct.pack("<IIQ", 9, 8, 0)
    vocabulary = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, tokens) + words.tobytes()
    vocabulary += text("tokenizer.ggml.token_type") + struct.pack("<IIQ", 9, 5, tokens)
    vocabulary += np.ones(tokens, "<i4").tobytes()
    tensors = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, 64, 0, 0)
    tensors += text("blk.0.attn_norm.weight") + struct.pack("<IQIQ", 1, 64, 0, 64 * 64 * 4)
    path.write_bytes(head + merges + vocabulary + tensors + bytes(64 * 64 * 4 + 64 * 4 + 64))
    return path


def test_a_vocabulary_of_millions_is_read_elsewhere(attacked: Attacked, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "huge.gguf", 3_000_000).read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    before = attacked.most_memory
    assert attacked.http.post(f"/api/blobs/{digest}", content=data).status_code == 201
    refused = attacked.http.post("/api/create", json={"model": "huge", "files": {"huge.gguf": digest}})
    assert refused.status_code == 400
    assert "cannot be read within" in refused.json()["error"]
    assert attacked.most_memory - before < 100 * 2**20
    assert attacked.chat().status_code == 200


def test_the_limits_of_reading_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "no.gguf"
    file.write_bytes(b"nothing" * 100)
    with pytest.raises(MalformedFile, match="GGUF"):
        check_text.check_text(file)
    monkeypatch.setattr(check_text, "WALL_SECONDS", 0.01)
    with pytest.raises(MalformedFile, match="cannot be read within"):
        check_text.check_text(file)
