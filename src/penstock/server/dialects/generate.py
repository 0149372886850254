"""Serves POST /generate, which SGLang and Text Generation Inference both have: the body says whose it is."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.dialects.sglang.generate import NO_EFFECT as SGLANG_NO_EFFECT
from penstock.server.dialects.sglang.generate import SglangAnswer, SglangBody
from penstock.server.dialects.sglang.generate import answer as answer_sglang
from penstock.server.dialects.tgi.generate import ParametersObject, TgiAnswer, TgiPrompt, TgiStreamEvent
from penstock.server.dialects.tgi.generate import answer as answer_tgi
from penstock.server.generation.speculation_fields import limit_drafts
from penstock.server.http.bodies import NoEffect, read_body
from penstock.server.http.openapi import Operation
from penstock.server.models.served_model import ServedModel
from penstock.server.request_context import RequestContext


class GenerateBody(SglangBody, kw_only=True):
    """Takes exactly one of `text` and `input_ids` (SGLang) and `inputs` (Text Generation Inference)."""

    inputs: str | None = None
    parameters: ParametersObject | None = None


NO_EFFECT: NoEffect = SGLANG_NO_EFFECT
GENERATE = Operation(
    GenerateBody, NO_EFFECT, (SglangAnswer, list[SglangAnswer], TgiAnswer), (SglangAnswer, TgiStreamEvent)
)


async def generate(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, GenerateBody, NO_EFFECT)
    given = [name for name in ("text", "input_ids", "inputs") if getattr(body, name) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise InvalidRequest(
            f"send exactly one of text and input_ids (SGLang) and inputs (TGI); got {got}", param="text"
        )
    limit_drafts(served, context, body.speculation)
    if body.inputs is None:
        return await answer_sglang(served, http, context, body)
    prompt = TgiPrompt(body.inputs, body.parameters or {}, bool(body.stream))
    return await answer_tgi(served, http, context, prompt)
