"""Tests that admission refuses nobody falsely, and hardly admits anybody falsely, on a virtual clock."""

from __future__ import annotations

from random import Random

from penstock.errors import WaitTooLong
from tests.server.virtual_server import Sent, VirtualServer, false_admissions, false_refusals

LONG, SHORT = 1024, 16  # tokens of long prompts and of the cached prefix; of what differs after it
PATIENCE = 15.0  # seconds: 64 long prompts take five times as long


def after_long_prompts(server: VirtualServer, long: int = 12) -> tuple[int, ...]:
    """Has a server compute long prompts; returns a prefix that it has cached."""
    prefix = server.unique(LONG)
    server.send(prefix)
    server.run()
    server.send_all([server.unique(LONG) for _ in range(long)])
    server.run()
    return prefix


def burst(server: VirtualServer, prefix: tuple[int, ...], size: int = 64) -> list[Sent]:
    """Sends requests over a prefix at once, and lets all end."""
    sent = server.send_all([(*prefix, *server.unique(SHORT)) for _ in range(size)])
    server.run()
    return sent


def test_a_burst_over_a_cached_prefix_is_not_refused_after_long_prompts() -> None:
    server = VirtualServer(patience=PATIENCE)
    prefix = after_long_prompts(server)
    for _ in range(2):
        sent = burst(server, prefix)
        assert false_refusals(sent, PATIENCE) == 0
        assert max(each.waited for each in sent) < PATIENCE / 2  # nobody waits for long, so refusals would be false


def test_a_burst_over_one_new_prefix_counts_the_prefix_once() -> None:
    server = VirtualServer(patience=PATIENCE)
    after_long_prompts(server)
    sent = burst(server, server.unique(LONG))
    assert false_refusals(sent, PATIENCE) == 0
    assert max(each.waited for each in sent) < PATIENCE / 2


def test_a_cached_burst_passes_long_prompts_that_wait() -> None:
    server = VirtualServer(patience=PATIENCE)
    prefix = after_long_prompts(server)
    server.send_all([server.unique(LONG) for _ in range(10)])
    server.run(1.0)
    assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_a_burst_after_idle_time_is_not_refused() -> None:
    server = VirtualServer(patience=PATIENCE)
    prefix = after_long_prompts(server)
    server.run(30.0)
    assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_a_burst_after_a_restart_that_adopts_the_cache_is_not_refused() -> None:
    server = VirtualServer(patience=PATIENCE)
    prefix = after_long_prompts(server)
    server.engines[0].restart()
    for _ in range(2):
        assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_agents_whose_prompts_grow_are_not_refused() -> None:
    server, waits = VirtualServer(patience=PATIENCE), list[Sent]()
    after_long_prompts(server)
    prompts = [server.unique(LONG // 2) for _ in range(24)]
    burst(server, prompts[0], size=8)
    for _ in range(8):
        turns = server.send_all(prompts)
        server.run()
        waits += turns
        prompts = [(*prompt, *turn.answer, *server.unique(SHORT)) for prompt, turn in zip(prompts, turns, strict=True)]
    later = waits[24:]  # the first prompts of all are long and new
    assert false_refusals(later, PATIENCE) == 0
    assert not any(each.refusal for each in later)


def test_one_model_is_not_refused_for_the_load_of_another() -> None:
    """Both share the machine, so steps take twice as long from one moment to the next."""
    server = VirtualServer(patience=PATIENCE)
    prefix = after_long_prompts(server)
    server.engines[0].slowness = 2.0
    for _ in range(3):
        assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_drafts_that_turn_out_wrong_refuse_nobody() -> None:
    server = VirtualServer(patience=PATIENCE)
    server.engines[0].rejected = 4
    prefix = after_long_prompts(server)
    for _ in range(2):
        assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_a_gateway_knows_prefixes_that_others_have_sent() -> None:
    server = VirtualServer(engines=2, patience=PATIENCE, indexed=True)
    after_long_prompts(server)
    other = VirtualServer(engines=2, patience=PATIENCE)  # another gateway of the same engines
    other.engines = server.engines
    prefix = other.unique(LONG)
    other.send_all([prefix, prefix])
    other.run()
    server.now = other.now
    assert false_refusals(burst(server, prefix), PATIENCE) == 0


def test_a_list_of_prompts_does_not_refuse_itself() -> None:
    server = VirtualServer(patience=PATIENCE)
    after_long_prompts(server)
    for _ in range(2):
        request = object()
        prompts = [server.unique(LONG // 4) for _ in range(200)]
        sent = [server.send(prompt, sender=request, ttft=2.0) for prompt in prompts]
        assert not any(each.refusal for each in sent)
        alone = server.send(server.unique(LONG), ttft=2.0)
        assert alone.refusal is not None  # for others a list is a line
        server.run()


def test_unique_prompts_after_cached_bursts_are_not_admitted_too_late() -> None:
    server, target = VirtualServer(), 5.0
    prefix = server.unique(LONG)
    server.send(prefix)
    server.run()
    for _ in range(3):
        burst(server, prefix)
    sent = server.send_all([server.unique(LONG // 2) for _ in range(40)], ttft=target)
    server.run()
    assert false_admissions(sent, target) <= 2
    admitted = [each.waited for each in sent if each.refusal is None]
    assert max(admitted) > target / 2  # the time that is allowed is used


def test_what_is_admitted_at_three_times_the_capacity_is_in_time() -> None:
    server, random, target = VirtualServer(), Random(5), 2.0
    until = 60.0
    while server.now < until:  # the capacity is some 8 requests a second
        server.send(server.unique(64), answer=16, ttft=target)
        server.run(random.expovariate(24))
    server.run()
    admitted = [each for each in server.all if each.refusal is None]
    assert false_admissions(admitted, target) <= 0.01 * len(admitted)
    assert len(admitted) < 0.7 * len(server.all)
    busy = server.engines[0].stats.busy_seconds
    assert busy > 0.95 * until  # nothing stands idle


def test_a_prefix_that_was_evicted_is_not_taken_for_cached_for_long() -> None:
    server = VirtualServer(patience=PATIENCE)
    after_long_prompts(server)
    prompts = [server.unique(LONG) for _ in range(12)]
    server.send_all(prompts)
    server.run()
    for _ in range(3):
        server.engines[0].scheduler.cache.flush()
        sent = server.send_all(prompts, ttft=5.0)
        server.run()
    assert false_admissions(sent, 5.0) <= 1


def test_a_refusal_has_a_forecast_a_limit_and_a_time_to_retry_that_agree() -> None:
    server, target = VirtualServer(), 3.0
    after_long_prompts(server)
    sent = server.send_all([server.unique(LONG) for _ in range(30)], ttft=target)
    errors = [each.refusal for each in sent if each.refusal is not None]
    assert errors
    for error in errors:
        assert isinstance(error, WaitTooLong)
        words = str(error).split()
        forecast, limit = float(words[7]), float(words[10])
        retry = int(words[-2])
        assert forecast > limit >= target
        assert forecast - limit - 0.1 <= retry <= forecast - limit + 1.1
        assert error.retry_after == retry
    server.run(errors[0].retry_after)
    assert server.send(server.unique(LONG), ttft=target).refusal is None
