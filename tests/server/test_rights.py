"""What each route needs: which of them a web page that only shows an image can use, and which a key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.server.access.guard import Rules
from penstock.server.access.rights import Right
from penstock.server.openapi import DocumentedRoute
from tests.server import toys
from tests.server.conftest import Server, serving
from tests.server.test_keys import MODEL, Locked, served_routes

READING = {  # what GET and HEAD may read from any page: a browser hides the answer
    *("/", "/health", "/v1/health", "/ping", "/load", "/version", "/api/hello", "/api/version", "/engine"),
    *("/v1/models", "/v1/models/{id:path}", "/models", "/api/tags", "/api/ps", "/running", "/lora-adapters"),
    *("/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/streams/{id}", "/openapi.json", "/metrics"),
    *("/v1/chat/completions", "/v1/chat/completions/{id}", "/v1/chat/completions/{id}/messages"),
    *("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content", "/v1/batches", "/v1/batches/{id}"),
    *("/api/blobs/{digest}", "/v2", "/v2/health/live", "/v2/health/ready", "/is_sleeping"),
}
CHANGING = {  # these unload or load a model, drop what is cached, or compute
    *("/unload", "/flush_cache", "/props", "/slots", "/info", "/tokenizer_info", "/health_generate"),
    *("/get_model_info", "/model_info", "/get_server_info", "/server_info", "/is_paused", "/weight_info"),
    *("/weight_version", "/get_weight_version", "/v2/models/{model:path}", "/v2/models/{model:path}/ready"),
    *("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}/versions/{version}/ready"),
}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
GETS: dict[str, DocumentedRoute] = {route.path: route for route in served_routes() if route.method in ("GET", "HEAD")}


def test_every_get_says_whether_it_only_reads() -> None:
    """A new route belongs into one of the two lists; who adds it to the first has looked at what it does."""
    changing = {path for path, route in GETS.items() if route.right in (Right.USE, Right.ADMIN)}
    assert changing == CHANGING
    assert GETS.keys() - changing == READING


@pytest.mark.parametrize("path", sorted(GETS))
def test_an_image_on_any_page_changes_nothing(parrot: Server, path: str) -> None:
    method = GETS[path].method
    answer = parrot.http.request(method, re.sub(r"{.*?}", "x", path), headers=IMAGE)
    assert (answer.status_code == 403) == (path in CHANGING)
    if path in CHANGING:
        assert "--cors" in answer.text
        assert parrot.http.head(re.sub(r"{.*?}", "x", path), headers=IMAGE).status_code == 403


FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
PAGES = [  # what comes with the GET of a page's image, frame, link or script
    IMAGE,
    {"sec-fetch-site": "same-site"},  # of another port of this machine
    {"referer": "https://evil.example/page"},
    {"referer": "https://[", "user-agent": FIREFOX},
    {"user-agent": FIREFOX},  # over plain HTTP from another machine, without a Referer
    {"sec-fetch-site": "cross-site", "referer": "https://evil.example/"},
    {"origin": "https://evil.example"},
]
OTHERS = [
    {"user-agent": "curl/8.5.0"},
    {"user-agent": "python-requests/2.32"},
    {"user-agent": FIREFOX, "sec-fetch-site": "none"},  # typed into a browser
    {"user-agent": FIREFOX, "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", PAGES)
def test_a_page_of_another_origin_changes_nothing(parrot: Server, headers: dict[str, str]) -> None:
    assert parrot.http.get("/flush_cache", headers=headers).status_code == 403


@pytest.mark.parametrize("headers", OTHERS)
def test_clients_and_the_own_page_may(parrot: Server, headers: dict[str, str]) -> None:
    assert parrot.http.get("/flush_cache", headers=headers).status_code == 200
    own = {"user-agent": FIREFOX, "referer": f"{parrot.url}/"}
    assert parrot.http.get("/flush_cache", headers=own).status_code == 200


def test_pages_that_are_allowed_may() -> None:
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(origins=("https://ui.example",))) as server:
        for page, status in (("https://ui.example/x", 200), ("https://evil.example/x", 403)):
            headers = {"referer": page, "sec-fetch-site": "cross-site"}
            assert server.http.get("/flush_cache", headers=headers).status_code == status


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text('{"keys": []}')
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file)) as server:
        yield Locked(server, file)


def get(locked: Locked, path: str, key: str) -> httpx.Response:
    return locked.server.http.get(path, headers={"x-api-key": key})


def test_metrics_are_for_keys_that_monitor(locked: Locked) -> None:
    plain = get(locked, "/metrics", locked.key("plain"))
    assert plain.status_code == 403
    assert "--monitor" in plain.text
    assert (
        'penstock_key_refusals_total{key="plain",reason="monitor"} 1.0'
        in get(locked, "/metrics", locked.key("prometheus", monitor=True)).text
    )
    assert get(locked, "/metrics", locked.key("root", admin=True)).status_code == 200
    assert get(locked, "/unload", locked.key("prometheus", monitor=True)).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_a_probe_that_computes_needs_a_key(locked: Locked, path: str) -> None:
    http = locked.server.http
    assert http.get(f"{path}?generate=1").status_code == 401
    assert http.get(f"{path}?generate=1", headers={"x-api-key": "no-such-key"}).status_code == 401
    assert http.get(f"{path}?generate=0").json() == {"status": "ok"}
    key = locked.key("prober")
    assert get(locked, f"{path}?generate=1", key).json()["models"][0]["generated"] == "probe"


def test_an_image_on_a_page_starts_no_probe_that_computes(parrot: Server) -> None:
    assert parrot.http.get("/health?generate=1", headers=IMAGE).status_code == 403
    assert parrot.http.get("/health?generate=1").status_code == 200


def test_health_tells_names_to_those_who_may_know_them(locked: Locked) -> None:
    other, own = locked.key("other", models=("another",)), locked.key("own")
    assert locked.server.http.get("/health").json() == {"status": "ok"}
    assert get(locked, "/health", "no-such-key").json() == {"status": "ok"}
    assert [model["name"] for model in get(locked, "/health", own).json()["models"]] == [MODEL]
    hidden = get(locked, "/health", other).json()
    assert (hidden["models"], hidden["engine"]) == ([], None)


def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(locked: Locked) -> None:
    other, own = locked.key("other", models=("another",)), locked.key("own")
    assert locked.ollama(own).show(MODEL).details is not None
    with pytest.raises(ollama.ResponseError) as hidden:
        locked.ollama(other).show(MODEL)
    assert hidden.value.status_code == 404
    assert locked.ollama(other).list().models == []
    assert locked.ollama(other).ps().models == []
    assert get(locked, "/running", other).json() == {"running": []}
    assert get(locked, "/running", own).json()["running"]
    assert get(locked, "/is_sleeping", other).status_code == 403
    assert MODEL not in get(locked, "/api/tags", other).text


@pytest.mark.parametrize("keep_alive", [0, "0s", -1, "24h"])
def test_a_plain_key_does_not_say_how_long_a_model_stays(locked: Locked, keep_alive: float | str) -> None:
    key = locked.key("plain")
    body = {"model": MODEL, "prompt": "[hello]", "keep_alive": keep_alive, "stream": False}
    answer = locked.server.http.post("/api/generate", json=body, headers={"x-api-key": key})
    assert answer.json()["response"] == "hello"
    assert answer.headers["x-penstock-ignored"] == "keep_alive"
    (loaded,) = locked.ollama(key).ps().models
    assert loaded.expires_at.year == 9999  # as before


def test_unloading_needs_an_admin(locked: Locked) -> None:
    with pytest.raises(ollama.ResponseError, match="--admin") as refused:
        locked.ollama(locked.key("plain")).generate(MODEL, keep_alive=0)
    assert refused.value.status_code == 403
    assert len(locked.ollama(locked.key("plain")).ps().models) == 1


def test_a_key_file_knows_who_monitors(tmp_path: Path) -> None:
    from penstock.keys import Key, changing, now, read

    with changing(tmp_path / "keys.json") as keys:
        keys.append(Key(name="x", sha256="0" * 64, created=now(), monitor=True))
    assert [key.monitor for key in read(tmp_path / "keys.json")] == [True]
