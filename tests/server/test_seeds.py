"""Every request that samples has a seed when it reaches the engine: another engine can then continue its answer."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.request_stream import EventReader
from penstock.text import make_request, seed_of_choice
from penstock.types import Request, SamplingParams
from tests.server import toys
from tests.server.conftest import Server, serving

MODEL = "toy/parrot"
HELLO = [{"role": "user", "content": "[hello]"}]


class Recorder(InProcessClient):
    """Keeps the requests that reach the engine."""

    def __init__(self) -> None:
        super().__init__(toys.open_parrot, "parrot")
        self.requests: list[Request] = []

    def run(self, request: Request, read: EventReader) -> Coroutine[Any, Any, None]:
        self.requests.append(request)
        return super().run(request, read)

    def seeds(self) -> list[int | None]:
        """The seeds of the requests since the last time."""
        seeds = [request.sampling.seed for request in self.requests]
        self.requests.clear()
        return seeds


@pytest.fixture(scope="module")
def recorded() -> Iterator[Server]:
    with serving(Recorder(), toys.ToyText(), MODEL) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "[hello]"}),
        ("/v1/responses", {"input": "[hello]"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
        ("/api/chat", {"messages": HELLO, "stream": False}),
        ("/api/generate", {"prompt": "[hello]", "stream": False}),
        ("/api/generate", {"prompt": "[hello]", "raw": True, "stream": False}),
    ],
)
def test_requests_without_a_seed_get_different_ones(recorded: Server, path: str, fields: dict[str, Any]) -> None:
    for _ in range(2):
        assert recorded.post(path, model=MODEL, **fields).status_code == 200
    first, second = recorded.client.seeds()
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert first != second


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_choices_have_seeds_derived_from_one(recorded: Server, path: str) -> None:
    fields: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "[hello]"}
    assert recorded.post(path, model=MODEL, n=3, **fields).status_code == 200
    drawn = recorded.client.seeds()
    assert drawn == [drawn[0], drawn[0] + 1, drawn[0] + 2]
    assert recorded.post(path, model=MODEL, n=3, seed=7, **fields).status_code == 200
    assert recorded.client.seeds() == [7, 8, 9]


def test_the_largest_seed_is_followed_by_the_first() -> None:
    assert [seed_of_choice(2**64 - 2, choice) for choice in range(4)] == [2**64 - 2, 2**64 - 1, 0, 1]
    assert [seed_of_choice(-2, choice) for choice in range(4)] == [-2, -1, 0, 1]


def test_a_seed_that_is_given_stays() -> None:
    tokenizer: Any = toys.ToyTokenizer()
    made = [make_request(1, [1], SamplingParams(seed=seed, max_tokens=1), tokenizer, 10) for seed in (-5, None, None)]
    given, first, second = [request.sampling.seed for request in made]
    assert given == -5
    assert first is not None
    assert first != second
