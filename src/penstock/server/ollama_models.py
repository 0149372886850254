"""The rest of Ollama's API: what is here, what it is, fetching and removing.

Models are found by the name they are served or stored under. A name that came in a request is never taken for a path.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from penstock import __version__, store
from penstock.errors import InvalidRequest, ModelError, ModelNotFound
from penstock.model.load import open_checkpoint
from penstock.server.ollama import OLLAMA
from penstock.server.openai import ANYTHING, Neutral, read_body
from penstock.server.page import page
from penstock.server.pulls import pulling
from penstock.server.reply import Stream, encode
from penstock.server.served import Served
from penstock.store.refs import parse
from penstock.text.chat import ChatTemplate, templates_in_folder, templates_in_metadata

API_VERSION = "0.12.0"  # of the API that is spoken: clients compare it to know what they may ask for
NEVER = "9999-12-31T23:59:59Z"
HUB = ("hf.co/", "huggingface.co/")

NEUTRAL: Neutral = {"insecure": (False,), "options": ANYTHING, "system": ANYTHING, "verbose": ANYTHING}
UNABLE = {
    "create": "models cannot be created here: the store keeps models as they were fetched, without layers of its own",
    "copy": "models cannot be copied here: the store knows each by one name",
    "push": "models cannot be pushed from here: the store only fetches",
    "blobs": "files cannot be uploaded here: the store only fetches",
}


class Named(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    name: str | None = None  # as older clients say it
    stream: bool | None = None

    @property
    def ref(self) -> str:
        ref = (self.model or self.name or "").removesuffix(":latest")
        if not ref:
            raise InvalidRequest("the field 'model' is missing", param="model", code="missing_required_parameter")
        return ref


class Known(NamedTuple):
    """A model that is served or stored."""

    name: str
    path: Path | None
    digest: str
    modified: str


async def greet(served: Served, http: HttpRequest) -> Response:
    """The page for those who ask for one, as browsers do; to others the words by which Ollama is known."""
    if "text/html" in http.headers.get("accept", ""):
        return await page(served, http)
    return PlainTextResponse("Ollama is running")


async def version(_: Served, __: HttpRequest) -> Response:
    return _json({"version": API_VERSION, "penstock": __version__})


async def list_stored(served: Served, _: HttpRequest) -> Response:
    def look() -> list[dict[str, Any]]:
        return [_listed(known) | {"modified_at": known.modified} for known in _all_known(served)]

    return _json({"models": await asyncio.to_thread(look)})


async def running(served: Served, _: HttpRequest) -> Response:
    """The one model, for as long as the server runs. How much of it is on a GPU is not known here."""
    listed = await asyncio.to_thread(lambda: _listed(_all_known(served)[0]))
    kept = {"expires_at": NEVER, "size_vram": None, "context_length": served.limits.max_len}
    return _json({"models": [listed | kept]})


async def show(served: Served, http: HttpRequest) -> Response:
    ref = (await _named(http)).ref
    return _json(await asyncio.to_thread(lambda: _shown(served, _known(served, ref))))


async def delete(served: Served, http: HttpRequest) -> Response:
    known = await asyncio.to_thread(_known, served, (await _named(http)).ref)
    if known == _all_known(served)[0]:
        raise InvalidRequest(f"{known.name!r} is being served and is not deleted", param="model")
    await asyncio.to_thread(store.remove, known.name)
    return Response()


async def unable(_: Served, http: HttpRequest) -> Response:
    raise InvalidRequest(UNABLE[http.url.path.split("/")[2]])


async def has_blob(_: Served, __: HttpRequest) -> Response:
    return Response(status_code=404)


async def _named(http: HttpRequest) -> Named:
    return await read_body(http, Named, NEUTRAL)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


# -- what is here -------------------------------------------------------------------------------------------------


def _all_known(served: Served) -> list[Known]:
    """The served one first."""
    stored = [Known(entry.name, entry.path, entry.sha256, entry.fetched) for entry in store.entries()]
    began = datetime.fromtimestamp(served.created, UTC).isoformat()
    digest = next((known.digest for known in stored if known.path == served.path), "")
    others = [known for known in stored if known.path != served.path and known.name != served.name]
    return [Known(served.name, served.path, digest, began), *others]


def _known(served: Served, name: str) -> Known:
    found = next((known for known in _all_known(served) if known.name == name), None)
    if found is None:
        raise ModelNotFound(f"model {name!r} not found")
    return found


def _listed(known: Known) -> dict[str, Any]:
    facts = _facts(known.path)
    size = store.size_of(known.path) if known.path else 0
    return {
        "name": known.name,
        "model": known.name,
        "size": size,
        "digest": known.digest,
        "details": facts.details,
    }


class Facts(NamedTuple):
    details: dict[str, Any]
    info: dict[str, Any]
    template: str


UNKNOWN = Facts(
    {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""},
    {},
    "",
)


@lru_cache(maxsize=256)
def _facts(path: Path | None) -> Facts:
    """What a model's own files say; nothing about those that this engine does not understand."""
    try:
        return UNKNOWN if path is None else _read_facts(path)
    except (ModelError, OSError):
        return UNKNOWN


def _read_facts(path: Path) -> Facts:
    checkpoint = open_checkpoint(path)
    spec, tensors = checkpoint.spec, checkpoint.tensors.values()
    formats: Counter[str] = Counter()
    for tensor in tensors:
        formats[tensor.format.name] += prod(tensor.shape)
    templates = templates_in_folder(path) if path.is_dir() else templates_in_metadata(checkpoint.metadata)
    details = {
        "parent_model": "",
        "format": "safetensors" if path.is_dir() else "gguf",
        "family": spec.arch,
        "families": [spec.arch],
        "parameter_size": _count(formats.total()),
        "quantization_level": formats.most_common(1)[0][0].upper(),
    }
    info = {
        "general.architecture": spec.arch,
        "general.basename": checkpoint.name,
        "general.parameter_count": formats.total(),
        f"{spec.arch}.attention.head_count": spec.attn.heads,
        f"{spec.arch}.attention.head_count_kv": spec.attn.kv_heads,
        f"{spec.arch}.block_count": spec.layers,
        f"{spec.arch}.context_length": spec.max_len,
        f"{spec.arch}.embedding_length": spec.dim,
        f"{spec.arch}.feed_forward_length": spec.hidden,
        f"{spec.arch}.vocab_size": spec.vocab,
    }
    return Facts(details, info, templates.get("default", ""))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _shown(served: Served, known: Known) -> dict[str, Any]:
    facts = _facts(known.path)
    info = dict(facts.info)
    if known.name == served.name:  # clients ask for as much context as they read here
        info[f"{facts.details['family'] or 'general'}.context_length"] = served.limits.max_len
    return {
        "modelfile": f"FROM {known.name}\n",
        "parameters": "",
        "template": facts.template,
        "details": facts.details,
        "model_info": info,
        "capabilities": _capabilities(facts.template),
        "modified_at": known.modified,
    }


def _capabilities(template: str) -> list[str]:
    format = ChatTemplate({"default": template}, {}).format
    named = {"completion": True, "tools": "tools" in template, "thinking": not format.plain(calling=False)}
    return [*(name for name, able in named.items() if able), "embedding"]


# -- fetching -----------------------------------------------------------------------------------------------------


class Status(msgspec.Struct):
    status: str
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


BEGUN, DONE = Status("pulling manifest"), Status("success")


async def pull(_: Served, http: HttpRequest) -> Response:
    asked = await _named(http)
    lines = _pulling(_source(asked.ref))
    if asked.stream is not False:
        return Stream(lines, OLLAMA)
    async with aclosing(lines):
        told = [line async for line in lines]
    return Response(told[-1], media_type="application/json")


def _source(ref: str) -> str:
    """A reference that leads to the store alone."""
    for hub in HUB:
        if ref.startswith(hub):
            ref = f"hf:{ref.removeprefix(hub)}"
    if ref in store.ALIASES or ref.startswith("hf:"):
        parse(ref)  # refuses what is no reference
        return ref
    known = ", ".join(store.ALIASES)
    raise ModelNotFound(f"model {ref!r} cannot be pulled: it may be {known} or hf.co/owner/repo[/file.gguf]")


async def _pulling(ref: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(pulling(ref)) as steps:
        async for step in steps:
            yield _line(BEGUN if step is None else Status(step.what, step.total or UNSET, step.done))
    yield _line(DONE)


def _line(status: Status) -> bytes:
    return encode(status) + b"\n"
