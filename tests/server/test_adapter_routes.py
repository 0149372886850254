"""Adapters over HTTP, computed by real engines of tiny models: loaded, named, scaled, replaced and unloaded while the
server runs, by every dialect that has a way to say it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock import store
from penstock.config import AdapterOption, configure
from penstock.engine.build import open_engine
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.models.pool import ModelPool
from penstock.server.models.source import ModelSource
from penstock.store import DerivedModel
from tests.server import conftest, toys

MODELS = Path(__file__).parents[1] / "models"
TIED, QWEN2 = MODELS / "adapters" / "tied", MODELS / "adapters" / "qwen2"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


class SmallTokenizer(toys.ToyTokenizer):
    """Writes every token as one character. The models of these tests have few tokens."""

    def token_bytes(self, id: int) -> bytes:
        return bytes([48 + id % 64])

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        return [3 + byte % 32 for byte in text.encode()][:40]


class SmallText(toys.ToyText):
    tokenizer = SmallTokenizer()

    def encode_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def source(name: str, *adapters: AdapterOption) -> ModelSource:
    settings = {"device": "cpu", "threads": 1, "max_rows": 4, "kv_memory": 1 << 20, "max_len": 64}
    given = settings | {"adapter": [f"{each.name}={each.path}" for each in adapters]}
    path = MODELS / "goldens" / name
    config = configure(path, given, name=name)
    make = partial(InProcessClient, lambda: open_engine(config, lambda _: None), name)
    return ModelSource(name, make, SmallText, path, adapters=adapters)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Serves two models. The second is started with an adapter; none is loaded yet."""
    pool = ModelPool([source("tied"), source("qwen2", AdapterOption("quirk", str(QWEN2)))])
    with TemporaryDirectory() as folder:
        app = create_app(pool, Setup(space=Space(Path(folder))))
        yield from conftest._serving(None, app)


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def pirate(server: Any) -> Iterator[str]:
    """Is loaded for one test."""
    assert server.post("/v1/load_lora_adapter", lora_name="pirate", lora_path=str(TIED)).status_code == 200
    yield "pirate"
    server.post("/v1/unload_lora_adapter", lora_name="pirate")


def said(server: Any, model: str | None = None, **fields: Any) -> str:
    answer = server.post("/v1/completions", model=model or "tied", prompt="once upon", **GREEDY | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "tied")
    return str(answer.json()["choices"][0]["text"])


def louder(folder: Path) -> Path:
    """Makes an adapter of twice the effect."""
    shutil.copytree(TIED, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    return folder


# -- vLLM's routes --------------------------------------------------------------------------------------------------


def test_an_adapter_is_loaded_named_and_unloaded(server: Any) -> None:
    answer = server.post("/v1/load_lora_adapter", lora_name="pirate", lora_path=str(TIED))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    plain = said(server)
    assert said(server, "pirate") == said(server, "tied:pirate") != plain
    listed = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
    assert (listed["pirate"]["parent"], listed["pirate"]["root"]) == ("tied", str(TIED))
    assert listed["tied"]["parent"] is None
    assert server.get("/v1/models/pirate").json()["parent"] == "tied"
    answer = server.post("/v1/unload_lora_adapter", lora_name="pirate", lora_int_id=1)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' removed successfully.")
    assert server.post("/v1/completions", model="pirate", prompt="x").status_code == 404
    assert said(server) == plain


def test_a_loaded_adapter_is_replaced_in_place(server: Any, pirate: str, tmp_path: Path) -> None:
    before = said(server, pirate)
    again = {"lora_name": pirate, "lora_path": str(louder(tmp_path / "louder"))}
    answer = server.post("/v1/load_lora_adapter", **again)
    assert answer.status_code == 400
    assert "load_inplace" in answer.json()["error"]["message"]
    bad = server.post("/v1/load_lora_adapter", lora_name=pirate, lora_path=str(QWEN2), load_inplace=True)
    assert bad.status_code == 400
    assert said(server, pirate) == before
    assert server.post("/v1/load_lora_adapter", **again, load_inplace=True).status_code == 200
    assert said(server, pirate) != before


def test_bad_adapters_are_refused_and_nobody_notices(server: Any, pirate: str, tmp_path: Path) -> None:
    plain = said(server)
    cut, empty, odd = tmp_path / "cut", tmp_path / "empty", tmp_path / "odd.gguf"
    shutil.copytree(TIED, cut)
    tensors = cut / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    empty.mkdir()
    odd.write_bytes(b"GGUF")
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_name": "x"}, 400, "'lora_path' is missing"),
        ({"lora_path": str(TIED)}, 400, "'lora_name' is missing"),
        ({"lora_name": "", "lora_path": str(TIED)}, 400, "lora_name: Expected str of length >= 1"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path: Expected str of length >= 1"),
        ({"lora_name": "x" * 257, "lora_path": str(TIED)}, 400, "1 to 256 characters"),
        ({"lora_name": "x", "lora_path": "~nobody-here/x"}, 404, "there is no adapter at"),
        ({"lora_name": "x", "lora_path": "x" * 5000}, 404, "there is no adapter at"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 404, "there is no adapter at"),
        ({"lora_name": "tied", "lora_path": str(TIED)}, 400, "is the name of a model"),
        ({"lora_name": "quirk", "lora_path": str(TIED), "load_inplace": True}, 400, "of 'qwen2' is loaded already"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, 404, "there is no adapter at"),
        ({"lora_name": "x", "lora_path": str(empty)}, 400, "has no adapter_config.json"),
        ({"lora_name": "x", "lora_path": str(odd)}, 400, "cannot be used"),
        ({"lora_name": "x", "lora_path": str(cut)}, 400, "cannot be used"),
        ({"lora_name": "x", "lora_path": str(MODELS / "goldens" / "tied" / "model.gguf")}, 400, "no LoRA adapter"),
        ({"lora_name": "x", "lora_path": str(QWEN2)}, 400, "another base"),
        ({"lora_name": "x", "lora_path": str(TIED), "model": "nobody"}, 404, "'nobody' does not exist"),
    ]
    for fields, status, told in cases:
        answer = server.post("/v1/load_lora_adapter", **fields)
        assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text
    answer = server.post("/v1/unload_lora_adapter", lora_name="x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")
    assert said(server) == plain


def test_an_answer_keeps_the_adapter_that_is_unloaded_meanwhile(server: Any, pirate: str) -> None:
    expected = said(server, pirate, max_tokens=40)

    async def scenario() -> str:
        sdk = server.async_sdk()
        stream = await sdk.completions.create(
            model=pirate, prompt="once upon", max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        pieces = [(await anext(stream)).choices[0].text]
        assert server.post("/v1/unload_lora_adapter", lora_name=pirate).status_code == 200
        pieces += [chunk.choices[0].text async for chunk in stream if chunk.choices]
        return "".join(pieces)

    assert asyncio.run(scenario()) == expected


def test_an_adapter_finds_its_model_and_outlives_its_unloading(server: Any) -> None:
    """One that the server was started with is known before its model is loaded."""
    quirk = said(server, "quirk")
    assert quirk != said(server, "qwen2")
    loaded = {"lora_name": "second", "lora_path": str(QWEN2), "model": "qwen2"}
    assert server.post("/v1/load_lora_adapter", **loaded).status_code == 200
    assert server.post("/models/unload", model="qwen2").status_code == 200
    assert {"quirk", "second"} <= {each["id"] for each in server.get("/v1/models").json()["data"]}
    assert said(server, "second") == said(server, "qwen2:quirk") == quirk
    assert server.post("/models/unload", model="qwen2").status_code == 200
    assert server.post("/v1/unload_lora_adapter", lora_name="second", model="qwen2").status_code == 200
    assert server.post("/v1/completions", model="second", prompt="x").status_code == 404
    assert said(server, "quirk") == quirk


# -- adapters on one request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_adapters_with_scales_add_up(server: Any, pirate: str, path: str) -> None:
    assert server.post("/v1/load_lora_adapter", lora_name="twin", lora_path=str(TIED)).status_code == 200
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}

    def ask(**fields: Any) -> str:
        answer = server.post(path, **asked, **GREEDY, **fields)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])

    halves = [{"name": "pirate", "scale": 0.5}, {"name": "twin", "scale": 0.5}]
    plain, whole = ask(model="tied"), ask(model="pirate")
    assert ask(model="tied", adapters=halves) == ask(model="tied", adapters=[{"name": "twin"}]) == whole != plain
    assert ask(model="pirate", adapters=[{"name": "twin", "scale": -1}]) == plain
    assert ask(model="tied", lora=[{"id": 0, "scale": 1.0}]) == whole
    assert ask(model="tied", adapters=[]) == plain
    for fields, status in (
        ({"adapters": [{"name": "nobody"}]}, 404),
        ({"adapters": [{"name": "twin"}, {"name": "twin"}]}, 400),
        ({"model": "pirate", "adapters": [{"name": "pirate"}]}, 400),
        ({"adapters": [{"name": "twin", "scale": 1e9}]}, 400),
        ({"adapters": [{"name": "twin"}] * 17}, 400),
        ({"lora": [{"id": 9, "scale": 1}]}, 404),
        ({"lora": [{"id": -1, "scale": 1}]}, 400),
    ):
        assert server.post(path, **asked, **fields).status_code == status, fields
    server.post("/v1/unload_lora_adapter", lora_name="twin")


def test_llamacpp_scales_the_adapters_of_all_requests(server: Any, pirate: str) -> None:
    def complete(**fields: Any) -> str:
        answer = server.post("/completion", prompt="hi", n_predict=8, temperature=0, ignore_eos=True, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["content"])

    plain, whole = complete(), complete(lora=[{"id": 0, "scale": 1.0}])
    assert complete(model="pirate") == whole != plain
    listed = {"id": 0, "name": "pirate", "path": str(TIED), "scale": 0.0}
    assert server.get("/lora-adapters").json() == [listed]
    assert server.http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json() == {"success": True}
    assert server.get("/lora-adapters").json() == [listed | {"scale": 1.0}]
    assert complete() == whole
    assert complete(lora=[]) == complete(lora=[{"id": 0, "scale": 0}]) == plain
    assert server.http.post("/lora-adapters", json=[]).json() == {"success": True}
    assert complete() == plain
    assert [each["name"] for each in server.get("/lora-adapters?model=qwen2").json()] == ["quirk"]
    for body, status in (
        ([{"id": 7, "scale": 1}], 404),
        ([{"id": 0}], 400),
        ({}, 400),
        ([{"id": "0", "scale": 1}], 400),
    ):
        assert server.http.post("/lora-adapters", json=body).status_code == status, body


def test_sglang_and_tgi_name_adapters_in_their_own_fields(server: Any) -> None:
    answer = server.post("/load_lora_adapter", lora_name="pirate", lora_path=str(TIED), pinned=False)
    assert answer.json()["success"] is True
    assert answer.json()["loaded_adapters"]["pirate"] == str(TIED)

    def sglang(**fields: Any) -> Any:
        how = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = server.post("/generate", sampling_params=how, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    plain, whole = sglang(text="hi")["text"], sglang(text="hi", lora_path="pirate")["text"]
    assert plain != whole
    both = sglang(text=["hi", "hi"], lora_path=["pirate", None])
    assert [each["text"] for each in both] == [whole, plain]
    assert server.post("/generate", text="hi", lora_path="nobody").status_code == 404

    def tgi(**parameters: Any) -> Any:
        return server.post("/generate", inputs="hi", parameters={"max_new_tokens": 8} | parameters)

    assert tgi(adapter_id="pirate").json()["generated_text"] == whole
    assert tgi().json()["generated_text"] == plain
    assert tgi(adapter_id="nobody").status_code == 404
    assert server.post("/unload_lora_adapter", lora_name="pirate").json()["success"] is True
    assert server.post("/unload_lora_adapter", lora_name="pirate").status_code == 404


# -- Ollama's ADAPTER -----------------------------------------------------------------------------------------------


def uploaded(server: Any, path: Path) -> str:
    content = path.read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert server.http.post(f"/api/blobs/{digest}", content=content).status_code in (200, 201)
    return digest


@pytest.mark.parametrize("files", [["adapter.gguf"], ["adapter_config.json", "adapter_model.safetensors"]])
def test_a_derived_model_is_computed_with_its_adapter(server: Any, pirate: str, files: list[str]) -> None:
    adapters = {name: uploaded(server, TIED / name) for name in files}
    asked = {"model": "mate", "from": "tied", "adapters": adapters, "stream": False}
    assert server.http.post("/api/create", json=asked).json() == {"status": "success"}
    for digest in adapters.values():
        os.utime(store.blob_path(digest), (0, 0))
    store.delete_unused_blobs()

    def ask(model: str) -> str:
        options = {"temperature": 0, "num_predict": 8}
        answer = server.post("/api/generate", model=model, prompt="hi", raw=True, stream=False, options=options)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["response"])

    assert ask("mate") == ask("pirate") != ask("tied")
    assert said(server, "mate") == said(server, pirate)
    assert f"ADAPTER {store.home()}" in server.post("/api/show", model="mate").json()["modelfile"]
    assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["tied", "qwen2", "pirate", "quirk"]


def test_an_adapter_that_does_not_fit_is_an_error_of_its_derived_model_alone(server: Any, tmp_path: Path) -> None:
    for name, path, told in (("bad", QWEN2, "another base"), ("gone", tmp_path / "gone", "there is no adapter at")):
        store.save_derived(DerivedModel(name=name, base="tied", adapters=[str(path)]))
        answer = server.post("/v1/completions", model=name, prompt="hi")
        assert (answer.status_code, told in answer.json()["error"]["message"]) == (400, True), answer.text
    said(server)


def test_uploads_that_make_no_adapter_are_refused(server: Any) -> None:
    config = uploaded(server, TIED / "adapter_config.json")
    missing = f"sha256:{'0' * 64}"
    for adapters, told in (
        ({"adapter_config.json": config}, "adapter_config.json and adapter_model.safetensors"),
        ({"a.gguf": missing}, f"upload it to /api/blobs/{missing}"),
        ({"a.gguf": "abc"}, "is not a digest"),
    ):
        answer = server.http.post("/api/create", json={"model": "m", "from": "tied", "adapters": adapters})
        assert (answer.status_code, told in answer.json()["error"]) == (400, True), answer.text
