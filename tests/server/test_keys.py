"""API keys: who is let in, within which limits, and what the official SDKs raise for the rest."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from starlette.applications import Starlette

from penstock.errors import ConfigError
from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, Keyring, changing, digest, new_key, now, read
from penstock.server import create_app
from penstock.server.access import accounts
from penstock.server.access.accounts import Account, Allowance
from penstock.server.access.authentication import OPEN, PROBES
from penstock.server.access.guard import Rules, check
from tests.server import toys
from tests.server.conftest import WAIT, Server, serving

MODEL = "toy/parrot"
HELLO = [{"role": "user", "content": "[hello]"}]
ENDLESS = [{"role": "user", "content": "[*hello]"}]


class Locked:
    """A server with a file of keys, and clients with any of them."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server = server
        self.file = file

    def key(self, name: str, **limits: Any) -> str:
        secret = new_key()
        with changing(self.file) as keys:
            keys[:] = [key for key in keys if key.name != name]
            keys.append(Key(name=name, sha256=digest(secret.encode()), created=now(), **limits))
        return secret

    def openai(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=WAIT)

    def anthropic(self, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.server.url, api_key=key, max_retries=0, timeout=WAIT)

    def ollama(self, key: str) -> ollama.Client:
        return ollama.Client(host=self.server.url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT)

    def ask(self, key: str, **headers: str) -> httpx.Response:
        fields = {"model": MODEL, "messages": HELLO}
        return self.server.http.post("/v1/chat/completions", json=fields, headers={"x-api-key": key} | headers)

    def metric(self, name: str) -> float:
        watcher = self.key("watcher", monitor=True)
        text = self.server.http.get("/metrics", headers={"x-api-key": watcher}).text
        return float(re.findall(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    with changing(file):
        pass
    client = InProcessClient(toys.open_slow_parrot, "parrot")
    with serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file)) as server:
        yield Locked(server, file)


# -- in or out ------------------------------------------------------------------------------------------------------


def test_every_client_comes_in_with_its_key(locked: Locked) -> None:
    key = locked.key("alice")
    said = locked.openai(key).chat.completions.create(model=MODEL, messages=HELLO)
    assert said.choices[0].message.content == "hello"
    told = locked.anthropic(key).messages.create(model="claude-x", max_tokens=9, messages=HELLO)
    assert told.content[0].text == "hello"
    assert locked.ollama(key).chat(MODEL, HELLO).message.content == "hello"
    bearer = locked.server.http.get("/v1/models", headers={"authorization": f"bearer {key}"})
    assert bearer.status_code == 200


@pytest.mark.parametrize("key", ["sk-penstock-wrong", "none"])
def test_every_client_raises_its_own_error_without(locked: Locked, key: str) -> None:
    with pytest.raises(openai.AuthenticationError, match="not one of this server's") as ours:
        locked.openai(key).chat.completions.create(model=MODEL, messages=HELLO)
    assert ours.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        locked.openai(key).chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(anthropic.AuthenticationError) as theirs:
        locked.anthropic(key).messages.create(model="claude-x", max_tokens=9, messages=HELLO)
    assert theirs.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.AuthenticationError):
        locked.anthropic(key).models.list()
    with pytest.raises(ollama.ResponseError, match="not one of this server's") as third:
        locked.ollama(key).chat(MODEL, HELLO)
    assert third.value.status_code == 401


def served_routes() -> list[Any]:
    app: Any = create_app(toys.pool_of(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), MODEL))
    while not isinstance(app, Starlette):
        app = app._app
    return app.routes


def routes() -> Iterator[tuple[str, str]]:
    for route in served_routes():
        for method in route.methods - {"HEAD"}:
            yield method, re.sub(r"{.*?}", "x", route.path)


ALL = {*routes(), ("HEAD", "/v1/models"), ("OPTIONS", "/v1/chat/completions"), ("GET", "/nothing")}
ASIDE = [("POST", "/"), ("POST", "/health"), ("GET", "//health"), ("GET", "/health/"), ("GET", "/x/%2e%2e/health")]


@pytest.mark.parametrize(("method", "path"), [*sorted(ALL - {("GET", path) for path in OPEN}), *ASIDE])
def test_no_route_answers_without_a_key(locked: Locked, method: str, path: str) -> None:
    answer = locked.server.http.request(method, httpx.URL(locked.server.url).copy_with(raw_path=path.encode()))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]


def test_health_and_the_page_need_none(locked: Locked) -> None:
    http = locked.server.http
    assert http.get("/health").json() == {"status": "ok"}
    assert {http.get(probe).status_code for probe in PROBES} == {200}
    assert http.get("/").text == "Ollama is running"
    assert http.head("/").status_code == 200
    page = http.get("/", headers={"accept": "text/html"}).text
    assert "sessionStorage" in page
    assert MODEL not in page


def test_a_key_ends(locked: Locked) -> None:
    over = locked.key("old", expires=now() - timedelta(seconds=1))
    answer = locked.ask(over)
    assert answer.status_code == 401
    assert "expired" in answer.json()["error"]["message"]
    assert locked.ask(locked.key("old", expires=now() + timedelta(days=1))).status_code == 200


def test_what_changes_in_the_file_holds_from_the_next_request(locked: Locked) -> None:
    first = locked.key("carol")
    assert locked.ask(first).status_code == 200
    second = locked.key("carol")
    assert locked.ask(first).status_code == 401
    assert locked.ask(second).status_code == 200
    with changing(locked.file) as keys:
        keys[:] = [key for key in keys if key.name != "carol"]
    assert locked.ask(second).status_code == 401


def test_either_header_will_do(locked: Locked) -> None:
    key = locked.key("both")
    assert locked.ask("stale", authorization=f"Bearer {key}").status_code == 200
    assert locked.ask(key, authorization="Bearer stale").status_code == 200
    assert locked.ask("", authorization=f"Basic {key}").status_code == 401
    assert locked.ask("", authorization="Bearer").status_code == 401


# -- limits -----------------------------------------------------------------------------------------------------------


def test_requests_a_minute(locked: Locked) -> None:
    sdk = locked.openai(locked.key("few", requests_per_minute=2))

    def ask() -> Any:
        return sdk.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)

    left = [ask().headers["x-ratelimit-remaining-requests"] for _ in range(2)]
    assert left == ["1", "0"]
    with pytest.raises(openai.RateLimitError, match="2 requests a minute") as caught:
        ask()
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 30
    assert 0 < int(headers["retry-after-ms"]) <= 30_000
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert re.fullmatch(r"\d+\.\d+s", headers["x-ratelimit-reset-requests"])
    assert caught.value.code == "rate_limit_exceeded"
    assert sdk.models.list().data  # reading is not counted


def test_the_other_dialects_say_it_too(locked: Locked) -> None:
    key = locked.key("one", requests_per_minute=1)
    assert locked.ask(key).status_code == 200
    with pytest.raises(anthropic.RateLimitError) as caught:
        locked.anthropic(key).messages.create(model="claude-x", max_tokens=9, messages=HELLO)
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    with pytest.raises(ollama.ResponseError, match="1 requests a minute") as told:
        locked.ollama(key).chat(MODEL, HELLO)
    assert told.value.status_code == 429


def test_tokens_a_minute_are_those_of_prompt_and_answer(locked: Locked) -> None:
    sdk = locked.openai(locked.key("frugal", tokens_per_minute=40))
    usage = sdk.chat.completions.create(model=MODEL, messages=HELLO).usage
    assert usage.total_tokens < 40
    sdk.chat.completions.create(model=MODEL, messages=ENDLESS, max_tokens=60)
    with pytest.raises(openai.RateLimitError, match="40 tokens a minute") as caught:
        sdk.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    assert int(caught.value.response.headers["retry-after"]) > 60  # more was used than a minute gives


def test_requests_at_once(locked: Locked) -> None:
    sdk = locked.openai(locked.key("single", concurrent=1))
    stream = sdk.chat.completions.create(model=MODEL, messages=ENDLESS, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="1 requests at once"):
        sdk.chat.completions.create(model=MODEL, messages=HELLO)
    stream.close()
    locked.server.until(lambda: locked.metric('penstock_key_running{key="single"}') == 0)
    assert sdk.chat.completions.create(model=MODEL, messages=HELLO).choices


def test_models_a_key_is_not_for(locked: Locked) -> None:
    other = locked.key("else", models=("another",))
    assert locked.openai(other).models.list().data == []
    with pytest.raises(openai.PermissionDeniedError, match="only another"):
        locked.openai(other).models.retrieve(MODEL)
    assert locked.ask(other).status_code == 403
    assert locked.ask(locked.key("this", models=("another", MODEL))).status_code == 200


def test_only_an_admin_changes_what_there_is(locked: Locked) -> None:
    plain, admin = locked.key("user"), locked.key("admin", admin=True)
    for call in (
        lambda client: client.pull("smollm2"),
        lambda client: client.create("x", from_=MODEL),
        lambda client: client.copy(MODEL, "x"),
        lambda client: client.delete("x"),
        lambda client: client.push("x"),
    ):
        with pytest.raises(ollama.ResponseError, match="--admin") as caught:
            call(locked.ollama(plain))
        assert caught.value.status_code == 403
    for method in ("GET", "POST"):
        for key, status in ((plain, 403), (admin, 200)):
            flushed = locked.server.http.request(method, "/flush_cache", headers={"x-api-key": key})
            assert flushed.status_code == status
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter"):
        for key, status in ((plain, 403), (admin, 404)):
            body = {"lora_name": "x"} | ({"lora_path": "/no/such/adapter"} if "/load" in path else {})
            assert locked.server.http.post(path, json=body, headers={"x-api-key": key}).status_code == status
    for key, status in ((plain, 403), (admin, 200)):
        scaled = locked.server.http.post("/lora-adapters", json=[], headers={"x-api-key": key})
        assert scaled.status_code == status
    assert locked.server.http.get("/lora-adapters", headers={"x-api-key": plain}).json() == []
    with pytest.raises(ollama.ResponseError) as reached:
        locked.ollama(admin).delete("no-such-model")
    assert reached.value.status_code == 404


def test_what_each_key_used_is_a_metric(locked: Locked) -> None:
    key = locked.key("counted")
    usage = locked.ask(key).json()["usage"]
    locked.server.http.get("/v1/models")
    used = {kind: locked.metric(f'penstock_key_tokens_total{{key="counted",kind="{kind}"}}') for kind in KINDS}
    assert used == {"prompt": usage["prompt_tokens"], "generated": usage["completion_tokens"]}
    assert locked.metric('penstock_key_requests_total{key="counted"}') == 1
    assert locked.metric("penstock_unauthorized_requests_total") > 0
    limited = locked.key("limited", requests_per_minute=1)
    assert [locked.ask(limited).status_code for _ in range(2)] == [200, 429]
    assert locked.metric('penstock_key_refusals_total{key="limited",reason="requests"}') == 1


KINDS = ("prompt", "generated")


def test_a_stream_that_is_left_is_paid_for(locked: Locked) -> None:
    key = locked.key("leaver")
    stream = locked.openai(key).chat.completions.create(model=MODEL, messages=ENDLESS, stream=True)
    for _ in range(5):
        next(iter(stream))
    stream.close()
    used = 'penstock_key_tokens_total{key="leaver",kind="generated"}'
    locked.server.until(lambda: locked.metric(used) >= 4)


def test_a_batch_is_paid_for_by_the_key_that_made_it(locked: Locked) -> None:
    key = locked.key("batcher")
    sdk = locked.openai(key)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    content = json.dumps(line | {"body": {"model": MODEL, "messages": HELLO}}).encode()
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    locked.server.until(lambda: sdk.batches.retrieve(batch.id).status == "completed")
    assert locked.metric('penstock_key_tokens_total{key="batcher",kind="generated"}') == len("hello") + 1


# -- alone ------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(accounts, "monotonic", lambda: self.now)


def test_an_allowance_fills_with_time_and_never_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    allowance = Allowance(60)
    allowance.take(90)
    assert allowance.left == -30
    assert allowance.seconds_to(1) == 31
    clock.now += 31
    assert allowance.left == 1
    clock.now += 1e6
    assert allowance.left == 60


def test_a_limit_that_changes_begins_anew_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    key = Key(name="x", sha256="0" * 64, created=now(), requests_per_minute=5, tokens_per_minute=100)
    account = Account("x")
    account.apply_limits(key)
    account.begin()
    account.charge("prompt", 30)
    account.apply_limits(Key(name="x", sha256="0" * 64, created=now(), requests_per_minute=9, tokens_per_minute=100))
    told = dict(account.headers())
    assert told[b"x-ratelimit-remaining-requests"] == b"9"
    assert told[b"x-ratelimit-remaining-tokens"] == b"70"


def test_the_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", new_key()
    before = os.umask(0)
    try:
        with changing(file) as keys:
            keys.append(Key(name="x", sha256=digest(secret.encode()), created=now()))
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret.encode() not in file.read_bytes()
    assert len(secret) > 43
    assert Keyring(file).find([b"wrong", secret.encode()]) == keys[0]


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with changing(file):
        pass
    with suppress(KeyboardInterrupt), changing(file) as keys:
        keys.append(Key(name="x", sha256="0" * 64, created=now()))
        raise KeyboardInterrupt
    assert read(file) == []
    with changing(file), pytest.raises(ConfigError, match="another process"), changing(file):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


KEY = {"name": "x", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (3, "Expected `array`"),
        ([{"name": "x"}], "missing required field `sha256`"),
        ([KEY, KEY], "two keys are called x"),
        ([KEY | {"name": "x y"}], "matching regex"),
        ([KEY | {"limit": 3}], "unknown field `limit`"),
        ([KEY | {"concurrent": 0}], ">= 1"),
        ([KEY | {"expires": "2026-01-01T00:00:00"}], "timezone"),
    ],
)
def test_a_file_that_is_wrong_is_said_to_be(tmp_path: Path, keys: Any, told: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    with pytest.raises(ConfigError, match=told):
        check(Rules(keys=file), "127.0.0.1")


def test_a_file_that_goes_wrong_leaves_the_keys_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, secret = tmp_path / "keys.json", new_key()
    with changing(file) as keys:
        keys.append(Key(name="x", sha256=digest(secret.encode()), created=now()))
    ring = Keyring(file)
    file.write_text("{")
    assert ring.find([secret.encode()]) == keys[0]
    assert "not a key file" in caplog.text
    file.unlink()
    assert ring.find([secret.encode()]) == keys[0]
    with pytest.raises(ConfigError, match="penstock keys add"):
        Keyring(file)


def test_what_is_unwise_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    with changing(file):
        pass
    for address in ("127.0.0.1", "::1"):
        check(Rules(), address)
    assert capsys.readouterr().err == ""
    for address in ("0.0.0.0", "::", "192.168.0.7", "fe80::1%eth0"):
        check(Rules(), address)
        assert "penstock keys add" in capsys.readouterr().err
    check(Rules(keys=file), "0.0.0.0")
    assert "no key in" in capsys.readouterr().err
    file.chmod(0o644)
    check(Rules(keys=file), "0.0.0.0")
    assert "chmod 600" in capsys.readouterr().err


def test_an_explanation_speaks_of_the_keys_own_prompts(locked: Locked) -> None:
    """However the key is sent, and whatever the address."""
    one, other = locked.key("one"), locked.key("other")
    long = "a text that is longer than two blocks of sixteen. "

    def miss(word: str, headers: dict[str, str]) -> Any:
        asked = {"model": MODEL, "prompt": f"{long}{word} {long}[x]", "penstock": True}
        answer = locked.server.http.post("/v1/completions", json=asked, headers=headers).json()
        return answer["penstock"]["choices"][0]["cache"]["miss"]

    miss("hunter2", {"x-api-key": one})
    assert miss("which?", {"x-api-key": other})["reason"] == "new"
    assert miss("whose?", {"authorization": f"Bearer {one}"})["expected"].startswith("hunter2")
