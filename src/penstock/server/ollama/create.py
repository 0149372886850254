"""POST /api/create, /api/copy and /api/blobs: models that Ollama's clients make.

A made model is a name for the served or a stored one, with settings of its own; or it is an uploaded file, to be
served by its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import store
from penstock.errors import InvalidRequest, ModelError
from penstock.model.load import load_text
from penstock.server.bodies import Neutral, read_body
from penstock.server.ollama.derived_settings import serves
from penstock.server.ollama.fields import (
    MESSAGE_NEUTRAL,
    OPTION_NEUTRAL,
    Generation,
    Message,
    Options,
    read_messages,
    read_options,
)
from penstock.server.ollama.models import Known, Status, all_known, facts_of, find_known
from penstock.server.openapi import Operation, read_as
from penstock.server.served_model import Served
from penstock.server.sse import encode
from penstock.store import DerivedModel, Upload
from penstock.text.ollama_template import OllamaTemplate

CREATE_NEUTRAL: Neutral = {"adapters": ({},), "insecure": (False,), "quantize": ("",)}
CHUNK = 2**20  # bytes of an upload that are written at a time


class Create(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    name: str | None = None  # as older clients say it
    stream: bool | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None  # digests by file name
    system: str | None = None
    template: str | None = None
    parameters: Annotated[dict[str, Any], read_as(Options, neutral=OPTION_NEUTRAL)] | None = None
    messages: list[Annotated[dict[str, Any], read_as(Message, neutral=MESSAGE_NEUTRAL)]] | None = None
    license: str | list[str] | None = None


class Copy(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    destination: str


CREATE = Operation(Create, CREATE_NEUTRAL, Status, Status)
COPY = Operation(Copy, {}, None)
UPLOAD_BLOB = Operation("application/octet-stream", answers=None)


# -- making -------------------------------------------------------------------------------------------------------


async def create(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Create, CREATE_NEUTRAL)
    steps = [await asyncio.to_thread(_create, served, asked), "writing manifest", "success"]
    if asked.stream is False:
        return Response(encode({"status": steps[-1]}), media_type="application/json")
    return Response(b"".join(encode({"status": step}) + b"\n" for step in steps), media_type="application/x-ndjson")


async def copy(served: Served, http: HttpRequest) -> Response:
    asked = await read_body(http, Copy, {})
    await asyncio.to_thread(_copy, served, _plain(asked.source), _plain(asked.destination))
    return Response()


def _create(served: Served, asked: Create) -> str:
    name = _plain(asked.model or asked.name or "")
    if not asked.from_ and not asked.files:
        raise InvalidRequest("a model is made `from` another or of `files`: send one of them", param="from")
    root = _of_file(asked) if asked.files else _of_known(find_known(served, _plain(asked.from_ or "")))
    _enter(served, replace(root, name=name, **_settings(served, asked, root)))
    return "parsing GGUF" if asked.files else f"using existing model {asked.from_}"


def _copy(served: Served, source: str, destination: str) -> None:
    _enter(served, replace(_of_known(find_known(served, source)), name=destination))


def _plain(name: str) -> str:
    return name.removesuffix(":latest")


def _of_file(asked: Create) -> DerivedModel:
    files = asked.files or {}
    if asked.from_ or len(files) != 1:
        raise InvalidRequest(
            f"files: one GGUF file makes a model, and then there is no `from`; got {len(files)} files", param="files"
        )
    digest = next(iter(files.values()))
    path = store.blob_path(digest)
    if not path.exists():
        raise InvalidRequest(f"files: {digest} is not here: upload it to /api/blobs/{digest} first", param="files")
    try:
        load_text(path)
    except ModelError as error:
        raise InvalidRequest(f"files: {error}", param="files") from error
    return DerivedModel(name="", blob=digest)


def _of_known(known: Known) -> DerivedModel:
    if known.made is not None:
        return known.made
    outside = known.path is not None and not known.stored
    return DerivedModel(name="", base=known.name, path=str(known.path) if outside else "")


def _settings(served: Served, asked: Create, root: DerivedModel) -> dict[str, Any]:
    """What is asked for, found to be right; the rest stays as it is in what the model is made of."""
    if asked.parameters is not None:
        held = {"num_ctx": None}  # how much there is depends on who serves it
        read_options(served, Generation(model="", options=asked.parameters | held))
    read_messages(asked.messages or [])
    given = {
        "system": asked.system,
        "template": None if asked.template is None else _template(served, asked.template, root),
        "parameters": None if asked.parameters is None else root.parameters | asked.parameters,
        "messages": asked.messages,
        "license": [asked.license] if isinstance(asked.license, str) else asked.license,
    }
    return {name: value for name, value in given.items() if value is not None}


def _template(served: Served, template: str, root: DerivedModel) -> str:
    """Empty where it is the model's own, which is in another notation."""
    own = facts_of(served.path if serves(served, root) else store.derived_path(root)).template
    if template in ("", own):
        return ""
    OllamaTemplate(template)
    return template


def _enter(served: Served, made: DerivedModel) -> None:
    store.check_name(made.name)
    if any(known.made is None and known.name == made.name for known in all_known(served)):
        raise InvalidRequest(f"{made.name!r} is a model that was not made here: choose another name", param="model")
    if made.name == served.name and not serves(served, made):
        raise InvalidRequest(f"{made.name!r} is being served and stays what it is made of", param="model")
    store.save_derived(made)


# -- files --------------------------------------------------------------------------------------------------------


async def has_blob(_: Served, http: HttpRequest) -> Response:
    there = store.blob_path(http.path_params["digest"]).exists()
    return Response(status_code=200 if there else 404)


async def upload(_: Served, http: HttpRequest) -> Response:
    """What is refused is read to its end, so that the client reads the refusal, but not kept."""
    chunks = http.stream()
    try:
        there = store.blob_path(http.path_params["digest"]).exists()
        if not there:
            await asyncio.to_thread(store.delete_unused_blobs)
            with Upload(http.path_params["digest"], int(http.headers.get("content-length", 0))) as arriving:
                await _receive(chunks, arriving)
    except InvalidRequest:
        await _drain(chunks)
        raise
    await _drain(chunks)
    return Response(status_code=200 if there else 201)


async def _receive(chunks: AsyncIterable[bytes], arriving: Upload) -> None:
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        if len(held) >= CHUNK:
            await asyncio.to_thread(arriving.write, bytes(held))
            held.clear()
    await asyncio.to_thread(arriving.write, bytes(held))
    await asyncio.to_thread(arriving.keep)


async def _drain(chunks: AsyncIterable[bytes]) -> None:
    async for _ in chunks:
        pass
