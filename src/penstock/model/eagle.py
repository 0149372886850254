"""Reads EAGLE-3 heads, which draft from a model's residual streams, in the layouts of vLLM and SGLang.

A head is one Llama layer. For each position it sees a projection of the target's residual streams before a few layers,
which the target's own program computes and stores, and the embedding of the next token. While drafting, its own
residual stream replaces the projection. Its vocabulary may be smaller than the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model import config_hf, decoder, names
from penstock.model.config_fields import CHANGING, NEUTRAL
from penstock.model.config_reader import COUNTS, ConfigReader
from penstock.model.decoder import Attention, Ends, Mlp, Norm, rms_norm
from penstock.model.formats.checkpoint import weights_of
from penstock.model.formats.modules import integers
from penstock.model.load import CONFIG, Checkpoint, check_biases, check_heads, read_safetensors_shards
from penstock.model.open_files import read_json
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec, ObservedSpec
from penstock.model.tensor import Tensor

ARCHITECTURES = (  # one Llama layer each
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),  # vLLM's speculators, with their own config.json layout
)
SPECULATORS = "transformer_layer_config"  # their key for the layer's config
SPECULATORS_FIELDS = ("speculators_config", "speculators_model_type", "speculators_version")
LAYERS = "eagle_aux_hidden_state_layer_ids"
UNOBSERVED = ("deepseek32", "gemma3n", "gemma4", "glmdsa", "opt")  # families that are not a plain stack of layers
NAMING = names.Naming(
    top={"embed_tokens": "embed", "fc": "fuse", "norm": "norm", "lm_head": "head"},
    layer=names.HUGGING_FACE.layer,
    parts={**names.HUGGING_FACE.parts, "hidden_norm": "hidden_norm"},
    ignored=names.HUGGING_FACE.ignored,
)


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """Describes an EAGLE-3 head's inputs from the target, and its vocabulary."""

    target_dim: int
    layers: tuple[int, ...]  # target layers whose input stream is taken; empty: the usual three
    vocab: int  # tokens that it can draft
    norm_before_residual: bool  # the residual stream starts after the input norm

    def layers_of(self, target: ModelSpec) -> tuple[int, ...]:
        """Returns the target layers whose input stream is taken; the number of layers stands for the final stream."""
        return self.layers or (2, target.layers // 2, target.layers - 3)


@dataclass(frozen=True, slots=True)
class EagleHead(Checkpoint):
    """Describes a head whose files are open but not loaded."""

    eagle: EagleSpec = field(kw_only=True)
    fuse: Tensor = field(kw_only=True)  # projects the target's residual streams, concatenated
    token_ids: tuple[int, ...] = ()  # the target's id of each draft token; empty: the same ids


def is_eagle(values: Mapping[str, Any]) -> bool:
    """Returns True for the config.json of an EAGLE-3 head. Some configs name a plain Llama; only heads have a draft
    vocabulary.
    """
    found = values.get("architectures")
    return found in [[name] for name in ARCHITECTURES] or (
        found == ["LlamaForCausalLM"] and values.get("draft_vocab_size") is not None
    )


def refuse_older(values: Mapping[str, Any], name: str) -> None:
    """Raises for earlier kinds of EAGLE heads."""
    found = values.get("architectures")
    if isinstance(found, list) and any("eagle" in str(one).lower() for one in found):
        raise UnsupportedModel(
            f"{name} is a head of architecture {', '.join(map(str, found))}; of EAGLE heads these are supported, which "
            f"are EAGLE-3 with a Llama layer: {', '.join(ARCHITECTURES)}"
        )


def open_eagle(path: Path) -> EagleHead:
    values = read_json(path / CONFIG)
    config = ConfigReader(in_one_table(values), CONFIG)
    spec, eagle = read_eagle(config)
    files = {file_name(name): tensor for name, tensor in read_safetensors_shards(path).items()}
    token_ids = read_token_ids(files.pop("d2t", None), eagle, spec.vocab)
    files.pop("t2d", None)  # the inverse of d2t
    weights = weights_of(files, ConfigReader(values, CONFIG), path)
    tensors = names.canonical(weights, NAMING, spec)
    check_heads(spec)
    check_biases(spec, tensors)
    if "fuse" not in tensors:
        raise MalformedFile(f"{path.name} has no tensor 'fc.weight', which every EAGLE-3 head has")
    return EagleHead(
        spec=spec,
        tensors=tensors,
        name=path.resolve().name,
        path=path,
        metadata=values,
        unknown=tuple(config.unknown),
        eagle=eagle,
        fuse=tensors.pop("fuse"),
        token_ids=token_ids,
    )


def file_name(name: str) -> str:
    """Normalizes a tensor name: some files call the layer `midlayer`, and some nest everything but the output head in a
    model.
    """
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    return f"model.{name}" if name.startswith("layers.") else name


def read_eagle(config: ConfigReader) -> tuple[ModelSpec, EagleSpec]:
    config.require("num_hidden_layers", (1,))
    for key in ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"):
        config.require(key, (False,), False)
    inner = config.table("eagle_config")
    inner.require("use_aux_hidden_state", (True,), True)
    # SGLang counts the layer before
    layers = config.array(LAYERS, COUNTS) or tuple(layer + 1 for layer in inner.array(LAYERS, COUNTS))
    inner.note_unread((), {})
    config.ignore("architectures", *SPECULATORS_FIELDS)
    spec = replace(config_hf.read_decoder(config, "eagle3"), biases=config_hf.read_biases(config), tied=False)
    eagle = EagleSpec(
        target_dim=config.size("target_hidden_size", spec.dim),
        layers=layers,
        vocab=config.size("draft_vocab_size", spec.vocab),
        norm_before_residual=config.flag("norm_before_residual", False),
    )
    config.note_unread(NEUTRAL, CHANGING)
    return spec, eagle


def in_one_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a config.json. Speculators nest the layer's config and have a different default."""
    if not isinstance(layer := values.get(SPECULATORS), dict):
        return dict(values)
    outer = {key: value for key, value in values.items() if key != SPECULATORS and value is not None}
    return {"norm_before_residual": True, **layer, **outer}


def read_token_ids(tensor: Tensor | None, eagle: EagleSpec, vocab: int) -> tuple[int, ...]:
    """Returns the target's id of each draft token; the tensor stores differences."""
    if tensor is None:
        if eagle.vocab != vocab:
            raise MalformedFile(
                f"the head drafts {eagle.vocab:,} of {vocab:,} tokens, and no tensor 'd2t' says which ones"
            )
        return ()
    if tensor.shape != (eagle.vocab,):
        raise MalformedFile(
            f"tensor 'd2t' has shape {tensor.shape}; draft_vocab_size in {CONFIG} needs ({eagle.vocab},)"
        )
    found = integers(tensor, "I64", "I32").astype(np.int64) + np.arange(eagle.vocab)
    if len(beyond := found[(found < 0) | (found >= vocab)]):
        raise MalformedFile(f"tensor 'd2t' leads to token {beyond[0]}, and the target has {vocab:,} tokens")
    return tuple(found.tolist())


def problems(head: EagleHead, target: Checkpoint) -> Iterator[str]:
    eagle, spec = head.eagle, target.spec
    if spec.arch in UNOBSERVED:
        yield f"residual streams cannot be taken from models of the family {spec.arch} yet"
    if eagle.target_dim != spec.dim:
        yield f"it is for a model of width {eagle.target_dim}, and the width of {target.name} is {spec.dim}"
    if head.spec.vocab != spec.vocab:
        yield f"it is for a model of {head.spec.vocab:,} tokens, and {target.name} has {spec.vocab:,}"
    layers = eagle.layers_of(spec)
    if min(layers) < 0 or max(layers) > spec.layers or len(set(layers)) < len(layers):
        yield f"it takes states before layers {', '.join(map(str, layers))}, and {target.name} has {spec.layers} layers"
    if "embed" not in head.tensors and head.spec.dim != spec.dim:
        yield f"it has no embeddings, and those of {target.name} have another width"


def observed(target: Checkpoint, head: EagleHead) -> Checkpoint:
    seen = ObservedSpec(head.eagle.layers_of(target.spec), head.spec.dim)
    tensors = {**target.tensors, "fuse": head.fuse}
    return replace(target, spec=replace(target.spec, observed=seen), tensors=tensors, head_files=tuple(head.files))


# ---- forward pass ----


@dataclass(frozen=True, slots=True)
class EagleModel:
    """Computes draft logits from embeddings and the stored state of the previous position."""

    spec: ModelSpec
    eagle: EagleSpec
    embed: Weight
    embed_norm: Norm
    hidden_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm
    head: Weight

    def forward(self, ops: Ops[V]) -> V:
        """Returns the logits of the sampled rows, [S, draft vocabulary], and stores their residual stream where the
        target will store the next position's projection.
        """
        seen = ops.load_hidden(0, self.spec.dim)
        normed, _ = self.hidden_norm(ops, seen)
        embedded, _ = self.embed_norm(ops, ops.embed(self.embed))
        x = ops.take_sampled(self.attention(ops, ops.concat(embedded, normed)))
        x, residual = self.mlp_norm(ops, x, ops.take_sampled(normed if self.eagle.norm_before_residual else seen))
        x, residual = self.norm(ops, self.mlp(ops, x), residual)
        ops.store_hidden(0, residual, ahead=1)
        return ops.linear(x, self.head, precision="float32")


def build(head: EagleHead, pack: Packer, ends: Ends) -> EagleModel:
    """Builds a head; embeddings and output head default to the target's."""
    spec, dim, layer = head.spec, head.spec.dim, "layers.0"
    embed = pack.matrix(("embed", spec.vocab), width=dim) if pack.has("embed") else ends.embed
    shares_head = not pack.has("head") and (head.eagle.vocab, dim) == (ends.spec.vocab, ends.spec.dim)
    return EagleModel(
        spec,
        head.eagle,
        embed,
        rms_norm(spec, pack, f"{layer}.attn_norm"),
        rms_norm(spec, pack, f"{layer}.hidden_norm"),
        decoder.attention(spec, pack, 0, width=2 * dim),
        rms_norm(spec, pack, f"{layer}.mlp_norm"),
        decoder.mlp(spec, pack, layer, spec.hidden),
        rms_norm(spec, pack, "norm"),
        ends.head if shares_head else pack.matrix(("head", head.eagle.vocab), width=dim),
    )
