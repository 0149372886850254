"""/v1/responses, judged by the official SDK: whole and streamed, stored and gone on with, in the background."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from penstock.config import Config
from penstock.engine.assemble import assemble
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
LIMITS = toys.LIMITS._replace(max_len=2048, num_blocks=1024)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "description": "Weather.", "parameters": CITY, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THOUGHT = "<think>\nAsk the sky.\n</think>\n\n"

BEGIN = ["response.created", "response.in_progress"]
SAID = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
THOUGHT_OF = [name.replace("output_text", "reasoning_text") for name in SAID]
CALLED = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


text = toys.Hermes("enable_thinking", "reasoning_effort")


@pytest.fixture(scope="module")
def hermes() -> Iterator[Server]:
    client = InProcessClient(lambda: assemble(toys.Parrot(LIMITS), LIMITS), "parrot")  # type: ignore[arg-type]
    with serving(client, text, MODEL) as server:
        yield server


def say(answer: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": f"[={answer.encode().hex()}]"} | fields


def plain(response: Any) -> dict[str, Any]:
    """Without what differs from one time to the next: ids, times, and what was cached."""
    told = response.model_dump()
    del told["usage"]["input_tokens_details"]
    for item in told["output"]:
        item.pop("parsed_arguments", None)
        item.pop("call_id", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)

    def same(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: same(each) for name, each in value.items() if name not in ("id", "created_at", "completed_at")
            }
        return [same(each) for each in value] if isinstance(value, list) else value

    return same(told)


def both_ways(server: Server, answer: str, **fields: Any) -> Any:
    """The response, whole; its stream ends with the same, and the SDK puts the same together from it."""
    sdk = server.sdk()
    whole = sdk.responses.create(**say(answer, **fields))
    with sdk.responses.stream(**say(answer, **fields)) as stream:
        events = list(stream)
    check_stream(events)
    assert plain(events[-1].response) == plain(whole)
    return whole


def check_stream(events: list[Any]) -> None:
    """What the API promises of every stream: numbers, ids and places that stay, and parts that add up to the whole."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
    output = events[-1].response.output
    added = {}
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(added)
            added[event.output_index] = event.item.id
        elif event.type == "response.output_item.done":
            assert event.item.id == added[event.output_index] == output[event.output_index].id
        elif hasattr(event, "item_id"):
            assert event.item_id == added[event.output_index]
    for index, item in enumerate(output):
        pieces = "".join(e.delta for e in events if getattr(e, "output_index", None) == index and hasattr(e, "delta"))
        assert pieces == (item.arguments if item.type == "function_call" else item.content[0].text)


def types(events: list[Any]) -> list[str]:
    """In order, each run of deltas as one."""
    told = [event.type for event in events]
    return [type for at, type in enumerate(told) if not (type.endswith(".delta") and told[at - 1] == type)]


# -- whole and streamed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["hello", "naïve 漢字 👩‍👩‍👧", 'quotes " and \\ slashes\r\n\t', ""])
def test_whole_and_streamed_read_the_same(parrot: Any, said: str) -> None:
    response = both_ways(parrot, said, metadata={"a": "b"}, user="me")
    assert response.output_text == said
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.id.startswith("resp_")
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (response.error, response.incomplete_details, response.previous_response_id) == (None, None, None)
    assert (response.metadata, response.user, response.tools, response.tool_choice) == ({"a": "b"}, "me", [], "auto")
    assert (response.temperature, response.top_p, response.truncation) == (0.7, 0.95, "disabled")


def test_the_events_are_in_order(parrot: Any) -> None:
    events = list(parrot.sdk().responses.create(**say("hello", stream=True)))
    assert [event.type for event in events] == [*BEGIN, *SAID[:3], *SAID[2:3] * 4, *SAID[3:], "response.completed"]
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[2].item.status == "in_progress"
    assert events[-1].response.usage.output_tokens == 6
    assert types(list(parrot.sdk().responses.create(**say("", stream=True)))) == [
        *BEGIN,
        *(name for name in SAID if not name.endswith(".delta")),
        "response.completed",
    ]


def test_the_bytes_of_a_stream(parrot: Any) -> None:
    """Events have names, and nothing follows the last: no [DONE]."""
    answer = parrot.post("/v1/responses", **say("hi", stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    assert all(line[0] == f"event: {json.loads(line[1][6:])['type']}" for line in lines)
    assert lines[-1][0] == "event: response.completed"


def test_async_whole_and_streamed(parrot: Any) -> None:
    async def scenario() -> None:
        async with parrot.async_sdk() as sdk:
            whole, raw = await asyncio.gather(
                sdk.responses.create(**say("one")), sdk.responses.create(**say("two", stream=True))
            )
            assert whole.output_text == "one"
            assert types([event async for event in raw]) == [*BEGIN, *SAID, "response.completed"]
            async with sdk.responses.stream(**say("three")) as stream:
                assert (await stream.get_final_response()).output_text == "three"
            gone_on = await sdk.responses.create(**say("four"), previous_response_id=whole.id)
            assert [item.type async for item in sdk.responses.input_items.list(gone_on.id)] == ["message"] * 3
            assert (await sdk.responses.input_tokens.count(**say("five"))).input_tokens > 0
            assert await sdk.responses.retrieve(whole.id) == whole
            await sdk.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(whole.id)

    asyncio.run(scenario())


def test_a_limit_makes_it_incomplete(parrot: Any) -> None:
    sdk = parrot.sdk()
    response = both_ways(parrot, "hello", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "hel")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.output[0].status, response.completed_at) == ("incomplete", None)
    events = list(sdk.responses.create(**say("hello", max_output_tokens=3, stream=True)))
    assert types(events) == [*BEGIN, *SAID, "response.incomplete"]
    beyond = sdk.responses.create(**say("hello", max_output_tokens=10_000))
    assert (beyond.status, beyond.max_output_tokens) == ("completed", 10_000)


def test_usage(parrot: Any) -> None:
    asked = say("a prompt that fills several blocks of sixteen tokens")
    first, again = (parrot.sdk().responses.create(**asked).usage for _ in range(2))
    prompt = len(f"user:{asked['input']}\nassistant:")
    assert first.input_tokens == prompt
    assert first.total_tokens == first.input_tokens + first.output_tokens
    assert again.input_tokens_details.cached_tokens == (prompt - 1) // 16 * 16
    assert parrot.sdk().responses.input_tokens.count(**asked).input_tokens == prompt


def test_logprobs(parrot: Any) -> None:
    include: list[Any] = ["message.output_text.logprobs"]
    response = both_ways(parrot, "aé", include=include, top_logprobs=2)
    (part,) = response.output[0].content
    assert [entry.bytes for entry in part.logprobs] == [[97], [0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]
    events = list(parrot.sdk().responses.create(**say("aé", include=include, stream=True)))
    streamed = [entry.token for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
    assert streamed == [entry.token for entry in part.logprobs]
    assert parrot.sdk().responses.create(**say("aé")).output[0].content[0].logprobs == []


def test_extras_of_other_servers(parrot: Any) -> None:
    asked = say("you and I and they")
    told = parrot.sdk().responses.create(**asked, extra_body={"stop": [" and"], "top_k": 5, "seed": 3, "min_p": 0.1})
    assert told.output_text == "you"


# -- thoughts and calls -------------------------------------------------------------------------------------------


def test_thoughts_words_and_calls_are_items(hermes: Server) -> None:
    answer = THOUGHT + "Well.\n" + CALL + "\n" + CALL.replace("Zürich", "Bern")
    response = both_ways(hermes, answer, tools=[TOOL])
    thought, said, call, second = response.output
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", "Ask the sky.")]
    assert thought.summary == []
    assert said.content[0].text == response.output_text == "Well."
    assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Zürich"}, "completed")
    assert call.call_id.startswith("call_")
    assert len({call.id, call.call_id, second.id, second.call_id}) == 4
    assert response.usage.output_tokens_details.reasoning_tokens == len("\nAsk the sky.\n</think>") + 1
    assert response.tools[0].name == "weather"
    events = list(hermes.sdk().responses.create(**say(answer, tools=[TOOL], stream=True)))
    assert types(events) == [*BEGIN, *THOUGHT_OF, *SAID, *CALLED, *CALLED, "response.completed"]
    assert text.given["tools"][0]["function"] == {"name": "weather", "description": "Weather.", "parameters": CITY}


def test_one_call_alone_and_none(hermes: Server) -> None:
    alone = both_ways(hermes, CALL + CALL, tools=[TOOL], parallel_tool_calls=False)
    assert [item.type for item in alone.output] == ["function_call"]
    assert alone.parallel_tool_calls is False
    none = both_ways(hermes, CALL, tools=[TOOL], tool_choice="none")
    assert (none.output_text, none.tool_choice) == (CALL, "none")


def test_a_call_cut_short_is_incomplete(hermes: Server) -> None:
    response = both_ways(hermes, CALL, tools=[TOOL], max_output_tokens=len(CALL) - 25)
    (call,) = response.output
    assert (response.status, call.status) == ("incomplete", "incomplete")
    assert '{"city": "Zürich"}'.startswith(call.arguments)
    with pytest.raises(openai.BadRequestError, match=f"{call.call_id}.* must be a JSON object"):
        hermes.sdk().responses.create(**say("a"), previous_response_id=response.id)


def test_a_conversation_by_hand(hermes: Server) -> None:
    """What the client has it sends back as it got it: the template sees one message of an assistant's turn."""
    sdk = hermes.sdk()
    first = sdk.responses.create(**say(THOUGHT + "Well.\n" + CALL, tools=[TOOL], store=False))
    items: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Rain?"}, *first.output]
    items += [{"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}]
    items += [{"role": "user", "content": [{"type": "input_text", "text": "[fine]"}]}]
    told = sdk.responses.create(model=MODEL, instructions="Speak plainly.", input=items, tools=[TOOL])
    assert told.instructions == "Speak plainly."
    system, user, said, result, last = text.given["messages"]
    assert system == {"role": "system", "content": "Speak plainly.\n\nBe brief."}
    assert user == {"role": "user", "content": "Rain?"}
    assert (said["role"], said["content"], said["reasoning_content"]) == ("assistant", "Well.", "Ask the sky.")
    assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    id = first.output[2].call_id
    assert result == {"role": "tool", "tool_call_id": id, "name": "weather", "content": "rain"}
    assert last == {"role": "user", "content": "[fine]"}


def test_turns_of_an_assistant_are_kept_apart(hermes: Server) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items: Any = [
        {"role": "user", "content": "a"},
        call,
        call | {"call_id": "d"},
        {"role": "assistant", "content": "b"},
    ]
    items += [{"role": "assistant", "content": "c"}, {"type": "reasoning", "id": "r", "summary": []}]
    items += [{"role": "system", "content": "d"}]
    hermes.sdk().responses.create(model=MODEL, input=items)
    told = [(m["role"], m["content"], len(m.get("tool_calls", ()))) for m in text.given["messages"]]
    assistant = [("assistant", None, 2), ("assistant", "b", 0), ("assistant", "c", 0), ("assistant", None, 0)]
    assert told == [("user", "a", 0), *assistant, ("system", "d", 0)]


def test_reasoning_that_clients_carry(hermes: Server) -> None:
    sdk = hermes.sdk()
    first = sdk.responses.create(**say(THOUGHT + "Yes.", include=["reasoning.encrypted_content"], store=False))
    sealed = first.output[0].encrypted_content
    item: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed}
    sdk.responses.create(model=MODEL, input=[{"role": "user", "content": "a"}, item])
    assert text.given["messages"][1]["reasoning"] == "Ask the sky."
    foreign = [{"role": "user", "content": "a"}, item | {"encrypted_content": "gAAA*"}]
    told: Any = sdk.responses.create(model=MODEL, input=foreign)
    assert told.penstock["ignored_fields"] == ["input[].encrypted_content"]


def test_reasoning_effort_reaches_the_template(hermes: Server) -> None:
    told = hermes.sdk().responses.create(**say("a", reasoning={"effort": "low", "summary": "auto"}))
    assert text.given["reasoning_effort"] == told.reasoning.effort == "low"
    hermes.sdk().responses.create(**say("a", reasoning={"effort": "none"}))
    assert text.given["enable_thinking"] is False
    hermes.sdk().responses.create(**say("a"), extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert text.given["enable_thinking"] is True


# -- state --------------------------------------------------------------------------------------------------------


def test_going_on_with_a_response(hermes: Server) -> None:
    sdk = hermes.sdk()
    first = sdk.responses.create(**say(THOUGHT + CALL, tools=[TOOL], instructions="Be brief."))
    output: Any = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "rain"}
    second = sdk.responses.create(model=MODEL, input=[output], previous_response_id=first.id, tools=[TOOL])
    third = sdk.responses.create(model=MODEL, input="And now?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    roles = [message["role"] for message in text.given["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"], "instructions are not carried over"
    assert text.given["messages"][1]["reasoning"] == "Ask the sky."
    counted = sdk.responses.input_tokens.count(model=MODEL, input="And now?", previous_response_id=second.id)
    assert counted.input_tokens == third.usage.input_tokens


def test_stored_responses_are_read_and_deleted(parrot: Any) -> None:
    sdk = parrot.sdk()
    response = sdk.responses.create(**say("hello"))
    assert sdk.responses.retrieve(response.id) == response
    with sdk.responses.stream(**say("hello")) as stream:
        streamed = stream.get_final_response()
    assert sdk.responses.retrieve(streamed.id).output_text == "hello"
    assert parrot.http.delete(f"/v1/responses/{response.id}").json() == {
        "id": response.id,
        "object": "response",
        "deleted": True,
    }
    for ask in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=response.id):
            ask(response.id)
    with pytest.raises(openai.NotFoundError):
        list(sdk.responses.input_items.list(response.id))


def test_what_is_not_stored_is_not_there(parrot: Any) -> None:
    sdk = parrot.sdk()
    response = sdk.responses.create(**say("hello", store=False))
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match=response.id) as caught:
        sdk.responses.create(**say("a"), previous_response_id=response.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_input_items_in_pages(hermes: Server) -> None:
    sdk = hermes.sdk()
    given: list[Any] = [{"role": "user", "content": f"[{number}]"} for number in range(5)]
    first = sdk.responses.create(model=MODEL, input=given)
    second = sdk.responses.create(model=MODEL, input="six", previous_response_id=first.id)

    def words(**fields: Any) -> list[str]:
        return [item.content[0].text for item in sdk.responses.input_items.list(second.id, **fields)]

    everything = ["[0]", "[1]", "[2]", "[3]", "[4]", first.output_text, "six"]
    assert words() == words(limit=2) == everything[::-1]
    assert words(order="asc", limit=3) == everything
    page = sdk.responses.input_items.list(second.id, order="asc", limit=3)
    assert page.has_more
    assert words(order="asc", after=page.data[-1].id) == everything[3:]
    assert sdk.responses.input_items.list(second.id, limit=7).has_more is False
    with pytest.raises(openai.BadRequestError, match="limit"):
        sdk.responses.input_items.list(second.id, limit=0)


# -- in the background --------------------------------------------------------------------------------------------


def endless(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "[*abc]"} | fields


def poll(server: Server, id: str) -> Any:
    server.until(lambda: server.sdk().responses.retrieve(id).status not in ("queued", "in_progress"))
    return server.sdk().responses.retrieve(id)


def test_a_response_in_the_background(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    running = sdk.responses.create(**endless(background=True))
    with pytest.raises(openai.BadRequestError, match=r"is (queued|in_progress)"):
        sdk.responses.create(**say("a"), previous_response_id=running.id)
    sdk.responses.delete(running.id)
    response = sdk.responses.create(**say("hello" * 20, background=True))
    assert (response.status, response.background, response.output) == ("queued", True, [])
    done = poll(slow_parrot, response.id)
    assert (done.id, done.status, done.output_text) == (response.id, "completed", "hello" * 20)
    assert sdk.responses.cancel(done.id).status == "completed"


def test_cancelling(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    response = sdk.responses.create(**endless(background=True))
    slow_parrot.until(lambda: getattr(sdk.responses.retrieve(response.id).usage, "output_tokens", 0) > 5)
    cancelled = sdk.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output[0].status == "incomplete"
    assert cancelled.output_text.startswith("abc")
    assert sdk.responses.cancel(response.id) == sdk.responses.retrieve(response.id) == cancelled
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.blocks_used == 0
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        sdk.responses.create(**say("a"), previous_response_id=response.id)
    whole = sdk.responses.create(**say("a"))
    with pytest.raises(openai.BadRequestError, match="made with background"):
        sdk.responses.cancel(whole.id)


def test_deleting_ends_the_work(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    response = sdk.responses.create(**endless(background=True))
    slow_parrot.until(lambda: slow_parrot.client.stats.running > 0)
    sdk.responses.delete(response.id)
    slow_parrot.until_idle()
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_a_stream_of_the_background_is_left_and_taken_up_again(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    said = "hello" * 20
    stream = sdk.responses.create(**say(said, background=True, stream=True))
    first = [next(stream) for _ in range(10)]
    stream.close()
    id = first[0].response.id
    assert first[0].response.status == "queued"
    assert poll(slow_parrot, id).output_text == said
    rest = list(sdk.responses.retrieve(id, stream=True, starting_after=9))
    check_stream([*first, *rest])
    assert types([*first, *rest]) == [BEGIN[0], "response.queued", BEGIN[1], *SAID, "response.completed"]
    with sdk.responses.stream(response_id=id, starting_after=5) as again:
        assert next(event.sequence_number for event in again) == 6
    assert list(sdk.responses.retrieve(id, stream=True, starting_after=len(first) + len(rest))) == []


def test_reading_on_after_what_never_comes(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    id = next(sdk.responses.create(**say("hello", background=True, stream=True))).response.id
    assert list(sdk.responses.retrieve(id, stream=True, starting_after=10**6)) == []


def test_only_so_many_at_once(slow_parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.server.dialects.responses.endpoints.MAX_BACKGROUND", 1)
    sdk = slow_parrot.sdk()
    first = sdk.responses.create(**endless(background=True))
    with pytest.raises(openai.InternalServerError, match="cancel one") as caught:
        sdk.responses.create(**endless(background=True))
    assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
    sdk.responses.cancel(first.id)
    sdk.responses.delete(sdk.responses.create(**endless(background=True)).id)
    slow_parrot.until_idle()


def test_a_cancelled_stream_says_so(slow_parrot: Any) -> None:
    sdk = slow_parrot.sdk()
    stream = sdk.responses.create(**endless(background=True, stream=True))
    events = [next(stream) for _ in range(10)]
    sdk.responses.cancel(events[0].response.id)
    events += list(stream)
    assert types(events) == [BEGIN[0], "response.queued", BEGIN[1], *SAID, "response.cancelled"]


def test_leaving_ends_the_work_unless_it_is_in_the_background(slow_parrot: Any) -> None:
    stats = slow_parrot.client.stats
    done = stats.generated_tokens
    sdk = slow_parrot.sdk()
    stream = sdk.responses.create(**endless(stream=True))
    id = next(stream).response.id
    stream.close()
    slow_parrot.until_idle()
    assert slow_parrot.client.stats.generated_tokens - done < toys.ENDLESS // 2
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(id)


def test_the_end_of_the_server_ends_what_is_in_the_background(caplog: pytest.LogCaptureFixture) -> None:
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL) as server:
        for _ in range(3):
            server.sdk().responses.create(**endless(background=True))
        server.until(lambda: client.stats.running == 3)
    assert client.stats.generated_tokens < 3 * toys.ENDLESS // 2
    assert not caplog.records


def test_an_engine_that_dies_fails_its_responses(mortal_parrot: Any) -> None:
    sdk = mortal_parrot.sdk()
    background = sdk.responses.create(**endless(background=True))
    stream = sdk.responses.create(**endless(stream=True))
    events = [next(stream) for _ in range(5)]
    os.kill(mortal_parrot.client.hello.pid, signal.SIGKILL)
    events += list(stream)
    assert types(events) == [*BEGIN, *SAID, "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.output[0].status == "incomplete"
    assert poll(mortal_parrot, background.id).error.message == failed.error.message
    assert sdk.responses.retrieve(failed.id).status == "failed"
    with pytest.raises(openai.InternalServerError):
        sdk.responses.create(**say("a"))


# -- refusals -----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt"}, "serves 'toy/parrot'"),
    ({"input": None}, "'input' is missing"),
    ({"input": []}, "input is empty"),
    ({"input": 5}, "input: Expected"),
    ({"input": [{"role": "user"}]}, r"'input\[0\].content' is missing|input\[0\].content: Expected"),
    ({"input": [{"role": "tool", "content": "a"}]}, r"input\[0\].role"),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, r"input\[0\].type: 'web_search_call'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\].type"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "a"}]}, "the call_id 'x'"),
    ({"truncation": "auto"}, "truncation is not supported"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"foo": 1}, "unknown field 'foo'"),
    ({"max_tokens": 5}, "unknown field 'max_tokens'"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature must be"),
    ({"top_logprobs": 3}, "top_logprobs needs"),
    ({"include": ["nothing"]}, "include is not supported"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "names 'other'"),
    ({"tool_choice": "required"}, "tools is empty"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "'text.format.schema' is missing"),
    ({"text": {"verbosity": "high"}}, "text.verbosity is not supported"),
    ({"response_format": {"type": "json_object"}}, "called text.format"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort is not supported"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary is not supported"),
    ({"background": True, "store": False}, "background needs store"),
    ({"metadata": {"a": "b" * 513}}, "513"),
    ({"stream_options": {"include_obfuscation": False}}, "needs stream"),
    ({"input": "x" * 600}, "512"),
]


@pytest.mark.parametrize(("fields", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_refusals_say_what_is_wrong(strict_parrot: Any, fields: dict[str, Any], told: str) -> None:
    kind = openai.NotFoundError if "model" in fields else openai.BadRequestError
    with pytest.raises(kind, match=told):
        strict_parrot.sdk().responses.create(**{"model": MODEL, "input": "[a]"}, extra_body=fields)
    assert strict_parrot.client.stats.running == 0


def test_refusals_of_what_is_in_the_address(strict_parrot: Any) -> None:
    id = strict_parrot.sdk().responses.create(**say("a")).id
    for query, told in {
        "stream=true": "background",
        "starting_after=2": "needs stream",
        "starting_after=-1": ">= 0",
        "foo=1": "foo",
    }.items():
        answer = strict_parrot.get(f"/v1/responses/{id}?{query}")
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="unknown field 'stream'"):
        strict_parrot.sdk().responses.input_tokens.count(**say("a"), extra_body={"stream": True})


# -- the default model ---------------------------------------------------------------------------------------------

DEFAULT = "smollm2"


@pytest.fixture(scope="module")
def smollm(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    config = Config(model=str(smollm2), name=DEFAULT, max_len=1024, max_rows=8)
    with serve(ProcessClient(config), load_text(smollm2), DEFAULT) as server:
        yield server


def test_the_default_model_answers_and_remembers(smollm: Any) -> None:
    sdk = smollm.sdk()
    settings: Any = {"model": DEFAULT, "temperature": 0, "max_output_tokens": 24}
    question = "What is the capital of France?"
    first = sdk.responses.create(input=question, instructions="Be brief.", **settings)
    assert "Paris" in first.output_text
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    chat = sdk.chat.completions.create(model=DEFAULT, messages=messages, temperature=0, max_tokens=24)
    assert first.output_text == chat.choices[0].message.content
    with sdk.responses.stream(input="And of Italy?", previous_response_id=first.id, **settings) as stream:
        second = stream.get_final_response()
    messages = [messages[1], {"role": "assistant", "content": first.output_text}]
    messages += [{"role": "user", "content": "And of Italy?"}]
    by_hand = sdk.chat.completions.create(model=DEFAULT, messages=messages, temperature=0, max_tokens=24)
    assert second.output_text == by_hand.choices[0].message.content
    background = sdk.responses.create(input=question, instructions="Be brief.", background=True, **settings)
    assert poll(smollm, background.id).output_text == first.output_text


class City(BaseModel):
    name: str
    big: bool


def test_the_default_model_is_held_to_a_format(smollm: Any) -> None:
    sdk = smollm.sdk()
    settings: Any = {"model": DEFAULT, "input": "Name a city.", "temperature": 0, "max_output_tokens": 60}
    parsed = sdk.responses.parse(text_format=City, **settings)
    assert isinstance(parsed.output_parsed, City)
    assert parsed.text.format.type == "json_schema"
    with sdk.responses.stream(text_format=City, **settings) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    anything = sdk.responses.create(text={"format": {"type": "json_object"}}, **settings | {"max_output_tokens": 8})
    assert anything.text.format.type == "json_object"
    assert anything.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_the_default_model_must_call(smollm: Any, choice: Any) -> None:
    tool = TOOL | {"strict": True, "parameters": CITY | {"required": ["city"], "additionalProperties": False}}
    response = smollm.sdk().responses.create(
        model=DEFAULT,
        input="Is it raining in Bern?",
        tools=[tool],
        tool_choice=choice,
        temperature=0,
        max_output_tokens=80,
    )
    call = response.output[0]
    assert (call.type, call.name) == ("function_call", "weather")
    assert isinstance(json.loads(call.arguments)["city"], str)
    assert response.tools[0].strict is True


class Weather(BaseModel):
    """Tells the weather."""

    city: Literal["Bern", "Rome"]
    days: Literal[1, 2]


def test_strict_calls_are_held_to_their_schema(smollm: Any) -> None:
    """Whether to call is left to the model: it is made likely here by what is said, or not at all."""
    sdk = smollm.sdk()
    parsed: Any = openai.pydantic_function_tool(Weather)
    tool = parsed["function"] | {"type": "function"}
    settings: Any = {"model": DEFAULT, "temperature": 0, "max_output_tokens": 40, "parallel_tool_calls": False}
    talk = [
        sdk.responses.create(input="Why is the sky blue?", tools=[tool | {"strict": strict}], **settings).output_text
        for strict in (True, False)
    ]
    assert talk[0] == talk[1] != ""
    (likely, *_) = smollm.post("/tokenize", prompt='{"').json()["tokens"]
    called = sdk.responses.parse(
        input="Hello.", tools=[parsed], extra_body={"logit_bias": {str(likely): 100.0}}, **settings
    )
    assert isinstance(called.output[0].parsed_arguments, Weather)


def test_a_schema_that_cannot_be_held_is_refused(smollm: Any) -> None:
    sdk = smollm.sdk()
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]}
    asked: Any = {
        "model": DEFAULT,
        "input": "a",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
    }
    for fields in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="nonsense"):
            sdk.responses.create(**asked, **fields)
    failed = poll(smollm, sdk.responses.create(**asked, background=True).id)
    assert (failed.status, failed.error.code) == ("failed", "invalid_prompt")
    assert "nonsense" in failed.error.message
