"""The rest of Ollama's API: what is here, what it is, fetching and removing.

Models are found by the name they are served or stored under. A name that came in a request is never taken for a path.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
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
from penstock.server.bodies import ANYTHING, Neutral, read_body
from penstock.server.ollama.chat import OLLAMA
from penstock.server.ollama.derived_settings import made_for, serves
from penstock.server.ollama.pulls import pulling
from penstock.server.openapi import Operation
from penstock.server.page import page
from penstock.server.served_model import Served
from penstock.server.sse import Stream, encode
from penstock.store import DerivedModel
from penstock.store.refs import parse
from penstock.text.chat import ChatTemplate, templates_in_folder, templates_in_metadata
from penstock.text.infill import infill_of

API_VERSION = "0.12.0"  # of the API that is spoken: clients compare it to know what they may ask for
NEVER = "9999-12-31T23:59:59Z"
HUB = ("hf.co/", "huggingface.co/")

NEUTRAL: Neutral = {"insecure": (False,), "options": ANYTHING, "system": ANYTHING, "verbose": ANYTHING}


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
    """A model that is served, stored or made."""

    name: str
    path: Path | None
    digest: str
    modified: str
    stored: bool = False  # its files are the store's
    made: DerivedModel | None = None


async def greet(served: Served, http: HttpRequest) -> Response:
    """The page for those who ask for one, as browsers do; to others the words by which Ollama is known."""
    if "text/html" in http.headers.get("accept", ""):
        return await page(served, http)
    return PlainTextResponse("Ollama is running")


async def version(_: Served, __: HttpRequest) -> Response:
    return _json({"version": API_VERSION, "penstock": __version__})


async def list_stored(served: Served, _: HttpRequest) -> Response:
    def look() -> list[dict[str, Any]]:
        return [_listed(known) | {"modified_at": known.modified} for known in all_known(served)]

    return _json({"models": await asyncio.to_thread(look)})


async def running(served: Served, _: HttpRequest) -> Response:
    """The one model and those made of it, for as long as the server runs. How much of it is on a GPU is not known
    here."""
    kept = {"expires_at": NEVER, "size_vram": None, "context_length": served.limits.max_len}

    def look() -> list[dict[str, Any]]:
        first, *others = all_known(served)
        here = [known for known in others if known.made is not None and serves(served, known.made)]
        return [_listed(known) | kept for known in [first, *here]]

    return _json({"models": await asyncio.to_thread(look)})


async def show(served: Served, http: HttpRequest) -> Response:
    ref = (await _named(http)).ref
    return _json(await asyncio.to_thread(lambda: _shown(served, find_known(served, ref))))


async def delete(served: Served, http: HttpRequest) -> Response:
    ref = (await _named(http)).ref

    def work() -> None:
        known = find_known(served, ref)
        if known.name == served.name or (known.path == served.path and _owns_files(known)):
            raise InvalidRequest(f"{known.name!r} is being served and is not deleted", param="model")
        (store.delete_derived if known.made else store.remove)(known.name)

    await asyncio.to_thread(work)
    return Response()


def _owns_files(known: Known) -> bool:
    return known.stored if known.made is None else bool(known.made.blob)


async def push(_: Served, __: HttpRequest) -> Response:
    raise InvalidRequest("models cannot be pushed from here: there is no registry to push to, the store only fetches")


async def _named(http: HttpRequest) -> Named:
    return await read_body(http, Named, NEUTRAL)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


# -- what is here -------------------------------------------------------------------------------------------------


def all_known(served: Served) -> list[Known]:
    """The served one first."""
    stored = [Known(entry.name, entry.path, entry.sha256, entry.fetched, stored=True) for entry in store.entries()]
    began = datetime.fromtimestamp(served.created, UTC).isoformat()
    same = next((known for known in stored if known.path == served.path), None)
    digest = same.digest if same else ""
    first = Known(served.name, served.path, digest, began, same is not None, made_for(served, served.name))
    fetched = [first, *(known for known in stored if known is not same and known.name != served.name)]
    taken = {known.name for known in fetched}
    return [*fetched, *(_known(served, made) for made in store.derived_models() if made.name not in taken)]


def _known(served: Served, made: DerivedModel) -> Known:
    path = served.path if serves(served, made) else store.derived_path(made)
    return Known(made.name, path, made.digest, made.made, bool(made.blob), made)


def find_known(served: Served, name: str) -> Known:
    found = next((known for known in all_known(served) if known.name == name), None)
    if found is None:
        raise ModelNotFound(f"model {name!r} not found")
    return found


def _listed(known: Known) -> dict[str, Any]:
    details = _details(known)
    size = store.size_of(known.path) if known.path else 0
    return {
        "name": known.name,
        "model": known.name,
        "size": size,
        "digest": known.digest,
        "details": details,
    }


def _details(known: Known) -> dict[str, Any]:
    return facts_of(known.path).details | {"parent_model": known.made.base if known.made else ""}


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
def facts_of(path: Path | None) -> Facts:
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
    facts, made = facts_of(known.path), known.made or DerivedModel(name=known.name)
    info = dict(facts.info)
    here = known.name == served.name or serves(served, made)
    if here:  # clients ask for as much context as they read here
        info[f"{facts.details['family'] or 'general'}.context_length"] = served.limits.max_len
    told = {"system": made.system, "messages": made.messages, "license": "\n".join(made.license)}
    return {name: value for name, value in told.items() if value} | {
        "modelfile": modelfile(made),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameter_lines(made)),
        "template": made.template or facts.template,
        "details": _details(known),
        "model_info": info,
        "capabilities": _capabilities(made.template or facts.template, served if here else None),
        "modified_at": known.modified,
    }


def parameter_lines(made: DerivedModel) -> Iterator[tuple[str, str]]:
    for name, given in made.parameters.items():
        for value in given if isinstance(given, list) else [given]:
            yield name, encode(value).decode()


def modelfile(made: DerivedModel) -> str:
    """What the model could be made from again, as Ollama writes it."""
    quoted = {"TEMPLATE": [made.template], "SYSTEM": [made.system], "LICENSE": made.license}
    lines = [f"FROM {made.base or made.blob or made.name}"]
    lines += [f'{word} """{text}"""' for word, texts in quoted.items() for text in texts if text]
    lines += [f"PARAMETER {name} {value}" for name, value in parameter_lines(made)]
    lines += [f"MESSAGE {message['role']} {encode(message.get('content') or '').decode()}" for message in made.messages]
    return "\n".join(lines) + "\n"


def _capabilities(template: str, served: Served | None) -> list[str]:
    """`served` where the model is that, whose vocabulary is known."""
    format = ChatTemplate({"default": template}, {}).format
    named = {
        "completion": served is None or not served.encoder,
        "tools": "tools" in template,
        "thinking": not format.plain(calling=False),
        "insert": served is not None and infill_of(served.text.tokenizer) is not None,
        "embedding": True,
    }
    return [name for name, able in named.items() if able]


# -- fetching -----------------------------------------------------------------------------------------------------


class Status(msgspec.Struct):
    status: str
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


BEGUN, DONE = Status("pulling manifest"), Status("success")
NAMED = Operation(Named, NEUTRAL)
DELETE = NAMED._replace(answers=None)
PULL = Operation(Named, NEUTRAL, Status, Status)


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
