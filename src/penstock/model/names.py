"""Gives every tensor one canonical name and one role, independent of the checkpoint's format.

A name that is in no table is an error. Canonical names are the keys of `roles.ROLES`; layer tensors are prefixed with
"layers.N.", and expert tensors within a layer with "experts.N.". A bias is named after its weight, plus ".bias".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.roles import BIAS, Role, role_of
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor, transposed


class Naming(NamedTuple):
    """Maps the names of a checkpoint's tensors to canonical ones."""

    top: Mapping[str, str]
    layer: re.Pattern[str]  # matches the layer number and the name within the layer
    parts: Mapping[str, str]  # "*" stands for an expert's number; names may include ".weight" or ".bias"
    ignored: re.Pattern[str]  # tensors that are not weights
    transposed: frozenset[str] = frozenset()  # parts stored as (in, out)
    renamed: Mapping[str, Mapping[str, str]] = {}  # replacement `parts` for files that contain the given part

    def but(self, **parts: str) -> Naming:
        kept = {
            theirs: ours for theirs, ours in self.parts.items() if ours not in parts and theirs not in parts.values()
        }
        return self._replace(parts=kept | {theirs: ours for ours, theirs in parts.items()})

    def of_file(self, tensors: Mapping[str, Tensor]) -> Naming:
        if not self.renamed:
            return self
        found = {match[2].rpartition(".")[0] for name in tensors if (match := self.layer.fullmatch(name))}
        changes = [parts for part, parts in self.renamed.items() if part in found]
        return self._replace(parts={theirs: ours for parts in (self.parts, *changes) for theirs, ours in parts.items()})


class Identity(NamedTuple):
    """Identifies a file's tensor by its place in the model."""

    name: str
    part: str  # canonical, without the numbers of its layer and expert
    role: Role


NUMBER = "(0|[1-9][0-9]{0,5})"
EXPERT = re.compile(rf"(?<=\.){NUMBER}(?=\.)")
LAYER = re.compile(rf"layers\.{NUMBER}\.")  # prefix of a layer's canonical names
SUFFIXES = {"weight": "", "bias": BIAS}

GGUF_PARTS = {
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "ffn_norm": "mlp_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
    "ffn_gate_inp": "router", "exp_probs_b.bias": "choice_bias",
    "ffn_gate_exps": "experts.gate", "ffn_up_exps": "experts.up", "ffn_down_exps": "experts.down",
    "ffn_gate_up_exps": "experts.gate_up",
    "ffn_gate.*": "experts.*.gate", "ffn_up.*": "experts.*.up", "ffn_down.*": "experts.*.down",  # older files
    "ffn_gate_shexp": "shared.gate", "ffn_up_shexp": "shared.up", "ffn_down_shexp": "shared.down",
}  # fmt: skip
GGUF = Naming(
    top={"token_embd": "embed", "output_norm": "norm", "output": "head"},
    layer=re.compile(rf"blk\.{NUMBER}\.(.+)"),
    parts=GGUF_PARTS,
    ignored=re.compile(r"rope_freqs\.weight"),  # gguf/config.py reads it into the RoPE spec
)

HUGGING_FACE_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
HUGGING_FACE = Naming(
    top={"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"},
    layer=re.compile(rf"model\.layers\.{NUMBER}\.(.+)"),
    parts=HUGGING_FACE_PARTS,
    ignored=re.compile(r".+\.rotary_emb\.inv_freq"),  # computed from the config
)


def beside_vision(naming: Naming) -> Naming:
    """Returns a naming that also finds the text part of a vision-language model and ignores its other parts."""
    whole = {f"language_model.{theirs}": ours for theirs, ours in naming.top.items()}
    inner = {theirs.replace("model.", "model.language_model."): ours for theirs, ours in naming.top.items()}
    return naming._replace(
        top={**naming.top, **whole, **inner},
        layer=re.compile(rf"(?:language_model\.model|model\.language_model|model)\.layers\.{NUMBER}\.(.+)"),
        ignored=re.compile(
            rf"{naming.ignored.pattern}|(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|mlp1)\..+"
            r"|(?:model\.)?(?:audio_tower|embed_audio|embed_vision|vision_embedder)\..+"
        ),
    )


def is_bare(tensors: Mapping[str, Tensor]) -> bool:
    """Returns True for a decoder saved without its outer model, and so without an output head."""
    return "embed_tokens.weight" in tensors


def within_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


KEYS_AND_VALUES = ("k", "v", "k_norm", "k.bias", "v.bias")  # unused by layers with shared KV
EXPERTS = {  # names in the Hugging Face checkpoints of most MoE families
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
    unused, naming = range(spec.layers, spec.layers + spec.unused_layers), naming.of_file(tensors)
    sharing = {layer for layer in range(spec.layers) if spec.attention(layer).shares_kv}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if naming.ignored.fullmatch(name) or (unused and layer_of(name, naming) in unused):
            continue
        ours, part, role = identify(name, naming)
        if part in KEYS_AND_VALUES and layer_of(name, naming) in sharing:
            continue  # published but unused
        if ours in found:
            raise MalformedFile(f"tensors {found[ours].name!r} and {name!r} are the same part of the model")
        found[ours] = (transposed(tensor) if part in naming.transposed else tensor).with_role(role)
    return found


def layer_of(name: str, naming: Naming) -> int:
    """Returns the layer number in a tensor's file name, or -1."""
    match = naming.layer.fullmatch(name)
    return int(match[1]) if match else -1


def identify(name: str, naming: Naming) -> Identity:
    match = naming.layer.fullmatch(name)
    within = match[2] if match else name
    expert = EXPERT.search(within) if match else None
    if expert:
        within = f"{within[: expert.start()]}*{within[expert.end() :]}"
    part = look_up(within, naming.parts if match else naming.top)
    if part is None:
        raise UnsupportedModel(f"the checkpoint has a tensor named {name!r}, which this engine does not use")
    ours = part.replace("*", expert[0]) if expert else part
    return Identity(f"layers.{match[1]}.{ours}" if match else ours, part, role_of(part))


def look_up(name: str, parts: Mapping[str, str]) -> str | None:
    """Returns the canonical name of a part, keeping a ".bias" suffix; None if no table lists it."""
    if name in parts:
        return parts[name]
    stem, _, suffix = name.rpartition(".")
    return parts[stem] + SUFFIXES[suffix] if stem in parts and suffix in SUFFIXES else None
