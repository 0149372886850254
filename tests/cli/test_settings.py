"""Options come from flags, then variables, then penstock.toml; other engines' flags are understood or told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import COMMANDS
from penstock.cli.framework.command import UsageError
from penstock.cli.framework.flag_aliases import KnownFlags, translate
from penstock.store import DerivedModel, save_derived

Penstock = Callable[..., tuple[int, str, str]]
FLAGS = KnownFlags(valued=["--max-len", "--max-rows", "--threads", "--name", "--port"], bare=["--raw"])


def in_force(penstock: Penstock, *words: str) -> dict[str, Any]:
    code, out, _ = penstock("config", *words, "--json")
    assert code == 0
    return {row["option"]: (row["value"], row["source"]) for row in json.loads(out)["options"]}


def test_a_variable_counts_before_the_file_and_a_table_before_the_top(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("penstock.toml").write_text(
        'port = 1\nthreads = 2\nalias = ["a=b"]\n[serve]\nport = 3\nmax-len = 4\nstrict = true'
    )
    assert in_force(penstock) == in_force(penstock, "serve")
    found = in_force(penstock)
    assert found["port"] == (3, "penstock.toml")
    assert found["max-len"] == (4, "penstock.toml")
    assert found["threads"] == (2, "penstock.toml")
    assert found["alias"] == (["a=b"], "penstock.toml")
    assert found["strict"] == (True, "penstock.toml")
    assert found["host"] == ("127.0.0.1", "default")
    monkeypatch.setenv("PENSTOCK_PORT", "5")
    monkeypatch.setenv("PENSTOCK_STRICT", "off")
    assert in_force(penstock)["port"] == (5, "the variable PENSTOCK_PORT")
    assert in_force(penstock)["strict"] == (False, "the variable PENSTOCK_STRICT")
    assert in_force(penstock, "run")["threads"] == (2, "penstock.toml")


def test_bytes_are_set_and_shown_with_a_unit(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_MEMORY", "2G")
    assert in_force(penstock)["kv-memory"] == (2 << 30, "the variable PENSTOCK_KV_MEMORY")
    _, table, _ = penstock("config")
    assert [line.split()[1] for line in table.splitlines() if line.startswith(("kv-memory", "max-file "))] == [
        "200M",
        "2G",
    ]
    assert "--kv-memory BYTES" in penstock("serve", "--help")[1]
    assert "[default: 16G]" in penstock("serve", "--help")[1]


def test_a_flag_counts_first(penstock: Penstock, reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEVICE", "ref")
    monkeypatch.setenv("PENSTOCK_MAX_TOKENS", "3")
    assert penstock("run", reciter, "Go")[:2] == (0, "abc\n")
    assert penstock("run", reciter, "Go", "--max-tokens", 2)[:2] == (0, "ab\n")
    monkeypatch.setenv("PENSTOCK_JSON", "1")
    assert json.loads(penstock("run", reciter, "Go")[1])["text"] == "abc"
    assert penstock("run", reciter, "Go", "--no-json")[1] == "abc\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "'prot' is not an option; did you mean 'prompt' or 'port'?"),
        ("[serv]\nport = 1", "[serv] is not a command; did you mean 'serve'?"),
        ("[run]\nport = 1", "'port' is not an option of penstock run"),
        ("[keys.add]\nport = 1", "'port' is not an option of penstock keys add"),
        ("[keys]\nport = 1\n[keys.add]\n", "[keys] is not a command"),
        ("port = ", "cannot be read as TOML"),
        ("port = 70000", "sets port: it must be 65535 or less; got 70000"),
        ("strict = 3", "sets strict to 3: it is true or false"),
    ],
)
def test_a_wrong_file_is_told(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "mine.toml"))
    code, out, err = penstock("serve", "--max-len", "1")
    assert (code, out) == (1, "")
    assert str(tmp_path / "mine.toml") in err
    assert told in err


def test_a_file_that_is_not_there_is_told(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", "nowhere.toml")
    assert "PENSTOCK_CONFIG names 'nowhere.toml', which is not a file" in penstock("list")[2]


def test_a_variable_that_is_no_option_is_told(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PROT", "1")
    assert "the variable PENSTOCK_PROT is not an option of any command" in penstock("config")[2]


def test_the_file_that_a_variable_names_is_not_an_engine_option(
    penstock: Penstock, reciter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text('device = "ref"\n[run]\nmax-tokens = 3')
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "mine.toml"))
    assert penstock("run", reciter, "Go")[:2] == (0, "abc\n")
    assert penstock("show", reciter)[0] == 0
    assert in_force(penstock)["config"] == ([], "default")
    assert in_force(penstock)["device"] == ("ref", str(tmp_path / "mine.toml"))


SERVICE_LINKS = {  # that Kubernetes sets for the services penstock and penstock-gateway
    "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
    "PENSTOCK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "PENSTOCK_PORT_8000_TCP_PROTO": "tcp",
    "PENSTOCK_PORT_8000_TCP_PORT": "8000",
    "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
    "PENSTOCK_SERVICE_HOST": "10.0.0.1",
    "PENSTOCK_SERVICE_PORT": "8000",
    "PENSTOCK_SERVICE_PORT_HTTP": "8000",
    "PENSTOCK_GATEWAY_PORT": "udp://10.0.0.2:53",
    "PENSTOCK_GATEWAY_SERVICE_HOST": "10.0.0.2",
}


def test_the_service_links_of_kubernetes_are_not_options(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_API_KEY", "k")
    assert in_force(penstock)["port"] == (8000, "default")
    assert not [
        name for name in (*SERVICE_LINKS, "PENSTOCK_API_KEY") if f"{name} is not an option" in penstock("config")[2]
    ]
    monkeypatch.setenv("PENSTOCK_PORT", "9000")
    assert in_force(penstock)["port"] == (9000, "the variable PENSTOCK_PORT")


def test_a_mistyped_command_has_suggestions(penstock: Penstock) -> None:
    code, _, err = penstock("config", "serv")
    assert (code, "there is no command 'serv'; did you mean penstock serve?" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        ("--max-model-len 5 m", ["--max-len", "5", "m"]),
        ("-c=5", ["--max-len", "5"]),
        ("m -np 4 --raw", ["m", "--max-rows", "4", "--raw"]),
        ("-hf owner/repo:Q4_K_M --port 1", ["hf:owner/repo:Q4_K_M", "--port", "1"]),
        ("--port 1 --model m.gguf", ["m.gguf", "--port", "1"]),
        ("-fa on --jinja m", ["m"]),
        ("-fa m", ["m"]),
        ("--tool-call-parser hermes m", ["m"]),
        ("--name -c", ["--name", "-c"]),  # the value of an option is not a flag
        ("m -- -c 5", ["m", "--", "-c", "5"]),
        ("m -5", ["m", "-5"]),
        ("-a short m", ["--name", "short", "m"]),
        ("m --served-model-name a b --port 1", ["m", "--name", "a", "--alias", "b=a", "--port", "1"]),
        ("--served-model-name a b --model m", ["m", "--name", "a", "--alias", "b=a"]),
        ("--served-model-name a m", ["--name", "a", "m"]),  # no other word is the model
    ],
)
def test_other_engines_flags_mean_the_same(words: str, own: list[str]) -> None:
    assert translate(words.split(), FLAGS).words == own


def test_a_flag_that_was_renamed_or_has_no_effect_is_told() -> None:
    assert translate(["-c", "5", "--jinja"], FLAGS).notes == [
        "-c is called --max-len here",
        "--jinja has no effect: chat templates are always rendered",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("-ngl 99", "write --device cuda"),
        ("-ctv q8_0", "write --kv int8 for both"),
        ("--cache-type-v q8_0", "write --kv int8 for both"),
        ("-ub 512", "-ub is called --step-tokens here, and this command does not have it"),
        ("--prot 1", "there is no option --prot, did you mean --port?"),
        ("--quite-unknown", "there is no option --quite-unknown"),
        (
            "-ngl 99 m --quite-unknown --cache-ram 512 --nothing 5",
            "-ngl is not an option here: .*; there is no option --quite-unknown; --cache-ram is not an option here: .*"
            "; there is no option --nothing$",
        ),
    ],
)
def test_what_cannot_be_meant_is_told(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        translate(words.split(), FLAGS)


def test_commands_of_other_programs_and_mistyped_ones(penstock: Penstock) -> None:
    assert penstock("ls") == penstock("list")
    assert penstock("help", "run") == penstock("run", "--help")
    code, _, err = penstock("servre")
    assert (code, err) == (2, "error: there is no command 'servre'; did you mean penstock serve?\n")


def test_completion_offers_commands_options_and_models(penstock: Penstock) -> None:
    assert penstock("completion", "words", "--")[1].split() == list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    assert penstock("completion", "words", "--", "keys")[1].split() == ["add", "list", "remove"]
    assert {"--port", "--max-len"} <= set(penstock("completion", "words", "--", "serve")[1].split())
    assert penstock("completion", "words", "--", "serve", "--port")[1].strip() == ""
    assert penstock("completion", "tcsh")[0] == 2


def test_completion_offers_stored_models_and_those_that_can_be_pulled(penstock: Penstock, reciter: Path) -> None:
    save_derived(DerivedModel(name="mine", base="reciter", path=str(reciter)))
    words = penstock("completion", "words", "--", "run")[1].split()
    assert {"mine", "smollm2", "llama3.2:1b", "--top-k"} <= set(words)
    assert "mine" not in penstock("completion", "words", "--", "doctor")[1].split()


COMPLETE = {  # how a shell is made to complete `penstock serve --max-l` by the script in $1; zsh does not filter here
    "bash": """
        . "$1"; COMP_WORDS=(penstock serve --max-l) COMP_CWORD=2; _penstock
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { }; _files() { }; compadd() { print -l -- "${found[@]}" }
        . "$1"; words=(penstock serve --max-l) CURRENT=3; _penstock
    """,
    "fish": """
        source $argv[1]; complete -C 'penstock serve --max-l'
    """,
}


@pytest.mark.parametrize("shell", COMPLETE)
def test_a_shell_completes_with_the_script(penstock: Penstock, tmp_path: Path, shell: str) -> None:
    if not (program := shutil.which(shell)):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "penstock").write_text(f'#!/bin/sh\nexec {sys.executable} -m penstock "$@"\n')
    (tmp_path / "penstock").chmod(0o755)
    script = tmp_path / "script"
    script.write_text(penstock("completion", shell)[1])
    alone = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]  # without what this user has set up
    asked = ["-c", COMPLETE[shell], *([] if shell == "fish" else [shell]), str(script)]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [program, *alone, *asked], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found = {line.partition("\t")[0].strip() for line in done.stdout.splitlines()}
    assert {name for name in found if name.startswith("--max-l")} == {"--max-len", "--max-loaded"}
    assert done.stderr == ""
