"""Names of the served model: its own, those that clients insist on, aliases, and none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server import Setup, Space, create_app
from penstock.server.access.guard import Rules
from penstock.server.models.pool import ModelPool, PoolSettings
from penstock.server.models.visible import named
from tests.server import conftest, toys
from tests.server.test_model_pool import source

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


# -- a name that nobody has -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """Serves four parrots, and returns keys for all of them and for one."""
    folder = tmp_path_factory.mktemp("zoo")
    file, secrets = folder / "keys.json", {"all": new_key(), "one": new_key()}
    with changing(file) as keys:
        for name, models in (("all", ()), ("one", ("jack",))):
            keys.append(Key(name=name, sha256=digest(secrets[name].encode()), created=now(), models=models))
    pool = ModelPool([source(name) for name in ("polly", "jack", "coco", "kiki")], PoolSettings())
    app = create_app(pool, Setup(space=Space(folder / "data"), rules=Rules(keys=file)))
    for server in conftest._serving(None, app):
        yield server, secrets


@pytest.mark.parametrize("path", [*ASKED, "/v1/models/cocoo", "/api/show", "/v2/models/cocoo/generate"])
def test_an_unknown_name_is_a_404_that_names_what_the_key_may_use(zoo: Any, path: str) -> None:
    server, secrets = zoo
    method = "GET" if path.startswith("/v1/models/") else "POST"
    body = ASKED.get(path, {"text_input": "[hi]"} if "/v2/" in path else {})
    keys = (("all", ("coco", "polly", "jack", "kiki"), ()), ("one", ("jack",), ("coco'", "polly")))
    for loaded in (False, True):
        for key, known, unknown in keys:
            headers = {"x-api-key": secrets[key]}
            answer = server.http.request(method, path, json={"model": "cocoo"} | body, headers=headers)
            assert answer.status_code == 404, answer.text
            assert [name for name in known if f"'{name}'" not in answer.text] == []
            assert [name for name in unknown if name in answer.text] == []
        if not loaded:
            said = {"model": "polly"} | ASKED["/v1/completions"]
            assert server.http.post("/v1/completions", json=said, headers={"x-api-key": secrets["all"]}).is_success


def test_an_error_names_ten_models_and_says_how_many_more_there_are() -> None:
    names = [f"model-{number}" for number in range(25)]
    told = named("model-24", names)
    assert told.startswith("'model-24', ")
    assert told.count("'") == 20
    assert told.endswith(" and 15 more, which GET /v1/models lists")
    assert named("x", []) == "no model that this request may use"
