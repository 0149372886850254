"""Tests that the simulator does what its engines' timing says, and that routing by blocks pays in it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from penstock.cli.app import app
from penstock.errors import InvalidRequest
from penstock.fleet.route import RoutingWeights
from penstock.fleet.timing import EngineTiming
from penstock.tools.sim.policies import NAMES
from penstock.tools.sim.simulation import FleetOptions, FleetSimulation, simulate
from penstock.tools.traces import Trace, TracedRequest, read_trace

TIMING = EngineTiming()
SMALL = EngineTiming(kv_tokens=64 * 512)


def conversations(users: int, turns: int, seed: int = 0) -> Trace:
    """Makes conversations whose prompts grow by two to six blocks a turn."""
    random, requests, blocks = Random(seed), [], 0
    for _ in range(users):
        path: list[int] = []
        at = random.uniform(0, 20_000)
        for _ in range(turns):
            fresh = random.randint(2, 6)
            path += range(blocks, blocks + fresh)
            blocks += fresh
            requests.append(
                TracedRequest(at, len(path) * 512 + random.randint(1, 511), random.randint(1, 120), tuple(path))
            )
            at += random.uniform(3_000, 9_000)
    return Trace(512, sorted(requests, key=lambda each: each.arrival))


def test_one_request_takes_what_the_polynomials_say() -> None:
    report = simulate(Trace(512, [TracedRequest(0.0, 10_000, 11)]), FleetOptions(1, "kv"))
    assert report.ttft_mean_ms == pytest.approx(TIMING.prefill_ms(8192) + TIMING.prefill_ms(10_000 - 8192))
    share = 20 / 512  # blocks of the prompt and the answer
    assert report.itl_mean_ms == pytest.approx(TIMING.decode_ms(share))
    assert report.reuse == 0


def test_the_second_turn_computes_only_what_is_new() -> None:
    path = tuple(range(10))
    turns = [TracedRequest(0.0, 5 * 512 + 10, 2, path[:5]), TracedRequest(60_000.0, 10 * 512 + 10, 2, path)]
    report = simulate(Trace(512, turns), FleetOptions(2, "kv"))
    assert report.reuse == pytest.approx(5 * 512 / (15 * 512 + 20))
    times = TIMING.prefill_ms(5 * 512 + 10) + TIMING.prefill_ms(5 * 512 + 10)
    assert report.ttft_mean_ms == pytest.approx(times / 2)


def test_a_request_that_comes_during_decode_waits_for_one_step_only() -> None:
    turns = [TracedRequest(0.0, 512, 1000), TracedRequest(2_000.0, 512, 1)]
    report = simulate(Trace(512, turns), FleetOptions(1, "round-robin"))
    step = TIMING.decode_ms(3 / 512)
    assert report.ttft_p99_ms <= TIMING.prefill_ms(512) + 2.1 * step


def test_a_full_cache_makes_requests_wait_and_all_of_them_end() -> None:
    requests = [TracedRequest(0.0, 20 * 512, 50) for _ in range(12)]
    report = simulate(Trace(512, requests), FleetOptions(1, "least-loaded", SMALL))
    alone = simulate(Trace(512, requests), FleetOptions(1, "least-loaded", EngineTiming()))
    assert report.ttft_p99_ms > alone.ttft_p99_ms
    with pytest.raises(InvalidRequest, match="more than the KV cache of a replica holds"):
        simulate(Trace(512, [TracedRequest(0.0, 65 * 512, 1)]), FleetOptions(1, "kv", SMALL))
    with pytest.raises(InvalidRequest, match="1 replica or more"):
        simulate(Trace(512, requests), FleetOptions(0, "kv"))


@pytest.mark.parametrize("gateways", [1, 3])
def test_requests_wait_at_the_gateway_while_no_replica_has_a_row(gateways: int) -> None:
    trace = Trace(512, [TracedRequest(float(at), 100, 30) for at in range(40)])
    few = EngineTiming(max_rows=4)
    fleet = FleetSimulation(trace, FleetOptions(2, "kv", few, gateways=gateways))
    fleet.run()
    assert sorted(each.id for each in fleet.requests) == list(range(40))
    assert all(each.finished >= each.first_token > each.sent >= each.request.arrival for each in fleet.requests)
    late = [each for each in fleet.requests if each.sent > each.request.arrival]
    there = [sum(other.sent <= each.sent < other.finished for other in fleet.requests) for each in fleet.requests]
    others = FleetSimulation(trace, FleetOptions(2, "round-robin", few))
    others.run()
    assert all(each.sent == each.request.arrival for each in others.requests)
    assert len(late) > 20
    assert max(there) <= 8 * gateways  # a gateway hears of another's requests with the next report
    if gateways == 1:
        assert [each.id for each in fleet.requests] == list(range(40))


def test_replicas_of_one_machine_slow_each_other_down_while_both_compute() -> None:
    """The second prompt comes when half of the first is computed. Each then takes twice as long, until one is done."""
    prompts = [TracedRequest(0.0, 1000, 1), TracedRequest(500.0, 1000, 1)]
    timing = EngineTiming(prefill=(0.0, 1.0, 0.0))
    alone = FleetSimulation(Trace(512, prompts), FleetOptions(2, "round-robin", timing))
    shared = FleetSimulation(Trace(512, prompts), FleetOptions(2, "round-robin", timing, contention=(1.0, 2.0)))
    alone.run()
    shared.run()
    assert [each.finished for each in alone.requests] == pytest.approx([1000.0, 1500.0])
    assert [each.finished for each in shared.requests] == pytest.approx([1500.0, 2000.0])


def test_decode_steps_slow_down_while_another_replica_computes() -> None:
    requests = [TracedRequest(0.0, 10, 101), TracedRequest(300.0, 400, 1)]
    timing = EngineTiming(prefill=(0.0, 1.0, 0.0), decode=(0.0, 0.0, 10.0))
    fleet = FleetSimulation(Trace(512, requests), FleetOptions(2, "round-robin", timing, contention=(1.0, 1.5)))
    fleet.run()
    assert fleet.requests[1].finished == pytest.approx(300 + 1.5 * 400)
    assert fleet.requests[0].finished == pytest.approx(10 + 100 * 10 + 600 / 3)  # in 600 ms it did what takes 400


def test_later_steps_of_a_prompt_pay_for_the_tokens_before_them() -> None:
    timing = EngineTiming(prefill=(0.0005, 0.5, 0.0), step_tokens=400, context_ms=0.001)
    whole = 0.0005 * 1000**2 + 0.5 * 1000  # as one step would take
    for tokens, cached in ((1000, 0), (600, 400), (200, 800)):
        expected = 0.0005 * (1000**2 - cached**2) + 0.5 * tokens
        assert timing.prompt_ms(tokens, cached) == pytest.approx(expected)
    report = simulate(Trace(512, [TracedRequest(0.0, 1000, 1)]), FleetOptions(1, "kv", timing))
    assert report.ttft_mean_ms == pytest.approx(whole)


def test_routing_by_blocks_reuses_more_and_answers_sooner() -> None:
    trace = conversations(40, 6)
    timing = EngineTiming(kv_tokens=160 * 512)
    reports = {name: simulate(trace, FleetOptions(4, name, timing)) for name in NAMES}
    assert reports["kv"].reuse > 1.2 * reports["round-robin"].reuse
    assert reports["kv"].ttft_mean_ms < min(reports[name].ttft_mean_ms for name in ("round-robin", "least-loaded"))
    assert reports["kv"].ttft_mean_ms <= 1.02 * reports["dynamo"].ttft_mean_ms


def test_a_ram_tier_and_pulls_reuse_more() -> None:
    trace = conversations(40, 6)
    plain = simulate(trace, FleetOptions(4, "kv", SMALL))
    tiered = simulate(trace, FleetOptions(4, "kv", SMALL, host_factor=4))
    pulled = simulate(trace, FleetOptions(4, "kv", SMALL, RoutingWeights(pull=True), host_factor=4))
    assert plain.reuse < tiered.reuse < pulled.reuse
    assert pulled.ttft_mean_ms < plain.ttft_mean_ms


def test_sixteen_gateways_do_not_herd_on_the_holder_of_a_hot_prefix() -> None:
    """Each gateway knows of its own requests and of the replicas' reports only."""
    random, requests = Random(0), []
    for at in range(1500):
        path = (*range(12), *range(100 + at * 4, 100 + at * 4 + random.randint(0, 3)))
        requests.append(TracedRequest(at * 25.0, len(path) * 512 + 9, random.randint(1, 200), path))
    for gateways in (1, 16):
        fleet = FleetSimulation(Trace(512, requests), FleetOptions(8, "kv", gateways=gateways))
        report = fleet.run()
        assert fleet.imbalance() <= 1.3
        assert report.reuse > 0.8


def test_a_simulation_repeats() -> None:
    trace = conversations(10, 4)
    assert simulate(trace, FleetOptions(3, "kv", SMALL)) == simulate(trace, FleetOptions(3, "kv", SMALL))


MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 7, 8]}
"""
DYNAMO = """\
{"timestamp": 5, "event": {"event_type": "tool_start"}}
{"timestamp": 9, "event": {"event_type": "request_end", "request": {"output_tokens": 3, "request_received_ms": 700,
"replay": {"trace_block_size": 16, "input_length": 40, "input_sequence_hashes": [11, 12, 13]}}}}
""".replace(",\n", ", ")
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,9,1
""".replace("\n", "\r\n")


def test_traces_of_three_kinds_are_read(tmp_path: Path) -> None:
    def read(text: str) -> Trace:
        (tmp_path / "trace").write_bytes(text.encode())
        return read_trace(tmp_path / "trace")

    first, second = read(MOONCAKE).requests
    assert (first.arrival, second.arrival, second.output) == (0.0, 2000.0, 1)
    assert len(first.hashes) == 2  # the third block is not full
    assert second.hashes[:2] == first.hashes
    assert len(second.hashes) == 3
    assert read(MOONCAKE).at_speed(4).requests[1].arrival == 500.0
    dynamo = read(DYNAMO)
    assert (dynamo.block_size, len(dynamo.requests[0].hashes), dynamo.requests[0].output) == (16, 2, 3)
    assert read(AZURE).requests[1] == TracedRequest(pytest.approx(1500.0), 9, 1)


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[1]", "{}", '{"event": "x"}', MOONCAKE.replace("1100", "-1"), MOONCAKE.replace("3000", "NaN")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(InvalidRequest, match=r"has no requests|is not a trace of Mooncake, Dynamo or Azure"):
        read_trace(tmp_path / "trace")


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ending:
        app(["fleet", "sim", *words])
    return int(ending.value.code or 0)


def test_the_command_prints_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    assert run("--trace", str(path), "--replicas", "2", "--json") == 0
    policies = json.loads(capsys.readouterr().out)["policies"]
    assert [each["policy"] for each in policies] == list(NAMES)
    keys = {"policy", "ttft_mean_ms", "ttft_p99_ms", "itl_mean_ms", "reuse", "goodput"}
    assert all(each.keys() == keys for each in policies)
    assert run("--trace", str(path), "--policy", "kv", "--speed", "2", "--ram", "4", "--pull") == 0
    assert "mean TTFT ms" in capsys.readouterr().out
    assert run() == 2
    assert run("--trace", str(path), "--policy", "best") == 2
    assert run("--trace", str(tmp_path / "none")) == 1
