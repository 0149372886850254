"""Serves POST /api/create, /api/copy and /api/blobs, which make derived models.

A derived model is another name for the served or a stored model, with settings of its own; or it is an uploaded file
that can be served under that name.
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
from penstock.model.check_text import check_text
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.ollama.models import KnownModel, PullStatus, all_known, facts_of, find_known
from penstock.server.generation.modelfile import (
    MESSAGE_NO_EFFECT,
    OPTION_NO_EFFECT,
    OllamaMessage,
    OllamaOptions,
    check_options,
    read_messages,
)
from penstock.server.http.bodies import ContentValues, NoEffect, read_body
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import encode, json_response
from penstock.server.models.derived import base_of, serves
from penstock.server.models.pool import ModelPool
from penstock.store import DerivedModel, Upload
from penstock.text.ollama_template import OllamaTemplate

CREATE_NO_EFFECT: NoEffect = {
    "insecure": (False,),
    "modelfile": ContentValues(),
    "quantize": ContentValues([""]),
}
WRITE_SIZE = 2**20  # bytes


class CreateModel(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    name: str | None = None  # the name of this field in older clients
    stream: bool | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None  # digests by file name
    adapters: dict[str, str] | None = None  # the same, of GGUF adapters or of the files of a PEFT folder
    system: str | None = None
    template: str | None = None
    parameters: Annotated[dict[str, Any], read_as(OllamaOptions, no_effect=OPTION_NO_EFFECT)] | None = None
    messages: list[Annotated[dict[str, Any], read_as(OllamaMessage, no_effect=MESSAGE_NO_EFFECT)]] | None = None
    license: str | list[str] | None = None


class CopyModel(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    destination: str


CREATE = Operation(CreateModel, CREATE_NO_EFFECT, PullStatus, PullStatus)
COPY = Operation(CopyModel, {}, None)
UPLOAD_BLOB = Operation("application/octet-stream", answers=None)


# -- deriving -----------------------------------------------------------------------------------------------------


async def create(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, CreateModel, CREATE_NO_EFFECT)
    pool.models.refresh()
    steps = [await asyncio.to_thread(_create, pool, context, body), "writing manifest", "success"]
    if body.stream is False:
        return json_response({"status": steps[-1]})
    return Response(b"".join(encode({"status": step}) + b"\n" for step in steps), media_type="application/x-ndjson")


async def copy(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, CopyModel, {})
    pool.models.refresh()
    await asyncio.to_thread(_copy, pool, context, _plain(body.source), _plain(body.destination))
    return Response()


def _create(pool: ModelPool, context: RequestContext, body: CreateModel) -> str:
    name = _plain(body.model or body.name or "")
    if not body.from_ and not body.files:
        raise InvalidRequest("a model is derived from another or from a file: send `from` or `files`", param="from")
    root = _of_file(body) if body.files else _of_known(find_known(pool, _plain(body.from_ or ""), context))
    _store(pool, context, replace(root, name=name, **_settings(pool, context, body, root)))
    return "parsing GGUF" if body.files else f"using existing model {body.from_}"


def _copy(pool: ModelPool, context: RequestContext, source: str, destination: str) -> None:
    _store(pool, context, replace(_of_known(find_known(pool, source, context)), name=destination))


def _plain(name: str) -> str:
    return name.removesuffix(":latest")


def _of_file(body: CreateModel) -> DerivedModel:
    files = body.files or {}
    if body.from_ or len(files) != 1:
        raise InvalidRequest(
            f"files: send exactly one GGUF file, and no `from` beside it; got {len(files)} files", param="files"
        )
    digest = next(iter(files.values()))
    path = store.blob_path(digest)
    if not path.exists():
        raise InvalidRequest(
            f"files: {digest} does not exist here: upload it to /api/blobs/{digest} first", param="files"
        )
    try:
        check_text(path)
    except ModelError as error:
        raise InvalidRequest(f"files: {error}", param="files") from error
    return DerivedModel(name="", blob=digest)


def _of_known(known: KnownModel) -> DerivedModel:
    if known.derived is not None:
        return known.derived
    outside = known.path is not None and not known.stored
    return DerivedModel(name="", base=known.name, path=str(known.path) if outside else "")


def _settings(pool: ModelPool, context: RequestContext, body: CreateModel, root: DerivedModel) -> dict[str, Any]:
    """Returns the settings that the request changes, after checking them; others stay as in the base model."""
    if body.parameters is not None:
        unchecked = {"num_ctx": None}  # the context depends on the server that serves the model
        check_options(context, body.parameters | unchecked)
    read_messages(context, body.messages or [])
    given = {
        "system": body.system,
        "template": None if body.template is None else _template(pool, body.template, root),
        "parameters": None if body.parameters is None else root.parameters | body.parameters,
        "messages": body.messages,
        "adapters": [*root.adapters, *store.adapter_of_blobs(body.adapters)] if body.adapters else None,
        "license": [body.license] if isinstance(body.license, str) else body.license,
    }
    return {name: value for name, value in given.items() if value is not None}


def _template(pool: ModelPool, template: str, root: DerivedModel) -> str:
    """Returns the template, or "" if it is the model's own, which is a Jinja template."""
    base = base_of(pool.models.entries, root)
    own = facts_of(base.source.path if base else store.derived_path(root)).template
    if template in ("", own):
        return ""
    OllamaTemplate(template)
    return template


def _store(pool: ModelPool, context: RequestContext, derived: DerivedModel) -> None:
    """Saves a derived model as its owner's own; raises if its name is taken."""
    store.check_name(derived.name)
    if not context.caller.may_see(store.derived_model(derived.name)):
        raise InvalidRequest(f"{derived.name!r} is taken: choose another name", param="model")
    if any(known.derived is None and known.name == derived.name for known in all_known(pool, RequestContext())):
        raise InvalidRequest(f"{derived.name!r} is a model that is not derived: choose another name", param="model")
    same = pool.models.find(derived.name)
    other = same is not None and same.name == derived.name and not serves(same.name, same.source.path, derived)
    if other and same is not None and (same.source.fixed or same.served is not None):
        raise InvalidRequest(
            f"{derived.name!r} is being served, so its base cannot change: choose another name", param="model"
        )
    store.save_derived(replace(derived, key=context.caller.owner_name or ""))


# -- files --------------------------------------------------------------------------------------------------------


async def has_blob(_: ModelPool, http: HttpRequest, __: RequestContext) -> Response:
    exists = store.blob_path(http.path_params["digest"]).exists()
    return Response(status_code=200 if exists else 404)


async def upload(_: ModelPool, http: HttpRequest, __: RequestContext) -> Response:
    """Stores an upload. A refused one is read to its end but not kept, so that the client reads the reason."""
    chunks = http.stream()
    try:
        exists = store.blob_path(http.path_params["digest"]).exists()
        if not exists:
            await asyncio.to_thread(store.delete_unused_blobs)
            with Upload(http.path_params["digest"], int(http.headers.get("content-length", 0))) as arriving:
                await _receive(chunks, arriving)
    except InvalidRequest:
        await _drain(chunks)
        raise
    await _drain(chunks)
    return Response(status_code=200 if exists else 201)


async def _receive(chunks: AsyncIterable[bytes], arriving: Upload) -> None:
    pending = bytearray()
    async for chunk in chunks:
        pending += chunk
        if len(pending) >= WRITE_SIZE:
            await asyncio.to_thread(arriving.write, bytes(pending))
            pending.clear()
    await asyncio.to_thread(arriving.write, bytes(pending))
    await asyncio.to_thread(arriving.keep)


async def _drain(chunks: AsyncIterable[bytes]) -> None:
    async for _ in chunks:
        pass
