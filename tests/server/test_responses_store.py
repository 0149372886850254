"""What is kept of responses, and what gives way: bounded by count and by bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import InvalidRequest, NotFound
from penstock.server.dialects.responses.items import (
    CustomOutputItem,
    FunctionOutputItem,
    InputText,
    LocalShellItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningSettings,
    ReasoningText,
    ResponseObject,
    ShellAction,
    TextFormat,
    TextSettings,
)
from penstock.server.dialects.responses.store import ResponseStore, StoredResponse
from penstock.server.storage.owned_store import FULL_OWNERS


def kept(
    id: str, previous: str | None = None, said: str = "a", status: str = "completed", busy: bool = False
) -> StoredResponse:
    response = ResponseObject(
        id=id,
        created_at=0,
        status=status,
        background=busy,
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model="toy",
        output=[MessageItem(f"out {id}", "assistant", [OutputText(said)])],
        parallel_tool_calls=True,
        previous_response_id=previous,
        prompt_cache_key=None,
        reasoning=ReasoningSettings(),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text=TextSettings(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        user=None,
    )
    job: Any = SimpleNamespace(done=not busy, buffer=SimpleNamespace(bytes=0))
    return StoredResponse(response, [MessageItem(f"in {id}", "user", [InputText(said)])], job)


def there(store: ResponseStore, *ids: str) -> list[str]:
    """Those of the ids that are kept; looking uses them."""
    found = []
    for id in ids:
        try:
            found.append(store.get(id, None).response.id)
        except NotFound:
            continue
    return found


def test_the_longest_unused_gives_way() -> None:
    store = ResponseStore(max_responses=3)
    for id in "abc":
        store.put(kept(id))
    store.get("a", None)
    store.put(kept("d"))
    assert there(store, *"abcd") == ["a", "c", "d"]


def test_bytes_are_bounded_too_and_given_back() -> None:
    size = kept("a", said="x" * 10_000).size
    store = ResponseStore(max_bytes=int(2.5 * size))
    for id in "ab":
        store.put(kept(id, said="x" * 10_000))
    store.put(kept("b", said="x" * 10_000))  # as it has become: not counted twice
    assert there(store, "a", "b") == ["a", "b"]
    store.put(kept("c", said="x" * 10_000))
    assert there(store, "a", "b", "c") == ["b", "c"]
    store.remove("b", None)
    store.put(kept("d", said="x" * 10_000))
    assert there(store, "c", "d") == ["c", "d"]
    store.put(kept("e", said="x" * 100_000))
    assert there(store, "c", "d", "e") == ["e"], "the latest stays, whatever its size"


def of(store: ResponseStore, owner: str) -> list[str]:
    return [stored.id for stored in store.of(owner)]


def put(store: ResponseStore, owner: str, *ids: str, said: str = "a") -> None:
    for id in ids:
        stored = kept(id, said=said)
        stored.tenant = owner
        store.put(stored)


def test_an_owner_who_stores_much_drops_its_own_answers_alone() -> None:
    store = ResponseStore(max_responses=3)
    put(store, "alice", "mine", "other")
    put(store, "mallory", *map(str, range(1100)))
    assert of(store, "alice") == ["mine", "other"]
    assert of(store, "mallory") == ["1097", "1098", "1099"]


def test_if_all_together_have_too_much_the_owner_with_the_most_gives_way() -> None:
    store = ResponseStore(max_responses=3)
    put(store, "alice", "mine")
    owners = [f"mallory {at}" for at in range(2 * FULL_OWNERS)]
    for owner in owners:
        put(store, owner, "a", "b", "c")
        held = [of(store, each) for each in owners]
        assert sum(map(len, held)) < 3 * FULL_OWNERS
    assert of(store, "alice") == ["mine"]
    assert all("c" in ids for ids in held), "nobody loses the latest answer to another"


def test_one_owners_bytes_are_bounded_apart_from_anothers() -> None:
    size = kept("a", said="x" * 10_000).size
    store = ResponseStore(max_bytes=2 * size)
    put(store, "alice", "mine")
    put(store, "mallory", *"abcdef", said="x" * 10_000)
    assert (of(store, "alice"), of(store, "mallory")) == (["mine"], ["e", "f"])


def test_what_is_worked_on_stays() -> None:
    store = ResponseStore(max_responses=2)
    store.put(kept("a", busy=True))
    for id in "bcd":
        store.put(kept(id))
    assert there(store, *"abcd") == ["a", "d"]


def test_a_conversation_is_used_as_a_whole() -> None:
    store = ResponseStore(max_responses=4)
    for id, previous in (("a", None), ("b", "a"), ("x", None), ("c", "b")):
        store.put(kept(id, previous))
    assert [item.id for item in store.conversation("c", None)] == ["in a", "out a", "in b", "out b", "in c", "out c"]
    store.put(kept("y"))
    assert there(store, *"abcxy") == ["a", "b", "c", "y"]
    assert store.conversation(None, None) == []


def test_a_conversation_with_a_gap_is_refused() -> None:
    store = ResponseStore()
    for id, previous in (("a", None), ("b", "a")):
        store.put(kept(id, previous))
    store.remove("a", None)
    with pytest.raises(InvalidRequest, match="'a'") as caught:
        store.conversation("b", None)
    assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_only_what_has_ended_well_is_gone_on_with(status: str) -> None:
    store = ResponseStore()
    store.put(kept("a", status=status))
    with pytest.raises(InvalidRequest, match=f"is {status}"):
        store.conversation("a", None)


def test_a_record_has_all_of_a_response() -> None:
    stored = kept("a", previous="b", said="naïve 漢字")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    stored.response.text = TextSettings(TextFormat("json_schema", "city", schema, strict=True))
    stored.response.output.append(ReasoningItem("r", content=[ReasoningText("hm")], encrypted_content="sealed"))
    stored.response.output.append(LocalShellItem("l", "call", ShellAction(["ls", "-l"], {"HOME": "x"})))
    stored.input += [FunctionOutputItem("o", "call", [InputText("done")]), CustomOutputItem("c", "other", "done")]
    stored.tenant = "alice"
    read = StoredResponse.of(stored.record())
    assert (read.response, read.input, read.tenant, read.running) == (stored.response, stored.input, "alice", False)


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_what_had_not_ended_when_its_server_did_has_failed(status: str) -> None:
    read = StoredResponse.of(kept("a", status=status, busy=True).record())
    assert (read.response.status, read.running) == ("failed", False)
    assert read.response.error is not None
    assert "was killed" in read.response.error.message
