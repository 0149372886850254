"""Lists every route: its method and path, its endpoint, and the operation that documents it in /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from penstock.server.anthropic.messages import COUNT_TOKENS, MESSAGES, count_tokens, messages
from penstock.server.generate import GENERATE as GENERATE_TEXT
from penstock.server.generate import generate as generate_text
from penstock.server.kserve import endpoints as kserve
from penstock.server.llamacpp.completion import COMPLETION, completion
from penstock.server.llamacpp.embedding import EMBEDDING, embedding
from penstock.server.llamacpp.infill import INFILL, infill
from penstock.server.llamacpp.server_state import (
    CHANGE_PROPS,
    PROPS,
    SLOT_ACTION,
    SLOTS,
    change_props,
    change_slot,
    list_adapters,
    props,
    slots,
)
from penstock.server.ollama.chat import CHAT, GENERATE, chat, generate
from penstock.server.ollama.create import COPY, CREATE, UPLOAD_BLOB, copy, create, has_blob, upload
from penstock.server.ollama.embed import EMBED, OLD_EMBED, embed, embed_old
from penstock.server.ollama.models import (
    DELETE,
    NAMED,
    PULL,
    delete,
    list_stored,
    pull,
    push,
    root,
    running,
    show,
    version,
)
from penstock.server.openai.batches import CREATE_BATCH, LIST_BATCHES, SHOW_BATCH, Batches
from penstock.server.openai.chat import CHAT_COMPLETIONS, chat_completions
from penstock.server.openai.completions import COMPLETIONS, completions
from penstock.server.openai.embeddings import EMBEDDINGS, embeddings
from penstock.server.openai.files import FILE_CONTENT, LIST_FILES, SHOW_FILE, UPLOAD, Files
from penstock.server.openapi import DocumentedRoute, OpenApiDocument, Operation
from penstock.server.request_context import RequestContext, context_of
from penstock.server.rerank.classify import CLASSIFY, classify
from penstock.server.rerank.rerank import RERANK, rerank
from penstock.server.rerank.score import SCORE, score
from penstock.server.rerank.tei import SIMILARITY, TEI_EMBED, similarity
from penstock.server.rerank.tei import embed as tei_embed
from penstock.server.responses.endpoints import CANCEL, INPUT_ITEMS, INPUT_TOKENS, RESPOND, RETRIEVE, Responses
from penstock.server.served_model import CLIENTS_NAMES, ServedModel
from penstock.server.sglang.endpoints import (
    ENCODE,
    encode_texts,
    flush_cache,
    health_generate,
    model_info,
    server_info,
)
from penstock.server.sse import json_response
from penstock.server.tgi.generate import GENERATE_COMPAT, GENERATE_STREAM, generate_compat, generate_stream
from penstock.server.tgi.info import info
from penstock.server.tokens import (
    APPLY_TEMPLATE,
    DETOKENIZE,
    TOKENIZE,
    apply_template,
    count_chat_tokens,
    detokenize,
    tokenize,
)
from penstock.server.vllm.endpoints import POOLING, load, model_fields, ping, pooling, tokenizer_info
from penstock.server.vllm.endpoints import version as vllm_version

Endpoint = Callable[[ServedModel, Request, RequestContext], Awaitable[Response]]
Endpoints = dict[str, tuple[Endpoint, Operation]]  # by path
JSON = Operation()
TEXT = Operation(answers="text/plain")
EMPTY = Operation(answers=None)


def all_routes(served: ServedModel, files: Files, batches: Batches, responses: Responses) -> list[DocumentedRoute]:
    """Returns the routes. They are tried in this order, so those with the most requests come first."""
    endpoints: dict[str, Endpoints] = {
        "POST": _generating(responses) | _changing(files, batches, responses) | _llamacpp(responses),
        "GET": _reading(files, batches, responses) | _llamacpp_reading(),
        "DELETE": {
            "/api/delete": (delete, DELETE),
            "/v1/responses/{id}": (responses.delete, JSON),
            "/v1/files/{id}": (files.delete, JSON),
        },
        "HEAD": {"/api/blobs/{digest}": (has_blob, EMPTY)},
    }
    return [
        _route(served, path, endpoint, method, operation)
        for method, routes in endpoints.items()
        for path, (endpoint, operation) in routes.items()
    ]


def _route(served: ServedModel, path: str, endpoint: Endpoint, method: str, operation: Operation) -> DocumentedRoute:
    @wraps(endpoint)
    async def call(request: Request) -> Response:
        return await endpoint(served, request, context_of(request.scope))

    return DocumentedRoute(path, call, method, operation)


def _generating(responses: Responses) -> Endpoints:
    """Returns the POST routes that need the engine or the tokenizer."""
    generating: Endpoints = {
        "/v1/chat/completions": (chat_completions, CHAT_COMPLETIONS),
        "/v1/completions": (completions, COMPLETIONS),
        "/v1/embeddings": (embeddings, EMBEDDINGS),
        "/v1/responses": (responses.create, RESPOND),
        "/v1/responses/input_tokens": (responses.input_tokens, INPUT_TOKENS),
        "/v1/messages": (messages, MESSAGES),
        "/v1/messages/count_tokens": (count_tokens, COUNT_TOKENS),
        "/api/chat": (chat, CHAT),
        "/api/generate": (generate, GENERATE),
        "/api/embed": (embed, EMBED),
        "/api/embeddings": (embed_old, OLD_EMBED),
        "/tokenize": (tokenize, TOKENIZE),
        "/detokenize": (detokenize, DETOKENIZE),
        "/apply-template": (apply_template, APPLY_TEMPLATE),
        **other_engines_generating(),
    }
    return generating | _scoring()


def _scoring() -> Endpoints:
    """Returns the POST routes that score pairs, classify and embed, in the shapes of other engines."""
    reranking = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")
    return {
        "/score": (score, SCORE),
        "/v1/score": (score, SCORE),
        "/classify": (classify, CLASSIFY),
        "/predict": (classify, CLASSIFY),
        "/embed": (tei_embed, TEI_EMBED),
        "/similarity": (similarity, SIMILARITY),
        **dict.fromkeys(reranking, (rerank, RERANK)),
    }


def _changing(files: Files, batches: Batches, responses: Responses) -> Endpoints:
    """Returns the other POST routes: models, files, batches and stored responses."""
    return {
        "/api/show": (show, NAMED),
        "/api/pull": (pull, PULL),
        "/api/push": (push, JSON),
        "/api/create": (create, CREATE),
        "/api/copy": (copy, COPY),
        "/api/blobs/{digest}": (upload, UPLOAD_BLOB),
        "/v1/files": (files.create, UPLOAD),
        "/v1/batches": (batches.create, CREATE_BATCH),
        "/v1/batches/{id}/cancel": (batches.cancel, SHOW_BATCH),
        "/v1/responses/{id}/cancel": (responses.cancel, CANCEL),
    }


def _reading(files: Files, batches: Batches, responses: Responses) -> Endpoints:
    return {
        **other_engines_reading(),
        "/": (root, TEXT),
        "/health": (health, JSON),
        "/api/hello": (hello, JSON),
        "/metrics": (show_metrics, TEXT),
        "/openapi.json": (OpenApiDocument(), JSON),
        "/v1/models": (list_models, JSON),
        "/v1/models/{id:path}": (show_model, JSON),
        "/api/version": (version, JSON),
        "/api/tags": (list_stored, JSON),
        "/api/ps": (running, JSON),
        "/v1/files": (files.list_all, LIST_FILES),
        "/v1/files/{id}": (files.show, SHOW_FILE),
        "/v1/files/{id}/content": (files.content, FILE_CONTENT),
        "/v1/batches": (batches.list_all, LIST_BATCHES),
        "/v1/batches/{id}": (batches.show, SHOW_BATCH),
        "/v1/responses/{id}": (responses.retrieve, RETRIEVE),
        "/v1/responses/{id}/input_items": (responses.input_items, INPUT_ITEMS),
    }


# -- vLLM, SGLang, Text Generation Inference and KServe -------------------------------------------------------------


def other_engines_generating() -> Endpoints:
    """Returns the POST routes of other engines that no dialect above has."""
    versions = "/v2/models/{model:path}/versions/{version}"
    return {
        "/pooling": (pooling, POOLING),
        "/ping": (ping, EMPTY),
        "/generate": (generate_text, GENERATE_TEXT),
        "/encode": (encode_texts, ENCODE),
        "/flush_cache": (flush_cache, TEXT),
        "/": (generate_compat, GENERATE_COMPAT),
        "/generate_stream": (generate_stream, GENERATE_STREAM),
        f"{versions}/generate": (kserve.generate, kserve.GENERATE),
        f"{versions}/generate_stream": (kserve.generate_stream, kserve.GENERATE_STREAM),
        "/v2/models/{model:path}/generate": (kserve.generate, kserve.GENERATE),
        "/v2/models/{model:path}/generate_stream": (kserve.generate_stream, kserve.GENERATE_STREAM),
    }


def other_engines_reading() -> Endpoints:
    """Returns the GET routes of other engines. A route that ends in a model's name, which may have slashes, comes after
    those that are longer."""
    versions = "/v2/models/{model:path}/versions/{version}"
    return {
        "/version": (vllm_version, JSON),
        "/ping": (ping, EMPTY),
        "/load": (load, JSON),
        "/tokenizer_info": (tokenizer_info, JSON),
        "/flush_cache": (flush_cache, TEXT),
        "/health_generate": (health_generate, EMPTY),
        "/get_model_info": (model_info, JSON),
        "/model_info": (model_info, JSON),
        "/get_server_info": (server_info, JSON),
        "/server_info": (server_info, JSON),
        "/info": (info, JSON),
        "/v2": (kserve.server_metadata, JSON),
        "/v2/health/live": (kserve.live, EMPTY),
        "/v2/health/ready": (kserve.ready, EMPTY),
        f"{versions}/ready": (kserve.model_ready, EMPTY),
        versions: (kserve.model_metadata, JSON),
        "/v2/models/{model:path}/ready": (kserve.model_ready, EMPTY),
        "/v2/models/{model:path}": (kserve.model_metadata, JSON),
    }


def _llamacpp(responses: Responses) -> Endpoints:
    """Returns the POST routes of llama.cpp's server: its own ones, and unversioned names of others."""
    return {
        "/completion": (completion, COMPLETION),
        "/completions": (completion, COMPLETION),
        "/infill": (infill, INFILL),
        "/embedding": (embedding, EMBEDDING),
        "/embeddings": (embedding, EMBEDDING),
        "/chat/completions": (chat_completions, CHAT_COMPLETIONS),
        "/chat/completions/input_tokens": (count_chat_tokens, APPLY_TEMPLATE),
        "/v1/chat/completions/input_tokens": (count_chat_tokens, APPLY_TEMPLATE),
        "/responses": (responses.create, RESPOND),
        "/responses/input_tokens": (responses.input_tokens, INPUT_TOKENS),
        "/props": (change_props, CHANGE_PROPS),
        "/slots/{id}": (change_slot, SLOT_ACTION),
    }


def _llamacpp_reading() -> Endpoints:
    return {
        "/v1/health": (health, JSON),
        "/models": (list_models, JSON),
        "/props": (props, PROPS),
        "/slots": (slots, SLOTS),
        "/lora-adapters": (list_adapters, JSON),
    }


# -- the server itself --------------------------------------------------------------------------------------------


async def list_models(served: ServedModel, _: Request, __: RequestContext) -> Response:
    """Returns one object for both SDKs that read this route: OpenAI's and Anthropic's read the fields they know.
    Aliases that the server was started with are listed beside the model's own name, unless they have wildcards."""
    aliases = [name for name in served.aliases if name not in CLIENTS_NAMES and not set(name) & set("*?[")]
    data = [_model(served), *(_model(served) | {"id": alias, "display_name": alias} for alias in aliases)]
    page = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return json_response({"object": "list", "data": data} | page)


async def show_model(served: ServedModel, request: Request, context: RequestContext) -> Response:
    served.check_model(request.path_params["id"], context)
    return json_response(_model(served))


async def hello(_: ServedModel, __: Request, ___: RequestContext) -> Response:
    """Answers the request by which Claude Code finds out whether it can reach a server."""
    return json_response({"message": "hello"})


async def health(served: ServedModel, _: Request, __: RequestContext) -> Response:
    hello = served.client.hello
    if hello is None:
        return json_response(
            {"status": "unavailable", "engine": None, "message": served.client.unavailable_reason}, 503
        )
    return json_response({"status": "ok", "engine": {"pid": hello.pid, "model": served.name}})


async def show_metrics(served: ServedModel, _: Request, __: RequestContext) -> Response:
    started = {"process-start-time-unix": str(served.created)}  # as llama.cpp's server says it
    return Response(served.metrics.render(), headers=started, media_type="text/plain; version=0.0.4; charset=utf-8")


def _model(served: ServedModel) -> dict[str, object]:
    openai = {"id": served.name, "object": "model", "created": served.created, "owned_by": "penstock"}
    openai |= model_fields(served)
    created = datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return openai | {"type": "model", "display_name": served.name, "created_at": created, "lifecycle": "active"}
