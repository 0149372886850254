"""Models that Ollama's own client makes: uploads, create, copy, delete, and asking for what was made."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ollama
import pytest

from penstock import store
from penstock.config import Config
from penstock.errors import InvalidRequest, MalformedFile
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from penstock.store import DerivedModel, blobs, derived
from tests.server import toys

MODEL = "toy/parrot"


@cache
def opened(url: str) -> ollama.Client:
    return ollama.Client(url, timeout=60.0)


def sdk(server: Any) -> ollama.Client:
    return opened(server.url)


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# -- files --------------------------------------------------------------------------------------------------------


def test_a_file_is_uploaded_and_found(parrot: Any, own_store: Path, tmp_path: Path) -> None:
    content = b"0123456789" * 300_000
    (tmp_path / "file").write_bytes(content)
    digest = digest_of(content)
    assert parrot.http.head(f"/api/blobs/{digest}").status_code == 404
    assert sdk(parrot).create_blob(tmp_path / "file") == digest
    assert parrot.http.head(f"/api/blobs/{digest}").status_code == 200
    (kept,) = (own_store / "blobs").iterdir()
    assert kept.read_bytes() == content
    assert parrot.http.post(f"/api/blobs/{digest}", content=content).status_code == 200
    assert asyncio.run(ollama.AsyncClient(parrot.url).create_blob(tmp_path / "file")) == digest


def test_what_is_not_what_its_digest_says_leaves_nothing(parrot: Any, own_store: Path) -> None:
    answer = parrot.http.post(f"/api/blobs/{digest_of(b'this')}", content=b"that")
    assert answer.status_code == 400
    assert digest_of(b"that") in answer.json()["error"]
    assert list((own_store / "blobs").iterdir()) == []
    assert parrot.http.post(f"/api/blobs/{digest_of(b'')}", content=b"").status_code == 201


@pytest.mark.parametrize("digest", ["sha256:00", "md5:" + "0" * 64, "sha256:" + "A" * 64, "..", "sha256:..%2f..%2fx"])
def test_a_digest_is_no_path(parrot: Any, own_store: Path, digest: str) -> None:
    assert parrot.http.post(f"/api/blobs/{digest}", content=b"x").status_code in (400, 404, 405)
    assert parrot.http.head(f"/api/blobs/{digest}").status_code in (400, 404)
    assert not (own_store / "blobs").exists() or list((own_store / "blobs").iterdir()) == []


def test_uploads_are_bounded(parrot: Any, own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_BYTES", 4_000_000)
    monkeypatch.setattr(blobs, "MAX_FILES", 1)
    content = b"x" * 5_000_000

    def pieces() -> Iterator[bytes]:  # without a length beforehand
        yield from (content[at : at + 100_000] for at in range(0, len(content), 100_000))

    for body in (content, pieces()):
        answer = parrot.http.post(f"/api/blobs/{digest_of(content)}", content=body)
        assert (answer.status_code, "4000000 bytes" in answer.json()["error"]) == (413, True)
    assert list((own_store / "blobs").iterdir()) == []
    assert parrot.http.post(f"/api/blobs/{digest_of(b'a')}", content=b"a").status_code == 201
    assert "which is the limit" in parrot.http.post(f"/api/blobs/{digest_of(b'b')}", content=b"b").json()["error"]
    monkeypatch.setattr(blobs, "UNUSED", -1.0)  # seconds: what no model is made of has been here too long
    assert parrot.http.post(f"/api/blobs/{digest_of(b'b')}", content=b"b").status_code == 201
    monkeypatch.setattr(blobs, "FREE", 2**62)
    assert (
        "the store's disk has room for 0"
        in parrot.http.post(f"/api/blobs/{digest_of(b'c')}", content=b"c").json()["error"]
    )


def test_an_upload_that_is_cut_leaves_nothing(parrot: Any, own_store: Path) -> None:
    address = parrot.url.removeprefix("http://").split(":")
    head = f"POST /api/blobs/{digest_of(b'x')} HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n"
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(head.encode() + b"x" * 2_000_000)
        parrot.until(lambda: any((own_store / "blobs").glob("*.part")))
    parrot.until(lambda: not any((own_store / "blobs").iterdir()))


# -- making -------------------------------------------------------------------------------------------------------


def test_a_system_prompt_and_messages_begin_every_chat(parrot: Any) -> None:
    client = sdk(parrot)
    shots = [{"role": "user", "content": "one"}]
    told = client.create("mario", from_=MODEL, system="[It's-a me]", messages=shots, stream=True)
    assert [line.status for line in told] == [f"using existing model {MODEL}", "writing manifest", "success"]
    begun = "system:[It's-a me]\nuser:one\n"
    chat = client.chat("mario", ask("hi"))
    assert (chat.model, chat.message.content) == ("mario", "It's-a me")
    assert chat.prompt_eval_count == len(f"{begun}user:hi\nassistant:")
    parts = list(client.generate("mario:latest", "hi", stream=True))
    assert "".join(part.response or "" for part in parts) == "It's-a me"
    assert (parts[0].model, parts[-1].prompt_eval_count) == ("mario", chat.prompt_eval_count)
    own = [{"role": "system", "content": "[Own]"}, *ask("hi")]
    assert client.chat("mario", own).prompt_eval_count == len("system:[Own]\nuser:one\nuser:hi\nassistant:")
    assert client.generate("mario", "hi", system="[Own]").response == "Own"
    assert client.generate("mario", "[raw]", raw=True).prompt_eval_count == len("[raw]")
    assert client.chat(MODEL, ask("[plain]")).message.content == "plain"


def test_a_template_makes_the_prompt(parrot: Any) -> None:
    client = sdk(parrot)
    client.create("curt", from_=MODEL, template="{{ .System }}|{{ .Prompt }}>", system="S")
    assert client.chat("curt", ask("[hi]")).prompt_eval_count == len("S|[hi]>")
    assert client.generate("curt", "[hi]", template="{{ .System }}{{ .Prompt }}").prompt_eval_count == len("S[hi]")
    assert client.generate(MODEL, "[hi]", template="<{{ .Prompt }}>").prompt_eval_count == len("<[hi]>")
    with pytest.raises(ollama.ResponseError, match="is not supported"):
        client.generate(MODEL, "[hi]", template="<{{ .Prompt }}>", raw=True)


def test_parameters_are_defaults(parrot: Any) -> None:
    client = sdk(parrot)
    client.create("short", from_=MODEL, parameters={"num_predict": 3, "stop": [","], "num_thread": 2})
    assert client.chat("short", ask("[abcdef]")).message.content == "abc"
    assert client.chat("short", ask("[abcdef]"), options={"num_predict": 4}).message.content == "abcd"
    assert client.generate("short", "[a,b]").response == "a"
    client.create("shorter", from_="short", parameters={"num_predict": 2})
    assert client.chat("shorter", ask("[abcdef]")).message.content == "ab"
    assert client.chat("shorter", ask("[a,b]")).message.content == "a"
    assert store.derived_model("shorter").base == MODEL  # type: ignore[union-attr]


def test_what_was_made_is_told(parrot: Any) -> None:
    client = sdk(parrot)
    shots = [{"role": "user", "content": "one"}, {"role": "assistant", "content": 'a "quote"'}]
    client.create(
        "ns/mario:v1", from_=MODEL, system="Be brief.", parameters={"temperature": 0.5, "stop": ["a", "b"]},
        messages=shots, license=["MIT", "and mine"],
    )  # fmt: skip
    client.copy("ns/mario:v1", "luigi")
    assert [each.model for each in client.list().models] == [f"{MODEL}:latest", "luigi:latest", "ns/mario:v1"]
    assert [each.model for each in client.ps().models] == [f"{MODEL}:latest", "luigi:latest", "ns/mario:v1"]
    for each in client.list().models[1:]:
        assert len(each.digest or "") == 64
        assert each.details is not None
        assert each.details.parent_model == MODEL
    shown = client.show("luigi")
    assert shown.modelfile == (
        f'FROM {MODEL}\nSYSTEM """Be brief."""\nLICENSE """MIT"""\nLICENSE """and mine"""\n'
        'PARAMETER temperature 0.5\nPARAMETER stop "a"\nPARAMETER stop "b"\n'
        'MESSAGE user "one"\nMESSAGE assistant "a \\"quote\\""\n'
    )
    assert [line.split() for line in (shown.parameters or "").splitlines()][1] == ["stop", '"a"']
    assert shown.license == "MIT\nand mine"
    assert shown.modelinfo == {"general.context_length": 512}
    assert parrot.post("/api/show", model="luigi").json()["system"] == "Be brief."


def test_copies_and_deleting(parrot: Any) -> None:
    client = sdk(parrot)
    assert client.copy(MODEL, "twin").status == "success"
    assert client.chat("twin", ask("[hi]")).message.content == "hi"
    client.create("mario", from_="twin", system="[Me]")
    client.copy("mario", "luigi")
    client.delete("mario")
    client.delete("twin")
    assert client.chat("luigi", ask("hi")).message.content == "Me"
    client.delete("luigi")
    assert [each.model for each in client.list().models] == [f"{MODEL}:latest"]
    for call in (
        lambda: client.delete("luigi"),
        lambda: client.chat("luigi", ask("hi")),
        lambda: client.copy("luigi", "x"),
        lambda: client.create("x", from_="luigi"),
        lambda: client.show("luigi"),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            call()
        assert caught.value.status_code == 404


def test_async_making(parrot: Any) -> None:
    async def scenario() -> None:
        client = ollama.AsyncClient(parrot.url)
        assert (await client.create("mario", from_=MODEL, system="[Me]")).status == "success"
        stream = await client.create("mario", from_="mario", system="[You]", stream=True)
        assert [line.status async for line in stream][-1] == "success"
        await client.copy("mario", "luigi")
        assert (await client.chat("luigi", ask("hi"))).message.content == "You"
        await client.delete("luigi")
        assert [each.model for each in (await client.list()).models] == [f"{MODEL}:latest", "mario:latest"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "../up"}, "is not allowed as the name"),
        ({"model": "/etc/passwd"}, "is not allowed as the name"),
        ({"model": "a\\b"}, "is not allowed as the name"),
        ({"model": "x" * 300}, "is not allowed as the name"),
        ({"model": "smollm2"}, "is not allowed as the name"),
        ({"model": "hf:a/b"}, "is not allowed as the name"),
        ({"model": ""}, "is not allowed as the name"),
        ({"model": MODEL}, "is not derived"),
        ({"from": None}, "send `from` or `files`"),
        ({"quantize": "q4_K_M"}, "quantize is not supported"),
        ({"adapters": {"a": "sha256:00"}}, "is not a digest"),
        ({"template": "{{ range .Messages }}{{ end }}"}, r"template: .*range .Messages.* is not supported"),
        ({"template": "{% for m in messages %}{{ m.content }}{% endfor %}"}, "template: .*is not supported"),
        ({"parameters": {"temperature": -1}}, "temperature must be between"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"system": "x" * 2**20}, "the limit is 1048576"),
        ({"from": None, "files": {"a.gguf": "sha256:00"}}, "is not a digest"),
        ({"from": None, "files": {"a.gguf": digest_of(b"a")}}, "upload it to /api/blobs/sha256:"),
        ({"files": {"a.gguf": digest_of(b"a")}}, "no `from` beside it"),
        ({"from": None, "files": {"a": "b", "c": "d"}}, "got 2 files"),
        ({"modelfile": "FROM x"}, "modelfile is not supported"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(
    parrot: Any, own_store: Path, fields: dict[str, Any], told: str
) -> None:
    answer = parrot.post("/api/create", **{"model": "x", "from": MODEL} | fields)
    assert answer.status_code == 400
    with pytest.raises(InvalidRequest, match=told):
        raise InvalidRequest(answer.json()["error"])
    assert not (own_store / "made").exists()


def test_files_that_are_no_models_are_refused(parrot: Any) -> None:
    parrot.http.post(f"/api/blobs/{digest_of(b'GGUF')}", content=b"GGUF")
    with pytest.raises(ollama.ResponseError, match="is not a valid GGUF file") as caught:
        sdk(parrot).create("x", files={"x.gguf": digest_of(b"GGUF")})
    assert caught.value.status_code == 400


def test_models_made_are_bounded(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "MAX_DERIVED", 2)
    client = sdk(parrot)
    for name in ("a", "b", "a"):
        client.copy(MODEL, name)
    with pytest.raises(ollama.ResponseError, match="which is the limit"):
        client.copy(MODEL, "c")


def test_a_name_whose_model_is_not_served_says_how_to_serve_it(parrot: Any) -> None:
    store.save_derived(DerivedModel(name="stranger", base="hf:a/b"))
    with pytest.raises(ollama.ResponseError, match="run `penstock serve stranger`") as caught:
        sdk(parrot).chat("stranger", ask("hi"))
    assert caught.value.status_code == 404
    assert [each.model for each in sdk(parrot).ps().models] == [f"{MODEL}:latest"]
    assert [each.model for each in sdk(parrot).list().models] == [f"{MODEL}:latest", "stranger:latest"]


def test_a_damaged_record_is_told(own_store: Path) -> None:
    store.save_derived(DerivedModel(name="x", base=MODEL))
    (record,) = (own_store / "made").iterdir()
    record.write_text(json.dumps({"nonsense": 1}))
    with pytest.raises(MalformedFile, match="is damaged"):
        store.derived_model("x")


def test_pushing_is_refused(parrot: Any) -> None:
    for streaming in (False, True):
        with pytest.raises(ollama.ResponseError, match="no registry to push to") as caught:
            list(sdk(parrot).push("x", stream=streaming))
        assert caught.value.status_code == 400


# -- loading and unloading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_alive", [0, "0", "0s"])
def test_unloading_is_answered_and_the_next_request_loads(serve: Callable[..., Any], keep_alive: Any) -> None:
    with serve(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL) as server:
        client = sdk(server)
        told = client.generate(MODEL, keep_alive=keep_alive)
        assert (told.done, told.done_reason, told.response) == (True, "unload", "")
        assert client.chat(MODEL, [], keep_alive=keep_alive).done_reason == "unload"
        server.until(lambda: not client.ps().models)
        assert client.chat(MODEL, ask("[hi]"), keep_alive=keep_alive).message.content == "hi"
        with pytest.raises(ollama.ResponseError, match="temperature must be between"):
            client.generate(MODEL, keep_alive=keep_alive, options={"temperature": -1})


# -- filling in ---------------------------------------------------------------------------------------------------


class FillingTokenizer(toys.ToyTokenizer):
    """Three control characters are the tokens that ask for what stands between two texts."""

    MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    special_ids = frozenset({1, 2, 3, toys.END})

    def token_text(self, id: int) -> str:
        return self.MARKERS[id - 1] if 1 <= id <= 3 else super().token_text(id)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return list(text.encode())


class FillingText(toys.ToyText):
    tokenizer = FillingTokenizer()


def test_a_suffix_is_honoured_where_there_are_tokens_for_it(serve: Callable[..., Any]) -> None:
    with serve(InProcessClient(toys.open_parrot, "parrot"), FillingText(), MODEL) as server:
        client = sdk(server)
        told = client.generate(MODEL, "before", suffix="[abcd]")
        assert told.response == "bcd"  # the toy takes the marker after the suffix for what it has said
        assert told.prompt_eval_count == len("before[abcd]") + 3
        assert "insert" in (client.show(MODEL).capabilities or [])
        asked = {"model": MODEL, "prompt": ["before", "and "], "suffix": "[abcd]"}
        texts = [choice["text"] for choice in server.post("/v1/completions", **asked).json()["choices"]]
        assert texts == ["bcd", "bcd"]
        echo = server.post("/v1/completions", **asked, echo=True).json()["error"]
        assert (echo["param"], "cannot be combined" in echo["message"]) == ("suffix", True)
        for field in ("system", "template"):
            with pytest.raises(ollama.ResponseError, match=f"suffix cannot be combined with {field}"):
                client.generate(MODEL, "x", suffix="y", **{field: "{{ .Prompt }}"})  # type: ignore[call-overload]


# -- the default model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name="small", max_len=512, max_rows=4)
    with serve(ProcessClient(config), load_text(smollm2), "small", smollm2) as server:
        yield server


TEMPLATE = "{{ if .System }}S: {{ .System }}\n{{ end }}U: {{ .Prompt }}\nA: {{ .Response }}\n"


def counted(server: Any, text: str) -> int:
    return int(server.post("/tokenize", prompt=text).json()["count"])


def test_a_template_of_ones_own(smollm2_server: Any) -> None:
    client = sdk(smollm2_server)
    client.create("other", from_="small", template=TEMPLATE, system="Be kind.", parameters={"num_predict": 1})
    told = client.chat("other", [*ask("Hi"), {"role": "assistant", "content": "Yes?"}, *ask("Why?")])
    assert told.prompt_eval_count == counted(smollm2_server, "S: Be kind.\nU: Hi\nA: Yes?\nU: Why?\nA: ")
    told = client.generate("small", "Hi", template="<{{ .Prompt }}>", options={"num_predict": 1})
    assert told.prompt_eval_count == counted(smollm2_server, "<Hi>")
    assert client.show("other").template == TEMPLATE
    client.create("again", from_="other", template=client.show("small").template)
    assert client.show("again").template == client.show("small").template != TEMPLATE
    with pytest.raises(ollama.ResponseError, match="does not support a system message"):
        client.generate("small", "Hi", system="S", template="<{{ .Prompt }}>")


def test_a_model_of_an_uploaded_file(
    smollm2_server: Any, smollm2: Path, serve: Callable[..., Any], own_store: Path
) -> None:
    client = sdk(smollm2_server)
    digest = client.create_blob(smollm2)
    told = client.create("mine", files={"model.gguf": digest}, system="Answer in French.", stream=True)
    assert [line.status for line in told] == ["parsing GGUF", "writing manifest", "success"]
    listed = next(each for each in client.list().models if each.model == "mine:latest")
    assert listed.size == smollm2.stat().st_size
    with pytest.raises(ollama.ResponseError, match="run `penstock serve mine`"):
        client.chat("mine", ask("hi"))
    path = store.fetch("mine")
    assert path.is_relative_to(own_store)
    config = Config(model=str(path), name="mine", max_len=512, max_rows=4)
    with serve(ProcessClient(config), load_text(path), "mine", path) as server:
        one = sdk(server)
        short = {"num_predict": 1}
        plain = one.chat("mine", [{"role": "system", "content": "Answer in French."}, *ask("Hi")], options=short)
        assert one.chat("mine", ask("Hi"), options=short).prompt_eval_count == plain.prompt_eval_count
        one.create("mine", from_="mine", system="No.")
        with pytest.raises(ollama.ResponseError, match="being served"):
            one.delete("mine")
    client.copy("mine", "yours")
    client.delete("mine")
    assert path.exists()
    client.delete("yours")
    assert not path.exists()
