"""Tests stored chat completions with OpenAI's own client: kept on request, whole and streamed, listed, changed and
deleted, by their owner alone and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from penstock.server.dialects.openai import stored_chats
from penstock.server.storage.owned_store import OwnedStore
from penstock.service_levels import ServiceTerms
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"


@pytest.fixture
def server() -> Iterator[Server]:
    rules = Rules(terms=ServiceTerms(tenant_header="x-tenant"))
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules) as server:
        yield server


def store(sdk: openai.OpenAI, said: str, **fields: Any) -> str:
    messages: Any = [{"role": "system", "content": "be short"}, {"role": "user", "content": f"[{said}]"}]
    return sdk.chat.completions.create(model=MODEL, messages=messages, store=True, **fields).id


def text(chat: Any) -> str | None:
    content: str | None = chat.choices[0].message.content
    return content


def test_a_stored_chat_is_retrieved_changed_and_deleted(server: Server) -> None:
    sdk = server.sdk()
    id = store(sdk, "hello", metadata={"topic": "greeting"}, temperature=0.5, seed=7)
    chat = sdk.chat.completions.retrieve(id)
    assert (chat.id, text(chat), chat.choices[0].finish_reason) == (id, "hello", "stop")
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 6
    told = chat.to_dict()
    assert (told["metadata"], told["temperature"], told["seed"]) == ({"topic": "greeting"}, 0.5, 7)
    changed = sdk.chat.completions.update(id, metadata={"topic": "none"})
    assert changed.to_dict()["metadata"] == {"topic": "none"}
    assert sdk.chat.completions.retrieve(id).to_dict()["metadata"] == {"topic": "none"}
    deleted = sdk.chat.completions.delete(id)
    assert (deleted.id, deleted.deleted, deleted.object) == (id, True, "chat.completion.deleted")
    for attempt in (sdk.chat.completions.retrieve, sdk.chat.completions.delete, sdk.chat.completions.messages.list):
        with pytest.raises(openai.NotFoundError):
            attempt(id)


def test_a_streamed_chat_is_stored_as_if_it_were_not_streamed(server: Server) -> None:
    sdk = server.sdk()
    messages: Any = [{"role": "user", "content": "[hello there]"}]
    fields: Any = {"model": MODEL, "messages": messages, "store": True, "logprobs": True, "n": 2}
    whole = sdk.chat.completions.create(**fields)
    chunks = list(sdk.chat.completions.create(**fields, stream=True))
    streamed = sdk.chat.completions.retrieve(chunks[0].id)
    assert [choice.model_dump() for choice in streamed.choices] == [choice.model_dump() for choice in whole.choices]
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_chats_are_listed_by_page_order_model_and_metadata(server: Server) -> None:
    sdk = server.sdk()
    ids = [store(sdk, str(at), metadata={"parity": str(at % 2), "at": str(at)}) for at in range(5)]
    listing = sdk.chat.completions
    assert [each.id for each in listing.list()] == ids
    assert [each.id for each in listing.list(order="desc", limit=2)] == ids[::-1]  # over all pages
    page = listing.list(after=ids[1], limit=2)
    assert ([each.id for each in page.data], page.has_more) == (ids[2:4], True)
    assert [each.id for each in listing.list(metadata={"parity": "1"})] == ids[1::2]
    assert [each.id for each in listing.list(metadata={"parity": "1", "at": "2"})] == []
    assert [each.id for each in listing.list(model=MODEL)] == ids
    assert [each.id for each in listing.list(model="another")] == []
    with pytest.raises(openai.BadRequestError, match="after"):
        listing.list(after="chatcmpl-none")


def test_the_messages_of_a_chat_are_listed(server: Server) -> None:
    sdk = server.sdk()
    id = store(sdk, "hello")
    messages = sdk.chat.completions.messages.list(id)
    assert [(each.id, each.role, each.content) for each in messages] == [
        (f"{id}-0", "system", "be short"),
        (f"{id}-1", "user", "[hello]"),
    ]
    page = sdk.chat.completions.messages.list(id, limit=1, order="desc")
    assert [each.id for each in page.data] == [f"{id}-1"]
    assert page.has_more
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "[x]"}]}]
    id = sdk.chat.completions.create(model=MODEL, messages=parts, store=True).id
    (message,) = server.get(f"/v1/chat/completions/{id}/messages").json()["data"]
    assert (message["content"], message["content_parts"]) == (None, parts[0]["content"])


def test_only_what_a_request_asks_to_store_is_stored_and_only_for_its_owner(server: Server) -> None:
    mine, theirs = (server.sdk().with_options(default_headers={"x-tenant": name}) for name in ("alice", "mallory"))
    plain: Any = {"model": MODEL, "messages": [{"role": "user", "content": "[x]"}]}
    mine.chat.completions.create(**plain)
    mine.chat.completions.create(**plain, store=False, metadata={"any": "thing"})
    assert mine.chat.completions.list().data == []
    id = store(mine, "secret", extra_body={"request_id": "chosen"})
    assert text(mine.chat.completions.retrieve(id)) == "secret"
    assert theirs.chat.completions.list().data == []
    for attempt in (theirs.chat.completions.retrieve, theirs.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(id)
    with pytest.raises(openai.NotFoundError):
        theirs.chat.completions.update(id, metadata={})
    with pytest.raises(openai.NotFoundError):
        theirs.chat.completions.messages.list(id)
    assert store(theirs, "other", extra_body={"request_id": "chosen"}) == id  # the same name is another's chat
    assert text(mine.chat.completions.retrieve(id)) == "secret"


def test_metadata_has_bounds_where_it_is_stored(server: Server) -> None:
    sdk = server.sdk()
    id = store(sdk, "x")
    for wrong in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(at): "" for at in range(17)}, {"k": 5}):
        with pytest.raises(openai.BadRequestError, match="metadata"):
            store(sdk, "x", metadata=wrong)
        with pytest.raises(openai.BadRequestError, match="metadata"):
            sdk.chat.completions.update(id, metadata=wrong)  # type: ignore[arg-type]
    assert [each.id for each in sdk.chat.completions.list()] == [id]


def test_the_number_of_stored_chats_is_bounded() -> None:
    client = InProcessClient(toys.open_parrot, "parrot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_chats, "OwnedStore", partial(OwnedStore, most=2))
        with serving(client, toys.ToyText(), MODEL) as server:
            ids = [store(server.sdk(), said) for said in "abc"]
            assert [each.id for each in server.sdk().chat.completions.list()] == ids[1:]
            with pytest.raises(openai.NotFoundError, match="dropped for newer ones"):
                server.sdk().chat.completions.retrieve(ids[0])
