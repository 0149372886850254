"""The numbers of adapter_config.json: found by patterns as PEFT finds them, in linear time."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import AdapterError
from penstock.model.adapter_files import AdapterBase, read_adapter
from penstock.model.load import load_placed, open_checkpoint
from penstock.model.module_pattern import MAX_EXPRESSIONS, MAX_LENGTH, MAX_PATTERNS
from penstock.model.peft_config import read_peft_config

HERE = Path(__file__).parent
MODULES = [
    f"{prefix}layers.{layer}.{part}"
    for prefix in ("", "model.", "model.decoder.")
    for layer in (0, 1, 11)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.q_proj")
]
PATTERNS = [
    "q_proj",
    "proj",
    "self_attn.q_proj",
    r"self_attn\.q_proj",
    r"model\.layers\.(0|11)\..*",
    r"layers\.\d+\.mlp\.down_proj",
    r".*\.(q_proj|k_proj)",
    r".*self_attn.*",
    r"layers\.[01]\.(self_attn|mlp)\.[qk]_proj",
    r"^layers\.0\.mlp\.q_proj",
    r"^model\.(decoder\.)?layers\.1\..*$",
    r"^(model|layers)\..*",
    r"(?:mlp\.)?down_proj$",
    r"1{1,2}\.mlp\.[^.]+",
    r"q_proj|k_proj",
]
SLOW = [r"(?:[a-z0-9_.]+)+!", r"(.*)*\d{40}", "(.*.*)*#", "(a|a|.)*(b|b|.)*(c|.)*(d|.)*(.|.)*!"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_in_peft(pattern: str) -> None:
    config = read_peft_config({"r": 8, "rank_pattern": {pattern: 4}})
    expected = [4 if re.match(rf"(.*\.)?({pattern})$", module) else 8 for module in MODULES]
    assert [config.rank_of(module) for module in MODULES] == expected


def test_the_first_pattern_that_matches_counts() -> None:
    config = read_peft_config({"r": 8, "lora_alpha": 16, "alpha_pattern": {"mlp.q_proj": 3, "q_proj": 5}})
    assert [config.scale_of(f"layers.0.{part}", 8) for part in ("mlp.q_proj", "attn.q_proj", "k_proj")] == [
        3 / 8,
        5 / 8,
        16 / 8,
    ]


@pytest.mark.parametrize("pattern", SLOW)
@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_backtracks_for_years_is_matched_at_once(field: str, pattern: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(HERE / "goldens" / "tied")
    base = AdapterBase.of(checkpoint, load_placed(checkpoint, RefBackend())[1])
    folder = shutil.copytree(HERE / "adapters" / "tied", tmp_path / "adapter")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: {pattern: 3}}))
    assert read_adapter(folder, base).matrices


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"q_proj(?!x)", "linear time: .*look-ahead"),
        (r"(q)_\1", "backreferences"),
        ("(.*a|.*b){500}(.{500})", "too many expressions"),
        (r"q_proj\b.*", "lookarounds"),
        ("q_proj(", "unclosed group"),
        ("^a|b", r"write \^\(a\|b\)"),
        ("a" * (MAX_LENGTH + 1), "513 characters"),
    ],
)
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(AdapterError, match=reason) as error:
        read_peft_config({"rank_pattern": {pattern: 4}}).rank_of("ab" * 500)
    assert f"rank_pattern has the pattern {pattern[:80]!r}" in error.value.message
    assert len(error.value.message) < 500


@pytest.mark.parametrize(
    "table",
    [{f"layers.{i}.q_proj": 1 for i in range(MAX_PATTERNS + 1)}, {f"a*{i}": 1 for i in range(MAX_EXPRESSIONS + 1)}],
)
def test_the_number_of_patterns_is_limited(table: dict[str, int]) -> None:
    with pytest.raises(AdapterError, match="write names of modules instead"):
        read_peft_config({"alpha_pattern": table})


@pytest.mark.parametrize("fields", [{"r": 1e999}, {"rank_pattern": {"q" * 5000: "x" * 5000}}, {"bias": ["x" * 5000]}])
def test_long_and_infinite_values_are_refused_in_a_short_line(fields: dict[str, object]) -> None:
    with pytest.raises(AdapterError) as error:
        read_peft_config(fields)
    assert len(error.value.message) < 600
