"""Makes tests/models/eagle3: a tiny random target, EAGLE-3 heads of it in the layouts that vLLM and SGLang read, and
what the authors' own implementation of EAGLE-3 (SafeAILab/EAGLE) computes with them in float32.

`expected.npz` of a head has a text, the logits of every row of the head over it, and a draft: tokens that the head
chooses one after the other, each from its own last state, with their logits. Needs torch, transformers and safetensors,
which the project itself does not, and a checkout of that repository:

    python scripts/make_eagle_goldens.py CHECKOUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "eagle3"
LENGTH = 40  # tokens of the text
DEPTH = 5  # tokens of the draft
TARGET = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
HEAD = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,  # fewer than the text has: RoPE goes on
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "vocab_size": 64,
    "draft_vocab_size": 24,
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DEFAULT = (2, 4, 5)  # the target's layers before which its states are taken, where a head's config says nothing
WIDER = {"hidden_size": 48, "num_attention_heads": 6, "target_hidden_size": 32}  # has embeddings of its own


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "eagle" / "model"))
    shutil.rmtree(FOLDER, ignore_errors=True)
    target = make_target()
    make_head("sglang", target, {}, DEFAULT)
    make_head("vllm", target, WIDER, (1, 4, 8))
    make_head("speculators", target, {}, (0, 3, 7))


def make_target() -> Any:
    """Writes the target and returns it."""
    torch.manual_seed(crc32(b"target"))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TARGET), attn_implementation="eager", dtype=torch.float32)
    fill(model)
    model.bfloat16().save_pretrained(FOLDER / "target")
    (FOLDER / "target" / "generation_config.json").unlink(missing_ok=True)
    return AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.float32, attn_implementation="eager")


def fill(module: Any) -> None:
    """Fills all weights at random, exact in BF16 and F16 alike."""
    with torch.no_grad():
        for key, weight in module.named_parameters():
            values = torch.randn_like(weight) * (0.2 if weight.ndim == 1 else 0.3) + ("norm" in key)
            weight.copy_(values.bfloat16().half())


def make_head(name: str, target: Any, changes: dict[str, Any], layers: tuple[int, ...]) -> None:
    """Writes a head and what it computes."""
    from cnets import Model  # of the checkout

    torch.manual_seed(crc32(name.encode()))
    head = Model(SimpleNamespace(**(HEAD | changes))).eval()
    fill(head)
    shared = "target_hidden_size" not in changes
    if shared:
        head.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight.data)
    chosen = torch.randperm(HEAD["vocab_size"])[: HEAD["draft_vocab_size"]].sort().values
    head.d2t.copy_(chosen - torch.arange(len(chosen)))
    head.t2d[chosen] = True
    if name == "speculators":
        norm_before_residual(head)
    expected = compute(head, target, layers)
    folder = FOLDER / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, changes, layers), indent=1) + "\n")
    weights = {key: value for key, value in head.state_dict().items() if not (shared and "embed_tokens" in key)}
    if name != "sglang":
        weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    save_file({key: stored(value) for key, value in weights.items()}, folder / "model.safetensors")
    np.savez_compressed(folder / "expected.npz", **expected)
    print(name, *(f"{key} {value.shape}" for key, value in expected.items()))


def stored(value: torch.Tensor) -> torch.Tensor:
    return value.half().contiguous() if value.is_floating_point() else value.contiguous()


def norm_before_residual(head: Any) -> None:
    """Has the residual stream begin with the normed state, as heads of vLLM's speculators do: the norm comes first, and
    what the layer norms then is left as it is."""
    norm, layer = head.midlayer.hidden_norm, head.midlayer
    plain = layer.forward

    def forward(input_emb: torch.Tensor, hidden_states: torch.Tensor, **options: Any) -> Any:
        layer.hidden_norm = torch.nn.Identity()
        try:
            return plain(input_emb=input_emb, hidden_states=norm(hidden_states), **options)
        finally:
            layer.hidden_norm = norm

    layer.forward = forward


@torch.no_grad()
def compute(head: Any, target: Any, layers: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns the text, the head's logits at each of its rows, and its draft with the logits of each token."""
    tokens = torch.randint(HEAD["vocab_size"], (1, LENGTH))
    states = streams(target, tokens, layers)
    hidden, cache = head(states[:, :-1], input_ids=tokens[:, 1:], use_cache=True)
    logits = head.lm_head(head.norm(hidden))
    last, rows, draft = hidden[:, -1:], [logits[0, -1]], list[int]()
    for at in range(DEPTH):
        token = int(rows[-1].argmax())
        draft.append(token + int(head.d2t[token]))
        if len(draft) == DEPTH:
            break
        position = torch.tensor([[LENGTH - 1 + at]])
        last, cache = head(last, input_ids=torch.tensor([draft[-1:]]), past_key_values=cache, position_ids=position,
                           use_cache=True)  # fmt: skip
        rows.append(head.lm_head(head.norm(last))[0, -1])
    return {
        "tokens": tokens[0].numpy().astype(np.int32),
        "logits": logits[0].numpy(),
        "draft": np.array(draft, np.int32),
        "draft_logits": torch.stack(rows).numpy(),
    }


def streams(target: Any, tokens: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """Returns the residual streams before these layers, one beside the other. After the last layer, transformers norms
    what it returns, so that one is taken from the layer itself."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, at=at: found.update({at + 1: out}))
        for at, layer in enumerate(target.model.layers)
    ]
    found[0] = target.model.embed_tokens(tokens)
    target(tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[layer] if isinstance(found[layer], torch.Tensor) else found[layer][0] for layer in layers],
                     dim=-1)  # fmt: skip


def config_of(name: str, changes: dict[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """Returns the config.json of a head as it is published for SGLang, for vLLM or by vLLM's speculators."""
    sizes = {key: value for key, value in (HEAD | changes).items() if value is not None}
    if name == "sglang":
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes}
    if name == "vllm":
        named = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", **sizes}
        return {**named, "eagle_aux_hidden_state_layer_ids": list(layers)}
    outer = ("draft_vocab_size", "tie_word_embeddings")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            **{key: value for key, value in sizes.items() if key not in outer},
        },
        **{key: sizes[key] for key in outer},
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }


if __name__ == "__main__":
    main()
