"""Serves chat completions that clients have asked to store: POST /v1/chat/completions with `store`, and the routes that
list, show, change and delete them. They are kept as responses are, and belong to their owner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.dialects.openai.chat import LLAMACPP_STYLE, OPENAI_STYLE, ChatBody, chat_completions
from penstock.server.dialects.openai.chat_answer import ChatCompletion
from penstock.server.dialects.openai.metadata import read_metadata
from penstock.server.http.bodies import read_body, read_object
from penstock.server.http.openapi import Operation
from penstock.server.http.sse import encode, json_response
from penstock.server.models.pool import ModelPool
from penstock.server.models.served_model import ServedModel
from penstock.server.services import Endpoints, Services
from penstock.server.storage.lasting_answers import AnswerRecord, LastingAnswers
from penstock.server.storage.owned_store import OwnedStore

METADATA = "metadata["  # begins a parameter of a query: metadata[name]=value


class StoredChatCompletion(ChatCompletion, kw_only=True):
    """Is a stored answer, with what its request said."""

    request_id: str
    metadata: dict[str, str]
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    response_format: Any


class StoredMessage(msgspec.Struct, kw_only=True):
    """Is a message that a stored answer was generated from."""

    id: str
    role: str
    content: str | None = None
    content_parts: list[dict[str, Any]] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatsQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"
    model: str | None = None
    metadata: dict[str, str] | None = None  # those whose metadata has these pairs; metadata[name]=value


class MessagesQuery(msgspec.Struct, forbid_unknown_fields=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "asc"


class ChangeChat(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[str, Any] | None


class DeletedChat(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.deleted"
    deleted: bool = True


LIST_CHATS = Operation(query=ChatsQuery)
SHOW_CHAT = Operation(answers=StoredChatCompletion)
CHANGE_CHAT = Operation(ChangeChat, {}, StoredChatCompletion)
DELETE_CHAT = Operation(answers=DeletedChat)
LIST_MESSAGES = Operation(query=MessagesQuery)


@dataclass(eq=False)
class StoredChat:
    completion: StoredChatCompletion
    messages: list[dict[str, Any]]  # as the request has them
    stored_at: int  # nanoseconds since 1970
    tenant: str | None = None
    running: bool = False

    @property
    def id(self) -> str:
        return self.completion.id

    @property
    def size(self) -> int:
        return len(encode(self.completion)) + len(encode(self.messages))

    def record(self) -> AnswerRecord:
        return AnswerRecord(self.id, self.tenant, encode((self.completion, self.messages, self.stored_at)))

    @classmethod
    def of(cls, record: AnswerRecord) -> Self:
        completion, messages, stored_at = _decoder.decode(record.body)
        return cls(completion, messages, stored_at, record.tenant)


_decoder = msgspec.json.Decoder(tuple[StoredChatCompletion, list[dict[str, Any]], int])


class StoredChats(Endpoints):
    """Holds the endpoints, and the chats they share."""

    def __init__(self, services: Services) -> None:
        lasting = None
        if services.keeps_answers:
            lasting = LastingAnswers(services.archive, "chat", StoredChat.record, StoredChat.of)
        self._store = OwnedStore("chat completion", lasting=lasting)

    async def open(self) -> None:
        await self._store.open()

    async def close(self) -> None:
        await self._store.close()

    async def create(self, served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
        return await chat_completions(served, http, context, OPENAI_STYLE, partial(self._keep, context))

    async def create_as_llamacpp(self, served: ServedModel, http: HttpRequest, context: RequestContext) -> Response:
        return await chat_completions(served, http, context, LLAMACPP_STYLE, partial(self._keep, context))

    def _keep(self, context: RequestContext, body: ChatBody, answer: ChatCompletion) -> None:
        fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
        asked = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "tools", "tool_choice")
        fields |= {name: getattr(body, name) for name in (*asked, "response_format")}
        fields |= {"request_id": context.id, "metadata": read_metadata(body.metadata)}
        completion = StoredChatCompletion(**fields)
        self._store.put(StoredChat(completion, body.messages, time.time_ns(), context.caller.owner_name))

    async def list_all(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        query = _read_query(context, http, ChatsQuery)
        wanted = (query.metadata or {}).items()
        found = [
            each.completion
            for each in sorted(self._store.of(context.caller.owner_name), key=lambda each: each.stored_at)
            if query.model in (None, each.completion.model) and wanted <= each.completion.metadata.items()
        ]
        return _page(found, query)

    async def show(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        return json_response(self._find(http, context).completion)

    async def change(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        body, stored = await read_body(http, context, ChangeChat, {}), self._find(http, context)
        stored.completion.metadata = read_metadata(body.metadata)
        self._store.put(stored)
        return json_response(stored.completion)

    async def delete(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        stored = self._find(http, context)
        self._store.remove(stored.id, context.caller.owner_name)
        return json_response(DeletedChat(id=stored.id))

    async def messages(self, _: ModelPool, http: HttpRequest, context: RequestContext) -> Response:
        query, stored = _read_query(context, http, MessagesQuery), self._find(http, context)
        return _page([_message(stored.id, *each) for each in enumerate(stored.messages)], query)

    def _find(self, http: HttpRequest, context: RequestContext) -> StoredChat:
        return self._store.get(http.path_params["id"], context.caller.owner_name)


def _message(chat: str, index: int, given: dict[str, Any]) -> StoredMessage:
    fields = {name: given[name] for name in StoredMessage.__struct_fields__ if name in given}
    if isinstance(given.get("content"), list):
        fields |= {"content": None, "content_parts": given["content"]}
    return StoredMessage(**fields | {"id": f"{chat}-{index}"})


Q = TypeVar("Q", ChatsQuery, MessagesQuery)


def _read_query(context: RequestContext, http: HttpRequest, kind: type[Q]) -> Q:
    given: dict[str, Any] = {}
    for key, value in http.query_params.multi_items():
        if key.startswith(METADATA) and key.endswith("]"):
            given.setdefault("metadata", {})[key[len(METADATA) : -1]] = value
        else:
            given[key] = value
    return read_object(context, given, kind, {}, strict=False)


def _page(found: Sequence[StoredChatCompletion | StoredMessage], query: ChatsQuery | MessagesQuery) -> Response:
    ordered = found if query.order == "asc" else found[::-1]
    ids = [each.id for each in ordered]
    if query.after is not None and query.after not in ids:
        raise InvalidRequest(f"after: there is no {query.after[:100]!r}: send an id of the page before", param="after")
    first = 0 if query.after is None else ids.index(query.after) + 1
    shown, more = ordered[first : first + query.limit], first + query.limit < len(ordered)
    ends = {"first_id": shown[0].id, "last_id": shown[-1].id} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, "has_more": more, **ends})
