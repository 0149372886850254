"""Tests that the smallest fleet that meets its targets is found, and what a simulation draws and is timed by."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli import tune as commands
from penstock.cli.app import run_command
from penstock.cli.fleet_sim import PlannedReplica, planned_replica
from penstock.cli.shell_completion import words_after
from penstock.config import DEFAULTS
from penstock.fleet.scale import ServiceTargets
from penstock.fleet.timing import EngineTiming
from penstock.fleet.timing_fit import fit_timing
from penstock.planning.roofline import MachineProfile, MatmulTimes, ModelCosts, WeightGroup, decode_time, prefill_time
from penstock.tools.fleet_tuning import GOOD, TIER, TunedFleet, plain_fleet, tune
from penstock.tools.plot import ttft_chart
from penstock.tools.sim.simulation import FleetOptions, FleetSimulation
from penstock.tools.traces import Trace, TracedRequest
from tests.core.world import limits

TIMING = EngineTiming()
BUSY = Trace(512, [TracedRequest(at * 60.0, 4000, 20) for at in range(120)])  # a prompt takes 84 ms


def test_the_fewest_replicas_that_meet_the_targets_are_found() -> None:
    tried: list[TunedFleet] = []
    plain = plain_fleet(TIMING, ServiceTargets(400.0, 100.0))
    best = tune(BUSY, plain, 16, tried.append)
    assert best.meets
    fleet = FleetSimulation(BUSY, best.options)
    fleet.run()
    assert best.good == fleet.good_share() >= GOOD
    fewer = [each for each in tried if each.options.replicas < best.options.replicas]
    assert {each.options.replicas for each in fewer} >= {best.options.replicas - 1}
    assert not any(each.meets for each in fewer)
    assert best.changed(plain) == {}
    assert all(each.options.weights.pull for each in tried)  # as in every gateway


def test_without_a_fleet_that_meets_them_the_nearest_is_returned() -> None:
    best = tune(BUSY, plain_fleet(TIMING, ServiceTargets(50.0, 100.0)), 3, lambda _: None)
    assert not best.meets
    assert best.options.replicas == 3


def test_a_prefill_budget_keeps_answers_going() -> None:
    trace = Trace(512, [TracedRequest(0.0, 100, 300), *(TracedRequest(50.0 + at, 8000, 1) for at in range(5))])
    gaps = [
        FleetSimulation(trace, FleetOptions(1, "kv", TIMING._replace(prefill_budget=budget))).run().itl_mean_ms
        for budget in (0, 512)
    ]
    assert TIMING._replace(prefill_budget=512).prompt_tokens(1) == 512
    assert TIMING._replace(prefill_budget=512).prompt_tokens(0) == TIMING.step_tokens
    assert gaps[0] != gaps[1]


@pytest.mark.parametrize("prefill", [(0.0, 0.5, 2.0), (1e-4, 0.5, 0.0), (1e-3, 0.0, 1.0)])
@pytest.mark.parametrize("decode", [5.0, 50.0])
def test_a_step_of_a_slow_engine_keeps_the_usual_target(prefill: tuple[float, float, float], decode: float) -> None:
    slow = TIMING._replace(prefill=prefill, decode=(0.0, 0.0, decode), prefill_budget=2048)
    tokens, left = slow.prompt_tokens(1), max(100.0, 12 * decode) / 1.2 - decode
    assert slow.prefill_ms(tokens) <= left < slow.prefill_ms(tokens + 2)
    assert slow._replace(prefill=(0.0, 0.0, 1e9)).prompt_tokens(1) == 1


def test_the_commands_print_the_fleet_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "trace.jsonl", tmp_path / "ttft.svg"
    line = {"input_length": 4000, "output_length": 20, "hash_ids": []}
    path.write_text("\n".join(json.dumps(line | {"timestamp": at * 60}) for at in range(60)))
    words = ["--trace", str(path), "--ttft", "400", "--itl", "100"]
    assert run_command("tune", [*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["meets"]
    assert found["command"] == f"penstock fleet serve MODEL --replicas {found['replicas']}"
    assert run_command("tune", ["--trace", str(path), "--ttft", "1", "--most", "1"]) == 1
    answer = capsys.readouterr()
    assert "1 replicas, " in answer.out
    assert "[targets_missed]" in answer.err
    assert run_command("fleet sim", ["--trace", str(path), "--policy", "kv", "--plot", str(picture)]) == 0
    assert "kv, mean" in "".join(ElementTree.parse(picture).getroot().itertext())


def repeating(path: Path) -> list[str]:
    """Writes a trace of prompts that come again, and are more than a KV cache of 64 blocks holds."""
    lines = [
        {"timestamp": at * 900, "input_length": 8 * 512 + 20, "output_length": 2}
        | {"hash_ids": list(range(at % 20 * 8, at % 20 * 8 + 8))}
        for at in range(100)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["--trace", str(path), "--most", "1", "--itl", "1000", "--ttft", "70"]


def test_a_ram_tier_is_part_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = repeating(tmp_path / "trace.jsonl")
    small = EngineTiming(kv_tokens=64 * 512)
    for replica, kv_ram in ((PlannedReplica(small), None), (PlannedReplica(small, 1000, 0.5), 4000)):
        monkeypatch.setattr(commands, "planned_replica", lambda *_, replica=replica: replica)
        run_command("tune", [*words, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["ram"], found["kv_ram"]) == (TIER, kv_ram)
        assert f" --kv-ram {kv_ram or 'BYTES'}" in found["command"]
        run_command("tune", words)
        assert ("BYTES: 4 times the bytes of your KV cache" in capsys.readouterr().out) == (kv_ram is None)
    large = PlannedReplica(small, 1000, TIER)  # an engine has such a tier without being told
    monkeypatch.setattr(commands, "planned_replica", lambda *_: large)
    run_command("tune", [*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["ram"], found["kv_ram"]) == (TIER, None)
    assert "--kv-ram" not in found["command"]


def test_the_command_has_the_options_that_it_was_found_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = repeating(tmp_path / "trace.jsonl")
    monkeypatch.setattr(commands, "planned_replica", lambda *_: PlannedReplica(EngineTiming(), 1000))
    given = ["--threads", "2", "--kv", "int8", "--adapter", "a=b c", "--adapter", "d=e", "--strict-config"]
    run_command("tune", ["my model", *words[:-1], "10000", *given, "--json"])
    said = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert said[:6] == ["penstock", "fleet", "serve", "my model", "--replicas", "1"]
    assert sorted(said[6:]) == sorted(given)


def test_what_is_found_for_a_model_knows_the_bytes_of_its_cache(smollm2: Path) -> None:
    engine = DEFAULTS | {"device": "cpu", "kv_memory": 64 << 20, "kv_ram": str(32 << 20)}
    replica = planned_replica(str(smollm2), engine, BUSY)
    assert replica.cache == pytest.approx(64 << 20, rel=0.01)
    assert replica.tier == pytest.approx(0.5, rel=0.01)


def test_a_picture_is_drawn_without_a_name_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*repeating(tmp_path / "trace.jsonl")[:2], "--policy", "kv"]
    for order in (["--json", "--plot"], ["--plot", "--json"]):
        assert run_command("fleet sim", [*words, *order]) == 0
        answer = capsys.readouterr()
        assert len(json.loads(answer.out)["policies"]) == 1
        assert "the picture is in fleet-sim.svg" in answer.err
        ElementTree.parse(tmp_path / "fleet-sim.svg")
        (tmp_path / "fleet-sim.svg").unlink()
    assert "--plot" in words_after(["fleet", "sim", "--plot"])  # what may follow is another option, too
    assert words_after(["fleet", "sim", "--model"]) == []


def test_a_picture_is_valid_and_its_lines_only_rise() -> None:
    root = ElementTree.fromstring(ttft_chart("a < b", {"x": [3.0, 40.0, 500.0], "y": [20.0]}))
    lines = [each.attrib["points"] for each in root.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))


def test_timing_is_fitted_to_what_the_machine_does() -> None:
    profile = MachineProfile(1e-4, 1e-5, 1e10, 1e10, {"F16": MatmulTimes((1, 64, 1024), (1e-10, 2e-10, 2e-9))})
    costs = ModelCosts((WeightGroup("F16", 10**8),), 20_000, (0,) * 30, 576)
    has = limits(max_rows=32, step_tokens=512, block_size=16, num_blocks=2048)
    timing = fit_timing(profile, costs, has, context=500)
    assert (timing.kv_tokens, timing.step_tokens, timing.max_rows) == (2048 * 16, 512, 32)
    for tokens in (64, 256, 512):
        assert timing.prefill_ms(tokens) == pytest.approx(1000 * prefill_time(profile, costs, tokens, 512), rel=0.1)
    for rows in (1, 8, 32):
        share = rows * 500 / timing.kv_tokens
        assert timing.decode_ms(share) == pytest.approx(1000 * decode_time(profile, costs, rows, 500), rel=0.1)
