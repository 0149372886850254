"""Serves the rest of Ollama's API: which models are here, what they are, pulling and deleting them.

Models are found by the name under which they are served or stored. A name in a request is never taken for a path.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
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
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.ollama.chat import OLLAMA
from penstock.server.dialects.ollama.pulls import pulling
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import StreamResponse, encode, json_response, sent
from penstock.server.models.derived import base_of, serves
from penstock.server.models.entry import FOR_EVER, ModelEntry
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.models.visible import may_use, named
from penstock.server.status.page import page
from penstock.store import DerivedModel
from penstock.store.refs import catalogue_source, parse, with_scheme
from penstock.text.chat import ChatTemplate, templates_in_folder, templates_in_metadata
from penstock.text.infill import infill_of

API_VERSION = "0.12.0"  # the emulated version of Ollama: clients choose features by it
NEVER = "9999-12-31T23:59:59Z"

NO_EFFECT: NoEffect = {"insecure": (False,), "options": ANY_VALUE, "system": ANY_VALUE, "verbose": ANY_VALUE}


class NamedModel(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    name: str | None = None  # the name of this field in older clients
    stream: bool | None = None

    @property
    def ref(self) -> str:
        ref = (self.model or self.name or "").removesuffix(":latest")
        if not ref:
            raise InvalidRequest("the field 'model' is missing", param="model", code="missing_required_parameter")
        return ref


class KnownModel(NamedTuple):
    """Describes a model that is served, stored or derived."""

    name: str
    path: Path | None
    digest: str
    modified: str
    stored: bool = False  # its files belong to the store
    derived: DerivedModel | None = None
    served: str = ""  # the model of the server that it is; empty: the server does not serve it


async def root(_: ModelPool, http: HttpRequest, __: RequestContext) -> Response:
    """Returns the page to browsers, and to other clients the text by which they recognize Ollama."""
    if "text/html" in http.headers.get("accept", ""):
        return page(http.headers.get("accept-encoding", ""))
    return PlainTextResponse("Ollama is running")


async def version(_: ModelPool, __: HttpRequest, ___: RequestContext) -> Response:
    return json_response({"version": API_VERSION, "penstock": __version__})


async def list_stored(pool: ModelPool, _: HttpRequest, context: RequestContext) -> Response:
    pool.models.refresh()

    def look() -> list[dict[str, Any]]:
        return [_listed(known) | {"modified_at": known.modified} for known in all_known(pool, context)]

    return json_response({"models": await asyncio.to_thread(look)})


async def running(pool: ModelPool, _: HttpRequest, context: RequestContext) -> Response:
    """Lists the loaded models and those derived from them. How much of a model is on a GPU is not known here."""
    loaded = {entry.name: entry for entry in pool.models.entries if entry.awake is not None}

    def look() -> list[dict[str, Any]]:
        here = [(known, loaded[known.served]) for known in all_known(pool, context) if known.served in loaded]
        return [_listed(known) | _kept(entry) for known, entry in here]

    return json_response({"models": await asyncio.to_thread(look)})


def _kept(entry: ModelEntry) -> dict[str, Any]:
    hello = entry.served.client.hello if entry.served else None
    until = NEVER
    if entry.expires < FOR_EVER:
        left = timedelta(seconds=entry.expires - time.monotonic())
        until = (datetime.now(UTC) + left).isoformat()
    return {"expires_at": until, "size_vram": None, "context_length": hello.limits.max_len if hello else None}


async def show(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    ref = (await _named(http, context)).ref
    pool.models.refresh()
    known = {each.name for each in all_known(pool, context)}
    if ref not in known and not store.derived_model(ref) and (stands_for := pool.models.find(ref)) is not None:
        ref = stands_for.name
    return json_response(await asyncio.to_thread(lambda: _shown(pool, find_known(pool, ref, context))))


async def delete(pool: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    """Deletes a model. One that the server found in the store itself is unloaded, too, unless it answers requests: then
    it stays until it is unloaded. One that the server was started with cannot be deleted."""
    ref = (await _named(http, context)).ref
    pool.models.refresh()

    def work() -> str:
        known = find_known(pool, ref, context)
        own = _owns_files(known)
        if (
            known.served
            and (known.name == known.served or own)
            and (not own or pool.models.get(known.served).source.fixed)
        ):
            raise InvalidRequest(
                f"{known.name!r} is being served and cannot be deleted: stop the server first", param="model"
            )
        (store.delete_derived if known.derived else store.remove)(known.name)
        return known.served

    await pool.discard(await asyncio.to_thread(work))
    return Response()


def _owns_files(known: KnownModel) -> bool:
    return known.stored if known.derived is None else bool(known.derived.blob)


async def push(_: ModelPool, __: HttpRequest, ___: RequestContext) -> Response:
    raise InvalidRequest("models cannot be pushed: there is no registry to push to")


async def _named(http: HttpRequest, context: RequestContext) -> NamedModel:
    return await read_body(http, context, NamedModel, NO_EFFECT)


# -- listing -----------------------------------------------------------------------------------------------------


def all_known(pool: ModelPool, context: RequestContext) -> list[KnownModel]:
    """Returns all models that exist for a request, those of the server first."""
    stored: dict[Path | None, KnownModel] = {
        entry.path: KnownModel(entry.name, entry.path, entry.sha256, entry.fetched, stored=True)
        for entry in store.entries()
    }
    began = datetime.fromtimestamp(pool.created, UTC).isoformat()
    served = [_served(entry, stored.get(entry.source.path), began) for entry in pool.models.entries]
    names, paths = {known.name for known in served}, {known.path for known in served}
    others = [known for known in stored.values() if known.path not in paths and known.name not in names]
    taken = names | {known.name for known in others}
    derived = [_derived(pool, each) for each in store.derived_models() if each.name not in taken]
    own = [known for known in (*served, *others, *derived) if _may_see(context, known)]
    return own + _foreign(pool, context, taken, began)


def _may_see(context: RequestContext, known: KnownModel) -> bool:
    """Returns whether a model exists for a request: its key may use the model, or has made it."""
    if context.caller.payer is None or (known.derived is not None and known.derived.key == context.caller.payer.name):
        return context.caller.may_see(known.derived)
    return context.caller.may_see(known.derived) and context.caller.payer.may_use(known.name)


def _foreign(pool: ModelPool, context: RequestContext, taken: set[str], began: str) -> list[KnownModel]:
    models = [] if pool.foreign is None else pool.foreign.models()
    allowed = [each.name for each in models if may_use(context, each.name)]
    return [KnownModel(name, None, "", began) for name in allowed if name not in taken]


def _served(entry: ModelEntry, same: KnownModel | None, began: str) -> KnownModel:
    """Describes a model of the server. `same` is the stored model that has its files."""
    derived = store.derived_model(entry.name)
    if derived is not None and not serves(entry.name, entry.source.path, derived):
        derived = None
    digest = same.digest if same else ""
    return KnownModel(entry.name, entry.source.path, digest, began, same is not None, derived, entry.name)


def _derived(pool: ModelPool, derived: DerivedModel) -> KnownModel:
    base = base_of(pool.models.entries, derived)
    path = base.source.path if base else store.derived_path(derived)
    served = base.name if base else ""
    return KnownModel(derived.name, path, derived.digest, derived.made, bool(derived.blob), derived, served)


def find_known(pool: ModelPool, name: str, context: RequestContext) -> KnownModel:
    """Returns the model of this name, or of the tag that it means in the catalogue; raises if there is none."""
    known = {each.name: each for each in all_known(pool, context)}
    full = store.full_name(name)
    if name in known or full in known:
        return known[name if name in known else full]
    pull = f"; pull {full} first" if catalogue_source(full) else ""
    here = named(name, [each for each in known if may_use(context, each)])
    raise ModelNotFound(f"model {name!r} not found{pull}; this server has {here}")


def _listed(known: KnownModel) -> dict[str, Any]:
    details = _details(known)
    size = store.size_of(known.path) if known.path else 0
    return {
        "name": tagged(known.name),
        "model": tagged(known.name),
        "size": size,
        "digest": known.digest,
        "details": details,
    }


def tagged(name: str) -> str:
    """Returns a name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _details(known: KnownModel) -> dict[str, Any]:
    return facts_of(known.path).details | {"parent_model": known.derived.base if known.derived else ""}


class ModelFacts(NamedTuple):
    details: dict[str, Any]
    info: dict[str, Any]
    template: str


UNKNOWN = ModelFacts(
    {"parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""},
    {},
    "",
)


@lru_cache(maxsize=256)
def facts_of(path: Path | None) -> ModelFacts:
    """Returns the facts in a model's files, or UNKNOWN if this engine does not support them."""
    try:
        return UNKNOWN if path is None else _read_facts(path)
    except (ModelError, OSError):
        return UNKNOWN


def _read_facts(path: Path) -> ModelFacts:
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
    return ModelFacts(details, info, templates.get("default", ""))


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M"


def _shown(pool: ModelPool, known: KnownModel) -> dict[str, Any]:
    facts, derived = facts_of(known.path), known.derived or DerivedModel(name=known.name)
    info = dict(facts.info)
    served = pool.models.get(known.served).served if known.served else None
    if served is not None and served.client.hello is not None:  # clients use this number as their context size
        info[f"{facts.details['family'] or 'general'}.context_length"] = served.limits.max_len
    settings = {"system": derived.system, "messages": derived.messages, "license": "\n".join(derived.license)}
    return {name: value for name, value in settings.items() if value} | {
        "modelfile": modelfile(derived),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameter_lines(derived)),
        "template": derived.template or facts.template,
        "details": _details(known),
        "model_info": info,
        "capabilities": _capabilities(derived.template or facts.template, served),
        "modified_at": known.modified,
    }


def parameter_lines(derived: DerivedModel) -> Iterator[tuple[str, str]]:
    for name, given in derived.parameters.items():
        for value in given if isinstance(given, list) else [given]:
            yield name, encode(value).decode()


def modelfile(derived: DerivedModel) -> str:
    quoted = {"TEMPLATE": [derived.template], "SYSTEM": [derived.system], "LICENSE": derived.license}
    lines = [f"FROM {derived.base or derived.blob or derived.name}"]
    lines += [f"ADAPTER {path}" for path in derived.adapters]
    lines += [f'{word} """{text}"""' for word, texts in quoted.items() for text in texts if text]
    lines += [f"PARAMETER {name} {value}" for name, value in parameter_lines(derived)]
    lines += [
        f"MESSAGE {message['role']} {encode(message.get('content') or '').decode()}" for message in derived.messages
    ]
    return "\n".join(lines) + "\n"


def _capabilities(template: str, served: ServedModel | None) -> list[str]:
    """Returns the model's capabilities. `served` is given while it is loaded: then its vocabulary is known."""
    format = ChatTemplate({"default": template}, {}).format
    named = {
        "completion": served is None or served.generates,
        "tools": "tools" in template,
        "thinking": not format.plain(calling=False),
        "insert": served is not None and infill_of(served.text.tokenizer) is not None,
        "embedding": True,
    }
    return [name for name, able in named.items() if able]


# -- pulling ----------------------------------------------------------------------------------------------------


class PullStatus(msgspec.Struct):
    status: str
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


BEGUN, DONE = PullStatus("pulling manifest"), PullStatus("success")
NAMED = Operation(NamedModel, NO_EFFECT)
DELETE = NAMED._replace(answers=None)
PULL = Operation(NamedModel, NO_EFFECT, PullStatus, PullStatus)


async def pull(_: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
    body = await _named(http, context)
    lines = _pulling(_source(body.ref))
    if body.stream is not False:
        return StreamResponse(context, sent(lines), OLLAMA)
    async with aclosing(lines):
        received = [line async for line in lines]
    return Response(received[-1], media_type="application/json")


def _source(ref: str) -> str:
    """Returns a reference that the store can pull; raises for everything else."""
    ref = with_scheme(ref)
    if ref in store.ALIASES:
        return ref
    if ref.startswith("hf:"):
        parse(ref)  # raises for a malformed reference
        return ref
    if source := catalogue_source(ref):
        return str(source)
    names = " or ".join(store.nearest_names(ref)) or "a name that `penstock list --all` shows"
    raise ModelNotFound(f"model {ref!r} cannot be pulled: use {names}, or hf.co/owner/repo[:quantization]")


async def _pulling(ref: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(pulling(ref)) as steps:
        async for step in steps:
            yield _line(BEGUN if step is None else PullStatus(step.what, step.total or UNSET, step.done))
    yield _line(DONE)


def _line(status: PullStatus) -> bytes:
    return encode(status) + b"\n"
