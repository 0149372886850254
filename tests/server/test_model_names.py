"""Names of the served model: its own, those that clients insist on, aliases, and none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from tests.server import toys

MODEL = "toy/parrot"
SAID = [{"role": "user", "content": "[hi]"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "[hi]"},
    "/v1/responses": {"input": "[hi]"},
    "/v1/responses/input_tokens": {"input": "[hi]"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/api/chat": {"messages": SAID},
    "/api/generate": {"prompt": "[hi]"},
    "/api/embed": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
}
NAME_NEEDED = ("/v1/messages", "/api/")


@pytest.fixture(scope="module")
def renamed(serve: Callable[..., Any]) -> Iterator[Any]:
    rules, pool = Rules(lenient=False), {"aliases": ("big-*", "text-embedding-3-small")}
    with serve(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL, rules=rules, pool=pool) as server:
        yield server


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("name", ["claude-opus-4-5", "gpt-4o", "gpt-5-codex", "o3-mini", "codex-mini", "chatgpt-4o"])
def test_names_that_clients_insist_on_mean_the_one_model(parrot: Any, path: str, name: str) -> None:
    answer = parrot.post(path, model=name, **ASKED[path])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-model"] == MODEL
    assert name not in answer.text


@pytest.mark.parametrize("path", ASKED)
def test_its_own_name_needs_no_note_and_other_names_are_not_found(parrot: Any, path: str) -> None:
    assert "x-penstock-model" not in parrot.post(path, model=MODEL, **ASKED[path]).headers
    for name in ("other", "my-gpt-4o", "opus", "ollama"):
        assert parrot.post(path, model=name, **ASKED[path]).status_code == 404


@pytest.mark.parametrize("path", [path for path in ASKED if not path.startswith(NAME_NEEDED)])
def test_without_a_name_it_is_the_one_model(strict_parrot: Any, path: str) -> None:
    answer = strict_parrot.post(path, **ASKED[path])
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", MODEL) == MODEL


@pytest.mark.parametrize("path", ASKED)
def test_a_strict_server_has_the_aliases_that_it_was_given(renamed: Any, path: str) -> None:
    assert renamed.post(path, model="gpt-4o", **ASKED[path]).status_code == 404
    for name in ("big-1", "text-embedding-3-small"):
        assert renamed.post(path, model=name, **ASKED[path]).status_code == 200


def test_models_are_found_by_their_other_names(parrot: Any) -> None:
    own = parrot.post("/api/show", model=MODEL).json()
    assert parrot.post("/api/show", model="gpt-4o").json() == own
    assert parrot.post("/api/show", model="other").status_code == 404
    assert parrot.http.request("DELETE", "/api/delete", json={"model": "gpt-4o"}).status_code == 404
    answer = parrot.get("/v1/models/claude-sonnet-4-5")
    assert (answer.json()["id"], answer.headers["x-penstock-model"]) == (MODEL, MODEL)


def test_aliases_without_wildcards_are_listed(renamed: Any, parrot: Any) -> None:
    assert [model["id"] for model in renamed.get("/v1/models").json()["data"]] == [MODEL, "text-embedding-3-small"]
    assert [model["id"] for model in parrot.get("/v1/models").json()["data"]] == [MODEL]
