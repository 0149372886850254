from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DIM = 320  # wide enough for every token to have a dimension of its own
RECITED = "abcdefghijklménopqrstuvwxyz"
TEMPLATE = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{{ '<|im_start|>assistant\\n' }}"""


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return home


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers any chat with RECITED."""
    return write_reciter(tmp_path_factory.mktemp("reciter") / "reciter", endless=False)


@pytest.fixture(scope="session")
def babbler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that recites over and over, to the end of its context."""
    return write_reciter(tmp_path_factory.mktemp("babbler") / "babbler", endless=True)


def write_reciter(folder: Path, *, endless: bool) -> Path:
    """A Llama whose layers add nothing: the head alone turns each token into the one that follows it."""
    folder.mkdir()
    tokenizer = byte_tokenizer()
    ids = tokenizer.get_vocab()
    recited = tokenizer.encode(RECITED).ids
    after = dict.fromkeys(ids.values(), recited[0])
    after |= dict(zip(recited, [*recited[1:], recited[0] if endless else ids["<|im_end|>"]], strict=True))
    head = np.zeros((len(ids), DIM), np.float32)
    for token, following in after.items():
        head[following, token] = 2.0  # sharp: sampled at temperature 1, another token comes once in 10 ** 13
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "vocab_size": len(ids),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    save_file(layer_that_adds_nothing() | {"lm_head.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def layer_that_adds_nothing() -> dict[str, np.ndarray]:
    widths = {"q_proj": (DIM, DIM), "k_proj": (64, DIM), "v_proj": (64, DIM), "o_proj": (DIM, DIM)}
    layer = {f"self_attn.{name}": shape for name, shape in widths.items()}
    layer |= {"mlp.gate_proj": (32, DIM), "mlp.up_proj": (32, DIM), "mlp.down_proj": (DIM, 32)}
    tensors = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()}
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"):
        tensors[f"{name}.weight"] = np.ones(DIM, np.float32)
    tensors["model.embed_tokens.weight"] = np.eye(258, DIM, dtype=np.float32)
    return tensors


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The command, in this process: penstock("run", "hello", stdin=b"...")."""
    from penstock.cli.app import app

    def command(*words: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words])
        return Outcome(int(ended.value.code or 0), *capsys.readouterr())

    return command
