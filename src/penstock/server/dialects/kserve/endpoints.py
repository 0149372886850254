"""Serves the KServe v2 protocol: health, metadata, and Triton's generate extension.

Text is generated as Triton's vLLM backend does: a whole answer begins with its prompt unless
`exclude_input_in_output` is true, and an event of a stream has only the text that is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import __version__
from penstock.errors import EngineUnavailable, InvalidRequest, NotFound
from penstock.ipc.client import EngineState
from penstock.server.access.bounds import read_json
from penstock.server.chat.stream import all_deltas
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.kserve.errors import KSERVE_ERRORS
from penstock.server.generation.explain import AnswerReport, Explanation
from penstock.server.generation.fields import SamplingFields, sampling
from penstock.server.generation.prompts import encode_prompts
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_body, read_object
from penstock.server.http.openapi import Operation, read_as
from penstock.server.http.sse import EVENT_STREAM, Framing, encode, event, json_response, reply
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.text import Delta
from penstock.types import SamplingParams

VERSION = "1"  # every model has one version
DEFAULT_TOKENS = 16  # Triton's vLLM backend has this default
KSERVE = Framing(EVENT_STREAM, event, b"", KSERVE_ERRORS.encode)

NO_EFFECT: NoEffect = {
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "stream": ANY_VALUE,  # the route decides whether an answer is streamed
}


class KserveSampling(SamplingFields, kw_only=True):
    """Declares the fields of `parameters`: the names used by OpenAI, by vLLM and by Triton's TensorRT-LLM backend."""

    max_tokens: int | None = None
    max_new_tokens: int | None = None
    random_seed: int | None = None
    stop_words: str | list[str] | None = None
    exclude_input_in_output: bool | None = None


class KserveBody(KserveSampling, kw_only=True):
    """Is the body of Triton's generate extension. Sampling may be set in it, in `parameters`, which count more, or in
    `sampling_parameters`, a JSON text."""

    text_input: str
    id: str | None = None
    parameters: Annotated[dict[str, Any], read_as(KserveSampling, no_effect=NO_EFFECT)] | None = None
    sampling_parameters: str | None = None


class KserveAnswer(msgspec.Struct):
    model_name: str
    model_version: str
    text_output: str
    id: str | UnsetType = UNSET
    penstock: AnswerReport | UnsetType = UNSET


GENERATE = Operation(KserveBody, NO_EFFECT, KserveAnswer)
GENERATE_STREAM = Operation(KserveBody, NO_EFFECT, "text/event-stream", KserveAnswer)


# -- generating ---------------------------------------------------------------------------------------------------


async def generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    return await _generate(served, http, context, streaming=False)


async def generate_stream(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    return await _generate(served, http, context, streaming=True)


async def _generate(served: ServedModel, http: HttpRequest, context: RequestContext, streaming: bool) -> Response:
    body = await read_body(http, context, KserveBody, NO_EFFECT)
    _check_path(served, http, context)
    fields = _fields(context, body)
    params = _sampling(served, fields)
    ids = (await encode_prompts(served, [body.text_input]))[0].ids
    request = served.request(context, ids, params, "text_input", DEFAULT_TOKENS)
    exclude = streaming if fields.exclude_input_in_output is None else fields.exclude_input_in_output
    head = {"model_name": served.name, "model_version": VERSION, "id": UNSET if body.id is None else body.id}
    writer = KserveWriter(head, "" if exclude else body.text_input, Explanation(served, context, [request]))
    running = all_deltas(served, context, [request])
    return await reply(http, context, writer, running, streaming=streaming, framing=KSERVE)


def _fields(context: RequestContext, body: KserveBody) -> KserveSampling:
    places: dict[str, dict[str, Any]] = {"parameters": body.parameters or {}}
    if body.sampling_parameters is not None:
        given = read_json(body.sampling_parameters, "sampling_parameters", "sampling_parameters")
        if not isinstance(given, dict):
            raise InvalidRequest("sampling_parameters must be the text of a JSON object", param="sampling_parameters")
        places["sampling_parameters"] = given
    merged = {name: getattr(body, name) for name in KserveSampling.__struct_fields__}
    for where, given in places.items():
        fields = read_object(context, given, KserveSampling, NO_EFFECT, where)
        merged |= {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    return KserveSampling(**merged)


def _sampling(served: ServedModel, fields: KserveSampling) -> SamplingParams:
    if fields.random_seed is not None:
        fields.seed = fields.random_seed & (2**63 - 1)
    if fields.stop_words:
        fields.stop = fields.stop_words
    limit = fields.max_new_tokens if fields.max_tokens is None else fields.max_tokens
    if limit is not None and limit < 1:
        raise InvalidRequest(f"max_tokens must be at least 1; got {limit}", param="max_tokens")
    (params,) = sampling(served, fields, max_tokens=limit)
    return params


class KserveWriter:
    def __init__(self, head: dict[str, Any], prompt: str, explanation: Explanation) -> None:
        self._head = head
        self._text = prompt
        self._explanation = explanation

    def collect(self, choice: int, delta: Delta) -> None:
        self._text += delta.text
        if delta.finish:
            self._explanation.end(choice, delta)

    def result(self) -> KserveAnswer:
        return KserveAnswer(text_output=self._text, penstock=self._explanation.report(), **self._head)

    def chunks(self, choice: int, delta: Delta) -> Iterator[bytes]:
        """Yields an event for every delta, whose text may be empty; a prompt that is wanted is in the first."""
        self.collect(choice, delta)
        text, self._text = self._text, ""
        if text or delta.finish:
            yield encode(KserveAnswer(text_output=text, penstock=self._explanation.report(), **self._head))

    def final_chunks(self) -> Iterator[bytes]:
        return iter(())


# -- health and metadata ------------------------------------------------------------------------------------------


async def live(_: ModelPool, __: HttpRequest, ___: RequestContext) -> Response:
    return Response()


async def ready(pool: ModelPool, _: HttpRequest, __: RequestContext) -> Response:
    pool.models.check_health()
    return Response()


async def server_metadata(_: ModelPool, __: HttpRequest, ___: RequestContext) -> Response:
    return json_response({"name": "penstock", "version": __version__, "extensions": ["generate"]})


async def model_metadata(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    _check_path(served, http, context)
    return json_response(
        {
            "name": served.name,
            "versions": [VERSION],
            "platform": "penstock",
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1]}],
            "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1]}],
        }
    )


async def model_ready(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    _check_path(served, http, context)
    if served.client.state is not EngineState.READY:
        raise EngineUnavailable(served.client.unavailable_reason)
    return Response()


def _check_path(served: ServedModel, http: HttpRequest, context: RequestContext) -> None:
    """Raises if the path names another model, or a version of it that does not exist."""
    served.check_model(http.path_params["model"], context)
    version = http.path_params.get("version", VERSION)
    if version != VERSION:
        raise NotFound(f"the model {served.name!r} has no version {version!r}; it has {VERSION!r}")
