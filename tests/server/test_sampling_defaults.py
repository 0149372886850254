"""Where a request does not say how to sample, the model's own defaults apply, the same in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.types import SamplingParams
from tests.server import toys
from tests.server.conftest import Server, serving
from tests.server.test_seeds import HELLO, MODEL, Recorder

OWN = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5}
ASKED = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/completions", {"prompt": "[hello]"}),
    ("/v1/responses", {"input": "[hello]"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    ("/api/chat", {"messages": HELLO, "stream": False}),
    ("/api/generate", {"prompt": "[hello]", "stream": False}),
    ("/completion", {"prompt": "[hello]"}),
    (f"/v2/models/{MODEL}/generate", {"text_input": "[hello]"}),
    ("/generate", {"text": "[hello]"}),
]


class Opinionated(toys.ToyText):
    sampling_defaults = OWN


@pytest.fixture(scope="module", params=[toys.ToyText, Opinionated])
def recorded(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(Recorder(), request.param(), MODEL) as server:
        server.client.defaults = request.param.sampling_defaults
        yield server


def given(path: str, fields: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling where the dialect of a request has it."""
    if path.startswith("/api"):
        return {"options": sampling}
    return {"sampling_params": sampling} if "text" in fields else sampling


def sampled(recorded: Server, path: str, **fields: Any) -> dict[str, Any]:
    assert recorded.post(path, model=MODEL, **fields).status_code == 200
    request = recorded.client.requests.pop()
    return {name: getattr(request.sampling, name) for name in OWN}


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_every_dialect_has_the_same_defaults(recorded: Server, path: str, fields: dict[str, Any]) -> None:
    plain = {name: getattr(SamplingParams(), name) for name in OWN}
    assert sampled(recorded, path, **fields) == plain | dict(recorded.client.defaults)


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_what_a_request_says_wins(recorded: Server, path: str, fields: dict[str, Any]) -> None:
    found = sampled(recorded, path, **fields, **given(path, fields, {"temperature": 0.125, "top_p": 0.875}))
    assert (found["temperature"], found["top_p"]) == (0.125, 0.875)


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_a_temperature_comes_without_the_fallbacks_cut(recorded: Server, path: str, fields: dict[str, Any]) -> None:
    found = sampled(recorded, path, **fields, **given(path, fields, {"temperature": 1.0}))
    assert found["top_p"] == (OWN["top_p"] if recorded.client.defaults is OWN else 1.0)
