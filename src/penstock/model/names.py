"""One name for each tensor, whatever the checkpoint calls it; a name that is in no table is an error.

embed, norm, head, in some families positions, in encoders types and embed_norm, and in each layer: attn_norm, q, k, v,
o, mlp_norm, gate, up, down, in some families q_norm, k_norm, after_attn_norm, after_mlp_norm, router, choice_bias,
shared.gate, shared.up, shared.down, and of each expert experts.N.gate, experts.N.up, experts.N.down; a bias is its
weight's + ".bias".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, transposed


class Naming(NamedTuple):
    """How the tensors of one kind of file are called, in most families."""

    top: Mapping[str, str]
    layer: re.Pattern[str]  # a layer's number, and its own name for the part
    parts: Mapping[str, str]  # "*" stands for an expert's number; a name may include its role
    ignored: re.Pattern[str]  # tensors that are no weights
    transposed: frozenset[str] = frozenset()  # parts that lie (in, out)

    def but(self, **parts: str) -> Naming:
        """With other parts, given as canonical_name="name in the file"."""
        kept = {
            theirs: ours for theirs, ours in self.parts.items() if ours not in parts and theirs not in parts.values()
        }
        return self._replace(parts=kept | {theirs: ours for ours, theirs in parts.items()})


NUMBER = "(0|[1-9][0-9]{0,5})"
EXPERT = re.compile(rf"(?<=\.){NUMBER}(?=\.)")
LAYER = re.compile(rf"layers\.{NUMBER}\.")  # how canonical names of its parts begin
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
        "ffn_gate_inp": "router",
        "ffn_gate_exps": "experts.gate",
        "ffn_up_exps": "experts.up",
        "ffn_gate_up_exps": "experts.gate_up",
        "ffn_down_exps": "experts.down",
        "ffn_gate.*": "experts.*.gate",  # older files
        "ffn_up.*": "experts.*.up",
        "ffn_down.*": "experts.*.down",
        "exp_probs_b.bias": "choice_bias",
        "ffn_gate_shexp": "shared.gate",
        "ffn_up_shexp": "shared.up",
        "ffn_down_shexp": "shared.down",
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

EXPERTS = {  # of Hugging Face's files, in most families that have them
    "router": "mlp.gate",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "experts.*.gate": "mlp.experts.*.gate_proj",
    "experts.*.up": "mlp.experts.*.up_proj",
    "experts.*.down": "mlp.experts.*.down_proj",
    "experts.gate_up": "mlp.experts.gate_up_proj",
    "experts.down": "mlp.experts.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}


def canonical(tensors: Mapping[str, Tensor], naming: Naming, spec: ModelSpec) -> dict[str, Tensor]:
    unused = range(spec.layers, spec.layers + spec.unused_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if naming.ignored.fullmatch(name) or layer_of(name, naming) in unused:
            continue
        ours = canonical_name(name, naming)
        if ours in found:
            raise MalformedFile(f"tensors {found[ours].name!r} and {name!r} are the same part of the model")
        found[ours] = transposed(tensor) if ours.rpartition(".")[2] in naming.transposed else tensor
    return found


def layer_of(name: str, naming: Naming) -> int:
    match = naming.layer.fullmatch(name)
    return int(match[1]) if match else -1


def canonical_name(name: str, naming: Naming) -> str:
    prefix, part = "", with_role(name, naming.top)
    if match := naming.layer.fullmatch(name):
        prefix, part = f"layers.{match[1]}.", numbered_part(match[2], naming.parts)
    if part is None:
        raise UnsupportedModel(f"the checkpoint has a tensor named {name!r}, which this engine has no use for")
    return prefix + part


def numbered_part(name: str, parts: Mapping[str, str]) -> str | None:
    number = EXPERT.search(name)
    part = with_role(EXPERT.sub("*", name, count=1), parts)
    return part.replace("*", number[0]) if part and number else part


def with_role(name: str, parts: Mapping[str, str]) -> str | None:
    stem, _, role = name.rpartition(".")
    if name in parts:
        return parts[name]
    return parts[stem] + SUFFIXES[role] if stem in parts and role in SUFFIXES else None
