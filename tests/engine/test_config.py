"""From a config to limits: everything fits, or it is said beforehand."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from penstock.backend import resolve_defaults
from penstock.config import (
    DEFAULTS,
    OPTIONS,
    Config,
    available_memory,
    configure,
    draft_limit,
    total_memory,
)
from penstock.config.speculative import speculation_in, speculation_in_json
from penstock.config.values import is_kv_quantized, read_bytes, written_bytes
from penstock.errors import ConfigError
from penstock.planning.limits import resolve
from penstock.types import Limits


def limits(memory: int = 1 << 30, context: int = 1024, **settings: Any) -> Limits:
    config = resolve_defaults(Config(model="m", device="cpu", **settings))
    return resolve(config, context=context, vocab=10, kv_bytes=1024, memory=memory)


def test_takes_what_all_rows_could_need_and_no_more() -> None:
    assert limits(max_rows=2).num_blocks == 2 * 1024 // 16
    assert limits(max_rows=2, max_len=100).num_blocks == 2 * 7


def test_takes_at_most_the_memory_there_is_or_what_it_was_given() -> None:
    assert limits(memory=1 << 20).num_blocks == (1 << 20) // (16 * 1024)
    assert limits(kv_memory=1 << 19).num_blocks == 32


def test_a_sequence_is_never_longer_than_the_cache() -> None:
    small = limits(kv_memory=1 << 18)
    assert small.max_len == small.num_blocks * small.block_size == 256


def test_a_step_has_a_token_for_every_row() -> None:
    assert limits(max_rows=700, step_tokens=512).step_tokens == 700


def test_steps_suit_the_device_where_none_are_given() -> None:
    sizes = lambda config: (config.max_rows, config.step_tokens, config.prefill_budget)  # noqa: E731
    assert sizes(resolve_defaults(Config(model="m", device="cpu"))) == (64, 512, 192)
    assert sizes(resolve_defaults(Config(model="m", device="cuda", max_rows=3))) == (3, 2048, 384)
    assert sizes(resolve_defaults(Config(model="m", device="cuda", quantize="fp8"))) == (256, 2048, 640)
    assert sizes(resolve_defaults(Config(model="m", device="cuda"), fp8=True)) == (256, 2048, 640)
    assert limits(prefill_budget=100).prefill_budget == 100


def test_steps_hold_the_whole_prompt_of_an_encoder_and_the_cache_two_of_them() -> None:
    complete = resolve_defaults(Config(model="m", device="cpu", max_rows=4), whole=8192)
    assert (complete.step_tokens, complete.kv) == (8192, "f32")
    found = resolve(complete, context=8192, vocab=10, kv_bytes=1024, memory=1 << 40, encoder=True)
    assert (found.encoder, found.max_len, found.num_blocks) == (True, 8192, 2 * (512 + 4))
    few = resolve(
        resolve_defaults(Config(model="m", device="cpu", max_rows=4, step_tokens=100), whole=8192),
        context=8192,
        vocab=10,
        kv_bytes=1024,
        memory=1 << 40,
        encoder=True,
    )
    assert (few.max_len, few.step_tokens, few.num_blocks) == (100, 100, 2 * (7 + 4))


def test_an_encoder_takes_the_step_and_the_cache_it_is_told() -> None:
    complete = resolve_defaults(Config(model="m", device="cpu", max_len=600, kv="f16"), whole=8192)
    assert (complete.step_tokens, complete.kv) == (600, "f16")
    assert resolve_defaults(Config(model="m", device="cpu", max_len=300), whole=8192).step_tokens == 512
    assert resolve_defaults(Config(model="m", device="cuda"), whole=512).kv == "auto"


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="max_len 2000 is beyond the model's context of 1024"):
        limits(max_len=2000)
    config = resolve_defaults(Config(model="m", device="cpu", max_len=2000, max_len_for_all=True))
    found = [resolve(config, context=each, vocab=10, kv_bytes=1024, memory=1 << 30).max_len for each in (1024, 4096)]
    assert found == [1024, 2000]
    with pytest.raises(ConfigError, match="needs at least 32768 bytes; got 100"):
        limits(kv_memory=100)


def test_knows_this_machine() -> None:
    assert 1 << 20 < available_memory() <= total_memory()


def test_a_container_has_what_it_was_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": ["MemAvailable: 4096 kB"], "/sys/fs/cgroup/memory.max": ["2097152"]}
    monkeypatch.setattr("penstock.config._lines", lambda path: files.get(path, []))
    assert available_memory() == total_memory() == 2 << 20
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert available_memory() == 4 << 20 < total_memory()


def test_every_field_that_a_user_may_set_is_described() -> None:
    others = {"model", "name", "yielding", "grammars_wait", "kv_file", "standby", "listen", "secret", "offers"}
    others |= {"max_len_for_all", "descriptors"}
    assert {field.name for field in fields(Config)} == OPTIONS.keys() | others
    for name, option in OPTIONS.items():
        assert option.help.endswith(".")
        assert DEFAULTS[name] == option.check(name, DEFAULTS[name], type(DEFAULTS[name]))


def test_what_a_user_sets_is_checked() -> None:
    found = configure("m", {"step_tokens": 128, "prefill_budget": 64, "block_size": 32, "device": "cpu"}, name="it")
    assert found == Config(model="m", name="it", step_tokens=128, prefill_budget=64, block_size=32, device="cpu")
    for settings, message in (
        ({"block_size": 0}, "block_size must be from 1 to 1024; got 0"),
        ({"block_size": 2000}, "block_size must be from 1 to 1024; got 2000"),
        ({"step_tokens": -1}, "step_tokens must be 0 or more; got -1"),
        ({"step_tokens": "512"}, "step_tokens takes a whole number; got '512'"),
        ({"kv_memory": "much"}, "kv_memory takes a number of bytes, such as 500M or 8G; got 'much'"),
        ({"kv_disk_bytes": "4K"}, "kv_disk_bytes must be 1048576 or more; got 4096"),
        ({"kv": 8}, "kv is one format, or two, .*; got 8"),
        *(
            ({"speculation": wrong}, f"speculation is auto, off, or the most tokens .*; got {wrong!r}")
            for wrong in ("fast", -1, "-1", 2.5, True, None)
        ),
        ({"config": [8]}, "config takes a text; got 8"),
        ({"strict_config": 1}, "strict_config takes True or False; got 1"),
        ({"step_tokens": 64, "prefill_budget": 65}, "prefill_budget 65 is more than step_tokens 64"),
        (
            {"speed": 1, "width": 2},
            "unknown options: speed, width; there are adapter, adapter_memory, block_size",
        ),
        ({"max_tokens": 1, "step_tokens": 2}, "option step_tokens was given twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            configure("m", settings, log=lambda _: None)


@pytest.mark.parametrize(
    ("text", "count", "written"),
    [
        ("0", 0, "0"),
        ("1000", 1000, "1000"),
        ("500M", 500 << 20, "500M"),
        ("8G", 8 << 30, "8G"),
        ("8 GiB", 8 << 30, "8G"),
        ("8GB", 8 * 10**9, "7812500K"),
        ("1.5k", 1536, "1536"),
        ("2048T", 2048 << 40, "2048T"),
    ],
)
def test_bytes_may_have_a_unit(text: str, count: int, written: str) -> None:
    assert configure("m", {"kv_memory": text, "kv_ram": text}) == Config(model="m", kv_memory=count, kv_ram=str(count))
    assert written_bytes(count) == written
    assert read_bytes(written) == count


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1e9", "0x10", "8GG", "8gb", "8 bytes", "١", "8,000", "0.5", "1.5B", f"{10**400}.5T"]
)
def test_other_texts_are_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        read_bytes(text)


@pytest.mark.parametrize(
    ("given", "text", "limit"),
    [("auto", "auto", None), ("off", "off", 0), (0, "off", 0), ("0", "off", 0), (4, "4", 4), ("16", "16", 16)],
)
def test_speculation(given: Any, text: str, limit: int | None) -> None:
    found = configure("m", {"speculation": given})
    assert (found.speculation, draft_limit(found.speculation)) == (text, limit)
    assert configure("m", {"speculation": found.speculation}) == found


@pytest.mark.parametrize(
    ("given", "means", "ignored"),
    [
        ({"method": "ngram"}, "auto", ""),
        ({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}, "5", "prompt_lookup_max"),
        ({"model": "[ngram]", "num_speculative_tokens": 3}, "3", ""),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "auto", "suffix_decoding_max_tree_depth"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 5]], "model": None},
            "auto",
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_vllms_speculative_config(given: dict[str, Any], means: str, ignored: str) -> None:
    lines: list[str] = []
    options = speculation_in(given, lines.append)
    assert options == speculation_in_json(json.dumps(given), lambda _: None) == {"speculation": means}
    assert lines == ([f"warning: fields of speculative_config without effect here: {ignored}"] if ignored else [])
    assert configure("m", {"speculation": means}).speculation == means


@pytest.mark.parametrize("method", [{}, {"method": "draft_model"}, {"method": "eagle3"}])
def test_vllms_speculative_config_of_a_draft_model(method: dict[str, str]) -> None:
    given = {"model": "small", "num_speculative_tokens": 3, **method}
    options = speculation_in(given, pytest.fail)
    assert options == {"speculation": "3", "draft": "small"}
    assert configure("m", options).draft == "small"


@pytest.mark.parametrize("given", [{"method": "mtp"}, {"method": "deepseek_mtp"}, {"model": "qwen3_next_mtp"}])
def test_vllms_speculative_config_of_a_head(given: dict[str, str]) -> None:
    options = speculation_in(given | {"num_speculative_tokens": 2}, pytest.fail)
    assert options == {"speculation": "2", "draft": "mtp"}
    found = configure("m", options)
    assert (found.draft, found.draft_model) == ("mtp", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "speculative_config is not JSON"),
        ("[]", "speculative_config is an object"),
        ("{}", "speculative_config names no method: use ngram, ngram_gpu, suffix"),
        ('{"method": "eagle", "model": "some/head"}', r"drafts by 'eagle' \(some/head\), which is not supported"),
        ('{"method": "eagle3"}', "speculative_config names no model: use ngram"),
        (
            '{"method": "draft_model"}',
            "speculative_config names no model: use ngram",
        ),
        ('{"method": "ngram", "model": "small"}', "drafts by 'ngram'"),
        ('{"method": "mtp", "model": "small"}', r"drafts by 'mtp' \(small\)"),
        ('{"method": "ngram", "width": 3}', "unknown fields: width; there are "),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens .* above 0; got 0"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "num_speculative_tokens .* above 0; got '4'"),
    ],
)
def test_a_speculative_config_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculation_in_json(text, lambda _: None)


def test_older_names_of_options_still_work_and_say_so() -> None:
    lines: list[str] = []
    found = configure("m", {"max_tokens": 128, "mixed_tokens": 64}, log=lines.append)
    assert (found.step_tokens, found.prefill_budget) == (128, 64)
    assert lines == [
        "option max_tokens is now called step_tokens; the older name still works",
        "option mixed_tokens is now called prefill_budget; the older name still works",
    ]


def windowed(memory: int = 1 << 40, **settings: Any) -> Limits:
    """Resolves limits for a model like Gemma 3: one group of layers sees everything, five see 512 positions."""
    config = resolve_defaults(Config(model="m", device="cpu", **settings))
    return resolve(config, context=32768, vocab=10, kv_bytes=1024, memory=memory, windows=(0, *[512] * 5))


def test_groups_with_a_window_need_no_more_blocks_than_it_has() -> None:
    found = windowed(max_rows=4, max_len=8192)
    beside = 5 * (33 + 512 // 16)  # of the one whose prompt is computed
    assert found.num_blocks == 4 * 512 + 3 * 5 * 33 + beside
    assert (found.max_len, found.windows) == (8192, (0, 512, 512, 512, 512, 512))


def test_windows_leave_room_for_longer_sequences() -> None:
    memory = 2000 * 16 * 1024
    assert windowed(memory).max_len == (2000 - 5 * 65) * 16
    assert limits(memory, context=32768).max_len == 32000, "its layers are those of one group, not of six"


def test_a_cache_that_holds_less_than_the_windows_shortens_sequences() -> None:
    small = windowed(60 * 16 * 1024)
    assert small.max_len == 160
    with pytest.raises(ConfigError, match="needs at least 196608 bytes"):
        windowed(11 * 16 * 1024)


def test_keys_and_values_may_have_formats_of_their_own() -> None:
    kept = {kv: configure("m", {"kv": kv}).kv for kv in ("int8", "int8:int4", "int4:int4", "auto:int4")}
    assert kept == {"int8": "int8", "int8:int4": "int8:int4", "int4:int4": "int4", "auto:int4": "auto:int4"}
    assert [is_kv_quantized(kv) for kv in ("auto", "f16:f32", "f16:int4", "int8")] == [False, False, True, True]
    for wrong in ("", ":", "int8:", "int8:int4:int4", 8):
        with pytest.raises(ConfigError, match=r"kv is one format, or two, KEYS:VALUES, as in int8:int4; got"):
            configure("m", {"kv": wrong})
