"""/v1/files, with the official SDK as the judge: what is kept, told, paged, refused and bounded."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server import Space
from penstock.server.batch import file_records
from penstock.server.batch.archive import Archive
from penstock.server.batch.form import Form
from tests.server import toys

MODEL = "toy/parrot"


def test_a_file_is_kept_told_and_deleted(parrot: Any) -> None:
    sdk = parrot.sdk()
    content = bytes(range(256)) * 20_000  # several pieces, and every byte a boundary could hide in
    file = sdk.files.create(file=("../../a name.bin", content), purpose="user_data")
    assert (file.object, file.bytes, file.filename, file.purpose) == (
        "file",
        len(content),
        "../../a name.bin",
        "user_data",
    )
    assert file.status == "processed"
    assert file.expires_at is None
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.content(file.id).read() == content
    gone = sdk.files.delete(file.id)
    assert (gone.id, gone.deleted) == (file.id, True)
    for ask in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"no file '{file.id}'"):
            ask(file.id)


def test_files_are_listed_in_pages(parrot: Any) -> None:
    sdk = parrot.sdk()
    first = [sdk.files.create(file=b"x", purpose="user_data").id for _ in range(5)]
    other = sdk.files.create(file=b"y", purpose="evals").id
    newest = [file.id for file in sdk.files.list(limit=2, purpose="user_data")]
    assert newest[:5] == first[::-1]  # the SDK went through the pages by itself
    assert [file.id for file in sdk.files.list(limit=2, order="asc", purpose="user_data")] == newest[::-1]
    assert [file.id for file in sdk.files.list(purpose="evals")] == [other]
    page = sdk.files.list(limit=2, after=first[-1])
    assert [file.id for file in page.data] == first[-2:-4:-1]
    assert page.has_more
    assert not sdk.files.list(limit=100).has_more
    with pytest.raises(openai.BadRequestError, match="there is no 'file-none'"):
        sdk.files.list(after="file-none")


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=ten", f"limit={'9' * 5000}", "order=up", "colour=red"]
)
def test_a_list_is_asked_for_properly(strict_parrot: Any, query: str) -> None:
    refused = strict_parrot.get(f"/v1/files?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize("query", ["order=up", "colour=red"])
def test_what_a_query_asks_for_in_vain_is_listed(parrot: Any, query: str) -> None:
    listed = parrot.get(f"/v1/files?{query}")
    assert listed.status_code == 200
    assert listed.headers["x-penstock-ignored"] == query.partition("=")[0]


def test_files_expire(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = parrot.sdk()
    kept = sdk.files.create(file=b"x", purpose="batch")
    soon = sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at == kept.created_at + 30 * 86_400
    assert soon.expires_at == soon.created_at + 3600
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    with pytest.raises(openai.NotFoundError):
        sdk.files.retrieve(soon.id)
    assert soon.id not in {file.id for file in sdk.files.list()}
    sdk.files.create(file=b"x", purpose="batch")
    assert sdk.files.retrieve(kept.id) == kept
    with pytest.raises(openai.BadRequestError, match="seconds"):
        sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})


FORM = {"content-type": "multipart/form-data; boundary=cut"}
DISPOSITION = b'--cut\r\ncontent-disposition: form-data; name="%s"\r\n\r\n%s\r\n'
PURPOSE = DISPOSITION % (b"purpose", b"batch")
FILE = DISPOSITION % (b"file", b"{}")
END = b"--cut--\r\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (FILE + END, "'purpose' is missing"),
        (PURPOSE + END, "no part named 'file'"),
        (PURPOSE + FILE, "incomplete"),
        (b"", "incomplete"),
        (PURPOSE + FILE + FILE + END, "two parts named 'file'"),
        (PURPOSE + PURPOSE + FILE + END, "two parts named 'purpose'"),
        (DISPOSITION % (b"purpose", b"mischief") + FILE + END, "purpose"),
        (PURPOSE + FILE + DISPOSITION % (b"colour", b"red") + END, "unknown field 'colour'"),
        (PURPOSE + FILE + DISPOSITION % (b"expires_after[hours]", b"2") + END, "expires_after"),
        (PURPOSE + FILE + DISPOSITION % (b"colour", b"r" * 2000) + END, "more than 1024 bytes"),
        (PURPOSE + b"--cut\r\n" + b"x-more: 1\r\n" * 20 + b"\r\n", "not well formed"),
        (b"not a form at all", "not well formed"),
        (FILE.replace(b'"file"', b'"file"; filename="%s"' % (b"n" * 300)) + PURPOSE + END, "300 characters"),
    ],
)
def test_a_form_that_is_wrong_is_refused_and_nothing_is_kept(strict_parrot: Any, body: bytes, told: str) -> None:
    before = strict_parrot.get("/v1/files").json()
    refused = strict_parrot.http.post("/v1/files", content=body, headers=FORM)
    assert refused.status_code == 400
    assert told in refused.json()["error"]["message"]
    assert strict_parrot.get("/v1/files").json() == before


def test_a_body_that_is_no_form_is_refused(parrot: Any) -> None:
    refused = parrot.post("/v1/files", purpose="batch")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_content_type"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 31, 1000])
def test_a_form_is_read_the_same_however_it_is_cut(size: int) -> None:
    content = b"\r\n--cu\r\n--cut\r--\n--cut\r\n" * 3 + b"\r\n--c"
    body = b"\r\n" + PURPOSE + DISPOSITION % (b'file"; filename="a;b', content) + END
    form = Form(FORM["content-type"])
    found = b"".join(form.push(body[at : at + size]) for at in range(0, len(body), size))
    form.finish()
    assert (found, form.fields, form.filename) == (content, {"purpose": "batch"}, "a;b")


def test_an_upload_that_is_cut_off_leaves_nothing(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM['content-type']}\r\n"
            client.sendall(f"{head}content-length: 9000000\r\n\r\n".encode() + PURPOSE + FILE[:-2] + b"x" * 2_000_000)
            server.until(lambda: (tmp_path / "files").exists() and any((tmp_path / "files").iterdir()))
        server.until(lambda: not any((tmp_path / "files").iterdir()))
        assert server.sdk().files.list().data == []


def test_uploads_are_bounded(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    space = Space(tmp_path / "data", file_bytes=3_000_000, total_bytes=4_000_000, files=3)
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=space) as server:
        assert not (tmp_path / "data").exists()  # before its first use
        sdk = server.sdk()
        with pytest.raises(openai.APIStatusError, match="more than 3000000 bytes") as long:
            sdk.files.create(file=b"x" * 3_000_001, purpose="batch")
        assert long.value.status_code == 413
        first = sdk.files.create(file=b"x" * 3_000_000, purpose="batch")
        with pytest.raises(openai.BadRequestError, match="the limit is 4000000") as full:
            sdk.files.create(file=b"x" * 1_500_000, purpose="batch")
        assert full.value.code == "storage_full"
        sdk.files.delete(first.id)
        for _ in range(3):
            sdk.files.create(file=b"x", purpose="batch")
        with pytest.raises(openai.BadRequestError, match="the limit is 3"):
            sdk.files.create(file=b"x", purpose="batch")
        assert len(list((tmp_path / "data" / "files").iterdir())) == 3


def test_a_folder_has_one_server(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    space = Space(tmp_path)
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=space) as one:
        kept = one.sdk().files.create(file=b"x", purpose="batch")
        with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=space) as two:
            with pytest.raises(openai.InternalServerError, match="another server keeps its files"):
                two.sdk().files.list()
            assert two.sdk().completions.create(model=MODEL, prompt="[fine]").choices[0].text == "fine"
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=space) as next:
        assert next.sdk().files.retrieve(kept.id) == kept


def test_what_is_not_our_database_is_said(serve: Any, toy_text: Any, tmp_path: Path) -> None:
    (tmp_path / "archive.db").write_bytes(b"something else entirely" * 100)
    with serve(InProcessClient(toys.open_parrot), toy_text, MODEL, space=Space(tmp_path)) as server:
        with pytest.raises(openai.InternalServerError, match="move it away, or give another folder with --data"):
            server.sdk().files.list()
        assert server.sdk().completions.create(model=MODEL, prompt="[fine]").choices[0].text == "fine"


def test_by_default_each_model_has_a_folder_beside_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))

    async def scenario() -> None:
        archive = Archive(Space(), "../toy/parrot")
        assert not archive.used
        assert await archive.do(file_records.usage) == (0, 0)
        await archive.close()

    asyncio.run(scenario())
    assert (tmp_path / "data" / "%2Ftoy%2Fparrot" / "archive.db").exists()
    assert (tmp_path / "data" / "%2Ftoy%2Fparrot").stat().st_mode & 0o077 == 0
