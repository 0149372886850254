from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.keys import Keyring

Penstock = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_KEYS", raising=False)
    return tmp_path / "penstock" / "keys.json"


def test_a_key_is_printed_once_and_opens_what_its_hash_is_kept_for(penstock: Penstock, settings: Path) -> None:
    code, out, err = penstock("keys", "add", "alice", "--requests", 60, "--model", "a", "--model", "b", "--admin")
    assert (code, out[:12], err.startswith(f"added alice to {settings}")) == (0, "sk-penstock-", True)
    key = Keyring(settings).find([out.strip().encode()])
    assert key is not None
    assert (key.name, key.requests_per_minute, key.models, key.admin) == ("alice", 60, ("a", "b"), True)
    listed = penstock("keys", "list")[1]
    assert "60 requests per minute, only a, b, may change models" in listed
    assert out.strip() not in listed
    assert penstock("keys", "remove", "alice")[2] == f"removed alice from {settings}\n"
    assert Keyring(settings).find([out.strip().encode()]) is None


def test_a_share_of_the_engine_is_kept_and_listed(penstock: Penstock, settings: Path) -> None:
    share = ("--weight", "3", "--priority", "-2", "--ttft-target", "500", "--itl-target", "40")
    added = penstock("keys", "add", "app", *share)[1].strip()
    key = Keyring(settings).find([added.encode()])
    assert key is not None
    assert (key.weight, key.priority, key.targets) == (3.0, -2, (0.5, 0.04))
    assert "weight 3, priority from -2, TTFT target 500 ms" in penstock("keys", "list")[1]


def test_as_json_and_in_a_file_of_ones_own(penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own" / "k.json"
    added = json.loads(penstock("keys", "add", "ci", "--file", file, "--expires", "30d", "--json")[1])
    assert added["file"] == str(file)
    assert Keyring(file).find([added["key"].encode()])
    monkeypatch.setenv("PENSTOCK_KEYS", str(file))
    (listed,) = json.loads(penstock("keys", "list", "--json")[1])
    assert listed == {name: added[name] for name in ("name", "created", "expires")}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["add"], 2, "required: NAME"),
        (["add", "a b"], 2, "letters, digits"),
        (["add", "x", "--expires", "soon"], 2, "got 'soon'"),
        (["add", "x", "--expires", "2020-01-01"], 2, "is in the past"),
        (["add", "x", "--tokens", "0"], 2, "must be 1 or more"),
        (["add", "taken"], 1, "has a key 'taken' already"),
        (["remove", "x"], 1, "has no key 'x'"),
        (["list", "--file", "nowhere.json"], 1, "penstock keys add NAME --file nowhere.json"),
        (["dance"], 2, "no command 'keys dance'"),
    ],
)
def test_what_cannot_be_done_is_said(penstock: Penstock, words: list[str], code: int, said: str) -> None:
    penstock("keys", "add", "taken")
    left, out, err = penstock("keys", *words)
    assert (left, out) == (code, "")
    assert said in err


def test_a_word_of_its_own_lists_what_can_be_done(penstock: Penstock) -> None:
    for words in (["keys"], ["keys", "--help"], ["keys", "-h"]):
        code, out, _ = penstock(*words)
        assert code == 0
        assert [line.split()[1] for line in out.splitlines()] == ["add", "list", "remove"]
