"""Small models with a field of their metadata replaced: each is refused or computed, without a crash, and none takes
memory that its files do not explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from penstock.config import configure
from penstock.engine.build import open_engine
from penstock.errors import MalformedFile
from penstock.model.load import open_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_models.py"
GOLDENS = Path(__file__).parent / "goldens"
HUGE = (1 << 31) - 1


def changed(golden: str, folder: Path, **fields: object) -> Path:
    for file in (GOLDENS / golden).glob("*.safetensors*"):
        (folder / file.name).symlink_to(file)
    values = json.loads((GOLDENS / golden / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | fields))
    return folder


@pytest.mark.parametrize(
    ("golden", "fields", "named"),
    [
        ("qwen35moe", {"num_attention_heads": HUGE}, "a width of all query heads of "),
        ("qwen3next", {"num_attention_heads": HUGE}, "a width of all query heads of "),
        ("nemotron_h_moe", {"mamba_num_heads": HUGE}, "a width of recurrent layers of "),
        ("nemotron_h_moe", {"ssm_state_size": HUGE}, "a width of recurrent layers of "),
        ("bamba", {"mamba_d_state": 1 << 24}, "a width of recurrent layers of "),
        ("falcon", {"hidden_size": HUGE - 1}, "heads of 536870911 dimensions"),
        ("gemma4", {"num_kv_shared_layers": HUGE}, "num_kv_shared_layers"),
        ("tied", {"num_hidden_layers": 10_000}, "no tensors of layer 2"),
        ("tied", {"intermediate_size": 1 << 20}, "a width of an MLP of 1048576, and the largest dimension of a tensor"),
        ("tied", {"vocab_size": 1 << 24}, "a vocabulary of 16777216"),
        ("qwen3_moe", {"num_local_experts": 10_000}, "a number of experts of 10000"),
        ("stablelm_12b", {"num_key_value_heads": HUGE}, "no tensor for 'layers.0.k_norm."),
        ("hunyuan_v1_moe", {"head_dim": 2}, "head_dim is 2"),
    ],
)
def test_sizes_are_compared_with_the_tensors_before_memory_is_taken(
    golden: str, fields: dict[str, object], named: str, tmp_path: Path
) -> None:
    folder = changed(golden, tmp_path, **fields)
    open_checkpoint(GOLDENS / golden)  # whatever is made once is made now
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFile, match=named):
            open_checkpoint(folder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_context_of_billions_takes_no_block_tables_of_gigabytes(tmp_path: Path) -> None:
    """Every layer of this model has a window, so its cache holds sequences of any length."""
    folder = changed("mistral", tmp_path, max_position_embeddings=HUGE)
    assert open_checkpoint(folder).spec.max_len == HUGE
    engine = open_engine(configure(folder, {"device": "cpu", "threads": 1, "kv_memory": 1 << 20, "max_rows": 2}))
    assert engine.limits.max_len == (1 << 20) // 8 // 4 // 2 * 16
    engine.close()


@pytest.mark.parametrize("arguments", [["--huge", "--cases", "150", "--seed", "1"], ["--cases", "100", "--seed", "2"]])
def test_fields_at_random(arguments: list[str]) -> None:
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "0 bad" in done.stdout
