"""Tests what the engine is told about whose request it is and how soon it is wanted, by keys, headers and fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from penstock.service_levels import PROFILES, ServiceTerms, Targets
from penstock.types import Request
from tests.server import toys
from tests.server.conftest import Server, serving

KEYS = {
    "plain": new_key(),
    "app": new_key(),
}
TERMS = ServiceTerms(Targets(5.0, None))


class Watched:
    """Sends requests to a server and returns what its engine got."""

    def __init__(self, server: Server, requests: list[Request]) -> None:
        self.server, self.requests = server, requests

    def post(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": "[x]", "max_tokens": 2} | fields
        return self.server.http.post("/v1/completions", json=body, headers=headers or {})

    def send(self, headers: dict[str, str] | None = None, **fields: Any) -> Request:
        answer = self.post(headers, **fields)
        assert answer.status_code == 200, answer.text
        return self.requests[-1]


def watch(rules: Rules) -> Iterator[Watched]:
    client = InProcessClient(toys.open_parrot, "parrot")
    run, requests = client.run, list[Request]()

    def keep(request: Any, read: Any) -> Any:
        requests.append(request)
        return run(request, read)

    client.run = keep  # type: ignore[method-assign]
    with serving(client, toys.ToyText(), "toy/parrot", rules=rules) as server:
        yield Watched(server, requests)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    more: dict[str, dict[str, Any]] = {"app": {"weight": 3.0, "priority": -2, "itl_target_ms": 40}}
    with changing(file) as keys:
        for name, secret in KEYS.items():
            known = digest(secret.encode())
            keys.append(Key(name=name, sha256=known, created=now(), **more.get(name, {})))
    yield from watch(Rules(file, terms=TERMS))


@pytest.fixture(scope="module")
def proxied() -> Iterator[Watched]:
    yield from watch(Rules(terms=ServiceTerms(tenant_header="x-tenant")))


def key(name: str, **more: str) -> dict[str, str]:
    return {"x-api-key": KEYS[name]} | more


def test_a_key_is_a_tenant_with_its_weight_and_targets(keyed: Watched) -> None:
    plain, app = keyed.send(key("plain")).claim, keyed.send(key("app")).claim
    assert (plain.tenant, plain.weight, plain.itl) == ("key plain", 1.0, None)
    assert (app.tenant, app.weight, app.itl) == ("key app", 3.0, 0.04)
    assert 4.5 < (plain.ttft or 0) <= 5.0  # the server's


def test_what_a_request_states_counts_before_its_key_and_the_server(keyed: Watched) -> None:
    stated = {"x-request-deadline-ms": "7000", "x-request-ttft-target-ms": "9000", "x-request-itl-target-ms": "30"}
    claim = keyed.send(key("app", **stated)).claim
    assert 6.5 < (claim.deadline or 0) <= 7.0
    assert 8.5 < (claim.ttft or 0) <= 9.0
    assert claim.itl == 0.03
    claim = keyed.send(key("app", **stated), deadline_ms=8000, ttft_target_ms=6000, itl_target_ms=20).claim
    assert 7.5 < (claim.deadline or 0) <= 8.0
    assert 5.5 < (claim.ttft or 0) <= 6.0
    assert claim.itl == 0.02


@pytest.mark.parametrize(
    ("headers", "fields"),
    [({"x-request-deadline-ms": "soon"}, {}), ({"x-request-itl-target-ms": "0"}, {}), ({}, {"deadline_ms": -5})],
)
def test_times_that_cannot_be_are_refused(keyed: Watched, headers: dict[str, str], fields: dict[str, Any]) -> None:
    answer = keyed.post(key("plain", **headers), **fields)
    assert answer.status_code == 400
    assert "milliseconds" in answer.json()["error"]["message"]


def test_a_priority_is_bounded_by_what_the_key_may_use(keyed: Watched) -> None:
    assert keyed.send(key("app"), priority=-2).priority == -2
    assert keyed.send(key("app"), priority=-9).priority == -2
    assert keyed.send(key("plain"), priority=5).priority == 5
    assert keyed.send(key("plain"), priority=-1).priority == 0
    answer = keyed.post(key("plain"), service_tier="priority")
    assert keyed.requests[-1].priority == 0
    assert answer.json()["service_tier"] == "default"
    assert answer.headers["x-penstock-ignored"] == "service_tier"
    assert keyed.post(key("app"), service_tier="priority").json()["service_tier"] == "priority"


@pytest.mark.parametrize("headers", [{"x-tenant": "one"}, {}])
def test_a_tenant_without_a_key_has_the_priorities_of_a_key_without_rights(
    proxied: Watched, headers: dict[str, str]
) -> None:
    assert proxied.send(headers, priority=5).priority == 5
    assert proxied.send(headers, priority=-1).priority == 0
    assert proxied.post(headers, priority=-1).headers["x-penstock-ignored"] == "priority"


def test_without_keys_and_tenants_everyone_may_use_every_priority() -> None:
    for plain in watch(Rules()):
        assert plain.send(priority=-7).priority == -7


def test_a_strict_server_refuses_a_tenants_priority() -> None:
    for strict in watch(Rules(lenient=False, terms=ServiceTerms(tenant_header="x-tenant"))):
        answer = strict.post({"x-tenant": "one"}, priority=-1)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")


def test_keys_share_no_cached_prompts_and_cannot_pass_for_one_another(keyed: Watched) -> None:
    salts = {keyed.send(key(name), **fields).salt for name in KEYS for fields in ({}, {"cache_salt": "s"})}
    assert len(salts) == 4
    assert keyed.send(key("plain"), cache_salt="key app\0s").salt not in salts


def test_a_proxy_names_tenants_and_those_without_a_name_are_one(proxied: Watched) -> None:
    one, other, nobody = (proxied.send(headers) for headers in ({"x-tenant": "one"}, {"x-tenant": "two"}, {}))
    assert [each.claim.tenant for each in (one, other, nobody)] == ["tenant one", "tenant two", ""]
    assert len({one.salt, other.salt, nobody.salt}) == 3
    assert one.owner != other.owner
    assert proxied.send(cache_salt="tenant one\0").salt not in (one.salt, other.salt)


def test_without_the_option_the_header_means_nothing(keyed: Watched) -> None:
    assert keyed.send(key("plain", **{"x-tenant": "one"})).claim.tenant == "key plain"


def test_prefixes_are_shared_if_the_operator_says_so(tmp_path: Path) -> None:
    for shared in watch(Rules(terms=ServiceTerms(tenant_header="x-tenant", share_prefixes=True))):
        assert {shared.send({"x-tenant": name}).salt for name in ("one", "two")} == {""}


def test_only_prompts_without_a_salt_may_be_kept_on_disk_unless_the_operator_says_so() -> None:
    asked = ({}, {"cache_salt": "s"}, {"cache_prompt": False})
    for plain in watch(Rules()):
        assert [plain.send(**fields).durable for fields in asked] == [True, False, False]
    for salted in watch(Rules(terms=ServiceTerms(durable_salts=True))):
        assert [salted.send(**fields).durable for fields in asked] == [True, True, False]


def test_profiles_describe_themselves() -> None:
    assert PROFILES["voice"].described() == (
        "speech, which must not pause: TTFT target 1000 ms, ITL target 50 ms, longest wait 5 s"
    )
    assert "longest wait no limit, prefill budget 2048" in PROFILES["batch"].described()
