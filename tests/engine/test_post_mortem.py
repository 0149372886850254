"""What is known of an engine's death is kept, without what was asked unless that is allowed, and can be replayed."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from penstock.cli.framework.command import Exit
from penstock.cli.replay import replay
from penstock.config import Config, configure
from penstock.engine.flight_recorder import FlightRecord, FlightRow
from penstock.errors import ConfigError, InvalidRequest
from penstock.ipc import post_mortem, spawn
from penstock.types import Grammar, Hello, Request, SamplingParams
from tests.engine.test_crashes import POISON, mortal, request
from tests.engine.test_ipc import LIMITS, events_of, run, started, until

GOLDEN = Path(__file__).parents[1] / "models" / "goldens" / "llama3"
HELLO = Hello("1", 7, "m", LIMITS)
FLIGHT = FlightRecord(committed=3, plans=((4, (FlightRow(9, 0, 3, 1), FlightRow(8, 5, 1, 1))),))
SECRET = (901, 902, 903)
ASKED = Request(9, SECRET, SamplingParams(temperature=0.5, seed=4, stop=("secret",), grammar=Grammar("regex", "s")), 6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    return tmp_path / "post-mortem"


@pytest.mark.parametrize("kept", ["shapes", "tokens"])
def test_a_bundle_has_what_was_asked_only_if_that_is_allowed(folder: Path, kept: str) -> None:
    asked = ASKED._replace(generated=(904,))
    config = Config(model="m", post_mortem=kept)
    path = post_mortem.write(post_mortem.describe(config, HELLO, "it fell", "stack", FLIGHT, [asked]))
    assert path.stat().st_mode & 0o777 == 0o600
    bundle = post_mortem.read(path)
    assert (bundle.reason, bundle.stack, bundle.flight, bundle.limits) == ("it fell", "stack", FLIGHT, LIMITS)
    (described,) = bundle.requests
    assert (described.prompt_tokens, described.generated_tokens, described.suspect) == (3, 1, True)
    replayed, (again,) = post_mortem.to_replay(bundle)
    assert replayed.post_mortem == "off"
    if kept == "tokens":
        assert again == asked
    else:
        assert (len(again.prompt), len(again.generated)) == (3, 1)
        assert not {*SECRET, 904} & {*again.prompt, *again.generated}
        assert (again.sampling.temperature, again.sampling.stop, again.sampling.grammar) == (0.5, (), None)


def test_a_bundle_names_what_computes_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if name == "triton":
            raise PackageNotFoundError(name)
        return f"{name} 1"

    monkeypatch.setattr(post_mortem, "version", installed)
    driver = tmp_path / "nvidia" / "version"
    monkeypatch.setattr(post_mortem, "DRIVER", driver)
    about = Config(model="m"), HELLO, "it fell", "", FLIGHT, [ASKED]
    packages = {name: f"{name} 1" for name in ("numpy", "msgspec", "pyzmq", "torch")}
    assert post_mortem.describe(*about).packages == packages
    driver.parent.mkdir()
    driver.write_text("NVRM version: 550\nGCC version: 12\n")
    assert post_mortem.describe(*about).packages == packages | {"nvidia": "NVRM version: 550"}


def test_the_last_bundles_are_kept(folder: Path) -> None:
    about = Config(model="m"), HELLO, "it fell", "", FLIGHT, [ASKED]
    for _ in range(post_mortem.KEPT + 3):
        last = post_mortem.write(post_mortem.describe(*about))
    assert len(list(folder.iterdir())) == post_mortem.KEPT
    assert last.exists()


def test_a_bundle_that_cannot_be_written_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    post_mortem.write_about(Config(model="m"), HELLO, "it fell", "", FLIGHT, [ASKED])


def test_only_known_words_are_taken() -> None:
    with pytest.raises(ConfigError, match="shapes, tokens and off; got 'all'"):
        configure(GOLDEN, {"post_mortem": "all"})


def test_an_engine_that_dies_leaves_a_bundle_with_its_stack_and_dies_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with started(mortal(post_mortem="tokens")) as client:
            stays = asyncio.create_task(events_of(client, request(client, [1, 2, 3], 400)))
            await until(lambda: client.stats.generated_tokens > 5)
            await events_of(client, request(client, [1, 2, POISON]))
            await stays

    run(scenario())
    first, second = sorted(folder.iterdir())
    for path in (first, second):
        bundle = post_mortem.read(path)
        assert "was killed by SIGSEGV" in bundle.reason
        assert "Segmentation fault" in bundle.stack
        assert "in launch" in bundle.stack
        _, requests = post_mortem.to_replay(bundle)
        assert (1, 2, POISON) in [request.prompt for request in requests]
    assert len(requests) == 1, "who is blamed runs alone"
    monkeypatch.setattr(spawn, "ProcessClient", lambda config, pauses: mortal(pauses=pauses))
    with pytest.raises(Exit):
        replay(str(second))
    assert "was killed by SIGSEGV, and is given up" in capsys.readouterr().out


def test_a_replay_without_a_death_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(GOLDEN, {"max_len": 64, "max_rows": 2, "step_tokens": 64, "threads": 1})
    hello = HELLO._replace(limits=LIMITS._replace(vocab=60))
    replay(str(post_mortem.write(post_mortem.describe(config, hello, "it fell", "", FLIGHT, [ASKED]))))
    printed = capsys.readouterr().out
    assert "it fell" in printed
    assert "1 requests, 1 of them in doubt" in printed
    assert "survived all requests" in printed


def test_another_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for name in ("file", "missing"):
        with pytest.raises(InvalidRequest, match="is not a file that describes"):
            replay(str(tmp_path / name))
