from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.backend.cpu.device import DEVICE
from penstock.cli.doctor import X86_KERNELS, _chosen_kernels
from penstock.cli.terminal import readable_size
from penstock.config import Config, home
from penstock.planning.roofline import MachineProfile, MatmulTimes
from penstock.store import DerivedModel, looks_like_model, save_derived
from penstock.store.paths import Entry, ModelPaths, sha256_of, write_record
from penstock.types import SamplingParams

RECITED = "abcdefghijklménopqrstuvwxyz"
Penstock = Callable[..., tuple[int, str, str]]


def test_the_answer_is_all_there_is_on_stdout(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", reciter, "Go", "--device", "ref") == (0, RECITED + "\n", "")


def test_a_prompt_from_stdin(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", reciter, "-", "--device", "ref", stdin="Löß".encode())[:2] == (0, RECITED + "\n")
    code, out, err = penstock("run", reciter, "-", stdin=b"\xff")
    assert (code, out) == (1, "")
    assert err.startswith("error: the prompt is not valid UTF-8")
    assert err.endswith("[invalid_request]\n")


def test_run_as_json(penstock: Penstock, reciter: Path) -> None:
    code, out, err = penstock("run", reciter, "Go", "--device", "ref", "--json", "--max-tokens", 3, "--system", "S")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert (answer["text"], answer["finish_reason"], len(answer["tokens"])) == ("abc", "length", 3)
    assert answer["prompt_tokens"] == len("system\nS\nuser\nGo\nassistant\n") + 5  # and the marks around them


def test_a_raw_prompt_is_continued(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", reciter, "uvw", "--raw", "--device", "ref") == (0, "xyz\n", "")


def test_options_stand_anywhere(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", "--raw", reciter, "--device=ref", "uvw")[:2] == (0, "xyz\n")
    assert penstock("run", "--device", "ref", "--", reciter, "--raw")[:2] == (0, RECITED + "\n")


def test_a_cut_answer_is_told_on_stderr(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", reciter, "Go", "--device", "ref", "--max-tokens", 2) == (
        0,
        "ab\n",
        "(the answer was cut off after 2 tokens)\n",
    )


@pytest.mark.parametrize(
    "word", ["llama3.2:7b", "mistrall", "lama3.2", "Qwen2.5-7B", "./m", "m.gguf", "smolm2", "~/models/m", "orca-mini"]
)
def test_what_looks_like_a_model_is_never_a_prompt(penstock: Penstock, word: str) -> None:
    keep("hf:some/model", b"")
    code, out, err = penstock("run", word)
    assert (code, out) == (1, "")
    assert word in err
    assert "Models stored here: hf:some/model; if it is a prompt: penstock run smollm2 " in err
    assert err.endswith("[model_not_found]\n")


def test_a_model_without_a_prompt_reads_it_from_stdin(penstock: Penstock, reciter: Path) -> None:
    save_derived(DerivedModel(name="mine", base="reciter", path=str(reciter)))
    for word in ("mine", str(reciter)):
        assert penstock("run", word, "--device", "ref", stdin=b"Go") == (0, RECITED + "\n", "")
    for word in ("smollm2", "mine", "owner/repo", "hf:owner/repo", "llama3.2", "qwen3:8b-q8_0"):
        assert penstock("run", word) == (1, "", "error: the prompt is empty: give some text [invalid_request]\n")


def test_the_names_that_can_be_pulled_are_listed(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.available_memory", lambda: 6 * 10**9)
    monkeypatch.setenv("COLUMNS", "200")
    keep("llama3.2:1b", b"")
    code, out, _ = penstock("list", "--all")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "8.03 B" in lines["llama3.1:8b"]
    assert "about 4.92 GB" in lines["llama3.1:8b"]
    here = {name: lines[name].split("GB")[-1].split("MB")[-1].strip().split("  ")[0] for name in lines}
    assert (here["llama3.2:3b"], here["llama3.1:8b"], here["gpt-oss:20b"]) == ("fits", "tight", "too large")
    assert here["llama3.2:1b"] == "stored"

    facts = {model["name"]: model for model in json.loads(penstock("list", "--all", "--json")[1])["models"]}
    assert facts["llama3.1:8b"]["quantizations"]["Q8_0"] == {"size": 8_531_875_000, "here": "too large"}
    assert facts["llama3.2:1b"]["stored"]


@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        "Hello!",
        "Hello",
        "Why is the sky blue?",
        "smile",
        "what is 3.2?",
        "what is mistral?",
        "a/b or c/d",
        "2+2",
        "42",
    ],
)
def test_what_does_not_look_like_a_model_is_a_prompt(prompt: str) -> None:
    assert not looks_like_model(prompt)


def test_a_short_context_is_told_truly(penstock: Penstock, reciter: Path) -> None:
    assert penstock("run", reciter, "uvw", "--raw", "--device", "ref", "--max-len", 10)[:2] == (0, "xyz\n")
    code, out, err = penstock("run", reciter, "uvw", "--device", "ref", "--max-len", 10)
    assert (code, out) == (1, "")
    assert "the context holds 10" in err


def test_sampling_is_the_models_own_unless_it_is_given(
    penstock: Penstock, reciter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params, **_: asked.append(params) or iter(()))
    monkeypatch.setattr("penstock.cli.run._print_stream", list)
    own = {"temperature": 0.25, "top_k": 5, "num_predict": 3}
    save_derived(DerivedModel(name="mine", base="reciter", path=str(reciter), parameters=own))
    penstock("run", reciter, "Go", "--device", "ref")
    penstock("run", "mine", "Go", "--device", "ref")
    penstock("run", "mine", "Go", "--device", "ref", "--temperature", 0, "--top-p", 0.5)
    assert [(each.temperature, each.top_k, each.top_p) for each in asked] == [(0.7, 0, 0.95), (0.25, 5, 1), (0, 5, 0.5)]
    penstock("run", "mine", "Go", "--device", "ref", "--top-k", 7, "--min-p", 0.1, "--repeat-penalty", 1.2)
    assert (asked[-1].top_k, asked[-1].min_p, asked[-1].repetition_penalty) == (7, 0.1, 1.2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "are required: [MODEL] PROMPT"),
        (["run", "why", "is", "it"], "put the prompt in quotes"),
        (["run", "x", "--heat", "1"], "there is no option --heat"),
        (["run", "x", "--raw", "--system", "y"], "--system cannot be used with it"),
        (["run", "x", "--max", "1"], "there is no option --max"),
        (["run", "x", "--top-p", "2"], "--top-p: must be 1 or less; got 2"),
        (["run", "x", "--top-p", "nan"], "--top-p: must be 0 or more; got nan"),
        (["run", "x", "--seed", "one"], "--seed: takes a whole number; got 'one'"),
        (["run", "x", "--block-size", "0"], "--block-size: must be 1 or more; got 0"),
        (["run", "x", "--max-rows", "2"], "there is no option --max-rows"),
        (["serve", "--step-tokens", "many"], "--step-tokens: takes a whole number; got 'many'"),
        (
            ["serve", "--kv-memory", "8 bytes"],
            "--kv-memory: takes a number of bytes, such as 500M or 8G; got '8 bytes'",
        ),
        (["serve", "--max-data", "0K"], "--max-data: must be 1 or more; got 0K"),
        (["serve", "--prefill-budget", "-1"], "--prefill-budget: must be 0 or more; got -1"),
        (["rm"], "are required: MODEL"),
        (["serve", "--port", "99999"], "port"),
        (["bench", "--concurrency", "1,none"], "got '1,none'"),
        (["bench", "--concurrency", "0"], "from 1 to"),
        (["bench", "--shared-prefix", "200"], "is longer than --input-len 128"),
        (["dance"], "there is no command 'dance'"),
    ],
)
def test_wrong_usage(penstock: Penstock, words: list[str], said: str) -> None:
    code, out, err = penstock(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_errors_are_one_line(penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = penstock("run", "smolm2", "Go")
    assert (code, out) == (1, "")
    assert err == (
        "error: no model is called 'smolm2'; did you mean smollm2 or smollm3? Or give a path, "
        "hf:owner/repo[:quantization] or pypi:package/file [model_not_found]\n"
    )
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GG")
    assert penstock("run", broken, "Go")[2].endswith("[malformed_file]\n")
    assert penstock("run", "smollm2", " ")[2] == "error: the prompt is empty: give some text [invalid_request]\n"
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert "Traceback" in penstock("run", "smolm2", "Go")[2]


def test_the_default_model_has_one_name() -> None:
    from penstock import store
    from penstock.cli.framework import options

    assert options.DEFAULT_MODEL == store.DEFAULT


def test_serve_passes_on_what_it_is_told(penstock: Penstock, reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[Any] = []
    configs: list[Config] = []
    monkeypatch.setattr("penstock.ipc.spawn.ProcessClient", lambda config, _: configs.append(config))
    setups: list[Any] = []
    pools: list[Any] = []

    def serve(pool: Any, host: str, port: int, setup: Any) -> None:
        setups.append(setup)
        pools.append(pool)
        rules.append(setup.rules)
        pool.models.default.source.make_client()

    monkeypatch.setattr("penstock.server.serve", serve)
    penstock("serve", str(reciter))
    sizes = ("--step-tokens", 100, "--prefill-budget", 50, "--block-size", 8, "--kv-memory", 10**6, "--name", "it")
    names = ("--strict", "--alias", "gpt-4o=it", "--alias", "big-*=it")
    penstock("serve", str(reciter), *names, *sizes, "--log-level", "debug", "--log-format", "json", "--log-prompts")
    assert [each.log for each in setups] == [("info", "text", False), ("debug", "json", True)]
    assert [each.lenient for each in rules] == [True, False]
    assert ("claude*", "") in pools[0].settings.aliases  # the default model
    assert pools[1].settings.aliases == (("gpt-4o", "it"), ("big-*", "it"))
    assert configs == [
        Config(model=str(reciter), name="reciter"),
        Config(model=str(reciter), name="it", step_tokens=100, prefill_budget=50, block_size=8, kv_memory=10**6),
    ]


def test_serve_says_what_is_the_default_and_what_makes_no_sense(
    penstock: Penstock, reciter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ipc.spawn.ProcessClient", lambda config: None)
    monkeypatch.setattr("penstock.server.serve", lambda *told: None)
    assert "the default now" in penstock("serve", str(reciter), "--ignore-unknown-fields")[2]
    code, _, err = penstock("serve", str(reciter), "--ignore-unknown-fields", "--strict")
    assert (code, "contradict" in err) == (2, True)
    for alias in ("gpt-4o", "=reciter", "gpt-4o=other"):
        code, _, err = penstock("serve", str(reciter), "--alias", alias)
        assert (code, "--alias is written NAME=reciter" in err) == (2, True)


def test_version_and_help(penstock: Penstock) -> None:
    from penstock import __version__

    code, out, _ = penstock("--version")
    assert code == 0
    assert re.fullmatch(rf"penstock {re.escape(__version__)}( \([0-9a-f]{{12}}\))?\n", out)  # built from a commit
    code, out, _ = penstock("--help")
    assert code == 0
    for command in ("run", "chat", "serve", "pull", "list", "show", "rm", "plan", "bench", "doctor", "keys add"):
        assert f"\n  {command} " in out
        code, page, _ = penstock(command, "--help")
        assert code == 0
        assert page.index(f"  penstock {command}") < page.index("Options:")


def keep(name: str, content: bytes) -> Entry:
    """Puts a file in the store as if it had been fetched."""
    place = ModelPaths(home(), name)
    path = place.folder / "model.gguf"
    place.folder.mkdir(parents=True)
    path.write_bytes(content)
    entry = Entry(name, "pypi:some/model.gguf", path, len(content), sha256_of(path), "2026-01-02T03:04:05+00:00")
    write_record(place, entry)
    return entry


def test_the_store_at_the_command_line(penstock: Penstock) -> None:
    entry = keep("smollm2", bytes(2_500_000))
    code, out, _ = penstock("list")
    assert code == 0
    assert out.splitlines()[1].startswith("smollm2  2.5 MB  2026-01-02")
    (listed,) = json.loads(penstock("list", "--json").out)  # type: ignore[attr-defined]
    assert listed["path"] == str(entry.path)
    assert penstock("pull", "smollm2") == (0, f"{entry.path}\n", "")
    assert penstock("rm", "smollm2") == (0, "", "removed smollm2, freed 2.5 MB\n")
    assert penstock("rm", "smollm2")[2].endswith("[model_not_found]\n")
    assert "penstock pull smollm2" in penstock("list")[1]
    assert json.loads(penstock("list", "--json")[1]) == []


def test_a_fetch_is_told_on_stderr(penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fetch(ref: str, *, progress: Callable[[str, int, int | None], None], advisor: object) -> Path:
        for done in (0, 1000):
            progress(f"downloading {ref}", done, None)
        (tmp_path / "m.gguf").write_bytes(bytes(1000))
        return tmp_path / "m.gguf"

    monkeypatch.setattr("penstock.store.fetch", fetch)
    path = tmp_path / "m.gguf"
    assert penstock("pull", "hf:a/b") == (0, f"{path}\n", f"downloading hf:a/b\nfetched hf:a/b (1 kB) to {path}\n")


def test_show(penstock: Penstock, reciter: Path) -> None:
    code, out, _ = penstock("show", reciter, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["architecture"] == "llama"
    assert facts["formats"] == {"F32": facts["parameters"]}
    assert (facts["context_length"], facts["vocabulary"], facts["chat_template"]) == (4096, 258, True)
    here = facts["here"]
    assert (here["device"], here["held_as"], here["trouble"]) == ("cpu", ["F32"], "")
    assert here["weights"]["as it is"] == 4 * facts["parameters"]
    out = penstock("show", reciter)[1]
    assert "F32 100.0%" in out
    assert "on cpu with weights stored as F32" in out
    (reciter / "tokenizer.json").rename(reciter / "aside")
    assert "has no tokenizer.json" in penstock("show", reciter)[1]
    (reciter / "aside").rename(reciter / "tokenizer.json")
    code, _, err = penstock("show", "smollm2")
    assert code == 1
    assert "penstock pull smollm2" in err


def test_fields_of_a_config(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    """Those that nothing is known of are shown and logged, or refused; those that are known can be changed."""
    folder = tmp_path / "reciter"
    shutil.copytree(reciter, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"colour": "red", "max_length": 20}))
    assert json.loads(penstock("show", folder, "--json")[1])["unknown_fields"] == ["colour"]
    assert "unknown fields  colour (of config.json" in penstock("show", folder)[1]
    code, _, err = penstock("show", folder, "--strict-config")
    assert (code, "fields that this engine does not know: colour" in err) == (1, True)
    assert "unknown fields" not in penstock("show", folder, "--strict-config", "--config", "colour=null")[1]
    words = ("run", folder, "Go", "--threads", 1, "--config", "max_position_embeddings=32", "--max-len", 64)
    assert "32" in penstock(*words)[2]


def test_unknown_fields_are_logged(reciter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "reciter"
    shutil.copytree(reciter, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"colour": "red"}))
    LLM(folder, threads=1, config=["max_length=7"]).close()
    assert [record.message for record in caplog.records] == [
        "config.json has fields that this engine does not know: colour"
    ]


def test_plan(penstock: Penstock, reciter: Path) -> None:
    code, out, _ = penstock("plan", reciter, "--device", "ref", "--max-len", "1000", "--max-rows", "3", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["max_len"], facts["max_rows"], facts["num_blocks"]) == (1000, 3, 189)
    assert facts["kv_token"] == 2 * 64 * 4  # one layer, one head of 64
    assert facts["cache"] == 189 * 16 * facts["kv_token"]
    assert (facts["notes"], facts["fits"], facts["speed"]) == ([], True, None)
    assert facts["quantized"] == {}
    sizes = ("--step-tokens", 100, "--prefill-budget", 50, "--block-size", 100)
    facts = json.loads(penstock("plan", reciter, "--device", "ref", "--max-len", "1000", *sizes, "--json")[1])
    assert (facts["step_tokens"], facts["prefill_budget"], facts["num_blocks"]) == (100, 50, 640)
    assert "is more than step_tokens 100" in penstock("plan", reciter, *sizes, "--prefill-budget", 101)[2]
    code, out, _ = penstock("plan", reciter, "--device", "ref", "--kv-memory", str(10**15))
    assert code == 0
    assert "KV cache" in out
    assert "asked for" not in out, "all rows take far less"
    assert re.search(r"  reserve +\S+ GB  left to others, unless --kv-memory takes it\n", out)
    assert "KV on disk" not in out
    disk = ("--kv-disk", str(reciter.parent / "kv"))
    assert f"  KV on disk        nothing yet in {disk[1]}" in penstock("plan", reciter, "--device", "ref", *disk)[1]
    assert json.loads(penstock("plan", reciter, "--device", "ref", *disk, "--json")[1])["kv_disk"]["prompts"] == 0
    code, out, err = penstock("plan", reciter, "--device", "ref", "--kv-memory", "1")
    assert (code, out) == (1, "")
    assert "KV cache" in err


MATMUL = MatmulTimes((1, 64), (1e-9, 1e-8))
PROFILE = MachineProfile(1e-5, 1e-6, 1e9, 1e9, dict.fromkeys(("F32", "Q8_0", "Q5_0", "Q4_1"), MATMUL))


def test_plan_shows_what_a_quantized_cache_costs(penstock: Penstock, reciter: Path, own_store: Path) -> None:
    asked = ("plan", reciter, "--device", "cpu", "--kv", "int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.plan.machine_profile", lambda *_: None)
        assert json.loads(penstock(*asked, "--json")[1])["kv_loss"] is None
        said = penstock("run", reciter, "Go", "--device", "cpu", "--kv", "int8", "--threads", 1).err
        assert "compared with 16 bits: mean KL 0.00000" in said, "its values are all 0"
        assert json.loads(penstock(*asked, "--json")[1])["kv_loss"] == {"mean": 0.0, "error": 0.0, "same_top": 1.0}
        assert "  KV in int8        mean KL 0.00000" in penstock(*asked)[1]
        assert "mean KL" not in penstock(*asked[:4])[1]


def test_plan_counts_adapters(penstock: Penstock, reciter: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter.gguf").write_bytes(b"x" * 30_000_000)
    given = ("plan", reciter, "--device", "ref", "--max-len", "1000", "--adapter", f"a={tmp_path / 'adapter.gguf'}")
    assert json.loads(penstock(*given, "--json")[1])["adapters"] == 30_000_000
    assert "adapters             0.03 GB" in penstock(*given)[1]
    assert "there is no adapter at" in penstock("plan", reciter, "--adapter", "a=./none")[2]


def test_plan_tells_speeds_from_what_was_measured_once(penstock: Penstock, reciter: Path, own_store: Path) -> None:
    measured: list[list[str]] = []

    def measure(
        config: Config, kinds: list[str], known: MachineProfile | None, log: Callable[[str], None]
    ) -> MachineProfile:
        measured.append(kinds)
        return PROFILE._replace(matmuls=dict.fromkeys([*kinds, *(known.matmuls if known else ())], MATMUL))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.planning.calibration.measure", measure)
        patch.setattr("penstock.cli.machine_profile._share_of_others", lambda _: 0.0)
        code, out, err = penstock("plan", reciter, "--prompt", "1000")
        assert code == 0
        assert "for a prompt of 1,000 tokens" in out
        assert "1 sequence" in out
        assert "q8_0" in out
        assert err.startswith("measuring ")
        again = json.loads(penstock("plan", reciter, "--json")[1])
        assert (again["speed"]["prompt"], again["machine_busy"]) == (512, 0.0)
        once, measured = measured, []
        assert once[0] == ["F32"]
        kept = own_store / "machine.json"
        kept.write_text(kept.read_text().replace('"version": "', '"version": "of another '))
        penstock("plan", reciter)
        kept.write_text("{")
        penstock("plan", reciter)
        penstock("doctor", "--measure")
        assert DEVICE.calibration is not None
        assert measured == [*once, *once, list(DEVICE.calibration.formats)]


def test_plan_says_that_a_busy_machine_was_measured(penstock: Penstock, reciter: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.plan.machine_profile", lambda *_: PROFILE._replace(busy=0.45))
        assert "note: other processes used 45% of this machine" in " ".join(penstock("plan", reciter)[1].split())
        assert json.loads(penstock("plan", reciter, "--json")[1])["machine_busy"] == 0.45


def test_doctor_finds_a_damaged_model(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.cli.doctor.CHECKS", [check for check in doctor_checks() if "native" not in check.__name__]
    )
    monkeypatch.setattr("penstock.planning.calibration.measure", lambda *_, **__: PROFILE)
    code, out, _ = penstock("doctor")
    assert code == 0
    assert "note  default model" in out
    assert "ok    profiles          default:" in out
    assert f"\n{24 * ' '}chat: people who read along" in out

    entry = keep("smollm2", bytes(1000))
    findings = {finding["check"]: finding["state"] for finding in json.loads(penstock("doctor", "--json")[1])}
    assert findings["default model"] == "ok"
    assert set(findings) == {
        *("python", "cpu", "cores", "load", "memory", "disk", "gpu", "torch", "compiler", "packages", "pip", "ports"),
        *("file limits", "proxies", "store", "default model", "profiles", "kv on disk", "speed", "faster with"),
        "next steps",
    }
    assert "nothing yet in ./kv; at most 17.18 GB" in penstock("doctor", "--kv-disk", "./kv")[1]

    entry.path.write_bytes(b"x" * 1000)
    code, out, _ = penstock("doctor")
    assert code == 1
    assert "bad   default model" in out


def test_doctor_tunes_only_a_gpu(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.cuda.device.has_gpu", lambda: False)
    code, out, error = penstock("doctor", "--tune")
    assert code != 0
    assert not out
    assert "--tune measures kernels on an NVIDIA GPU" in error


def doctor_checks() -> list[Callable[[], tuple[str, str]]]:
    from penstock.cli.doctor import CHECKS

    return list(CHECKS)


@pytest.mark.parametrize(
    ("chosen", "flags", "told"),
    [
        (
            "avx2",
            "avx2 fma f16c avx512f amx_tile",
            ["uses avx2: the CPU reports avx2 fma f16c", "not avx512vnni: no avx512bw"],
        ),
        ("avx2", " ".join(sum(X86_KERNELS.values(), ())), ["not amx: the system does not allow it"]),
        ("generic", "sse2", ["uses generic; not amx: no amx_tile", "not avx2: no avx2 fma f16c"]),
        ("amx", "amx_tile amx_int8 amx_bf16 avx512_bf16", ["uses amx: the CPU reports amx_tile"]),
        ("generic", "", ["uses generic"]),
    ],
)
def test_doctor_tells_why_kernels_were_chosen(chosen: str, flags: str, told: list[str]) -> None:
    detail = _chosen_kernels(chosen, X86_KERNELS, set(flags.split()))
    assert all(part in detail for part in told)
    assert f"not {chosen}" not in detail


def test_doctor_reports_a_store_that_cannot_be_written(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.planning.calibration.measure", lambda *_, **__: PROFILE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "home"))
    code, out, _ = penstock("doctor")
    assert code == 1
    assert "bad   store" in out


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (1e9, "1 GB"), (2.5e15, "2.5e+03 TB")]
)
def test_sizes(size: float, text: str) -> None:
    assert readable_size(size) == text


def test_models_that_were_made_are_listed_and_answer_as_they_were_made(penstock: Penstock, reciter: Path) -> None:
    save_derived(DerivedModel(name="mine", base="reciter", path=str(reciter), system="Be brief."))
    (listed,) = json.loads(penstock("list", "--json")[1])
    assert (listed["name"], listed["source"]) == ("mine", "derived from reciter")

    def asked(*words: str) -> int:
        return int(json.loads(penstock("run", *words, "Go", "--device", "ref", "--json")[1])["prompt_tokens"])

    briefly = asked(str(reciter), "--system", "Be brief.")
    assert asked("mine") == briefly > asked(str(reciter))
    assert asked("mine", "--system", "Go on.") == briefly - 3  # bytes
    assert penstock("rm", "mine") == (0, "", "removed mine, freed 0 B\n")
    assert json.loads(penstock("list", "--json")[1]) == []


def test_the_speed_of_an_encoder_is_that_of_embeddings(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(
        config: Config, kinds: list[str], known: MachineProfile | None, log: Callable[[str], None]
    ) -> MachineProfile:
        return PROFILE._replace(matmuls=dict.fromkeys([*kinds, *(known.matmuls if known else ())], MATMUL))

    monkeypatch.setattr("penstock.planning.calibration.measure", measure)
    bert = Path(__file__).parents[1] / "models" / "encoders" / "bert"
    code, out, _ = penstock("plan", bert, "--device", "cpu")
    assert code == 0
    assert "embedding" in out
    assert "for a prompt of 50 tokens" in out
    assert "1 sequence" not in out


def test_an_encoder_is_shown_and_planned_and_asked_for_no_text(penstock: Penstock, tmp_path: Path) -> None:
    bert = Path(__file__).parents[1] / "models" / "encoders" / "bert"
    code, out, _ = penstock("show", bert, "--json")
    assert (code, json.loads(out)["architecture"], json.loads(out)["context_length"]) == (0, "bert", 50)
    code, out, _ = penstock("plan", bert, "--device", "ref", "--step-tokens", 40, "--max-rows", 2, "--json")
    planned = json.loads(out)
    assert (code, planned["max_len"], planned["num_blocks"], planned["kv_token"]) == (0, 40, 10, 256)
    assert planned["notes"] == ["prompt and answer have 40 tokens at most, not 50: a step holds no more"]
    for words in (("run", bert, "Go"), ("run", bert, "Go", "--raw"), ("chat", bert)):
        code, out, err = penstock(*words, "--device", "ref")
        assert (code, out) == (1, "")
        assert err.startswith("error: this model is an encoder, which returns embeddings and no text")
    (tmp_path / "text").write_text("the river " * 100)
    for words in (("ppl", bert), ("kl", bert, "--against", bert)):
        code, _, err = penstock("eval", *words, "--text", tmp_path / "text", "--context", 16)
        assert code == 1
        assert "error: this model is an encoder, which predicts no tokens" in err


def test_the_default_model_is_served_by_its_own_name(smollm2: Path) -> None:
    from penstock.cli.served_models import ModelFinder

    assert [model.name for model in ModelFinder(["smollm2"], "", "").found] == ["smollm2"]


def test_a_greedy_answer_that_repeats_itself_is_ended(penstock: Penstock, babbler: Path) -> None:
    words = ("run", babbler, "Go", "--device", "ref", "--temperature", 0, "--max-tokens", 1200)
    code, out, error = penstock(*words)
    assert (code, 1024 <= len(out.encode()) < 1100) == (0, True)
    assert "(the answer repeated itself and was ended after 10" in error
    assert json.loads(penstock(*words, "--json")[1])["stop_reason"] == "repetition"
    code, out, error = penstock(*words, "--no-loop-guard")
    assert "(the answer was cut off after 1200 tokens)" in error
