"""Serves POST /infill: the text between a prefix and a suffix, with other files as context."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import check_count
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.llamacpp.completion import NativeChunk, answer
from penstock.server.dialects.llamacpp.fields import NO_EFFECT, NativeFields
from penstock.server.http.bodies import read_body
from penstock.server.http.openapi import Operation
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.text.infill import ContextFile, infill_of, infill_prompt

MAX_FILES = 1024


class ExtraFile(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    filename: str = "tmp"
    time: int | float | None = None  # as editors send it: without effect


class InfillFields(NativeFields):
    input_prefix: str
    input_suffix: str
    prompt: str = ""  # follows the prefix
    input_extra: list[ExtraFile] | None = None


INFILL = Operation(InfillFields, NO_EFFECT, streams=NativeChunk)


async def infill(served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
    body = await read_body(http, context, InfillFields, NO_EFFECT)
    check_count(body.input_extra or (), MAX_FILES, "input_extra")
    tokenizer, markers = served.text.tokenizer, infill_of(served.text.tokenizer)
    if markers is None:
        raise InvalidRequest("this model has no tokens for infill: send the text before the cursor to /completion")
    before = body.input_prefix + body.prompt
    files = [ContextFile(each.filename, each.text) for each in body.input_extra or ()]
    size = len(before) + len(body.input_suffix) + sum(len(each.text) for each in files)
    prompt = await off_loop(size, lambda: infill_prompt(tokenizer, markers, before, body.input_suffix, files))
    return await answer(served, http, context, body, [prompt], markers.ends)
