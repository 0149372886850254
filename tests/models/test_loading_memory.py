"""A model in memory is there once: beside its packed weights, only a little is held while it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.model.tensor import FORMATS, INTEGERS, Tensor
from tests.models.conftest import write_safetensors

DIM, HIDDEN, LAYERS, VOCAB, GROUP = 1024, 2048, 8, 256, 128
SHAPES = {
    "self_attn.q_proj": (DIM, DIM),
    "self_attn.k_proj": (DIM // 4, DIM),
    "self_attn.v_proj": (DIM // 4, DIM),
    "self_attn.o_proj": (DIM, DIM),
    "mlp.gate_proj": (HIDDEN, DIM),
    "mlp.up_proj": (HIDDEN, DIM),
    "mlp.down_proj": (DIM, HIDDEN),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
LOAD = """
import re, sys, threading, time
from pathlib import Path
from penstock.backend.cpu import CpuBackend
from penstock.model.load import load_model, open_checkpoint

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

backend, most, done = CpuBackend(1), 0, threading.Event()

def watch():
    global most
    while not done.wait(0.001):
        most = max(most, held())

before = held()
watcher = threading.Thread(target=watch)
watcher.start()
checkpoint = open_checkpoint(Path(sys.argv[1]))
backend.load(load_model(checkpoint, backend))
done.set()
watcher.join()
packed = backend.footprint(checkpoint.spec, checkpoint.tensors.values()).weights
left = held()
print(max(most, left) - before, left - before, packed)
"""


def plain(rows: int, width: int) -> dict[str, Tensor]:
    return {"weight": Tensor("", FORMATS["BF16"], (rows, width), np.full(2 * rows * width, 0x3C, np.uint8))}


def awq(rows: int, width: int) -> dict[str, Tensor]:
    words = {"qweight": (width, rows // 8), "qzeros": (width // GROUP, rows // 8)}
    parts = {
        name: Tensor("", INTEGERS["I32"], shape, np.full(4 * shape[0] * shape[1], 0x53, np.uint8))
        for name, shape in words.items()
    }
    scales = np.full((width // GROUP, rows), 0.01, np.float16)
    return parts | {"scales": Tensor("", FORMATS["F16"], scales.shape, scales.reshape(-1).view(np.uint8))}


def write_model(folder: Path, make: Any, **config: Any) -> None:
    """In two files."""
    norms = ("input_layernorm", "post_attention_layernorm")
    gain = Tensor("", FORMATS["BF16"], (DIM,), np.full(2 * DIM, 0x3C, np.uint8))
    files: list[dict[str, Tensor]] = [plain_top(gain), {}]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        files[layer % 2] |= {f"{prefix}.{norm}.weight": gain for norm in norms}
        for name, shape in SHAPES.items():
            files[layer % 2] |= {f"{prefix}.{name}.{part}": tensor for part, tensor in make(*shape).items()}
    for i, tensors in enumerate(files):
        write_safetensors(folder / f"{i}.safetensors", tensors)
    places = {name: f"{i}.safetensors" for i, tensors in enumerate(files) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))


def plain_top(gain: Tensor) -> dict[str, Tensor]:
    return {"model.norm.weight": gain, "model.embed_tokens.weight": plain(VOCAB, DIM)["weight"]}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what a process holds")
@pytest.mark.parametrize(("make", "config"), [(plain, {}), (awq, {"quantization_config": AWQ})])
def test_no_second_copy_is_held(tmp_path: Path, make: Any, config: Any) -> None:
    write_model(tmp_path, make, **config)
    told = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    most, held, packed = map(int, told.stdout.split())
    assert packed > 35 << 20
    assert most - packed < 24 << 20  # what is made of one weight, and threads' own
    assert held > 0.9 * packed
