"""One name for each tensor, whatever the checkpoint calls it; a name that is in no table is an error.

embed, norm, head, and in each layer: attn_norm, q, k, v, o, mlp_norm, gate, up, down, in some families q_norm,
k_norm, after_attn_norm, after_mlp_norm; in some families positions; a bias is its weight's + ".bias".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.tensor import Tensor, transposed


class Naming(NamedTuple):
    """How the tensors of one kind of file are called, in most families."""

    top: Mapping[str, str]
    layer: re.Pattern[str]  # a layer's number, and its own name for the part
    parts: Mapping[str, str]
    ignored: re.Pattern[str]  # tensors that are no weights
    transposed: frozenset[str] = frozenset()  # parts that lie (in, out)

    def but(self, **parts: str) -> Naming:
        """With other parts, given as canonical_name="name in the file"."""
        kept = {
            theirs: ours for theirs, ours in self.parts.items() if ours not in parts and theirs not in parts.values()
        }
        return self._replace(parts=kept | {theirs: ours for ours, theirs in parts.items()})


NUMBER = "(0|[1-9][0-9]{0,5})"
SUFFIXES = {"weight": "", "bias": ".bias"}

GGUF = Naming(
    top={"token_embd": "embed", "output_norm": "norm", "output": "head"},
    layer=re.compile(rf"blk\.{NUMBER}\.(.+)"),
    parts={
        "attn_norm": "attn_norm",
        "attn_q": "q",
        "attn_k": "k",
        "attn_v": "v",
        "attn_output": "o",
        "ffn_norm": "mlp_norm",
        "ffn_gate": "gate",
        "ffn_up": "up",
        "ffn_down": "down",
    },
    ignored=re.compile(r"rope_freqs\.weight"),  # config_gguf puts it in the rope spec
)

HUGGING_FACE = Naming(
    top={"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"},
    layer=re.compile(rf"model\.layers\.{NUMBER}\.(.+)"),
    parts={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q",
        "self_attn.k_proj": "k",
        "self_attn.v_proj": "v",
        "self_attn.o_proj": "o",
        "post_attention_layernorm": "mlp_norm",
        "mlp.gate_proj": "gate",
        "mlp.up_proj": "up",
        "mlp.down_proj": "down",
    },
    ignored=re.compile(r".+\.rotary_emb\.inv_freq"),  # computed from the config
)


def canonical(tensors: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if naming.ignored.fullmatch(name):
            continue
        ours = canonical_name(name, naming)
        if ours in found:
            raise MalformedFile(f"tensors {found[ours].name!r} and {name!r} are the same part of the model")
        found[ours] = transposed(tensor) if ours.rpartition(".")[2] in naming.transposed else tensor
    return found


def canonical_name(name: str, naming: Naming) -> str:
    stem, _, role = name.rpartition(".")
    prefix, part = "", naming.top.get(stem)
    if match := naming.layer.fullmatch(stem):
        prefix, part = f"layers.{match[1]}.", naming.parts.get(match[2])
    if part is None or role not in SUFFIXES:
        raise UnsupportedModel(f"the checkpoint has a tensor named {name!r}, which this engine has no use for")
    return prefix + part + SUFFIXES[role]
