"""Makes tests/models/odd: configurations that nobody has published, against what transformers computes of them.

A golden is the config.json that transformers writes, and expected.npz: the names and shapes of its tensors, a prompt of
330 tokens, its logits at 24 positions, and 20 greedy steps. Weights are not stored: here and in tests,
tests/models/odd_weights.py makes them out of names and shapes. Of an encoder there are hidden states and no steps.

To add one, write a line in odd_dense.py, odd_experts.py or odd_recurrent.py: a name, transformers' model type and what
its config says besides `SIZES` (odd_parts.py), of which a config takes what it knows. Then run the script with the
name; tests/models/test_odd_goldens.py takes every folder that it finds. Needs torch and
transformers, which the project itself does not:

    python scripts/make_odd_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import torch
from odd_dense import DENSE
from odd_experts import EXPERTS
from odd_parts import SIZES
from odd_recurrent import RECURRENT
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

TESTS = Path(__file__).parents[1] / "tests" / "models"
sys.path.insert(0, str(TESTS))
from odd_weights import random_weights  # noqa: E402

FOLDER = TESTS / "odd"
PROMPT, POSITIONS, STEPS = 330, 24, 20
SPECIAL = 3  # the first tokens, which are not in prompts: RoBERTa gives padding no position
PROMPTS = 25  # that are tried
MARGIN = 0.01  # between the best and the next token of every greedy step
NOISE = 1e-7  # relative; what it changes shows whether a router's choice hangs by a thread

GOLDENS = DENSE | EXPERTS | RECURRENT


def main() -> None:
    torch.set_num_threads(1)  # more cost more than they save
    for name in sys.argv[1:] or GOLDENS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        kind, says = GOLDENS[name]
        config = config_of(kind, says)
        with TemporaryDirectory() as folder:
            shapes = write_weights(config, Path(folder))
            model = loaded(config, Path(folder))
            (FOLDER / name).mkdir(parents=True)
            shutil.copy(Path(folder) / "config.json", FOLDER / name)
        weights = np.array(json.dumps(shapes, separators=(",", ":")))
        np.savez_compressed(FOLDER / name / "expected.npz", weights=weights, **expected_of(model, name))
        print(f"{name:32} {sum(file.stat().st_size for file in (FOLDER / name).iterdir()):7} bytes")


def config_of(kind: str, says: dict[str, Any]) -> PreTrainedConfig:
    """Returns a config that says `says`, and of `SIZES` what its class has a field for."""
    other = CONFIG_MAPPING[kind].attribute_map
    known = {field.name for field in fields(CONFIG_MAPPING[kind])}
    known |= {key for key in other if other[key] not in SIZES | says}
    return CONFIG_MAPPING[kind](**deepcopy({key: size for key, size in SIZES.items() if key in known} | says))


def is_encoder(config: PreTrainedConfig) -> bool:
    named = "bert" in config.model_type or config.model_type == "mpnet"
    return named or bool(getattr(config, "use_bidirectional_attention", False))


def kind_of(config: PreTrainedConfig) -> type[AutoModel]:
    return AutoModel if is_encoder(config) else AutoModelForCausalLM


def write_weights(config: PreTrainedConfig, folder: Path) -> dict[str, list[int]]:
    """Writes a checkpoint with the tensors that transformers saves, each made out of its name; returns their shapes."""
    model = kind_of(config).from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
    save_file(random_weights(config.to_dict(), shapes), folder / "model.safetensors", {"format": "pt"})
    return shapes


def loaded(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    model, report = kind_of(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def computed(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits of all positions, or an encoder's hidden states."""
    with torch.no_grad():
        answer = model(torch.tensor(tokens)[None])
    return (answer.last_hidden_state if is_encoder(model.config) else answer.logits)[0].float().numpy()


def expected_of(model: PreTrainedModel, name: str) -> dict[str, np.ndarray]:
    """Returns what a backend must compute. Prompts are tried until rounding decides neither over an expert nor over a
    token."""
    positions = np.linspace(0, PROMPT - 1, POSITIONS).astype(np.int32)
    for seed in range(crc32(name.encode()), crc32(name.encode()) + PROMPTS):
        tokens = np.random.default_rng(seed).integers(SPECIAL, model.config.vocab_size, size=PROMPT)
        logits = computed(model, tokens)
        if not is_steady(model, tokens, logits):
            continue
        assert 0.3 < logits.std() < 30, f"{name}: logits of a deviation of {logits.std()}"
        expected = {"tokens": tokens.astype(np.uint8), "positions": positions, "logits": logits[positions]}
        if is_encoder(model.config):
            return expected
        steps = greedy(model, tokens)
        best = np.sort(steps, axis=1)
        if (best[:, -1] - best[:, -2]).min() > MARGIN:
            return expected | {"steps": steps}
    raise AssertionError(f"{name}: every prompt hangs by a thread")


def is_steady(model: PreTrainedModel, tokens: np.ndarray, logits: np.ndarray) -> bool:
    """Returns whether a little noise in all matrices changes the logits no more than rounding may."""
    saved = {key: weight.clone() for key, weight in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
    moved = np.abs(computed(model, tokens) - logits).max()
    model.load_state_dict(saved)
    return bool(moved < 2e-4)


def greedy(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the logits that each greedy step chooses from."""
    steps: list[np.ndarray] = []
    for _ in range(STEPS):
        steps.append(computed(model, tokens)[-1])
        tokens = np.append(tokens, steps[-1].argmax())
    return np.stack(steps)


if __name__ == "__main__":
    main()
