"""Modelfiles: what they say, and the models that `create` and `cp` make of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.app import run_command
from penstock.cli.served_models import ModelFinder
from penstock.errors import ConfigError
from penstock.store import DerivedModel, Entry, derived_model, derived_path, read_modelfile, save_derived

PIRATE = '''
# a pirate
FROM ./parrot.gguf
PARAMETER temperature 0.5
PARAMETER num_ctx 2048
PARAMETER stop "<|end|>"
PARAMETER stop STOP
SYSTEM """You are a pirate.
Say "arr"."""
TEMPLATE """{{ .Prompt }}"""
MESSAGE user Who are you?
MESSAGE assistant """Arr, a
pirate."""
ADAPTER ./pirate
LICENSE "free"
'''


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "parrot.gguf").write_bytes(b"GGUF")
    (tmp_path / "Modelfile").write_text(PIRATE)
    return tmp_path


def test_every_instruction_is_read() -> None:
    made = read_modelfile(PIRATE)
    assert (made.base, made.adapters, made.license) == ("./parrot.gguf", ["./pirate"], ["free"])
    assert made.parameters == {"temperature": 0.5, "num_ctx": 2048, "stop": ["<|end|>", "STOP"]}
    assert made.system == 'You are a pirate.\nSay "arr".'
    assert made.template == "{{ .Prompt }}"
    assert made.messages == [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Arr, a\npirate."},
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SYSTEM hi", "FROM"),
        ("FROM a\nSHOUT hi", "line 2.*SHOUT"),
        ("FROM", "line 1.*is empty"),
        ('FROM a\nSYSTEM """hi', "line 2.*no end"),
        ("FROM a\nPARAMETER top_k", "line 2.*top_k"),
        ("FROM a\nMESSAGE robot hi", "line 2.*role"),
    ],
)
def test_a_wrong_line_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_modelfile(text)


def test_create_and_cp_save_models(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("create", ["pirate", "-f", str(own_home / "Modelfile")]) == 1
    assert f"there is no adapter at {own_home / 'pirate'}" in capsys.readouterr().err
    (own_home / "pirate").write_bytes(b"GGUF")
    assert run_command("create", ["pirate", "-f", str(own_home / "Modelfile")]) == 0
    pirate = derived_model("pirate")
    assert pirate is not None
    assert derived_path(pirate) == own_home / "parrot.gguf"
    assert pirate.adapters == [str(own_home / "pirate")]
    assert run_command("cp", ["pirate", "captain:v2"]) == 0
    captain = derived_model("captain:v2")
    assert captain is not None
    assert captain.system == pirate.system
    assert run_command("cp", ["nobody", "else"]) == 1
    assert "no model is called 'nobody'" in capsys.readouterr().err
    assert run_command("cp", ["smollm2", "small"]) == 1
    assert "penstock pull smollm2" in capsys.readouterr().err
    assert run_command("create", ["x", "-f", str(own_home / "none")]) == 1
    assert "no Modelfile" in capsys.readouterr().err


def test_a_server_of_the_whole_store_loads_nothing_twice(own_home: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        entry = Entry("parrot", "pypi:x/y.gguf", own_home / "parrot.gguf", 4, "", "2026")
        patch.setattr("penstock.store.store.entries", lambda: [entry])
        patch.setattr("penstock.store.entries", lambda: [entry])
        save_derived(DerivedModel(name="pirate", base="parrot"))
        save_derived(DerivedModel(name="lost", base="nowhere"))
        assert [model.name for model in ModelFinder([], "", "").found] == ["parrot"]
        assert [model.name for model in ModelFinder([], "", "it").found] == ["it"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("PARAMETER temprature 0.1", "PARAMETER of the Modelfile: .*temprature"),
        ("PARAMETER temperature hot", "PARAMETER of the Modelfile: .*temperature"),
        ("PARAMETER top_p 3", "PARAMETER of the Modelfile: top_p must be between"),
        ('TEMPLATE """{{ range .Messages }}{{ end }}"""', "TEMPLATE of the Modelfile: .*the model's own is used"),
    ],
)
def test_what_no_chat_could_be_answered_with_is_refused(
    own_home: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (own_home / "Modelfile").write_text(f"FROM ./parrot.gguf\n{line}\n")
    assert run_command("create", ["pirate", "-f", str(own_home / "Modelfile")]) == 1
    assert re.search(said, capsys.readouterr().err)
    assert derived_model("pirate") is None


def test_parameters_without_effect_are_none_that_are_unknown(own_home: Path) -> None:
    (own_home / "Modelfile").write_text("FROM ./parrot.gguf\nPARAMETER num_gpu 2\nPARAMETER num_ctx 999999\n")
    assert run_command("create", ["pirate", "-f", str(own_home / "Modelfile")]) == 0
    assert derived_model("pirate") is not None
